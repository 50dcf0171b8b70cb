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
from modelyard.gateway.server import ClientConnection, Request

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

PUBLIC = ("/console", "/docs", "/openapi.json", "/favicon.ico")
"""Paths (and what lies below) that need no key here; the console has its own session."""
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 60.0
HEAD_BYTES_MAX = 64 * 1024
NEVER_S = float("inf")

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
        if not _is_public(path):
            if not path.startswith("/v1/"):
                raise errors.unknown_url(request.method.decode("latin-1"), path)
            identity = b"%b: %b\r\n" % (
                IDENTITY_HEADER.encode(),
                _encode(self.gateway.authenticate(request, None).identity),
            )
        self.gateway.metrics.control_requests += 1
        exchange = ControlExchange(self, client, request, request_id)
        client.current = exchange
        self.active.add(exchange)
        payload = self._head(request, request_id, identity) + request.body
        task = asyncio.get_running_loop().create_task(self._open(exchange, payload))
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
            if now_s >= exchange.deadline_s or now_s - exchange.stalled_since_s > stall_s:
                exchange.fail()

    async def close(self) -> None:
        """Drop everything."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for exchange in list(self.active):
            exchange.fail()

    async def _open(self, exchange: "ControlExchange", payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_unix_connection(lambda: exchange, str(self._socket))
        except (OSError, TimeoutError):
            exchange.fail()
        else:
            exchange.send(payload)

    def _head(self, request: Request, request_id: str, identity: bytes) -> bytes:
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
            self.gateway.settings.public_url.rstrip("/").encode() or b"http://" + request.host,
            len(request.body),
        )


class ControlExchange(asyncio.Protocol):
    """One forwarded request; both the connection to the controller and what the client waits for."""

    def __init__(self, proxy: ControlProxy, client: ClientConnection, request: Request, request_id: str) -> None:
        self.deadline_s = proxy.gateway.clock.monotonic_s() + ANSWER_TIMEOUT_S
        self.stalled_since_s = NEVER_S
        self._proxy = proxy
        self._client = client
        self._request = request
        self._request_id = request_id
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._has_head = False
        self._left: int | None = None
        self._tail = b""
        self._is_over = False

    @property
    def is_followed(self) -> bool:
        """Say whether the answer has begun and comes as a stream."""
        return self._has_head and self._left is None

    def send(self, payload: bytes) -> None:
        """Write the request."""
        if self._transport is not None and not self._is_over:
            self._transport.write(payload)
            if self._client.is_paused:
                # It has not read its last answer yet, and will not be told again that it is behind.
                self.client_paused()

    def fail(self) -> None:
        """End without the controller's answer."""
        if self._is_over:
            return
        self._finish()
        if self._has_head:
            self._client.abort()
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
        if self._is_over:
            opened.abort()
        else:
            self._transport = opened

    def data_received(self, data: bytes) -> None:
        """Pass on what comes."""
        if self._is_over:
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
        if self._is_over:
            return
        is_whole = self._has_head and (self._left == 0 or (self._left is None and self._tail.endswith(b"0\r\n\r\n")))
        if is_whole:
            self._finish()
            self._client.end_raw(is_last=False)
        else:
            self.fail()

    def _pass_head(self, head: bytes) -> None:
        self._has_head = True
        self.deadline_s = NEVER_S
        lines = head.split(b"\r\n")
        status = int(lines[0].split(b" ", 2)[1])
        out = [lines[0]]
        has_id = False
        for line in lines[1:]:
            name = line.partition(b":")[0].lower()
            if name == b"connection":
                continue
            if name == b"content-length":
                self._left = int(line.partition(b":")[2])
            has_id = has_id or name == b"x-request-id"
            out.append(line)
        if self._request.method == b"HEAD" or status in (204, 304):
            self._left = 0
        if not has_id:
            out.append(b"x-request-id: " + self._request_id.encode())
        if self._client.is_closing or not self._request.keep_alive:
            out.append(b"connection: close")
        self._client.send_raw(b"\r\n".join(out) + b"\r\n\r\n")

    def _pass_body(self, data: bytes) -> None:
        if data and self._left != 0:
            self._client.send_raw(data)
        if self._left is None:
            self._tail = (self._tail + data)[-5:]
        else:
            self._left = max(0, self._left - len(data))
        if self._left == 0:
            self._finish()
            self._client.end_raw(is_last=False)

    def _refuse(self, refusal: ApiError) -> None:
        self._proxy.gateway.refuse(self._client, refusal, self._request_id)

    def _finish(self) -> None:
        self._is_over = True
        self._proxy.active.discard(self)
        if self._transport is not None:
            self._transport.abort()


def _is_public(path: str) -> bool:
    if ".." in path or "%" in path or "//" in path:
        return False
    return any(path == prefix or path.startswith(prefix + "/") for prefix in PUBLIC)
