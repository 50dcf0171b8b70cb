"""From a whole chat completion to the output items of a response."""

import msgspec

from modelyard.gateway.dialects.responses_object import (
    INCOMPLETE_REASONS,
    FunctionCall,
    Item,
    Logprobs,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    Status,
    id_for,
    whole_logprobs,
)
from modelyard.gateway.openai.chat import ABSENT


class CalledFunction(msgspec.Struct):
    """``arguments`` is taken as it comes: some engines give an object in place of its text."""

    name: str | None = None
    arguments: msgspec.Raw = ABSENT


class _ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_completion = msgspec.json.Decoder(_Completion)
_text = msgspec.json.Decoder(str)


def arguments_text(raw: msgspec.Raw) -> str:
    """Return arguments as JSON text; engines also give an object, or null.

    Raises:
        msgspec.MsgspecError: they are no text.
    """
    given = bytes(raw)
    if given in (b"", b"null"):
        return ""
    return _text.decode(given) if given.startswith(b'"') else given.decode()


def answer_items(chat: bytes, request_id: str) -> tuple[list[Item], str]:
    """Return the items of a chat completion's first choice, and its ``finish_reason``.

    Raises:
        ValueError: ``chat`` is no chat completion.
    """
    try:
        completion = _completion.decode(chat)
        if not completion.choices:
            raise ValueError("a chat completion without choices")
        choice = completion.choices[0]
        items = _items(choice, request_id)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ValueError("no chat completion") from None
    finish_reason = choice.finish_reason or ""
    if finish_reason in INCOMPLETE_REASONS:
        # It is the last item that was cut.
        items[-1].status = "incomplete"
    return items, finish_reason


def _items(choice: _Choice, request_id: str) -> list[Item]:
    message = choice.message
    items: list[Item] = []
    done: Status = "completed"

    def new_id(prefix: str) -> str:
        return item_id(prefix, request_id, len(items))

    thought = message.reasoning_content or message.reasoning
    if thought:
        items.append(Reasoning(new_id("rs"), done, [ReasoningText(thought)]))
    content: list[OutputText | Refusal] = []
    if message.content:
        tokens = choice.logprobs.content if choice.logprobs is not None else None
        content.append(OutputText(message.content, logprobs=whole_logprobs(tokens or ())))
    if message.refusal:
        content.append(Refusal(message.refusal))
    if content:
        items.append(Message(new_id("msg"), done, content))
    for call in message.tool_calls or ():
        if not call.function.name:
            continue
        arguments = arguments_text(call.function.arguments) or "{}"
        call_id = call.id or item_id("call", request_id, len(items))
        items.append(FunctionCall(new_id("fc"), call_id, call.function.name, arguments, done))
    # Clients look for a message in every answer that calls nothing.
    return items or [Message(new_id("msg"), done, [OutputText("")])]


def item_id(prefix: str, request_id: str, index: int) -> str:
    """Return the id of the item at ``index`` of the output."""
    return f"{id_for(prefix, request_id)}_{index}"
