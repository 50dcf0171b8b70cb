"""Forwarding to the controller: one public port, one place where keys are checked.

Management paths go to the controller over its unix socket, with the caller's
identity attached by the gateway; a client's own ``x-modelyard-*`` headers and
its key stay here. Such requests are rare, so each takes a connection of its
own and the response is passed on as it comes.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from modelyard import errors
from modelyard.domain.tenants import IDENTITY_HEADER, INTERNAL_TOKEN_HEADER
from modelyard.errors import ApiError
from modelyard.gateway.framing import ChunkReader
from modelyard.gateway.head import Request, is_public
from modelyard.gateway.server import ClientConnection
from modelyard.policy.job import NEVER_S

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

CONNECT_TIMEOUT_S = 15.0
"""Longest wait for the controller; one that restarts is back within it."""
CONNECT_PAUSE_S = 0.05
ANSWER_TIMEOUT_S = 60.0
TRIES_MAX = 3
HEAD_BYTES_MAX = 64 * 1024

_REPEATABLE = frozenset({b"GET", b"HEAD"})
_DROPPED = frozenset(
    {b"authorization", b"connection", b"content-length", b"expect", b"keep-alive", b"proxy-authorization",
     b"te", b"trailer", b"transfer-encoding", b"upgrade", b"x-api-key", b"x-request-id"}
)  # fmt: skip
_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ControlProxy:
    """Sends requests to the controller."""

    def __init__(self, gateway: "Gateway", socket: Path, internal_token: str) -> None:
        self.gateway = gateway
        self.active: set[ControlExchange] = set()
        self._socket = socket
        self._token = internal_token
        self._scheme = b"https://" if gateway.settings.tls_certificate else b"http://"
        self._opening: set[asyncio.Task[None]] = set()

    def forward(self, client: ClientConnection, request: Request, request_id: str) -> None:
        """Pass ``request`` on.

        Raises:
            ApiError: 401 without a good key, 404 for a path outside the API.
        """
        path = request.path
        if path == "/":
            head = b"location: /console\r\nx-request-id: %b\r\n" % request_id.encode()
            client.respond(307, head, b"")
            return
        identity = b""
        if not is_public(path):
            if not path.startswith("/v1/"):
                raise errors.unknown_url(request.method.decode("latin-1"), path)
            identity = self._identity(request)
        self._begin(ControlExchange(self, client, request, request_id), identity, len(request.body))

    def stream(self, exchange: "ControlExchange") -> None:
        """Pass on a request of which only the head has come.

        Raises:
            ApiError: 401 without a good key.
        """
        self._begin(exchange, self._identity(exchange.request), exchange.request.length)

    def _identity(self, request: Request) -> bytes:
        known = self.gateway.authenticate(request, None).identity
        return b"%b: %b\r\n" % (IDENTITY_HEADER.encode(), _encode(known))

    def _begin(self, exchange: "ControlExchange", identity: bytes, length: int) -> None:
        request = exchange.request
        self.gateway.metrics.control_requests += 1
        exchange.client.current = exchange
        self.active.add(exchange)
        exchange.payload = self._head(request, exchange.request_id, identity, length) + request.body
        self.open(exchange)

    def open(self, exchange: "ControlExchange") -> None:
        """Send a request on a connection of its own."""
        task = asyncio.get_running_loop().create_task(self._open(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    @property
    def unanswered(self) -> int:
        """Return how many requests wait for an answer that will end; one that is followed (logs) may never."""
        return sum(not exchange.is_followed for exchange in self.active)

    def check_time(self, now_s: float) -> None:
        """Give up on answers that do not come, and on clients that do not read them."""
        stall_s = self.gateway.settings.write_stall_timeout_s
        for exchange in list(self.active):
            exchange.check_time(now_s, stall_s)

    async def close(self) -> None:
        """Drop everything."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for exchange in list(self.active):
            exchange.fail()

    async def _open(self, exchange: "ControlExchange") -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # Nothing has been sent yet, so trying again repeats nothing.
                while not exchange.is_over:
                    try:
                        await loop.create_unix_connection(lambda: exchange, str(self._socket))
                    except OSError:
                        await asyncio.sleep(CONNECT_PAUSE_S)
                    else:
                        exchange.send()
                        return
        except TimeoutError:
            exchange.fail()

    def _head(self, request: Request, request_id: str, identity: bytes, length: int) -> bytes:
        target = request.path.encode("latin-1")
        if request.query:
            target += b"?" + request.query
        kept = b"".join(
            b"%b: %b\r\n" % (name, value)
            for name, value in request.headers
            if name not in _DROPPED and not name.startswith(b"x-modelyard-")
        )
        return (
            b"%b %b HTTP/1.1\r\n%b%b%b: %b\r\nx-request-id: %b\r\nx-modelyard-url: %b\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n"
        ) % (
            request.method,
            target,
            kept,
            identity,
            INTERNAL_TOKEN_HEADER.encode(),
            self._token.encode(),
            request_id.encode(),
            self.gateway.settings.public_url.rstrip("/").encode() or self._scheme + request.host,
            length,
        )


