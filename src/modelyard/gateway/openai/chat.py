"""``POST /v1/chat/completions``: the request (OpenAI's schema, 2026-08)."""

from typing import Annotated, Literal

import msgspec

from modelyard import errors
from modelyard.gateway.openai.call import Call, Sampling, ServiceTier, TokenCount, decode_strict

MESSAGES_MAX = 2048
TOOLS_MAX = 128

ABSENT = msgspec.Raw()
"""A JSON Schema that was not given; schemas are passed on as they came."""

FunctionName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A piece of text."""

    text: str


class ImageUrl(msgspec.Struct, omit_defaults=True):
    """An image as a ``data:`` URL; a link would make the engine fetch it (SSRF)."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """A picture for models that see."""

    image_url: ImageUrl


class AudioInput(msgspec.Struct):
    """Base64 of a recording."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(msgspec.Struct, tag="input_audio", tag_field="type"):
    """A recording for models that hear."""

    input_audio: AudioInput


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type"):
    """An earlier refusal of the assistant."""

    refusal: str


class CalledFunction(msgspec.Struct):
    """``arguments`` is JSON as text."""

    name: FunctionName
    arguments: str


class ToolCall(msgspec.Struct, tag="function", tag_field="type"):
    """A call that the assistant made earlier."""

    id: str
    function: CalledFunction


Text = str | list[TextPart]


class SystemMessage(msgspec.Struct, tag="system", tag_field="role", omit_defaults=True):
    """Instructions."""

    content: Text
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag="developer", tag_field="role", omit_defaults=True):
    """Instructions, under their newer name."""

    content: Text
    name: str | None = None


class UserMessage(msgspec.Struct, tag="user", tag_field="role", omit_defaults=True):
    """What the user said."""

    content: str | list[TextPart | ImagePart | AudioPart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag="assistant", tag_field="role", omit_defaults=True):
    """What the model said earlier; ``content`` may be absent beside tool calls."""

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None


class ToolMessage(msgspec.Struct, tag="tool", tag_field="role"):
    """What a tool returned."""

    content: Text
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct, omit_defaults=True):
    """A function the model may call; ``parameters`` is a JSON Schema."""

    name: FunctionName
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function", tag_field="type"):
    """A tool."""

    function: Function


class ChosenFunction(msgspec.Struct):
    """The function that must be called."""

    name: FunctionName


class ToolChoice(msgspec.Struct, tag="function", tag_field="type"):
    """One function that must be called."""

    function: ChosenFunction


class TextFormat(msgspec.Struct, tag="text", tag_field="type"):
    """Free text."""


class JsonFormat(msgspec.Struct, tag="json_object", tag_field="type"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, omit_defaults=True):
    """The schema that the answer must follow."""

    name: FunctionName
    schema: msgspec.Raw = ABSENT
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type"):
    """JSON of a given schema."""

    json_schema: NamedSchema


class ChatRequest(Sampling, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body; ``docs/reference/api.md`` says what becomes of each field."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, msgspec.Meta(max_length=64)],
                Annotated[str, msgspec.Meta(max_length=512)],
            ],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=64)] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_decoder, body)
    return call_of(request, ignored)


def call_of(request: ChatRequest, ignored: tuple[str, ...] = ()) -> Call:
    """Return the call for ``request``, which keeps only what is for the engine.

    Raises:
        ApiError: 400 for fields that contradict each other.
    """
    limit = request.max_completion_tokens or request.max_tokens
    # Engines know the older name; both mean the same here.
    request.max_tokens, request.max_completion_tokens = limit, None
    options = request.stream_options
    choices = request.n or 1
    call = Call(
        model=request.model,
        request=request,
        text_length=_text_length(request.messages),
        choices=choices,
        output_tokens=limit * choices if limit else None,
        is_stream=bool(request.stream),
        wants_usage=bool(request.stream and options is not None and options.include_usage),
        ignored=ignored,
        tier=request.service_tier or "",
        user=request.prompt_cache_key or request.safety_identifier or request.user or "",
        can_resume=_can_resume(request),
    )
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.invalid_value("top_logprobs", "it needs 'logprobs': true")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        raise errors.invalid_value("tool_choice", "it needs 'tools'")
    # What is for the platform stays here.
    request.user = request.service_tier = request.store = request.metadata = None
    request.prompt_cache_key = request.safety_identifier = None
    return call


def _can_resume(request: ChatRequest) -> bool:
    """Say whether the rest of the answer follows from its text so far: one choice of plain text without logprobs."""
    return (
        (request.n or 1) == 1
        and not request.logprobs
        and (not request.tools or request.tool_choice == "none")
        and isinstance(request.response_format, TextFormat | None)
        and request.messages[-1].__class__ is not AssistantMessage
    )


def _text_length(messages: list[Message]) -> int:
    total = 0
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += _parts_length(content, index)
        elif isinstance(message, AssistantMessage) and not message.tool_calls and message.refusal is None:
            raise errors.missing_parameter(f"messages[{index}].content")
    return total


def _parts_length(
    parts: list[TextPart] | list[TextPart | ImagePart | AudioPart] | list[TextPart | RefusalPart], index: int
) -> int:
    if not parts:
        raise errors.invalid_value(f"messages[{index}].content", "it is an empty list", code="empty_array")
    total = 0
    for place, part in enumerate(parts):
        match part:
            case TextPart():
                total += len(part.text)
            case RefusalPart():
                total += len(part.refusal)
            case ImagePart():
                if not part.image_url.url.startswith("data:"):
                    where = f"messages[{index}].content[{place}].image_url.url"
                    raise errors.invalid_value(where, "only data: URLs are accepted; links are not fetched")
            case AudioPart():
                pass
    return total
