"""Reading an engine's HTTP/1.1 responses: what frames them, strictly; the rest not at all."""

import re

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
RETRY_AFTER_S_MAX = 120.0
"""OpenAI's SDKs do not try again at all after a longer one."""


class ResponseHead:
    """Status and the headers that matter; ``length`` is None when the body ends otherwise."""

    __slots__ = ("content_type", "is_chunked", "is_last", "length", "retry_after", "status")

    def __init__(self) -> None:
        self.status = 0
        self.content_type = b""
        self.length: int | None = None
        self.is_chunked = False
        self.is_last = False
        self.retry_after: float | None = None


class MalformedResponseError(Exception):
    """The peer does not speak HTTP/1.1 as we know it."""


# What frames a response, with its value up to the line's end, a bare CR included. One pass over the head with this
# costs a third of a search for each name.
_FRAMING = re.compile(
    rb"\r\n(content-length|content-type|content-encoding|transfer-encoding|connection):([^\r]*(?:\r(?!\n)[^\r]*)*)"
)


def parse_head(head: bytes) -> ResponseHead:
    """Parse status line and headers (without the blank line).

    Raises:
        MalformedResponseError: it is no HTTP/1.x response, or its framing is ambiguous.
    """
    found = ResponseHead()
    lower = head.lower() + b"\r\n"
    if lower[:13] == b"http/1.1 200 ":
        found.status = 200  # nearly always, and to take a line apart costs ten times as much
    else:
        found.status, found.is_last = _status_of(lower)
    lines = _FRAMING.findall(lower)
    fields = dict(lines)
    if len(fields) != len(lines):
        raise MalformedResponseError("a header that frames the response is given twice")
    found.length = _length_of(fields)
    if (encoding := fields.get(b"transfer-encoding")) is not None:
        if encoding.strip() != b"chunked":
            raise MalformedResponseError("unknown transfer-encoding")
        if found.length is not None:
            raise MalformedResponseError("both content-length and chunked")
        found.is_chunked = True
    if (coding := fields.get(b"content-encoding")) is not None and coding.strip() not in (b"", b"identity"):
        # We never ask for it, and what cannot be read cannot be metered; unpacked, it may be 1,000 times its size.
        raise MalformedResponseError("a compressed response that nobody asked for")
    found.content_type = fields.get(b"content-type", b"").strip()
    if (connection := fields.get(b"connection")) is not None:
        found.is_last = connection.strip() == b"close"
    if found.status != 200:
        _take_rare(found, lower)
    return found


def _take_rare(found: ResponseHead, head: bytes) -> None:
    if found.status in _BODYLESS:
        found.length = 0
    elif found.status >= 400 and (pause := _value_of(head, b"\r\nretry-after:")) and pause.isdigit():
        found.retry_after = min(float(pause), RETRY_AFTER_S_MAX)


_BODYLESS = frozenset({204, 304})


def _status_of(head: bytes) -> tuple[int, bool]:
    """Return the status, and whether the version is one that closes after each response."""
    if head[:7] != b"http/1." or head[8:9] != b" " or not head[9:12].isdigit() or head[12:13] not in (b" ", b"\r"):
        raise MalformedResponseError("not an HTTP/1.1 response")
    return int(head[9:12]), head[7:8] == b"0"


def _length_of(fields: dict[bytes, bytes]) -> int | None:
    given = fields.get(b"content-length")
    if given is None:
        return None
    value = given.strip()
    if not value.isdigit():
        raise MalformedResponseError("bad content-length")
    length = int(value)
    if length > BODY_BYTES_MAX:
        raise MalformedResponseError("response too long")
    return length


def _value_of(head: bytes, name: bytes) -> bytes | None:
    """Return the value of the one header ``name`` (with its line break and colon), None without it."""
    at = head.find(name)
    if at < 0:
        return None
    at += len(name)
    if head.find(name, at) >= 0:
        raise MalformedResponseError("a header that matters is given twice")
    return head[at : head.index(b"\r\n", at)].strip()


def join_chunks(body: bytearray) -> tuple[bytes, int] | None:
    """Return the payload of a chunked body and where the body ends, or None while it is unfinished.

    Raises:
        MalformedResponseError: the framing is broken.
    """
    out = bytearray()
    at = 0
    while True:
        line_end = body.find(b"\r\n", at)
        if line_end < 0:
            return None
        size = chunk_size(bytes(body[at:line_end]))
        start = line_end + 2
        if size == 0:
            # The line break before it makes an empty trailer end like any other: with a blank line.
            end = body.find(b"\r\n\r\n", line_end)
            return None if end < 0 else (bytes(out), end + 4)
        at = start + size + 2
        if at > len(body):
            return None
        if body[at - 2 : at] != b"\r\n":
            raise MalformedResponseError("bad chunk framing")
        out += body[start : start + size]


def chunk_size(line: bytes) -> int:
    """Return the size that the first line of a chunk tells; extensions are ignored.

    Raises:
        MalformedResponseError: it is no plain hexadecimal number (``int`` would also take a sign, ``0x`` or ``1_0``).
    """
    size = line.partition(b";")[0].strip()
    if not size or len(size) > 16 or size.strip(b"0123456789abcdefABCDEF"):
        raise MalformedResponseError("bad chunk framing")
    return int(size, 16)
