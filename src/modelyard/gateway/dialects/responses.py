"""OpenAI's Responses API on top of chat completions.

``decode_response`` makes the chat request that an engine gets, and keeps what
the answer repeats of the request. Nothing is stored,
so every field that names something stored is refused with what to do instead.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from modelyard import errors
from modelyard.clock import Clock, SystemClock
from modelyard.errors import ApiError
from modelyard.gateway.dialects.responses_answer import answer_items
from modelyard.gateway.dialects.responses_input import messages_of
from modelyard.gateway.dialects.responses_object import INCOMPLETE_REASONS, ResponseObject, echo_of, encode
from modelyard.gateway.dialects.responses_request import (
    LOGPROBS,
    NOT_HERE,
    AnyJson,
    FunctionTool,
    ResponseRequest,
    SchemaJson,
    TextOptions,
    ToolChoice,
    begins_with,
    is_given,
)
from modelyard.gateway.dialects.responses_stream import ResponseStream
from modelyard.gateway.openai import chat
from modelyard.gateway.openai.call import Call, decode_strict
from modelyard.gateway.openai.chat import ABSENT, ChatRequest, call_of
from modelyard.gateway.sse import Usage

ENGINE_ROUTE = "/v1/chat/completions"

_decoder = msgspec.json.Decoder(ResponseRequest)
_CLOCK = SystemClock()


@dataclass(slots=True)
class ResponseTranslation:
    """One request of the Responses API, on its way back: what the answer repeats of it, and when it was decoded."""

    echo: bytes
    created_at: int
    clock: Clock

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the ``response`` object for a whole chat completion.

        Raises:
            ValueError: ``chat`` is no chat completion.
        """
        items, finish_reason = answer_items(chat, request_id)
        return ResponseObject(self.echo, request_id, self.created_at).encoded(
            "incomplete" if finish_reason in INCOMPLETE_REASONS else "completed",
            [encode(item) for item in items],
            usage=usage,
            completed_at=int(self.clock.unix_s()),
            finish_reason=finish_reason,
        )

    def stream(self, request_id: str) -> ResponseStream:
        """Return a new translation of a stream."""
        response = ResponseObject(self.echo, request_id, self.created_at)
        return ResponseStream(response, request_id, self.clock)


def decode_response(body: bytes, clock: Clock = _CLOCK) -> Call:
    """Return the call for a body of ``POST /v1/responses``; ``clock`` dates the response.

    Raises:
        ApiError: 400 naming what is wrong or cannot be honoured.
    """
    request, ignored = decode_strict(_decoder, body)
    for name in ignored:
        if name in NOT_HERE:
            raise errors.unsupported_parameter(name, NOT_HERE[name])
    _refuse_what_needs_a_store(request)
    call = call_of(_chat_request(request), ignored)
    if request.truncation == "auto":
        # The gateway cannot count an engine's tokens. An input that is too long is refused by the engine, not cut.
        call.ignored = (*call.ignored, "truncation")
    try:
        echo = echo_of(request)
    except RecursionError:
        raise errors.invalid_json("it is nested too deeply") from None
    call.engine_route = ENGINE_ROUTE
    call.translation = ResponseTranslation(echo, int(clock.unix_s()), clock)
    return call


def decode_input_tokens(body: bytes) -> Call:
    """Return the call whose prompt ``POST /v1/responses/input_tokens`` asks to count; it takes the same fields.

    Raises:
        ApiError: 400 naming what is wrong or cannot be honoured.
    """
    call = decode_response(body)
    call.is_stream = False
    call.translation = None
    return call


def input_tokens_answer(tokens: int) -> bytes:
    """Return the body that says how many tokens the prompt has."""
    return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


