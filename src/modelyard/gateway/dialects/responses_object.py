"""The ``response`` object of OpenAI's Responses API, and the items in its ``output``.

Clients validate it strictly: every key is always present, also those that are
null, so that ``openai-python``, the AI SDK and the schema of OpenResponses
all take it (``reference/api.md`` 1.7). Nothing is stored, so ``store`` is
false whatever was asked.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from modelyard.errors import ApiError
from modelyard.gateway.dialects.responses_request import NULL, FunctionTool, ResponseRequest, ToolChoice, is_given
from modelyard.gateway.sse import Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]
encode = msgspec.json.Encoder().encode

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is not whole, by the engine's ``finish_reason``; every other reason completes it."""


# --- items ---


class TopLogprob(msgspec.Struct):
    """A token that was likely at some place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(msgspec.Struct):
    """How likely a token was; in this form both APIs write it."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    """The tokens of a choice of a chat."""

    content: list[Logprob] | None = None


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    """Text that the model said. It never has annotations: no engine here cites."""

    text: str
    annotations: list[str] = []
    logprobs: list[Logprob] = []


class Refusal(msgspec.Struct, tag="refusal", tag_field="type"):
    """The model's reason for not answering."""

    refusal: str


class ReasoningText(msgspec.Struct, tag="reasoning_text", tag_field="type"):
    """What the model thought."""

    text: str


class Message(msgspec.Struct, tag="message", tag_field="type"):
    """What the model said."""

    id: str
    status: Status
    content: list[OutputText | Refusal]
    role: str = "assistant"


class Reasoning(msgspec.Struct, tag="reasoning", tag_field="type"):
    """What the model thought before it said anything."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[str] = []


class FunctionCall(msgspec.Struct, tag="function_call", tag_field="type"):
    """A function that the caller shall call; ``call_id`` is the engine's id of the call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


Item = Message | Reasoning | FunctionCall


def id_for(prefix: str, request_id: str) -> str:
    """Return the id that belongs to a request of the platform: ``resp_…``, ``msg_…``."""
    return f"{prefix}_{request_id.removeprefix('req_')}"


def whole_logprobs(given: Iterable[Logprob]) -> list[Logprob]:
    """Return tokens with their bytes, which clients require and some engines leave out."""
    found = list(given)
    for token in found:
        token.bytes = token.bytes if token.bytes is not None else list(token.token.encode())
        token.top_logprobs = token.top_logprobs or []
        for other in token.top_logprobs:
            other.bytes = other.bytes if other.bytes is not None else list(other.token.encode())
    return found


# --- the object ---


class ResponseObject:
    """One response and its identity. ``encoded`` gives it in any state; ``echo`` is what ``echo_of`` made."""

    __slots__ = ("_echo", "created_at", "id")

    def __init__(self, echo: bytes, request_id: str, created_at: int) -> None:
        self.id = id_for("resp", request_id)
        self.created_at = created_at
        self._echo = echo

    def encoded(
        self,
        status: Status,
        output: Iterable[bytes] = (),
        *,
        usage: Usage | None = None,
        completed_at: int | None = None,
        finish_reason: str = "",
        error: ApiError | None = None,
    ) -> bytes:
        """Return the JSON object; ``output`` is encoded items."""
        reason = INCOMPLETE_REASONS.get(finish_reason)
        return (
            b'{"id":%b,"object":"response","created_at":%d,"completed_at":%b,"status":"%b","error":%b,'
            b'"incomplete_details":%b,"output":[%b],"usage":%b,%b'
        ) % (
            encode(self.id),
            self.created_at,
            encode(completed_at if status == "completed" else None),
            status.encode(),
            encode(_error(error)) if error is not None else b"null",
            encode({"reason": reason}) if status == "incomplete" else b"null",
            b",".join(output),
            encode(_usage(usage)) if usage is not None else b"null",
            self._echo,
        )


def _error(error: ApiError) -> dict[str, str]:
    # OpenAI's schema has a closed list of codes here; ours stands in the ``error`` event.
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


def _usage(usage: Usage) -> dict[str, Any]:
    completion = usage.completion_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + completion,
    }


def echo_of(request: ResponseRequest) -> bytes:
    """Return what the response repeats of its request, with OpenAI's defaults: an encoded object without its brace.

    Raises:
        RecursionError: a schema in it is nested too deeply.
    """
    echo = encode(_echo(request))[1:]
    # Schemas stand in it as they came, perhaps over many lines, which would end an event's line.
    is_one_line = b"\n" not in echo and b"\r" not in echo
    return echo if is_one_line else msgspec.json.format(b"{" + echo, indent=-1)[1:]


def _echo(request: ResponseRequest) -> dict[str, Any]:
    tier = request.service_tier
    reasoning = request.reasoning
    return {
        "background": False,
        "conversation": None,
        "frequency_penalty": _or(request.frequency_penalty, 0.0),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": _or(request.presence_penalty, 0.0),
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default" if tier is None or tier == "auto" else tier,
        "store": False,
        "temperature": _or(request.temperature, 1.0),
        "text": _text(request),
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": [_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _or(request.top_p, 1.0),
        # Nothing is ever cut from the input here, whatever was asked.
        "truncation": "disabled",
        "user": request.user,
    }


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _text(request: ResponseRequest) -> dict[str, Any]:
    text = request.text
    if text is None:
        return {"format": {"type": "text"}, "verbosity": "medium"}
    return {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters if is_given(tool.parameters) else NULL,
        "strict": tool.strict,
    }


def _tool_choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
