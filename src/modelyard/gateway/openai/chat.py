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
    # Written so that a plain chat pays for reading its fields only: setting one costs ten times as much as reading it.
    limit = request.max_completion_tokens
    if limit is not None:
        # Engines know the older name; both mean the same here.
        request.max_tokens, request.max_completion_tokens = limit, None
    else:
        limit = request.max_tokens
    choices = request.n or 1
    is_stream = request.stream is True
    options = request.stream_options
    wants_usage = is_stream and options is not None and options.include_usage is True
    translation: Translation | None = None
    length, needs, is_older = _look(request)
    if is_older:
        translation = functions.modernize(request, wants_usage=wants_usage)
    if request.metadata and not is_stream:
        translation = MetadataTranslation(request.metadata, translation)
    if request.tools is not None or request.tool_choice is not None:
        needs += _settle_tools(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.invalid_value("top_logprobs", "it needs 'logprobs': true")
    tier = request.service_tier
    user = request.prompt_cache_key or request.safety_identifier or request.user
    call = Call(
        request.model,
        request,
        length,
        choices,
        limit * choices if limit is not None else None,
        is_stream,
        wants_usage,
        ignored,
        translation=translation,
        tier=tier or "",
        user=user or "",
        can_resume=is_stream and _can_resume(request),
        needs=needs,
    )
    _keep_back(request)
    return call


def _keep_back(request: ChatRequest) -> None:
    """Unset what is for the platform and not for the engine."""
    if request.user is not None:
        request.user = None
    if request.service_tier is not None:
        request.service_tier = None
    if request.store is not None:
        request.store = None
    if request.metadata is not None:
        request.metadata = None
    if request.prompt_cache_key is not None:
        request.prompt_cache_key = None
    if request.safety_identifier is not None:
        request.safety_identifier = None
    if request.prompt_cache_options is not None:
        request.prompt_cache_options = None
    if request.prompt_cache_retention is not None:
        request.prompt_cache_retention = None


def _with_key(error: ApiError, body: bytes) -> ApiError:
    """Return the refusal of a value of ``metadata`` with its key, which the decoder does not tell."""
    if error.param == "metadata" and error.code == "invalid_type":
        metadata = _fields.decode(body).get("metadata")
        pairs = metadata.items() if isinstance(metadata, dict) else ()
        bad = next((key for key, value in pairs if not isinstance(value, str)), None)
        if bad is not None:
            return errors.invalid_value(f"metadata.{bad[:64]}", "it is no text", code="invalid_type")
    return error


def _settle_tools(request: ChatRequest) -> Needs:
    """Make of the tools and the choice among them what every engine knows; return what not every one can do.

    Raises:
        ApiError: 400 for a choice without tools, or of a tool that is not there.
    """
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise errors.invalid_value("tool_choice", "it needs 'tools'")
        request.tool_choice = None
        return ()
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
    must_call = request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)
    return (("tools.required", "tool_choice"),) if must_call else ()


def _can_resume(request: ChatRequest) -> bool:
    """Say whether the rest of the answer follows from its text so far: one choice of plain text without logprobs."""
    return (
        (request.n or 1) == 1
        and not request.logprobs
        and (not request.tools or request.tool_choice == "none")
        and isinstance(request.response_format, TextFormat | None)
        and request.messages[-1].__class__ is not AssistantMessage
    )


def _look(request: ChatRequest) -> tuple[int, Needs, bool]:
    """Return the characters of the prompt, what in the request few engines can do, and if it uses the older functions.

    Raises:
        ApiError: 400 for a message without content, or with a link.
    """
    total = 0
    is_older = request.functions is not None or request.function_call is not None
    for index, message in enumerate(request.messages):
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, msgspec.Raw):
            total += text_length(content)  # only chats of many kilobytes have such
        elif content is not None:
            total += _parts_length(content, index)
        elif _is_empty(message):
            raise errors.missing_parameter(f"messages[{index}].content")
        kind = message.__class__
        if kind is AssistantMessage or kind is FunctionMessage:
            is_older = is_older or functions.is_older(message)
    needs: Needs = ()
    if request.modalities is not None or request.audio:
        needs = _spoken(request)
    if request.prediction or request.web_search_options or request.moderation:
        needs += _rare(request)
    return total, needs, is_older


def _is_empty(message: Message) -> bool:
    """Say whether a message without content says nothing in another way either."""
    if not isinstance(message, AssistantMessage):
        return False
    return not message.tool_calls and message.refusal is None and message.function_call is None


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
