"""The body of ``POST /v1/chat/completions`` as types (OpenAI's schema, 2026-08)."""

from typing import Annotated, Literal

import msgspec

from modelyard.gateway.openai.call import Sampling, ServiceTier, TokenLimit

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
    """What the model said earlier; ``content`` may be absent beside tool calls. ``function_call`` is deprecated."""

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    function_call: CalledFunction | None = None


class ToolMessage(msgspec.Struct, tag="tool", tag_field="role"):
    """What a tool returned."""

    content: Text
    tool_call_id: str


class FunctionMessage(msgspec.Struct, tag="function", tag_field="role"):
    """What a function returned; deprecated, engines get a ``ToolMessage``."""

    content: str | None
    name: FunctionName


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


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


class AllowedTools(msgspec.Struct):
    """Some of the tools; ``required``: one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)]


class AllowedToolsChoice(msgspec.Struct, tag="allowed_tools", tag_field="type"):
    """The tools that may be called."""

    allowed_tools: AllowedTools


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


class PromptCacheOptions(msgspec.Struct):
    """How prompts are cached, which engines here do by themselves."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class ChatRequest(Sampling, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body; ``docs/reference/api.md`` says what becomes of each field."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice | None = None
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
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    functions: Annotated[list[Function], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT
