"""What the simulated engine reads of a request: OpenAI's fields, strictly typed, unknown ones ignored as vLLM does."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

N = Annotated[int, msgspec.Meta(ge=1, le=128)]
MaxTokens = Annotated[int, msgspec.Meta(ge=0)]


class Refused(Exception):
    """An HTTP error before anything was generated, in vLLM's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind

    def body(self) -> bytes:
        """Return the JSON body."""
        detail = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": detail})


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    """One chat message."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Return the text of all parts; a part that is no text (an image, a sound) counts as one marker token."""
        if isinstance(self.content, list):
            return "".join(part.text if part.type == "text" else "<|media|>" for part in self.content)
        return self.content or ""


class Function(msgspec.Struct):
    """A tool's function."""

    name: str
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool."""

    function: Function


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """``response_format``."""

    type: str
    json_schema: dict[str, Any] | None = None


class Generate(msgspec.Struct):
    """What chat and completions share."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: MaxTokens | None = None
    ignore_eos: bool | None = None
    n: N | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    def length_max(self) -> int | None:
        """Return the cap on the answer, or None."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def stops(self) -> list[str]:
        """Return the stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in found if text]

    def wants_usage(self) -> bool:
        """Say whether the stream shall end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Generate, kw_only=True):
    """``POST /v1/chat/completions``. ``continue_final_message`` goes on where the last, assistant's, message ends."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def rendered(self) -> str:
        """Return the prompt as the model sees it.

        Raises:
            Refused: a turn of the assistant cannot both be continued and begun, and only its own can be continued.
        """
        turns = [f"<|{message.role}|>{message.text()}{_calls_text(message)}<|end|>" for message in self.messages]
        tools = "".join(f"<|tool|>{tool.function.name}" for tool in self.tools or [])
        whole = f"{tools}{''.join(turns)}"
        if not self.continue_final_message:
            return f"{whole}<|assistant|>"
        if self.add_generation_prompt is not False:
            raise Refused(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if self.messages[-1].role != "assistant":
            raise Refused(400, "continue_final_message needs a last message of the assistant")
        return whole.removesuffix("<|end|>")

    def given(self) -> str:
        """Return the text that the answer must go on from, "" for a new answer."""
        return self.messages[-1].text() if self.continue_final_message else ""

    def top(self) -> int | None:
        """Return how many log probabilities a token shall have, None for no such thing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def last_text(self) -> str:
        """Return what is echoed: the last message of the user or of a tool."""
        return next((m.text() for m in reversed(self.messages) if m.role in ("user", "tool")), self.messages[-1].text())

    def wanted_tools(self, text: str) -> list[Tool]:
        """Return the tools to call: the chosen one, or those that ``text`` names; ``required`` calls at least one."""
        tools = self.tools or []
        choice = self.tool_choice or "auto"
        if isinstance(choice, dict):
            name = choice.get("function", {}).get("name")
            return [tool for tool in tools if tool.function.name == name]
        is_required = choice == "required"
        if not is_required and (choice != "auto" or self.messages[-1].role == "tool"):
            return []
        named = [tool for tool in tools if tool.function.name in text] or (tools[:1] if is_required else [])
        return named[:1] if self.parallel_tool_calls is False else named


class CompletionRequest(Generate, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def given(self) -> str:
        """Return "": a completion goes on from its prompt."""
        return ""

    def top(self) -> int | None:
        """Return how many log probabilities a token shall have, None for no such thing."""
        return self.logprobs

    def prompts(self) -> list[str]:
        """Return the prompts as text.

        Raises:
            Refused: ``prompt`` is of another form.
        """
        return texts_of(self.prompt, "prompt")


class EmbeddingsRequest(msgspec.Struct):
    """``POST /v1/embeddings``."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


R = TypeVar("R")


def decode(body: bytes, kind: type[R]) -> R:
    """Return ``body`` as a ``kind``.

    Raises:
        Refused: it is no JSON, or a field has a wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, str(error)) from error


def body_keys(body: bytes) -> list[str]:
    """Return the top-level names in a body that ``decode`` took."""
    return list(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


def texts_of(value: str | list[Any], field: str) -> list[str]:
    """Return the texts of a ``prompt`` or ``input``: text, texts, token ids, or lists of token ids.

    Raises:
        Refused: another form, or nothing at all.
    """
    if isinstance(value, str):
        found = [value]
    elif value and all(isinstance(item, str) for item in value):
        found = list(value)
    elif value and all(_is_id(item) for item in value):
        found = [_ids_text(value)]
    elif value and all(isinstance(item, list) and item and all(_is_id(i) for i in item) for item in value):
        found = [_ids_text(item) for item in value]
    else:
        raise Refused(400, f"'{field}' must be a string, strings, token ids or lists of token ids, and not empty")
    return found


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _ids_text(ids: list[int]) -> str:
    return " ".join(f"id{number}" for number in ids)


def _calls_text(message: Message) -> str:
    calls = message.tool_calls or []
    functions = [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]
    return "".join(f"{function.get('name', '')}{function.get('arguments', '')}" for function in functions)