def _refuse_what_needs_a_store(request: ResponseRequest) -> None:
    if request.previous_response_id is not None:
        raise _unsupported(
            "previous_response_id", "responses are not stored here; send the whole conversation as 'input'"
        )
    if is_given(request.conversation):
        raise _unsupported("conversation", "conversations are not stored here; send the whole conversation as 'input'")
    if request.background:
        raise _unsupported(
            "background", "responses are not stored here; use 'stream', or the header 'Prefer: respond-async'"
        )
    if is_given(request.prompt):
        raise _unsupported("prompt", "prompt templates are not stored here; send 'instructions' and 'input'")


def _unsupported(param: str, reason: str) -> ApiError:
    return errors.unsupported_parameter(param, reason)


def _chat_request(request: ResponseRequest) -> ChatRequest:
    messages = messages_of(request.input)
    if request.instructions is not None:
        messages.insert(0, chat.SystemMessage(content=request.instructions))
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())]
    tools, tool_choice = _chosen(tools, request.tool_choice)
    text = request.text or TextOptions()
    has_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=True if has_logprobs else None,
        top_logprobs=request.top_logprobs or 0 if has_logprobs else None,
        tools=tools or None,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls if tools else None,
        response_format=_response_format(text),
        verbosity=text.verbosity,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        service_tier="fast" if request.service_tier == "ultrafast" else request.service_tier,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        top_k=request.top_k,
        min_p=request.min_p,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        repetition_penalty=request.repetition_penalty,
    )


def _response_format(text: TextOptions) -> chat.JsonFormat | chat.SchemaFormat | None:
    match text.format:
        case AnyJson():
            return chat.JsonFormat()
        case SchemaJson(name=name, schema=schema, description=description, strict=strict):
            if not begins_with(schema, b"{"):
                raise errors.invalid_value("text.format.schema", "it is no JSON Schema object", code="invalid_type")
            return chat.SchemaFormat(chat.NamedSchema(name, schema, description, strict))
        case _:
            return None


def _tool(tool: FunctionTool, place: str) -> chat.Tool:
    if tool.type != "function":
        reason = f"no engine here has a tool '{tool.type[:64]}'; only functions can be called"
        raise _unsupported(f"{place}.type", reason)
    if tool.name is None:
        raise errors.missing_parameter(f"{place}.name")
    parameters = tool.parameters if is_given(tool.parameters) else ABSENT
    if parameters and not begins_with(parameters, b"{"):
        raise errors.invalid_value(f"{place}.parameters", "it is no JSON Schema object", code="invalid_type")
    return chat.Tool(chat.Function(tool.name, tool.description, parameters, tool.strict))


def _chosen(
    tools: list[chat.Tool], choice: Literal["none", "auto", "required"] | ToolChoice | None
) -> tuple[list[chat.Tool], Literal["none", "auto", "required"] | chat.ToolChoice | None]:
    """Return the tools and the choice for the chat; of ``allowed_tools`` only those that may be called are left."""
    if not tools:
        if choice in (None, "none", "auto"):
            return tools, None
        raise errors.invalid_value("tool_choice", "it needs 'tools'")
    if not isinstance(choice, ToolChoice):
        return tools, choice
    names = {tool.function.name for tool in tools}
    if choice.type == "function":
        name = _known(choice.name, names, "tool_choice.name")
        return tools, chat.ToolChoice(chat.ChosenFunction(name))
    if choice.type != "allowed_tools":
        raise _unsupported("tool_choice.type", "use 'function' or 'allowed_tools'; only functions can be called")
    if choice.mode is None or choice.tools is None:
        raise errors.missing_parameter("tool_choice.tools" if choice.mode else "tool_choice.mode")
    allowed = set()
    for place, tool in enumerate(choice.tools):
        if tool.type != "function":
            raise _unsupported(f"tool_choice.tools[{place}].type", "only functions can be called")
        allowed.add(_known(tool.name, names, f"tool_choice.tools[{place}].name"))
    return [tool for tool in tools if tool.function.name in allowed], choice.mode


def _known(name: str | None, names: set[str], param: str) -> str:
    if name is None:
        raise errors.missing_parameter(param)
    if name not in names:
        raise errors.invalid_value(param, "no function of this name is in 'tools'")
    return name
