"""HTTP/1.1 answers, read byte by byte by code that shares nothing with the product.

``AnswerReader`` is fed what a socket gives and says how far the answer is. It
is stricter than a client would be: what it cannot read is ``broken``.
"""

import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """One answer, as far as it was read."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False

    def header(self, name: str) -> str | None:
        """Return the first header of this name (lower case)."""
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(bytes(self.body))

    @property
    def is_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return (self.header("content-type") or "").startswith("text/event-stream")


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer; bytes after its end stay in ``rest``."""

    answer: Answer = field(default_factory=Answer)
    rest: bytearray = field(default_factory=bytearray)
    broken: str = ""
    _phase: str = "head"
    _left: int = 0

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket."""
        self.rest += data
        steps = {
            "head": self._head,
            "length": self._length,
            "size": self._size,
            "chunk": self._chunk,
            "close": self._close,
        }
        while self._phase in steps and not self.broken and steps[self._phase]():
            pass

    def end(self) -> None:
        """Take the end of the connection: completes only an answer without a length."""
        if self._phase == "close":
            self._finish()

    def _head(self) -> bool:
        end = self.rest.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self.rest[:end]).split(b"\r\n")
        del self.rest[: end + 4]
        parts = lines[0].split(b" ", 2)
        if len(parts) < 2 or parts[0] != b"HTTP/1.1" or not parts[1].isdigit():
            self.broken = f"bad status line {lines[0]!r}"
            return False
        self.answer.status = int(parts[1])
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or b"\n" in line or name != name.strip():
                self.broken = f"bad header line {line!r}"
                return False
            self.answer.headers.append((name.decode("latin-1").lower(), value.strip().decode("latin-1")))
        self._choose_framing()
        return True

    def _choose_framing(self) -> None:
        length, coding = self.answer.header("content-length"), self.answer.header("transfer-encoding")
        if length is not None and coding is not None:
            self.broken = "both content-length and transfer-encoding"
        elif self.answer.status in (204, 304):
            self._finish()
        elif coding is not None:
            self._phase = "size"
        elif length is not None:
            self._left, self._phase = int(length), "length"
        else:
            self._phase = "close"

    def _length(self) -> bool:
        taken = self.rest[: self._left]
        del self.rest[: self._left]
        self.answer.body += taken
        self._left -= len(taken)
        if self._left == 0:
            self._finish()
        return False

    def _size(self) -> bool:
        end = self.rest.find(b"\r\n")
        if end < 0:
            return False
        line = bytes(self.rest[:end])
        del self.rest[: end + 2]
        try:
            self._left = int(line, 16)
        except ValueError:
            self.broken = f"bad chunk size {line!r}"
            return False
        self._phase = "chunk"
        return True

    def _chunk(self) -> bool:
        if len(self.rest) < self._left + 2:
            return False
        if self.rest[self._left : self._left + 2] != b"\r\n":
            self.broken = "chunk without its end"
            return False
        self.answer.body += self.rest[: self._left]
        del self.rest[: self._left + 2]
        if self._left == 0:
            self._finish()
            return False
        self._phase = "size"
        return True

    def _close(self) -> bool:
        self.answer.body += self.rest
        self.rest.clear()
        return False

    def _finish(self) -> None:
        self.answer.is_complete = True
        self._phase = "done"


def exchange(port: int, request: bytes, *, within_s: float = 20.0, half_close: bool = False) -> list[Answer]:
    """Send raw bytes, read until the server closes or is silent, and return every answer that came.

    An answer that is broken or cut short is returned with ``is_complete`` false.
    """
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=within_s) as peer:
        with contextlib.suppress(ConnectionError):  # the server may answer and close before it read all
            peer.sendall(request)
            if half_close:
                peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while data := peer.recv(65536):
                received += data
                answers = split(bytes(received))
                if answers and all(answer.is_complete for answer in answers):
                    peer.settimeout(0.25)  # a second answer would follow at once
    return split(bytes(received))


def split(received: bytes) -> list[Answer]:
    """Return the answers in a byte stream, one after another."""
    answers: list[Answer] = []
    rest = received
    while rest:
        reader = AnswerReader()
        reader.feed(rest)
        if not reader.answer.is_complete:
            reader.end()
        answers.append(reader.answer)
        if not reader.answer.is_complete or len(reader.rest) == len(rest):
            break
        rest = bytes(reader.rest)
    return answers


def request_bytes(
    method: str, path: str, *, body: bytes = b"", headers: list[tuple[str, str]] | None = None, host: str = "127.0.0.1"
) -> bytes:
    """Return a well-formed request with Host and, for a body, its length; ``headers`` are added as they are."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers or []]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
