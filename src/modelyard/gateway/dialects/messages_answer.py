"""A chat completion, or a stream of one, as Anthropic's message.

Engines differ, so everything they may leave out may be left out here. A stream
has one content block open at a time: its deltas need nothing but the text,
since all around it is the same from one token to the next.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.errors import ApiError
from modelyard.gateway.dialects.messages_replies import error_body
from modelyard.gateway.relay import EngineStreamError
from modelyard.gateway.sse import Usage, split_fields

INVALID_JSON = "INVALID_JSON"
"""The key under which arguments that are no JSON object are passed on: Anthropic's own advice for such text.

An empty object would run the tool with none of its arguments.
"""
REFUSALS = frozenset({"content_filter", "refusal"})
"""Finish reasons of an answer that was refused."""


# --- what engines say ---


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    """A message or a delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    """``stop_reason`` (vLLM) and ``matched_stop`` (SGLang) are the stop sequence that was met, or a token's number."""

    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] | None = None


# --- what callers get ---
#
# Anthropic's schema requires more keys than there is anything to say about here; typed clients miss them when they are
# not there. So they are null.


class _TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    text: str
    citations: None = None


class _ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class _Caller(msgspec.Struct, frozen=True, tag="direct", tag_field="type"):
    """Who calls a tool: the model, and not a program that it runs."""


_DIRECT = _Caller()


class _ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: msgspec.Raw | dict[str, str]
    caller: _Caller = _DIRECT


class MessageUsage(msgspec.Struct):
    """Anthropic's usage: ``input_tokens`` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: None = None


class _Message(msgspec.Struct, tag="message", tag_field="type"):
    id: str
    model: str
    content: list[_TextBlock | _ThinkingBlock | _ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"
    stop_details: None = None
    container: None = None


class _Stop(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


_decode = msgspec.json.Decoder(_Completion).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class MessageTranslation:
    """What a message request needs for its way back. ``input_tokens`` is the estimate that a stream begins with."""

    __slots__ = ("_model", "_shows_thinking", "_stops", "input_tokens")

    def __init__(self, model: str, *, stops: tuple[str, ...], shows_thinking: bool, input_tokens: int) -> None:
        self._model = model
        self._stops = stops
        self._shows_thinking = shows_thinking
        self.input_tokens = input_tokens

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the message for a whole chat completion.

        Raises:
            ValueError: ``chat`` is no chat completion.
        """
        try:
            choices = _decode(chat).choices
        except RecursionError:
            raise ValueError("nested too deeply") from None
        said = choices[0].message if choices else None
        if not choices or said is None:
            raise ValueError("no message in it")
        content: list[_TextBlock | _ThinkingBlock | _ToolUseBlock] = []
        thinking = said.reasoning_content or said.reasoning
        if thinking and self._shows_thinking:
            content.append(_ThinkingBlock(thinking))
        text = (said.content or "") + (said.refusal or "")
        if text:
            content.append(_TextBlock(text))
        uses = _tool_uses(said.tool_calls or [], request_id)
        content += uses
        stop = stop_of(choices[0], self._stops, has_uses=bool(uses), is_refusal=bool(said.refusal))
        message = _Message(
            message_id(request_id), self._model, content, stop.stop_reason, stop.stop_sequence, usage_of(usage)
        )
        return _encode(message)

    def stream(self, request_id: str) -> "MessageStream":
        """Return a new translation of a stream."""
        start = _Message(
            message_id(request_id), self._model, [], None, None, MessageUsage(self.input_tokens, output_tokens=0)
        )
        return MessageStream(start, request_id, stops=self._stops, shows_thinking=self._shows_thinking)


def message_id(request_id: str) -> str:
    """Return the id of the message that answers a request."""
    return "msg_" + request_id.removeprefix("req_")


def usage_of(usage: Usage) -> MessageUsage:
    """Return ``usage`` as Anthropic counts."""
    cached = usage.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens or 0, cache_read_input_tokens=cached)


def stop_of(choice: _Choice, stops: tuple[str, ...], *, has_uses: bool, is_refusal: bool) -> _Stop:
    """Return why the answer ended; a stop sequence is known only where the engine names it."""
    reason = choice.finish_reason
    if is_refusal or reason in REFUSALS:
        return _Stop("refusal", None)
    if reason == "length":
        return _Stop("max_tokens", None)
    if has_uses:
        return _Stop("tool_use", None)
    for met in (choice.stop_reason, choice.matched_stop):
        if isinstance(met, str) and met in stops:
            return _Stop("stop_sequence", met)
    return _Stop("end_turn", None)


def _tool_uses(calls: list[_Call], request_id: str) -> list[_ToolUseBlock]:
    uses = []
    for number, call in enumerate(calls):
        function = call.function
        if function is not None and function.name:
            tool_id = call.id or tool_use_id(request_id, number)
            uses.append(_ToolUseBlock(tool_id, function.name, _input(function.arguments)))
    return uses


def _input(arguments: str | dict[str, Any] | None) -> msgspec.Raw | dict[str, str]:
    text = _text(arguments)
    if not text.strip():
        return {}
    try:
        _decode_object(text)
    except (msgspec.MsgspecError, RecursionError):
        return {INVALID_JSON: text}
    return msgspec.Raw(text.encode())


