"""``functions`` and ``function_call``, which tools replaced: asked of the engine as tools, answered as before.

The older form has one call in an answer, so the engine is asked for one.
"""

from typing import Any

import msgspec

from modelyard import errors
from modelyard.gateway.openai.chat_request import (
    AssistantMessage,
    ChatRequest,
    FunctionMessage,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
)
from modelyard.gateway.openai.chunks import RewrittenChunks
from modelyard.gateway.sse import Usage

_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def is_older(message: Message) -> bool:
    """Say whether ``message`` tells of an earlier call in the older form."""
    return isinstance(message, FunctionMessage) or (
        isinstance(message, AssistantMessage) and message.function_call is not None
    )


def modernize(request: ChatRequest, *, wants_usage: bool) -> "FunctionsTranslation | None":
    """Turn functions into tools; return how to turn the answer back, None when it can hold no call.

    Raises:
        ApiError: 400 for functions beside tools, or a choice of a function without functions.
    """
    given, choice = request.functions, request.function_call
    if given is not None and request.tools is not None:
        raise errors.invalid_value("functions", "it cannot be used beside 'tools', which replaced it")
    if given is None and choice not in (None, "none", "auto"):
        raise errors.invalid_value("function_call", "it needs 'functions'")
    request.functions = request.function_call = None
    request.messages = _messages(request.messages)
    if given is None:
        return None
    request.tools = [Tool(function=function) for function in given]
    request.parallel_tool_calls = False
    if choice is None or isinstance(choice, str):
        request.tool_choice = choice
    elif all(function.name != choice.name for function in given):
        raise errors.invalid_value("function_call", "it names a function that is not in 'functions'")
    else:
        request.tool_choice = ToolChoice(function=choice)
    return FunctionsTranslation(wants_usage=wants_usage)


def _messages(messages: list[Message]) -> list[Message]:
    """Return ``messages`` with earlier calls as tool calls; each result belongs to the last call of its name."""
    calls: dict[str, str] = {}
    found: list[Message] = []
    for index, message in enumerate(messages):
        if isinstance(message, FunctionMessage):
            call_id = calls.get(message.name, f"call_{message.name}")
            found.append(ToolMessage(content=message.content or "", tool_call_id=call_id))
        elif isinstance(message, AssistantMessage) and message.function_call is not None:
            called = message.function_call
            calls[called.name] = f"call_{index}"
            call = ToolCall(id=calls[called.name], function=called)
            found.append(msgspec.structs.replace(message, tool_calls=[call], function_call=None))
        else:
            found.append(message)
    return found


class FunctionsTranslation:
    """One request with functions: its answer, plain or streamed, with ``function_call`` instead of ``tool_calls``."""

    __slots__ = ("_wants_usage",)

    def __init__(self, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the chat completion in the older form.

        Raises:
            ValueError: ``chat`` is no chat completion.
        """
        body = _any.decode(chat)
        for choice in _choices(body):
            _older(choice, choice.get("message"))
        return _encode(body)

    def stream(self, request_id: str) -> "FunctionsStream":
        """Return a new translation of a stream."""
        return FunctionsStream(wants_usage=self._wants_usage)


class FunctionsStream(RewrittenChunks):
    """One stream of chunks in the older form."""

    __slots__ = ()

    def _rewrite(self, chunk: Any) -> None:
        for choice in _choices(chunk):
            _older(choice, choice.get("delta"))


def _choices(body: Any) -> list[dict[str, Any]]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("no choices")
    return choices


def _older(choice: dict[str, Any], message: Any) -> None:
    """Put the first call of ``message`` (or the piece of it) where it used to be."""
    calls = message.pop("tool_calls", None) if isinstance(message, dict) else None
    if calls:
        first = calls[0] if isinstance(calls, list) else None
        if not isinstance(first, dict):
            raise ValueError("calls in no form that is known")
        if first.get("index", 0) == 0:
            message["function_call"] = first.get("function", {})
    if choice.get("finish_reason") == "tool_calls":
        choice["finish_reason"] = "function_call"
