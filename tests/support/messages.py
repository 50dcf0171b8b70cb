"""Anthropic's messages and events, strictly, and chat answers of engines to make them of."""

import json
from typing import Any, Literal

import msgspec

from modelyard.gateway.dialects.messages import decode_message
from modelyard.gateway.dialects.messages_answer import MessageTranslation
from modelyard.gateway.sse import PromptDetails, Usage

REQUEST_ID = "req_abcdefghijkmnpqr00000001"
USAGE = Usage(prompt_tokens=10, completion_tokens=5, prompt_tokens_details=PromptDetails(cached_tokens=4))
THINKING = {"type": "enabled", "budget_tokens": 1024}


# --- the shapes that clients rely on, strictly ---


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing but what is listed."""


class Text(Closed, tag="text", tag_field="type"):
    text: str
    citations: None = None


class Thinking(Closed, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class Direct(Closed, tag="direct", tag_field="type"):
    pass


class ToolUse(Closed, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Direct = msgspec.field(default_factory=Direct)


Block = Text | Thinking | ToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class Tokens(Closed):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: None = None


class Message(Closed, tag="message", tag_field="type"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Tokens
    stop_details: None = None
    container: None = None


class Start(Closed, tag="message_start", tag_field="type"):
    message: Message


class BlockStart(Closed, tag="content_block_start", tag_field="type"):
    index: int
    content_block: Block


class TextDelta(Closed, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Closed, tag="thinking_delta", tag_field="type"):
    thinking: str


class InputDelta(Closed, tag="input_json_delta", tag_field="type"):
    partial_json: str


class BlockDelta(Closed, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Closed, tag="content_block_stop", tag_field="type"):
    index: int


class End(Closed):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Closed, tag="message_delta", tag_field="type"):
    delta: End
    usage: Tokens


class Stop(Closed, tag="message_stop", tag_field="type"):
    pass


class ErrorDetail(Closed):
    type: str
    message: str


class Error(Closed, tag="error", tag_field="type"):
    error: ErrorDetail
    request_id: str


Event = Start | BlockStart | BlockDelta | BlockStop | MessageDelta | Stop | Error


def read(stream: bytes) -> list[Any]:
    """Return the events of a stream, each of a known shape under its own name."""
    events = []
    for raw in stream.decode().split("\n\n")[:-1]:
        name, data = raw.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "), type=Event)
        assert name == f"event: {event.__struct_config__.tag}"
        events.append(event)
    return events


def joined(stream: bytes) -> Message:
    """Return the message that a client makes of a complete stream; its blocks come one after the other."""
    start, *between, delta, stop = read(stream)
    assert isinstance(stop, Stop)
    message: Message = start.message
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], None, 0)
    arguments: dict[int, str] = {}
    is_open = False
    for event in between:
        match event:
            case BlockStart():
                assert not is_open
                assert event.index == len(message.content)
                is_open = True
                message.content.append(event.content_block)
            case BlockDelta():
                assert is_open
                assert event.index == len(message.content) - 1
                add(message.content[-1], event, arguments)
            case BlockStop():
                assert is_open
                assert event.index == len(message.content) - 1
                is_open = False
            case _:
                raise AssertionError(f"{event} in the middle")
    assert not is_open
    for index, text in arguments.items():
        block = message.content[index]
        assert isinstance(block, ToolUse)
        block.input = json.loads(text)
    message.stop_reason, message.stop_sequence = delta.delta.stop_reason, delta.delta.stop_sequence
    message.usage = delta.usage
    return message


def add(block: Block, event: BlockDelta, arguments: dict[int, str]) -> None:
    """Add a delta to its block; ``arguments`` are collected, as text."""
    match event.delta:
        case TextDelta():
            assert isinstance(block, Text)
            block.text += event.delta.text
        case ThinkingDelta():
            assert isinstance(block, Thinking)
            block.thinking += event.delta.thinking
        case InputDelta():
            arguments[event.index] = arguments.get(event.index, "") + event.delta.partial_json


def translation(**fields: object) -> MessageTranslation:
    """Return what a message request with ``fields`` is answered by."""
    body = {"model": "asked", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}], **fields}
    found = decode_message(json.dumps(body).encode()).translation
    assert isinstance(found, MessageTranslation)
    return found


def whole(
    said: dict[str, object], finish: object = "stop", *, told: dict[str, object] | None = None, **fields: object
) -> Message:
    """Return the message for a whole chat completion; ``told`` is more of its choice."""
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish, **(told or {})}
    chat = json.dumps({"id": "x", "object": "chat.completion", "model": "other", "choices": [choice]}).encode()
    return msgspec.json.decode(translation(**fields).answer(chat, USAGE, REQUEST_ID), type=Message)


def chunk(delta: object, finish: object = None, **told: object) -> bytes:
    """Return an event of a chat stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **told}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "other", "choices": [choice]}
    return b"data: " + json.dumps(body).encode()


def stream_of(*chunks: bytes, **fields: object) -> bytes:
    """Return the whole stream for ``chunks``."""
    stream = translation(**fields).stream(REQUEST_ID)
    return stream.begin() + b"".join(stream.feed(event) for event in chunks) + stream.finish(USAGE)


def call(index: int | None, name: str | None = None, arguments: object = None, **fields: object) -> dict[str, object]:
    """Return a piece of a tool call."""
    return {"index": index, "function": {"name": name, "arguments": arguments}, **fields}
