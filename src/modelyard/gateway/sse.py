"""Reading one event of an engine's stream: only as much as the gateway must know.

Engines differ (``reference/api.md`` 1.3 and part 3): errors come in three
forms, usage on a chunk of its own or on every chunk, the role chunk may be
missing. ``read_event`` turns all of that into one ``StreamEvent``.
"""

import enum
from typing import Annotated, Any, NamedTuple

import msgspec

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A count that an engine tells; any other number is garbage and must not reach a bill."""


class Usage(msgspec.Struct):
    """OpenAI's usage object, as far as it is billed."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens | None = None
    total_tokens: Tokens = 0
    prompt_tokens_details: "PromptDetails | None" = None
    completion_tokens_details: "CompletionDetails | None" = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had cached."""
        details = self.prompt_tokens_details
        return min(details.cached_tokens or 0, self.prompt_tokens) if details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that were thought and not said."""
        details = self.completion_tokens_details
        return min(details.reasoning_tokens or 0, self.completion_tokens or 0) if details is not None else 0

    @property
    def audio_input_tokens(self) -> int:
        """Prompt tokens that were sound."""
        details = self.prompt_tokens_details
        return min(details.audio_tokens or 0, self.prompt_tokens) if details is not None else 0

    @property
    def audio_output_tokens(self) -> int:
        """Generated tokens that are sound."""
        details = self.completion_tokens_details
        return min(details.audio_tokens or 0, self.completion_tokens or 0) if details is not None else 0


class PromptDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: Tokens | None = None
    audio_tokens: Tokens | None = None


class CompletionDetails(msgspec.Struct):
    """What generated tokens were for."""

    reasoning_tokens: Tokens | None = None
    audio_tokens: Tokens | None = None


class Kind(enum.Enum):
    """What an event means to the relay."""

    COMMENT = enum.auto()
    ROLE = enum.auto()
    CONTENT = enum.auto()
    FINISH = enum.auto()
    USAGE = enum.auto()
    ERROR = enum.auto()
    DONE = enum.auto()
    GARBAGE = enum.auto()


class StreamEvent(NamedTuple):
    """One event. ``usage`` may come with any kind; ``has_content``: it carries text, also when it is the FINISH."""

    kind: Kind
    usage: Usage | None = None
    has_content: bool = False
    has_role: bool = False
    message: str = ""
    finishes: int = 0
    """How many choices end with it."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None
    message: str | None = None


class _ErrorText(msgspec.Struct):
    message: str | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_error = msgspec.json.Decoder(_ErrorText)
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def split_fields(event: bytes) -> tuple[bytes, bytes]:
    """Return the event's name and data (SSE: several ``data:`` lines join with a newline)."""
    name = b""
    data: list[bytes] = []
    for line in event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip()
    return name, b"\n".join(data)


def one_line(event: bytes) -> bytes:
    """Return an event as clients know it: one ``data:`` line, no ``id:``, ``event:``, ``retry:`` or comment."""
    if event.startswith(b"data:") and b"\n" not in event and b"\r" not in event:
        return event
    # A line break between two parts of JSON is as good as a space.
    return b"data: " + split_fields(event)[1].replace(b"\n", b" ")


def read_event(event: bytes) -> StreamEvent:
    """Return what ``event`` (without its blank line) means."""
    name, data = split_fields(event)
    if not data:
        return StreamEvent(Kind.COMMENT)
    if data == b"[DONE]":
        return StreamEvent(Kind.DONE)
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        kind = Kind.ERROR if name == b"error" else Kind.GARBAGE
        return StreamEvent(kind)
    has_error = bool(chunk.error) and bytes(chunk.error) != b"null"
    if has_error or name == b"error" or chunk.object == "error" or (chunk.choices is None and chunk.usage is None):
        return StreamEvent(Kind.ERROR, message=_error_text(chunk) if has_error else chunk.message or "")
    return _read_choices(chunk)


def _read_choices(chunk: _Chunk) -> StreamEvent:
    choices = chunk.choices or []
    if not choices:
        return StreamEvent(Kind.USAGE, usage=chunk.usage)
    has_content = has_role = False
    finishes = 0
    for choice in choices:
        delta = choice.delta
        finishes += bool(choice.finish_reason)
        if delta is not None:
            has_role = has_role or delta.role is not None
            has_content = has_content or bool(
                delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
            )
        has_content = has_content or bool(choice.text)
    kind = Kind.FINISH if finishes else Kind.CONTENT if has_content else Kind.ROLE
    return StreamEvent(kind, usage=chunk.usage, has_content=has_content, has_role=has_role, finishes=finishes)


def _error_text(chunk: _Chunk) -> str:
    try:
        return _error.decode(chunk.error).message or ""
    except msgspec.MsgspecError:
        return ""


def without_usage(event: bytes) -> bytes:
    """Return a chunk event re-encoded without its usage."""
    chunk = _any.decode(split_fields(event)[1])
    chunk.pop("usage", None)
    return b"data: " + _encode(chunk)


def with_role(event: bytes) -> bytes:
    """Return a chat chunk event whose first deltas name the assistant, for engines that forget it."""
    chunk: dict[str, Any] = _any.decode(split_fields(event)[1])
    for choice in chunk["choices"]:
        if isinstance(choice.get("delta"), dict):
            choice["delta"] = {"role": "assistant", **choice["delta"]}
    return b"data: " + _encode(chunk)


def usage_event(sample: bytes, usage: Usage) -> bytes:
    """Return a usage chunk in the likeness of ``sample`` (any earlier chunk), for engines that sent none."""
    chunk: dict[str, Any] = _any.decode(split_fields(sample)[1])
    completion = usage.completion_tokens or 0
    chunk["choices"] = []
    chunk["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": usage.prompt_tokens + completion,
    }
    return b"data: " + _encode(chunk)
