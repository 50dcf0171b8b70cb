"""``POST /v1/messages``: Anthropic's request as a chat completion.

What a chat completion cannot say is refused by name (links, files, PDFs, tools
of Anthropic's own servers), never dropped, save earlier thinking, which no
engine takes back. Turns of one role in a row are one turn, as with Anthropic:
the chat templates of many models insist on it.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, TypeVar

import msgspec

from modelyard import errors
from modelyard.gateway.dialects import messages_request as asked
from modelyard.gateway.dialects.messages_answer import MessageTranslation
from modelyard.gateway.openai.call import Call, ServiceTier, decode_strict
from modelyard.gateway.openai.chat import (
    ABSENT,
    AssistantMessage,
    AudioPart,
    CalledFunction,
    ChatRequest,
    ChosenFunction,
    Function,
    ImagePart,
    ImageUrl,
    Message,
    NamedSchema,
    RefusalPart,
    SchemaFormat,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
    call_of,
)

STOPS_MAX = 4
STOP_LENGTH_MAX = 64
CHAT_ROUTE = "/v1/chat/completions"
NEEDS_PREFILL = (("prefill", "messages"),)
"""What an engine must be able to for a request that begins the answer itself."""
BILLING_LINE = "x-anthropic-billing-header:"
"""How a line begins that Claude Code puts before its instructions, for Anthropic's books.

