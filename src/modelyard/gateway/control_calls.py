"""Questions of the gateway itself to the controller: msgpack over its unix socket, a connection each.

They are as rare as requests that are kept; ``control_proxy.py`` carries those of clients.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from modelyard.domain.tenants import INTERNAL_TOKEN_HEADER

ANSWER_BYTES_MAX = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
"""Longest wait for the controller; one that restarts is back within it."""
CONNECT_PAUSE_S = 0.05

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class ControlAwayError(Exception):
    """The controller did not answer. ``was_sent``: it may have done what it was asked."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class ControlRefusedError(Exception):
    """The controller answered with an error: ``status``, the value of ``retry-after`` if any, and the body."""

    def __init__(self, status: int, retry_after: bytes, should_retry: bytes, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.body = body


class ControlCalls:
    """Asks the controller at ``socket``."""

    def __init__(self, socket: Path, token: str) -> None:
        self._socket = str(socket)
        self._token = token.encode()

    async def ask(self, path: str, question: object, answer: type[T], *, timeout_s: float) -> T:
        """Send ``question`` and return the answer.

        Raises:
            ControlAwayError: no answer came.
            ControlRefusedError: an error came.
        """
        payload = _encode(question)
        head = b"POST %b HTTP/1.1\r\nhost: control\r\n%b: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (
            path.encode(),
            INTERNAL_TOKEN_HEADER.encode(),
            self._token,
            len(payload),
        )
        was_sent = False
        try:
            reader, writer = await self._open()
            try:
                was_sent = True
                async with asyncio.timeout(timeout_s):
                    writer.write(head + payload)
                    await writer.drain()
                    reply = await _read(reader)
            finally:
                writer.transport.abort()
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:  # a TimeoutError is an OSError
            raise ControlAwayError(str(error) or "no answer in time", was_sent=was_sent) from error
        if reply.status != 200:
            raise ControlRefusedError(reply.status, reply.retry_after, reply.should_retry, reply.body)
        return msgspec.msgpack.decode(reply.body, type=answer)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while True:
                try:
                    return await asyncio.open_unix_connection(self._socket)
                except OSError:
                    await asyncio.sleep(CONNECT_PAUSE_S)


class _Reply(NamedTuple):
    status: int
    retry_after: bytes
    should_retry: bytes
    body: bytes


async def _read(reader: asyncio.StreamReader) -> _Reply:
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = int(lines[0].split(b" ", 2)[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    length = int(headers[b"content-length"])
    if length > ANSWER_BYTES_MAX:
        raise ValueError("the answer is too large")
    body = await reader.readexactly(length)
    return _Reply(status, headers.get(b"retry-after", b""), headers.get(b"x-should-retry", b""), body)