class ControlExchange(asyncio.Protocol):
    """One forwarded request; both the connection to the controller and what the client waits for."""

    def __init__(self, proxy: ControlProxy, client: ClientConnection, request: Request, request_id: str) -> None:
        self.deadline_s = proxy.gateway.clock.monotonic_s() + ANSWER_TIMEOUT_S
        self.stalled_since_s = NEVER_S
        self.payload = b""
        self._tries = 1
        self._proxy = proxy
        self.client = client
        self.request = request
        self.request_id = request_id
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._has_head = False
        self._is_last = False
        """Whether the client was told that the connection ends with this answer."""
        self._left: int | None = None
        self._chunks: ChunkReader | None = None
        self.is_over = False

    @property
    def is_followed(self) -> bool:
        """Say whether the answer has begun and comes as a stream."""
        return self._has_head and self._left is None

    @property
    def _is_early(self) -> bool:
        """Say whether the answer comes before the end of the request's body."""
        return False

    def send(self) -> None:
        """Write the request."""
        if self._transport is not None and not self.is_over:
            self._transport.write(self.payload)
            if self.client.is_paused:
                # It has not read its last answer yet, and will not be told again that it is behind.
                self.client_paused()

    def check_time(self, now_s: float, stall_s: float) -> None:
        """Give up on an answer that does not come, or that is not read for ``stall_s``."""
        if now_s >= self.deadline_s or now_s - self.stalled_since_s > stall_s:
            self.fail()

    def fail(self) -> None:
        """End without the controller's answer."""
        if self.is_over:
            return
        self._finish()
        if self._has_head:
            self.client.abort()
        else:
            self._refuse(errors.control_unavailable())

    # --- the client's side ---

    def client_left(self) -> None:
        """Drop the request."""
        self._finish()

    def client_paused(self) -> None:
        """Hold the controller back."""
        self.stalled_since_s = self._proxy.gateway.clock.monotonic_s()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def client_resumed(self) -> None:
        """Let it go on."""
        self.stalled_since_s = NEVER_S
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- the controller's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, unless the client left while it was opened."""
        # uvloop's transports are no subclass of asyncio's.
        opened = cast("asyncio.Transport", transport)
        if self.is_over:
            opened.abort()
        else:
            self._transport = opened

    def data_received(self, data: bytes) -> None:
        """Pass on what comes."""
        if self.is_over:
            return
        if not self._has_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > HEAD_BYTES_MAX:
                    self.fail()
                return
            data = self._head[end + 4 :]
            self._pass_head(self._head[:end])
        self._pass_body(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End: cleanly if the body was whole."""
        if self.is_over:
            return
        # What has a length or chunks is over when they say so; only a body without both ends with the connection.
        if self._has_head and self._left is None and self._chunks is None:
            self._finish()
            self._end_client(is_last=True)
        elif not self._has_head and self.request.method in _REPEATABLE and self._tries < TRIES_MAX:
            # It was about to stop, or crashed; reading again changes nothing.
            self._tries += 1
            self._transport, self._head = None, b""
            self._proxy.open(self)
        else:
            self.fail()

    def _pass_head(self, head: bytes) -> None:
        self._has_head = True
        self.deadline_s = NEVER_S
        lines = head.split(b"\r\n")
        status = int(lines[0].split(b" ", 2)[1])
        out = [lines[0]]
        has_id = False
        request = self.request
        for line in lines[1:]:
            name = line.partition(b":")[0].lower()
            if name == b"connection":
                continue
            if name == b"content-length":
                self._left = int(line.partition(b":")[2])
            elif name == b"transfer-encoding":
                self._chunks = ChunkReader()
                if request.is_http10:
                    continue
            has_id = has_id or name == b"x-request-id"
            out.append(line)
        if request.method == b"HEAD" or status in (204, 304):
            self._left = 0
        if not has_id:
            out.append(b"x-request-id: " + self.request_id.encode())
        is_until_close = self._left is None and (request.is_http10 or self._chunks is None)
        self._is_last = self.client.is_closing or not request.keep_alive or is_until_close or self._is_early
        if self._is_last:
            out.append(b"connection: close")
        self.client.send_raw(b"\r\n".join(out) + b"\r\n" + request.cors + b"\r\n")

    def _pass_body(self, data: bytes) -> None:
        if self._left is None:
            self._pass_unmeasured(data)
            return
        if data and self._left:
            self.client.send_raw(data)
        self._left = max(0, self._left - len(data))
        if self._left == 0:
            self._finish()
            self._end_client(is_last=False)

    def _pass_unmeasured(self, data: bytes) -> None:
        """Pass on a piece of a body without a length; HTTP/1.0 knows no chunks, and learns the end from the close."""
        chunks = self._chunks
        if chunks is None:
            self.client.send_raw(data)
            return
        try:
            payload = chunks.feed(data)
        except ValueError:
            self.fail()
            return
        is_old = self.request.is_http10
        if data:
            self.client.send_raw(payload if is_old else data)
        if chunks.is_ended:
            self._finish()
            self._end_client(is_last=is_old)

    def _end_client(self, *, is_last: bool) -> None:
        self.client.end_raw(is_last=is_last or self._is_last)

    def _refuse(self, refusal: ApiError) -> None:
        self._proxy.gateway.refuse(self.client, refusal, self.request_id)

    def _finish(self) -> None:
        self.is_over = True
        self._proxy.active.discard(self)
        if self._transport is not None:
            self._transport.abort()
