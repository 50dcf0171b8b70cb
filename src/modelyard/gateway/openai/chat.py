"""``POST /v1/chat/completions``: from the body to a call.

What is for the platform stays here, what is deprecated becomes its successor,
and what few engines honour becomes a need.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway.openai import functions
from modelyard.gateway.openai.call import Call, decode_strict
from modelyard.gateway.openai.chat_request import (
    ABSENT,
    MESSAGES_MAX,
    TOOLS_MAX,
    AllowedTools,
    AllowedToolsChoice,
    AssistantMessage,
    AudioInput,
    AudioPart,
    CalledFunction,
    ChatRequest,
    ChosenFunction,
    DeveloperMessage,
    Function,
    FunctionMessage,
    FunctionName,
    ImagePart,
    ImageUrl,
    JsonFormat,
    Message,
    NamedSchema,
    PromptCacheOptions,
    RefusalPart,
    SchemaFormat,
    SystemMessage,
    Text,
    TextFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from modelyard.gateway.openai.large_chat import LARGE_BYTES, decode_large, text_length
from modelyard.gateway.openai.whole import MetadataTranslation

if TYPE_CHECKING:
    from modelyard.gateway.dialects import Translation

__all__ = [
    "ABSENT",
    "MESSAGES_MAX",
    "TOOLS_MAX",
    "AllowedTools",
    "AllowedToolsChoice",
    "AssistantMessage",
    "AudioInput",
    "AudioPart",
    "CalledFunction",
    "ChatRequest",
    "ChosenFunction",
    "DeveloperMessage",
    "Function",
    "FunctionMessage",
    "FunctionName",
    "ImagePart",
    "ImageUrl",
    "JsonFormat",
    "Message",
    "NamedSchema",
    "PromptCacheOptions",
    "RefusalPart",
    "SchemaFormat",
    "SystemMessage",
    "Text",
    "TextFormat",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolMessage",
    "UserMessage",
    "call_of",
    "decode_chat",
]

_decoder = msgspec.json.Decoder(ChatRequest)
_fields = msgspec.json.Decoder(dict[str, object])
_RARE = ("prediction", "web_search_options", "moderation")
"""Fields that change the answer and that few engines honour."""

Needs = tuple[tuple[str, str], ...]


def decode_chat(body: bytes) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    if len(body) >= LARGE_BYTES and (large := decode_large(body)) is not None:
        return call_of(large)
    try:
        request, ignored = decode_strict(_decoder, body)
    except ApiError as error:
        raise _with_key(error, body) from None
    return call_of(request, ignored)


def call_of(request: ChatRequest, ignored: tuple[str, ...] = ()) -> Call:
    """Return the call for ``request``, which keeps only what is for the engine.

    Raises:
        ApiError: 400 for fields that contradict each other.
    """
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    # Engines know the older name; both mean the same here.
    request.max_tokens, request.max_completion_tokens = limit, None
    options = request.stream_options
    choices = request.n or 1
    is_stream = bool(request.stream)
    wants_usage = bool(is_stream and options is not None and options.include_usage)
    translation: Translation | None
    translation = functions.modernize(request, wants_usage=wants_usage) if functions.is_deprecated(request) else None
    if request.metadata and not is_stream:
        translation = MetadataTranslation(request.metadata, translation)
    length, needs = _look(request)
    if request.tools is not None or request.tool_choice is not None:
        _settle_tools(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.invalid_value("top_logprobs", "it needs 'logprobs': true")
    call = Call(
        model=request.model,
        request=request,
        text_length=length,
        choices=choices,
        output_tokens=limit * choices if limit is not None else None,
        is_stream=is_stream,
        wants_usage=wants_usage,
        ignored=ignored,
        translation=translation,
        tier=request.service_tier or "",
        user=request.prompt_cache_key or request.safety_identifier or request.user or "",
        can_resume=is_stream and _can_resume(request),
        needs=needs,
    )
    # What is for the platform stays here.
    request.user = request.service_tier = request.store = request.metadata = None
    request.prompt_cache_key = request.safety_identifier = None
    request.prompt_cache_options = request.prompt_cache_retention = None
    return call


def _with_key(error: ApiError, body: bytes) -> ApiError:
    """Return the refusal of a value of ``metadata`` with its key, which the decoder does not tell."""
    if error.param == "metadata" and error.code == "invalid_type":
        metadata = _fields.decode(body).get("metadata")
        pairs = metadata.items() if isinstance(metadata, dict) else ()
        bad = next((key for key, value in pairs if not isinstance(value, str)), None)
        if bad is not None:
            return errors.invalid_value(f"metadata.{bad[:64]}", "it is no text", code="invalid_type")
    return error


def _settle_tools(request: ChatRequest) -> None:
    """Make of the tools and the choice among them what every engine knows.

    Raises:
        ApiError: 400 for a choice without tools, or of a tool that is not there.
    """
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise errors.invalid_value("tool_choice", "it needs 'tools'")
        request.tool_choice = None
        return
    named = {tool.function.name for tool in tools}
    chosen: set[str] = set()
    if isinstance(choice, AllowedToolsChoice):
        chosen = {each.function.name for each in choice.allowed_tools.tools}
        request.tools = [tool for tool in tools if tool.function.name in chosen]
        request.tool_choice = choice.allowed_tools.mode
    elif isinstance(choice, ToolChoice):
        chosen = {choice.function.name}
    if not chosen <= named:
        raise errors.invalid_value("tool_choice", "it names a tool that is not in 'tools'")


def _can_resume(request: ChatRequest) -> bool:
    """Say whether the rest of the answer follows from its text so far: one choice of plain text without logprobs."""
    return (
        (request.n or 1) == 1
        and not request.logprobs
        and (not request.tools or request.tool_choice == "none")
        and isinstance(request.response_format, TextFormat | None)
        and request.messages[-1].__class__ is not AssistantMessage
    )


def _look(request: ChatRequest) -> tuple[int, Needs]:
    """Return the characters of the prompt, and what in the request few engines can do.

    Raises:
        ApiError: 400 for a message without content, or with a link.
    """
    total = 0
    needs: list[tuple[str, str]] = []
    for index, message in enumerate(request.messages):
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, msgspec.Raw):
            total += text_length(content)  # only chats of many kilobytes have such
        elif content is not None:
            total += _parts_length(content, index)
        elif isinstance(message, AssistantMessage) and not message.tool_calls and message.refusal is None:
            raise errors.missing_parameter(f"messages[{index}].content")
    if request.modalities is not None or request.audio:
        needs += _spoken(request)
    if request.prediction or request.web_search_options or request.moderation:
        needs += _rare(request)
    return total, tuple(needs)


def _spoken(request: ChatRequest) -> Needs:
    """Return the need to speak; answers of text are what every engine gives."""
    if request.modalities is not None and "audio" in request.modalities:
        return (("modalities.audio", "modalities"),)
    request.modalities, request.audio = None, ABSENT
    return ()


def _rare(request: ChatRequest) -> Needs:
    found = []
    for name in _RARE:
        value = getattr(request, name)
        if value and bytes(value) != b"null":
            found.append((name, name))
        else:
            setattr(request, name, ABSENT)
    return tuple(found)


def _parts_length(parts: Sequence[TextPart | ImagePart | AudioPart | RefusalPart], index: int) -> int:
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
