"""Relaying a stream: bytes as they come, followed but not decoded.

In the steady state a read from the engine is a whole number of HTTP chunks
holding whole events; nothing in it is of interest, and the very same bytes go
to the client. Only a read that does not fit that picture, or that mentions
usage, an error, a finish or the end, is taken apart event by event.

Nothing is passed on before the first content: until then a lost engine can be
replaced without the client seeing anything (``faults.md`` F4). The stream
never ends cleanly without ``[DONE]`` (I8). This module does no I/O: ``feed``
says what to send.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from modelyard.gateway.chunk_form import ChunkForm
from modelyard.gateway.responses import MalformedResponseError, chunk_size
from modelyard.gateway.sse import (
    Kind,
    StreamEvent,
    Usage,
    one_line,
    read_event,
    usage_event,
    with_role,
    without_usage,
)

EVENT_BYTES_MAX = 4 * 1024 * 1024
"""Longest event of an engine; a line without end must not fill the memory (F36)."""
LINE_BYTES_MAX = 1024
"""Longest line of chunk framing: a size with its extensions, or a trailer."""

FORM_TOKENS = 16
"""How often at most the form of a stream's chunks is learnt anew: some engines write each differently."""

DONE = b"data: [DONE]\n\n"
_OBJECT_EVENTS = (b"data: {", b"data:{")


class EngineStreamError(MalformedResponseError):
    """The engine's stream is broken: bad framing, an event over the limit, or garbage."""


class Line(Protocol):
    """The connection that a stream came over (``upstream.py``)."""

    def abort(self) -> None:
        """Drop it."""
        ...

    def release(self) -> None:
        """Let the next request have it."""
        ...

    def linger(self, follow: Callable[[bytes], bool]) -> None:
        """Let the next request have it once ``follow`` says that the body has ended."""
        ...


def give_back(connection: Line, relay: "StreamRelay | None") -> None:
    """End the use of a connection whose stream was followed by ``relay``, None for one that is of no more use.

    One that said more than its answer would fail its next request, too.
    """
    if relay is None or relay.has_excess:
        connection.abort()
    elif relay.is_ended:
        connection.release()
    elif relay.is_chunked:
        connection.linger(relay.skip)
    else:
        connection.abort()


