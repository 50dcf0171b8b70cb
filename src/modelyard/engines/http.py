"""HTTP/1.1 on bare sockets, for engines and guards of ours: an answer can be passed on, cut, split or left hanging at
any byte.

One ``Connection`` a socket; requests of a connection are answered one after
the other by one task, which is cancelled the moment the peer closes: that is
how a request learns at once that its client has gone.
"""

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

BODY_BYTES_MAX = 64 * 1024 * 1024
_PIPELINED_MAX = 16
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    413: "Content Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


@dataclass(slots=True)
class Request:
    """One whole request; header names are lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True


Handle = Callable[[Request, "Connection"], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One socket. Writing methods never wait; ``drain`` does, while the peer reads too slowly."""

    def __init__(self, handle: Handle, connections: set["Connection"]) -> None:
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._body = bytearray()
        self._pending: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    # --- asyncio.Protocol ---------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what was being answered."""
        self._transport = None
        self._connections.discard(self)
        self._can_write.set()
        if self._task is not None:
            self._task.cancel("client gone")

    def data_received(self, data: bytes) -> None:
        """Parse; a peer that does not speak HTTP gets 400 and is closed."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except httptools.HttpParserError:
            self.respond(400, b'{"error":{"message":"bad request","type":"BadRequestError","param":null,"code":400}}')
            self.close()

    def pause_writing(self) -> None:
        """Make ``drain`` wait."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Let ``drain`` return."""
        self._can_write.set()

    # --- httptools callbacks --------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a request."""
        self._request = Request()
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Ask for the body of a client that waits for permission (curl with big bodies)."""
        if self._request.headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self.respond(413, b"{}")
            self.close()

    def on_message_complete(self) -> None:
        """Queue the request and see that somebody answers."""
        request = self._request
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.body = bytes(self._body)
        request.path = request.path.partition("?")[0]
        if len(self._pending) >= _PIPELINED_MAX:
            self.close()
            return
        self._pending.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        while self._pending and self._transport is not None:
            request = self._pending.popleft()
            try:
                await self._handle(request, self)
            except Exception:  # noqa: BLE001  # boundary: a bug in one answer ends its connection, not the engine
                traceback.print_exc(file=sys.stderr)
                self.close()
            if not request.keep_alive:
                self.close()

    # --- writing ----------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait while the peer reads too slowly."""
        await self._can_write.wait()

    def respond(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """Send a whole response."""
        self.write(_head(status, content_type, f"content-length: {len(body)}") + body)

    def begin_chunked(self, content_type: str) -> None:
        """Send the head of a chunked response with status 200."""
        self.write(_head(200, content_type, "transfer-encoding: chunked"))

    def begin_sized(self, length: int) -> None:
        """Send the head of a JSON response whose body follows, or does not."""
        self.write(_head(200, "application/json", f"content-length: {length}"))

    def chunk(self, data: bytes) -> None:
        """Send one chunk."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_chunked(self) -> None:
        """End a chunked response as it should be."""
        self.write(b"0\r\n\r\n")

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None:
            self._transport.close()

    async def end(self) -> None:
        """Close at once and wait for the task: the engine stops."""
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel("engine stops")
            await asyncio.wait([self._task])


def _head(status: int, content_type: str, length: str) -> bytes:
    reason = _REASONS.get(status, "Status")
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{length}\r\n\r\n".encode()