def _text(arguments: str | dict[str, Any] | None) -> str:
    # Some engines give the object itself.
    return arguments or "" if not isinstance(arguments, dict) else _encode(arguments).decode()


def tool_use_id(request_id: str, number: int) -> str:
    """Return an id for the call of an engine that gives none."""
    return f"toolu_{request_id.removeprefix('req_')}{number}"


# --- streams ---


def _event(kind: str, **fields: object) -> bytes:
    """Return one event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _delta_head(index: int, kind: str, field: str) -> bytes:
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
    ) % (index, kind.encode(), field.encode())


_DELTA_END = b"}}\n\n"


class _Use:
    """A tool call of a stream: its block once it has one, and what came before its name did."""

    __slots__ = ("block", "early", "head", "id", "name")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.early = ""
        self.block = -1
        self.head = b""


class MessageStream:
    """One stream on its way back. ``start`` is the message as it begins."""

    __slots__ = (
        "_choice",
        "_has_uses",
        "_head",
        "_is_refusal",
        "_kind",
        "_next_block",
        "_request_id",
        "_shows_thinking",
        "_start",
        "_stops",
        "_uses",
    )

    def __init__(self, start: _Message, request_id: str, *, stops: tuple[str, ...], shows_thinking: bool) -> None:
        self._start = start
        self._request_id = request_id
        self._stops = stops
        self._shows_thinking = shows_thinking
        self._kind = ""
        self._head = b""
        self._next_block = 0
        self._uses: dict[int, _Use] = {}
        self._has_uses = False
        self._is_refusal = False
        self._choice = _Choice()

    def begin(self) -> bytes:
        """Return the start of the message."""
        return _event("message_start", message=self._start)

    def feed(self, event: bytes) -> bytes:
        """Return the events for one event of a chat stream.

        Raises:
            EngineStreamError: it is no chunk of a chat completion.
        """
        data = event[5:] if event.startswith(b"data:") and b"\n" not in event else split_fields(event)[1]
        try:
            choices = _decode(data).choices
        except (msgspec.MsgspecError, RecursionError):
            raise EngineStreamError("malformed chunk") from None
        if not choices:
            return b""
        choice = choices[0]
        if choice.finish_reason:
            self._choice = choice
        said = choice.delta
        if said is None:
            return b""
        text = said.content
        if text and self._kind == "text" and not (said.reasoning_content or said.reasoning or said.tool_calls):
            return self._head + _encode(text) + _DELTA_END
        return self._feed_slowly(said)

    def finish(self, usage: Usage) -> bytes:
        """Return the end of a complete message."""
        stop = stop_of(self._choice, self._stops, has_uses=self._has_uses, is_refusal=self._is_refusal)
        return self._close() + _event("message_delta", delta=stop, usage=usage_of(usage)) + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """Return the event of a stream that broke."""
        return b"event: error\ndata: %b\n\n" % error_body(error, self._request_id)

    def _feed_slowly(self, said: _Said) -> bytes:
        out = b""
        thinking = said.reasoning_content or said.reasoning
        if thinking and self._shows_thinking:
            out += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta")
            out += self._head + _encode(thinking) + _DELTA_END
        self._is_refusal = self._is_refusal or bool(said.refusal)
        text = (said.content or "") + (said.refusal or "")
        if text:
            out += self._open("text", {"type": "text", "text": "", "citations": None}, "text_delta")
            out += self._head + _encode(text) + _DELTA_END
        for call in said.tool_calls or ():
            out += self._feed_call(call)
        return out

    def _feed_call(self, call: _Call) -> bytes:
        function = call.function or _Function()
        index = call.index or 0
        use = self._uses.get(index)
        # Another id under the same index is another call: engines that give each call whole number them all 0.
        if use is None or (call.id and use.id and call.id != use.id and function.name):
            use = self._uses[index] = _Use()
        use.id = use.id or call.id or ""
        use.name = use.name or function.name or ""
        arguments = _text(function.arguments)
        if use.block >= 0:
            return use.head + _encode(arguments) + _DELTA_END if arguments else b""
        use.early += arguments
        return self._open_use(use) if use.name else b""

    def _open_use(self, use: _Use) -> bytes:
        self._has_uses = True
        out = self._close()
        tool_id = use.id or tool_use_id(self._request_id, self._next_block)
        block = {"type": "tool_use", "id": tool_id, "name": use.name, "input": {}, "caller": _DIRECT}
        use.block = self._next_block
        use.head = _delta_head(use.block, "input_json_delta", "partial_json")
        out += self._open("tool_use", block, "")
        return out + (use.head + _encode(use.early) + _DELTA_END if use.early else b"")

    def _open(self, kind: str, block: Mapping[str, object], delta: str) -> bytes:
        """Open a block unless one of its kind is open."""
        if self._kind == kind:
            return b""
        out = self._close()
        index = self._next_block
        self._next_block += 1
        self._kind = kind
        self._head = _delta_head(index, delta, kind) if delta else b""
        return out + _event("content_block_start", index=index, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._next_block - 1)
