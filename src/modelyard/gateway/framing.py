"""HTTP/1.1 framing of what goes to clients: status lines, and chunks taken apart for HTTP/1.0."""

import http

LINE_BYTES_MAX = 1024
"""Longest line of chunk framing: a size with its extensions, or a trailer."""

_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_OK = b"HTTP/1.1 200 OK\r\n"


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    return _OK if status == 200 else b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Status"))


def without_framing(chunks: bytes) -> bytes:
    """Strip chunk framing of our own making, for HTTP/1.0 clients."""
    out = bytearray()
    at = 0
    while at < len(chunks):
        line_end = chunks.index(b"\r\n", at)
        size = int(chunks[at:line_end], 16)
        out += chunks[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2
    return bytes(out)


class ChunkReader:
    """Follows a chunked body that comes in any pieces; ``is_ended`` once its last blank line is there."""

    __slots__ = ("_is_trailer", "_left", "_line", "is_ended")

    def __init__(self) -> None:
        self.is_ended = False
        self._is_trailer = False
        self._left = 0
        self._line = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece; return its payload.

        Raises:
            ValueError: this is no chunked body.
        """
        out = bytearray()
        at = 0
        while at < len(data) and not self.is_ended:
            if self._left:
                piece = data[at : at + self._left]
                # The line break behind a chunk counts as two bytes of it.
                out += piece[: max(0, self._left - 2)]
                at += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\n", at)
            self._line += data[at:] if end < 0 else data[at : end + 1]
            if len(self._line) > LINE_BYTES_MAX:
                raise ValueError("a line of chunk framing does not end")
            if end < 0:
                break
            at = end + 1
            self._take_line()
        return bytes(out)

    def _take_line(self) -> None:
        line, self._line = self._line.strip(), b""
        if self._is_trailer:
            self.is_ended = not line
        elif size := int(line.partition(b";")[0], 16):
            self._left = size + 2
        else:
            self._is_trailer = True