It differs in each request, so no engine would find the rest of the prompt in its cache (vllm#36829).
"""

_EFFORTS: tuple[tuple[int, Literal["low", "medium"]], ...] = ((4096, "low"), (16384, "medium"))
"""Thinking of fewer tokens than this is of this effort; more is ``high``."""
_TIERS: dict[str | None, ServiceTier | None] = {None: None, "auto": "auto", "standard_only": "default"}
_MEDIA_MARK = "[image]"
"""What a tool message holds in place of a picture: chat completions take pictures from users only."""

Effort = Literal["none", "low", "medium", "high", "xhigh", "max"]
UserPart = TextPart | ImagePart | AudioPart
B = TypeVar("B")

_message = msgspec.json.Decoder(asked.MessageRequest)
_count = msgspec.json.Decoder(asked.CountRequest)


def decode_message(body: bytes) -> Call:
    """Return the chat request for a message request.

    Raises:
        ApiError: 400 naming what is wrong, or what cannot be honoured here.
    """
    return _call(*decode_strict(_message, body))


def decode_count(body: bytes) -> Call:
    """Return the same for ``POST /v1/messages/count_tokens``, which needs no ``max_tokens``.

    Raises:
        ApiError: 400, as for the request that is to be counted.
    """
    return _call(*decode_strict(_count, body))


def counted_length(call: Call) -> int:
    """Return the characters that an engine makes a prompt of: the text, and also the tools and their calls."""
    request = call.request
    assert isinstance(request, ChatRequest)
    length = call.text_length
    for tool in request.tools or ():
        function = tool.function
        length += len(function.name) + len(function.description or "") + len(bytes(function.parameters))
    for message in request.messages:
        if isinstance(message, AssistantMessage):
            for use in message.tool_calls or ():
                length += len(use.function.name) + len(use.function.arguments)
    return length


def _call(request: asked.CountRequest, ignored: tuple[str, ...]) -> Call:
    for name in ("container", "mcp_servers"):
        if bytes(getattr(request, name)) not in (b"", b"null", b"[]"):
            raise errors.unsupported_parameter(name, "what runs on Anthropic's servers does not run here")
    messages = _messages(request)
    tools = _tools(request.tools or [])
    choice = request.tool_choice
    may_use_one = getattr(choice, "disable_parallel_tool_use", None)
    stops = _stops(request.stop_sequences or [])
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or None,
        stop=stops or None,
        tools=tools or None,
        tool_choice=_choice(choice, tools),
        parallel_tool_calls=False if may_use_one and tools else None,
        response_format=_format(request),
        reasoning_effort=_effort(request),
        service_tier=_TIERS[request.service_tier],
        user=request.metadata.user_id if request.metadata is not None else None,
    )
    call = call_of(chat, ignored)
    call.engine_route = CHAT_ROUTE
    call.translation = MessageTranslation(
        request.model,
        stops=tuple(stops),
        shows_thinking=_shows_thinking(request.thinking),
        input_tokens=max(1, call.text_length // 4),
    )
    if isinstance(messages[-1], AssistantMessage):
        call.needs = NEEDS_PREFILL
    return call


# --- turns ---


def _messages(request: asked.CountRequest) -> list[Message]:
    messages: list[Message] = []
    for _, run in groupby(enumerate(request.messages), key=lambda numbered: numbered[1].__class__):
        _add_run(messages, list(run))
    if not messages:
        raise errors.invalid_value("messages", "nothing in them has any content")
    last = messages[-1]
    if isinstance(last, AssistantMessage) and last.tool_calls:
        where = f"messages[{len(request.messages) - 1}]"
        raise errors.invalid_value(where, "a 'tool_use' must be followed by a user turn with its 'tool_result'")
    instructions = _instructions(request.system or "")
    if instructions:
        messages.insert(0, SystemMessage(content=instructions))
    return messages


def _add_run(messages: list[Message], run: list[tuple[int, asked.Turn]]) -> None:
    """Append what a run of turns of one role becomes."""
    results: list[Message] = []
    parts: list[UserPart] = []
    texts: list[TextPart | RefusalPart] = []
    uses: list[ToolCall] = []
    for place, turn in run:
        match turn:
            case asked.UserTurn():
                for where, block in _blocks(turn.content, place):
                    _add_user_block(block, where, results, parts)
            case asked.AssistantTurn():
                for where, said in _blocks(turn.content, place):
                    _add_assistant_block(said, where, texts, uses)
            case asked.SystemTurn():
                instructions = _instructions(turn.content)
                if instructions:
                    messages.append(SystemMessage(content=instructions))
    # An engine wants results right behind their calls, whatever else the user said with them.
    messages += results
    if parts:
        messages.append(UserMessage(content=_plain(parts)))
    if texts or uses:
        messages.append(AssistantMessage(content=_plain(texts) if texts else None, tool_calls=uses or None))


def _blocks(content: str | list[B], place: int) -> Iterator[tuple[str, B | asked.TextBlock]]:
    """Yield each block of a turn's content with its path."""
    if isinstance(content, str):
        yield f"messages[{place}].content", asked.TextBlock(content)
        return
    if not content:
        raise errors.invalid_value(f"messages[{place}].content", "it is an empty list", code="empty_array")
    for at, block in enumerate(content):
        yield f"messages[{place}].content[{at}]", block


def _add_user_block(block: asked.UserBlock, where: str, results: list[Message], parts: list[UserPart]) -> None:
    match block:
        case asked.TextBlock():
            parts.append(TextPart(block.text))
        case asked.ImageBlock():
            parts.append(_image(block, where))
        case asked.DocumentBlock():
            parts.append(_document(block, where))
        case asked.ToolResultBlock():
            results.append(_tool_result(block, where, parts))


def _add_assistant_block(
    block: asked.AssistantBlock, where: str, texts: list[TextPart | RefusalPart], uses: list[ToolCall]
) -> None:
    match block:
        case asked.TextBlock():
            if block.text:
                texts.append(TextPart(block.text))
        case asked.ToolUseBlock():
            uses.append(ToolCall(block.id, CalledFunction(block.name, _json_object(block.input, f"{where}.input"))))
        case asked.ThinkingBlock() | asked.RedactedThinkingBlock():
            pass


def _tool_result(block: asked.ToolResultBlock, where: str, pictures: list[UserPart]) -> ToolMessage:
    """Return the tool message; its pictures go to the user message behind it."""
    texts: list[TextPart] = []
    if isinstance(block.content, str):
        texts.append(TextPart(block.content))
    for at, part in enumerate(block.content or () if not isinstance(block.content, str) else ()):
        path = f"{where}.content[{at}]"
        match part:
            case asked.TextBlock():
                texts.append(TextPart(part.text))
            case asked.DocumentBlock():
                texts.append(_document(part, path))
            case asked.ImageBlock():
                pictures.append(_image(part, path))
                texts.append(TextPart(_MEDIA_MARK))
    if block.is_error:
        texts[:1] = [TextPart(f"Error: {texts[0].text}" if texts else "Error")]
    content = texts if len(texts) > 1 else texts[0].text if texts else ""
    return ToolMessage(content=content, tool_call_id=block.tool_use_id)


def _image(block: asked.ImageBlock, where: str) -> ImagePart:
    source = block.source
    if not isinstance(source, asked.Base64Source):
        reason = "only pictures of type 'base64' are accepted; links and files are not fetched"
        raise errors.invalid_value(f"{where}.source", reason)
    return ImagePart(ImageUrl(f"data:{source.media_type};base64,{source.data}"))


def _document(block: asked.DocumentBlock, where: str) -> TextPart:
    source = block.source
    if not isinstance(source, asked.TextSource):
        raise errors.invalid_value(f"{where}.source", "only documents of type 'text' are accepted; send their text")
    if block.citations is not None and block.citations.enabled:
        raise errors.unsupported_parameter(f"{where}.citations", "no engine of this platform cites documents")
    return TextPart("\n".join(text for text in (block.title, block.context, source.data) if text))


def _plain(parts: list[B]) -> str | list[B]:
    """Return one text as what it is: the form that every chat template takes."""
    only = parts[0]
    return only.text if len(parts) == 1 and isinstance(only, TextPart) else parts


def _instructions(text: asked.Text) -> str | list[TextPart]:
    texts = [text] if isinstance(text, str) else [block.text for block in text]
    kept = [text for text in map(_without_billing, texts) if text]
    return [TextPart(text) for text in kept] if len(kept) > 1 else "".join(kept)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def _json_object(raw: msgspec.Raw, where: str) -> str:
    """Return the text of a JSON object."""
    text = bytes(raw)
    if text[:1] != b"{":
        raise errors.invalid_value(where, "it must be a JSON object", code="invalid_type")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise errors.invalid_json("it is not UTF-8") from None


# --- everything else ---


def _stops(texts: list[str]) -> list[str]:
    if len(texts) > STOPS_MAX or not all(1 <= len(text) <= STOP_LENGTH_MAX for text in texts):
        reason = f"this platform takes at most {STOPS_MAX}, of 1 to {STOP_LENGTH_MAX} characters each"
        raise errors.invalid_value("stop_sequences", reason)
    return texts


def _tools(specs: list[asked.ToolSpec]) -> list[Tool]:
    names = set()
    tools = []
    for index, spec in enumerate(specs):
        where = f"tools[{index}]"
        if spec.type not in (None, "custom"):
            reason = "tools of Anthropic's own do not run here; define it by 'input_schema'"
            raise errors.unsupported_parameter(f"{where}.type", reason)
        if spec.name in names:
            raise errors.invalid_value(f"{where}.name", "another tool has that name")
        names.add(spec.name)
        if spec.input_schema is ABSENT:
            raise errors.missing_parameter(f"{where}.input_schema")
        _json_object(spec.input_schema, f"{where}.input_schema")
        function = Function(spec.name, description=spec.description, parameters=spec.input_schema, strict=spec.strict)
        tools.append(Tool(function))
    return tools


def _choice(choice: asked.Choice | None, tools: list[Tool]) -> Literal["none", "auto", "required"] | ToolChoice | None:
    match choice:
        case None:
            return None
        case asked.AutoChoice():
            return "auto" if tools else None
        case asked.NoChoice():
            return "none" if tools else None
        case asked.AnyChoice():
            # Without tools it is refused where chat completions are.
            return "required"
        case asked.NamedChoice():
            if not any(tool.function.name == choice.name for tool in tools):
                raise errors.invalid_value("tool_choice.name", "no tool of 'tools' has that name")
            return ToolChoice(ChosenFunction(choice.name))


def _format(request: asked.CountRequest) -> SchemaFormat | None:
    config = request.output_config
    wanted = (config.format if config is not None else None) or request.output_format
    if wanted is None:
        return None
    _json_object(wanted.schema, "output_config.format.schema")
    return SchemaFormat(NamedSchema("answer", schema=wanted.schema, strict=True))


def _effort(request: asked.CountRequest) -> Effort | None:
    """Return the effort of reasoning: ``output_config.effort``, or what the budget for thinking comes to."""
    thinking = request.thinking
    config = request.output_config
    effort = config.effort if config is not None else None
    if isinstance(thinking, asked.ThinkingDisabled):
        return "none"
    if not isinstance(thinking, asked.ThinkingEnabled):
        return effort
    budget = thinking.budget_tokens
    if request.max_tokens is not None and budget >= request.max_tokens:
        raise errors.invalid_value("thinking.budget_tokens", "it must be less than 'max_tokens'")
    return effort or next((name for limit, name in _EFFORTS if budget < limit), "high")


def _shows_thinking(thinking: asked.Thinking | None) -> bool:
    """Say whether thinking is part of the answer: a caller that did not ask for it takes the first block for text."""
    if isinstance(thinking, asked.ThinkingEnabled | asked.ThinkingAdaptive):
        return thinking.display != "omitted"
    return isinstance(thinking, asked.ThinkingBetweenTools)
