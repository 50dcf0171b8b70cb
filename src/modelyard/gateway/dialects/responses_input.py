"""From the input items of a Responses request to the messages of a chat.

A chat wants a model's calls in the message that made them and every result
behind its call; items come one by one. Reasoning items are dropped: chat
templates of reasoning models leave out earlier thinking themselves. What would
need a store or a tool that OpenAI hosts is refused, with the path of the item.
"""

from typing import TypeVar

import msgspec

from modelyard import errors
from modelyard.gateway.dialects.responses_request import (
    FunctionCallItem,
    FunctionOutputItem,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    ItemHead,
    Items,
    MessageItem,
    OnlyMessages,
    OutputTextInput,
    Part,
    RefusalInput,
    begins_with,
    is_given,
)
from modelyard.gateway.openai.chat import (
    AssistantMessage,
    AudioPart,
    CalledFunction,
    DeveloperMessage,
    ImagePart,
    ImageUrl,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from modelyard.web.decoding import decode, refusal

T = TypeVar("T")

_REFERENCE = (
    "items are not stored here; send the item itself in place of a reference "
    "(clients that send references do so unless told 'store': false)"
)

_text = msgspec.json.Decoder(str)
_only_messages = msgspec.json.Decoder(OnlyMessages)
_items = msgspec.json.Decoder(Items)
_head = msgspec.json.Decoder(ItemHead)
_message = msgspec.json.Decoder(MessageItem)
_function_call = msgspec.json.Decoder(FunctionCallItem)
_function_output = msgspec.json.Decoder(FunctionOutputItem)


def messages_of(given: msgspec.Raw) -> list[Message]:
    """Return the messages for ``input``: a text of the user, or items.

    Raises:
        ApiError: 400 with the path of what is wrong or cannot be honoured.
    """
    if not begins_with(given, b"["):
        return [UserMessage(content=_decode_at(_text, given, "input"))]
    conversation = _Conversation()
    try:
        messages = _only_messages.decode(given)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        # Other items, or a mistake, which only a look at each of them can name.
        items = _decode_at(_items, given, "input")
        for index, item in enumerate(items):
            conversation.add(item, index)
    else:
        if not messages:
            raise errors.invalid_value("input", "it is an empty list", code="empty_array")
        for index, message in enumerate(messages):
            conversation.add_message(message, index)
    if not conversation.messages:
        raise errors.invalid_value("input", "it has no message")
    return conversation.messages


def _decode_at(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, place: str) -> T:
    """Decode a part of the body, with errors that name their path from its root."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        inner = " - at `$"
        if text.endswith("`") and inner in text:
            head, _, tail = text.rpartition(inner)
            text = f"{head}{inner}.{place}{tail}"
        else:
            text = f"{text}{inner}.{place}`"
        raise refusal(msgspec.ValidationError(text)) from None
    except (msgspec.MsgspecError, RecursionError, ValueError):
        # Strings inside are looked at only now; this says what is wrong with them.
        return decode(decoder, bytes(raw))


class _Conversation:
    """Messages so far, and the calls that results may answer."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._call_ids: set[str] = set()

    def add(self, item: msgspec.Raw, index: int) -> None:
        place = f"input[{index}]"
        head = _decode_at(_head, item, place)
        match head.type:
            case "message":
                self.add_message(_decode_at(_message, item, place), index)
            case None if is_given(head.role) or not is_given(head.id):
                self.add_message(_decode_at(_message, item, place), index)
            case "function_call":
                self._add_call(_decode_at(_function_call, item, place))
            case "function_call_output":
                self._add_result(_decode_at(_function_output, item, place), index)
            case "reasoning":
                pass
            case None | "item_reference":
                raise errors.unsupported_parameter(place, _REFERENCE)
            case other:
                reason = (
                    f"items of the type '{other[:64]}' cannot be passed to an engine; "
                    "use message, function_call, function_call_output or reasoning"
                )
                raise errors.unsupported_parameter(f"{place}.type", reason)

    def add_message(self, item: MessageItem, index: int) -> None:
        content = item.content
        where = f"input[{index}].content" if content.__class__ is list else ""
        match item.role:
            case "user":
                self.messages.append(UserMessage(content=_user_content(content, where)))
            case "system":
                self.messages.append(SystemMessage(content=_text_content(content, where)))
            case "developer":
                self.messages.append(DeveloperMessage(content=_text_content(content, where)))
            case "assistant":
                self._add_answer(_assistant_content(content, where))

    def _add_answer(self, content: str | list[TextPart | RefusalPart]) -> None:
        last = self.messages[-1] if self.messages else None
        if isinstance(last, AssistantMessage) and last.tool_calls and last.content is None:
            # Text behind a call: results must follow the message that has the calls.
            last.content = content
        else:
            self.messages.append(AssistantMessage(content=content))

    def _add_call(self, item: FunctionCallItem) -> None:
        self._call_ids.add(item.call_id)
        call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments or "{}"))
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, AssistantMessage):
            last = AssistantMessage()
            self.messages.append(last)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(call)

    def _add_result(self, item: FunctionOutputItem, index: int) -> None:
        if item.call_id not in self._call_ids:
            where = f"input[{index}].call_id"
            raise errors.invalid_value(where, "no function_call with this call_id stands before it")
        content = _text_content(item.output, f"input[{index}].output")
        self.messages.append(ToolMessage(content=content, tool_call_id=item.call_id))


