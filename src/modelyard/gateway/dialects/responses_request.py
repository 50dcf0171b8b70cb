"""``POST /v1/responses``: the request as OpenAI's API writes it (2026-05).

Items of ``input`` are decoded one by one, since their ``type`` may be left out
and most of the forty types belong to tools that OpenAI hosts. Only what can be
honoured has a shape here; hints inside an item (``id``, ``status``, ``phase``)
are dropped.
"""

from typing import Annotated, Literal

import msgspec

from modelyard.gateway.openai.call import ModelName, Penalty, ServiceTier, TokenCount, Unit
from modelyard.gateway.openai.chat import ABSENT, MESSAGES_MAX, TOOLS_MAX, AudioInput, FunctionName

NULL = msgspec.Raw(b"null")
OUTPUT_TOKENS_MIN = 16
"""OpenAI's own lower bound of ``max_output_tokens``."""

CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=64)],
        Annotated[str, msgspec.Meta(max_length=512)],
    ],
    msgspec.Meta(max_length=16),
]
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
LOGPROBS: Include = "message.output_text.logprobs"


# --- input items ---


class InputText(msgspec.Struct, tag="input_text", tag_field="type"):
    """A piece of text of the caller."""

    text: str


class OutputTextInput(msgspec.Struct, tag="output_text", tag_field="type"):
    """A piece of text that the model said earlier; its annotations are dropped."""

    text: str


class RefusalInput(msgspec.Struct, tag="refusal", tag_field="type"):
    """An earlier refusal of the model."""

    refusal: str


class InputImage(msgspec.Struct, tag="input_image", tag_field="type"):
    """A picture as a ``data:`` URL, or by a file id, which is refused."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(msgspec.Struct, tag="input_audio", tag_field="type"):
    """A recording for models that hear."""

    input_audio: AudioInput


class InputFile(msgspec.Struct, tag="input_file", tag_field="type"):
    """A document, which no engine here reads."""


Part = InputText | OutputTextInput | RefusalInput | InputImage | InputAudio | InputFile


class ItemHead(msgspec.Struct):
    """What tells one item from another."""

    type: str | None = None
    role: msgspec.Raw = ABSENT
    id: msgspec.Raw = ABSENT


class MessageItem(msgspec.Struct):
    """A message of anybody; the ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] | None = None


class FunctionCallItem(msgspec.Struct):
    """A call that the model made earlier; ``arguments`` is JSON as text."""

    call_id: CallId
    name: FunctionName
    arguments: str


class FunctionOutputItem(msgspec.Struct):
    """What the caller's function returned."""

    call_id: CallId
    output: str | list[Part]


# --- options ---


class FunctionTool(msgspec.Struct):
    """A tool. Any ``type`` is decoded, so that one that is not a function can be named."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class AllowedTool(msgspec.Struct):
    """One of the tools that may be called."""

    type: str
    name: FunctionName | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """A function that must be called, or (``allowed_tools``) those that may be."""

    type: str
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)] | None = None


class PlainText(msgspec.Struct, tag="text", tag_field="type"):
    """Free text."""


class AnyJson(msgspec.Struct, tag="json_object", tag_field="type"):
    """Any JSON object."""


class SchemaJson(msgspec.Struct, tag="json_schema", tag_field="type"):
    """JSON of a given schema."""

    name: FunctionName
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """How the text shall look."""

    format: PlainText | AnyJson | SchemaJson | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct):
    """How much to think. No summary is ever written: engines give the thinking itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseStreamOptions(msgspec.Struct):
    """``include_obfuscation`` is accepted and has no effect: streams are not padded."""

    include_obfuscation: bool | None = None


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body; ``docs/reference/api.md`` says what becomes of each field. None is absent."""

    model: ModelName
    input: msgspec.Raw
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=OUTPUT_TOKENS_MIN, le=2**31 - 1)] | None = None
    max_tool_calls: TokenCount | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: Annotated[list[Include], msgspec.Meta(max_length=32)] | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: msgspec.Raw = ABSENT
    service_tier: ServiceTier | Literal["ultrafast"] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT


Items = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MESSAGES_MAX)]
OnlyMessages = Annotated[list[MessageItem], msgspec.Meta(max_length=MESSAGES_MAX)]

_CHAT_ONLY = "the Responses API has no such field; use /v1/chat/completions"

NOT_HERE = {
    "audio": _CHAT_ONLY,
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
    "logit_bias": _CHAT_ONLY,
    "logprobs": "use 'include': [\"message.output_text.logprobs\"]",
    "max_completion_tokens": "use 'max_output_tokens'",
    "max_tokens": "use 'max_output_tokens'",
    "messages": "use 'input'",
    "modalities": _CHAT_ONLY,
    "moderation": "answers are not moderated here; use /v1/moderations",
    "n": _CHAT_ONLY,
    "prediction": _CHAT_ONLY,
    "reasoning_effort": "use 'reasoning': {\"effort\": …}",
    "response_format": "use 'text': {\"format\": …}",
    "seed": _CHAT_ONLY,
    "stop": _CHAT_ONLY,
    "verbosity": "use 'text': {\"verbosity\": …}",
    "web_search_options": _CHAT_ONLY,
}
"""Fields that would change the answer and that this route does not have, mostly those of chats; what to do instead."""


def is_given(raw: msgspec.Raw) -> bool:
    """Say whether a field that was taken as it came is there and not null."""
    return bool(raw) and raw != NULL


def begins_with(raw: msgspec.Raw, bracket: bytes) -> bool:
    """Say whether a field that was taken as it came is an object (``{``) or a list (``[``), without a copy of it."""
    return memoryview(raw)[:1] == bracket
