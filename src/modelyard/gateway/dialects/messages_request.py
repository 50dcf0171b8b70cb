"""``POST /v1/messages``: the request as Anthropic's API writes it (2026-05).

Only what can be honoured has a type here. ``cache_control``, ``citations`` of
text and the like are hints or annotations inside objects and are dropped with
every other unknown field in there; unknown fields of the request itself are
named in ``x-modelyard-ignored``.
"""

from typing import Annotated, Literal

import msgspec

from modelyard.gateway.openai.call import ModelName, TokenCount, Unit
from modelyard.gateway.openai.chat import ABSENT, MESSAGES_MAX

TOOLS_MAX = 512
BUDGET_MIN = 1024
"""Fewest tokens of thinking that may be asked for."""

ToolName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,128}\Z")]
ToolUseId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """A piece of text."""

    text: str


class Base64Source(msgspec.Struct, tag="base64", tag_field="type"):
    """A picture in the request itself."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Annotated[str, msgspec.Meta(min_length=1)]


class UrlSource(msgspec.Struct, tag="url", tag_field="type"):
    """A link, which is not fetched here (SSRF)."""


class FileSource(msgspec.Struct, tag="file", tag_field="type"):
    """An uploaded file of Anthropic's."""


class ImageBlock(msgspec.Struct, tag="image", tag_field="type"):
    """A picture for models that see."""

    source: Base64Source | UrlSource | FileSource


class TextSource(msgspec.Struct, tag="text", tag_field="type"):
    """A document that is plain text."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class DocumentSource(msgspec.Struct, tag="content", tag_field="type"):
    """A document made of blocks."""


class PdfSource(msgspec.Struct, tag="base64", tag_field="type"):
    """A PDF, which no engine here reads."""


class Citations(msgspec.Struct):
    """Whether the answer shall cite the document."""

    enabled: bool | None = None


class DocumentBlock(msgspec.Struct, tag="document", tag_field="type"):
    """A document; only one of plain text can be passed on."""

    source: TextSource | DocumentSource | PdfSource | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    """What the caller's tool returned for the call ``tool_use_id``."""

    tool_use_id: ToolUseId
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call that the model made earlier, perhaps of a tool that never was; ``input`` is a JSON object."""

    id: ToolUseId
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    input: msgspec.Raw


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """Earlier thinking. Engines are not told of it."""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    """Earlier thinking that nobody but Anthropic can read."""


UserBlock = TextBlock | ImageBlock | DocumentBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock
Text = str | list[TextBlock]


class UserTurn(msgspec.Struct, tag="user", tag_field="role"):
    """What the user said, and what tools returned."""

    content: str | list[UserBlock]


class AssistantTurn(msgspec.Struct, tag="assistant", tag_field="role"):
    """What the model said earlier, or the beginning of what it shall say."""

    content: str | list[AssistantBlock]


class SystemTurn(msgspec.Struct, tag="system", tag_field="role"):
    """Instructions in the middle of the conversation."""

    content: Text


Turn = UserTurn | AssistantTurn | SystemTurn


class ToolSpec(msgspec.Struct):
    """A tool. One with a ``type`` other than ``custom`` would run at Anthropic."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class AutoChoice(msgspec.Struct, tag="auto", tag_field="type"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag="any", tag_field="type"):
    """Some tool must be used."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, tag="tool", tag_field="type"):
    """This tool must be used."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, tag="none", tag_field="type"):
    """No tool may be used."""


Choice = AutoChoice | AnyChoice | NamedChoice | NoChoice
Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, tag="enabled", tag_field="type"):
    """Think, for about so many tokens."""

    budget_tokens: Annotated[int, msgspec.Meta(ge=BUDGET_MIN, le=2**31 - 1)]
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, tag="adaptive", tag_field="type"):
    """Think as much as seems right."""

    display: Display | None = None


class ThinkingBetweenTools(msgspec.Struct, tag="between_tools", tag_field="type"):
    """Think between uses of tools."""


class ThinkingDisabled(msgspec.Struct, tag="disabled", tag_field="type"):
    """Do not think."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled


class JsonFormat(msgspec.Struct, tag="json_schema", tag_field="type"):
    """The answer must be JSON of this schema."""

    schema: msgspec.Raw


class OutputConfig(msgspec.Struct):
    """How the answer shall be made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct):
    """Whom the request is for."""

    user_id: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class CountRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``: a message request that names no ``max_tokens``."""

    model: ModelName
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: TokenCount | None = None
    system: Text | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Unit | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    top_p: Unit | None = None
    tools: Annotated[list[ToolSpec], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: msgspec.Raw = ABSENT
    container: msgspec.Raw = ABSENT
    mcp_servers: msgspec.Raw = ABSENT


class MessageRequest(CountRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``POST /v1/messages``."""

    max_tokens: TokenCount