def _user_content(content: str | list[Part], where: str) -> str | list[TextPart | ImagePart | AudioPart]:
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0], InputText | OutputTextInput):
        return content[0].text
    return [_user_part(part, f"{where}[{place}]") for place, part in enumerate(_not_empty(content, where))]


def _user_part(part: Part, where: str) -> TextPart | ImagePart | AudioPart:
    match part:
        case InputText() | OutputTextInput():
            return TextPart(part.text)
        case InputImage():
            return _image(part, where)
        case InputAudio():
            return AudioPart(part.input_audio)
        case InputFile() | RefusalInput():
            raise _misplaced(part, where)


def _image(part: InputImage, where: str) -> ImagePart:
    if part.file_id is not None:
        raise errors.unsupported_parameter(f"{where}.file_id", "files are not passed to engines; send a data: URL")
    if part.image_url is None:
        raise errors.missing_parameter(f"{where}.image_url")
    if not part.image_url.startswith("data:"):
        raise errors.invalid_value(f"{where}.image_url", "only data: URLs are accepted; links are not fetched")
    # Chat completions know no "original"; "high" is as near as it gets.
    detail = "high" if part.detail == "original" else part.detail
    return ImagePart(ImageUrl(url=part.image_url, detail=detail))


def _text_content(content: str | list[Part], where: str) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(_not_empty(content, where)):
        if not isinstance(part, InputText | OutputTextInput):
            raise _misplaced(part, f"{where}[{place}]")
        texts.append(TextPart(part.text))
    return texts[0].text if len(texts) == 1 else texts


def _assistant_content(content: str | list[Part], where: str) -> str | list[TextPart | RefusalPart]:
    if isinstance(content, str):
        return content
    texts: list[TextPart | RefusalPart] = []
    for place, part in enumerate(_not_empty(content, where)):
        match part:
            case InputText() | OutputTextInput():
                texts.append(TextPart(part.text))
            case RefusalInput():
                # As text, which every engine knows: it is what the model said.
                texts.append(TextPart(part.refusal))
            case InputImage() | InputAudio() | InputFile():
                raise _misplaced(part, f"{where}[{place}]")
    if len(texts) == 1 and isinstance(texts[0], TextPart):
        return texts[0].text
    return texts


def _not_empty(content: list[Part], where: str) -> list[Part]:
    if not content:
        raise errors.invalid_value(where, "it is an empty list", code="empty_array")
    return content


def _misplaced(part: Part, where: str) -> errors.ApiError:
    if isinstance(part, InputFile):
        return errors.unsupported_parameter(f"{where}.type", "no engine here reads files; send their text")
    kind = part.__struct_config__.tag
    return errors.unsupported_parameter(f"{where}.type", f"a part of the type '{kind}' cannot stand here")