def as_chunk(payload: bytes) -> bytes:
    """Return ``payload`` in HTTP/1.1 chunk framing."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class StreamRelay:
    """Follows one engine stream. Attributes tell what was seen so far.

    ``is_chunked`` is how the engine frames its body. ``feed`` returns bytes
    for the client in chunk framing, without the last chunk.

    ``transform`` makes of each event what the client gets of it, where that is not the event itself. ``transcript``
    collects what was passed on of the engine's events, raw. ``tokens`` is how many the client had before, of an answer
    that another engine began: then there is no role to tell and no beginning to hold back, and the usage that the
    engine tells is not that of the whole answer, so it is kept for ``finish``. ``has_finish`` is true once all
    ``choices`` have been told to be over.
    """

    __slots__ = (
        "_buffer",
        "_carry",
        "_first",
        "_form",
        "_form_due",
        "_has_role",
        "_is_chat",
        "_is_continued",
        "_is_steady",
        "_is_trailer",
        "_left",
        "_open_choices",
        "_transform",
        "_wants_usage",
        "error",
        "has_finish",
        "has_usage_event",
        "is_chunked",
        "is_done",
        "is_ended",
        "sample",
        "tokens",
        "tokens_before",
        "transcript",
        "usage",
    )

    def __init__(
        self,
        *,
        is_chunked: bool,
        is_chat: bool,
        wants_usage: bool,
        transform: Callable[[bytes], bytes] | None = None,
        transcript: list[bytes] | None = None,
        tokens: int = 0,
        choices: int = 1,
    ) -> None:
        self.is_chunked = is_chunked
        self._is_chat = is_chat
        self._wants_usage = wants_usage
        self._transform = transform
        self.transcript = transcript
        self.tokens = self.tokens_before = tokens
        self._open_choices = choices
        self._is_continued = tokens > 0
        self.usage: Usage | None = None
        self.error: str | None = None
        self.has_finish = False
        self.has_usage_event = False
        self.is_done = False
        self.is_ended = False
        self._is_steady = self._is_continued
        self._is_trailer = False
        self._has_role = self._is_continued
        self._first: list[bytes] = []
        self._carry = bytearray()
        self._left = 0
        # Kept only while nothing is held back of what came: a chunk of this form is passed on without another look.
        self._form: ChunkForm | None = None
        self._form_due = 0
        self._buffer = bytearray()
        self.sample = b""

    @property
    def has_begun(self) -> bool:
        """Say whether anything was passed on."""
        return self._is_steady

    @property
    def has_excess(self) -> bool:
        """Say whether bytes came behind the end of the body."""
        return self.is_ended and bool(self._carry)

    def skip(self, data: bytes) -> bool:
        """Follow only the framing, of a stream whose client has been served; say whether it has ended."""
        self._dechunk(data)
        return self.is_ended

    def feed(self, data: bytes) -> bytes:
        """Take a read from the engine; return what the client gets.

        Raises:
            EngineStreamError: the framing is broken, an event is too long, or what looked like a chunk is none.
        """
        if (form := self._form) is not None and form.fits(data):
            self.tokens += 1
            if self.transcript is not None:
                self.transcript.append(data)
            return data
        if (
            self._is_steady
            and self._transform is None
            and self.is_chunked
            and not self._carry
            and not self._left
            and not self._buffer
            and data.endswith(b"\n\n\r\n")
            and (b'"usage"' not in data or (self._wants_usage and _has_no_usage(data)))
            and b'"finish_reason":"' not in data
            and b'"finish_reason": "' not in data
            and b"[DONE]" not in data
            and b'"error"' not in data
            and b"\nevent" not in data
        ):
            count = _whole_events(data)
            if count:
                self.tokens += count
                if self.transcript is not None:
                    self.transcript.append(data)
                if count == 1 and self.tokens >= self._form_due:
                    self._form, self._form_due = ChunkForm.of(data), self.tokens + FORM_TOKENS
                return data
        self._form = None
        try:
            return self._feed_slowly(data)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            # What nobody had looked at before: text that is no UTF-8, a number that is too large.
            raise EngineStreamError("malformed event") from None

    def finish(self, usage: Usage) -> bytes:
        """Return the last bytes of a complete answer, ``[DONE]`` included, and ``usage`` if it is still owed."""
        out = b""
        if self._wants_usage and not self.has_usage_event and self.sample:
            out = usage_event(self.sample, usage) + b"\n\n"
        return out + DONE

    def _feed_slowly(self, data: bytes) -> bytes:
        self._buffer += self._dechunk(data) if self.is_chunked else data
        out = bytearray()
        for event in self._take_events():
            if self.is_done or self.error is not None:
                break
            out += self._pass_on(event, read_event(event))
        return as_chunk(bytes(out)) if out else b""

    def _pass_on(self, event: bytes, seen: StreamEvent) -> bytes:
        if seen.usage is not None:
            self.usage = seen.usage
        if seen.has_content:
            self.tokens += 1
        match seen.kind:
            case Kind.COMMENT:
                return b""
            case Kind.DONE:
                self.is_done = True
                return b""
            case Kind.ERROR | Kind.GARBAGE:
                self.error = seen.message or "malformed event"
                return b""
            case Kind.USAGE:
                if not self._wants_usage or not self._is_steady or seen.usage is None or self._is_continued:
                    return b""
                self.has_usage_event = True
                return one_line(event) + b"\n\n"
            case Kind.FINISH:
                self._open_choices -= seen.finishes
                self.has_finish = self._open_choices <= 0
            case Kind.ROLE | Kind.CONTENT:
                pass
        return self._hold_or_pass(event, seen)

    def _hold_or_pass(self, event: bytes, seen: StreamEvent) -> bytes:
        event = one_line(event)
        if seen.usage is not None or (not self._wants_usage and b'"usage"' in event):
            event = without_usage(event)
        if not self.sample:
            self.sample = event
        self._has_role = self._has_role or seen.has_role
        if self._is_chat and not self._has_role:
            event = with_role(event)
            self._has_role = True
        if seen.kind is Kind.ROLE and (self._is_continued or not self._is_steady):
            if not self._is_continued:
                self._first.append(event)
            return b""
        if self.transcript is not None:
            self.transcript.append(event + b"\n\n")
        self._is_steady = True
        held, self._first = [*self._first, event], []
        if self._transform is None:
            return b"".join([piece + b"\n\n" for piece in held])
        return b"".join([self._transform(piece) for piece in held])

    def _dechunk(self, data: bytes) -> bytes:
        """Strip chunk framing; a partial chunk is continued by the next call."""
        out = bytearray()
        carry = self._carry
        carry += data
        at = 0
        while at < len(carry) and not self.is_ended:
            if self._left:
                piece = carry[at : at + self._left]
                out += piece[:-2] if len(piece) == self._left else piece[: max(0, self._left - 2)]
                at += len(piece)
                self._left -= len(piece)
                continue
            line_end = carry.find(b"\r\n", at)
            if line_end < 0:
                if len(carry) - at > LINE_BYTES_MAX:
                    raise EngineStreamError("bad chunk framing")
                break
            line = bytes(carry[at:line_end])
            at = line_end + 2
            if self._is_trailer:
                self.is_ended = not line
            elif size := _chunk_size(line):
                self._left = size + 2
            else:
                # The body ends with the blank line behind this, not here: a reused connection would begin with it.
                self._is_trailer = True
        del carry[:at]
        return bytes(out)

    def _take_events(self) -> list[bytes]:
        buffer = self._buffer
        if len(buffer) > EVENT_BYTES_MAX:
            raise EngineStreamError("event too long")
        events: list[bytes] = []
        at = 0
        while (found := _event_end(buffer, at)) is not None:
            end, following = found
            if end > at:
                events.append(bytes(buffer[at:end]))
            at = following
        del buffer[:at]
        return events


def _has_no_usage(data: bytes) -> bool:
    """Say whether every usage in ``data`` is null, and none stands on a chunk of its own."""
    return not any(mark in data for mark in (b'"usage":{', b'"usage": {', b'"choices":[]', b'"choices": []'))


def _whole_events(data: bytes) -> int:
    """Return how many events ``data`` holds if it is whole chunks of whole ``data:`` events, else 0."""
    at = 0
    size = len(data)
    while at < size:
        line_end = data.find(b"\r\n", at, at + 10)
        if line_end < 0:
            return 0
        try:
            end = line_end + 2 + int(data[at:line_end], 16)
        except ValueError:
            return 0
        if (
            end <= line_end + 2
            or data[end - 3 : end + 2] != b"}\n\n\r\n"
            or not data.startswith(_OBJECT_EVENTS, line_end + 2)
        ):
            return 0
        at = end + 2
    # Raw newlines cannot stand inside JSON, so each blank line ends an event; comments would have failed above
    # unless they follow data in one chunk, which no engine we know does.
    return data.count(b"\n\n") if at == size else 0


def _chunk_size(line: bytes) -> int:
    try:
        return chunk_size(line)
    except MalformedResponseError as error:
        raise EngineStreamError(str(error)) from None


def _event_end(buffer: bytearray, at: int) -> tuple[int, int] | None:
    """Return where the event at ``at`` ends and where the next begins, or None when it is unfinished."""
    plain = buffer.find(b"\n\n", at)
    # Not beyond the other kind of end: many events may come in one read.
    carriage = buffer.find(b"\r\n\r\n", at, plain + 3 if plain >= 0 else len(buffer))
    if plain < 0 and carriage < 0:
        return None
    if carriage < 0 or 0 <= plain < carriage:
        return plain, plain + 2
    return carriage, carriage + 4
