"""Connections to replicas: a keep-alive pool and a small HTTP/1.1 client.

One ``asyncio.Protocol`` a connection, no task and no future a request; only
opening a new connection costs a task. The most recently used idle connection
is taken first, so that the rest can grow old and be closed. What happens on a
connection is told to a ``Receiver``.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from modelyard.clock import Clock
from modelyard.gateway.responses import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    MalformedResponseError,
    ResponseHead,
    join_chunks,
    parse_head,
)

IDLE_S_MAX = 4.0
"""llama.cpp and uvicorn close idle connections after 5 s; closing first avoids writing into a closing one."""
LEFTOVER_BYTES_MAX = 1024
CONNECT_TIMEOUT = "connect timeout"
"""The reason given to ``unreachable`` when nobody answered in time."""
JOINED_BODY_MAX = 16 * 1024
"""A longer body is written behind its head instead of joined with it: below, one more write costs more than a copy."""
JOIN_BYTES_MAX = 4 * 1024
"""Above this length a chunked body is no longer checked at every read: that is work with the square of its length."""

_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who is told what comes back. ``wants_stream`` chooses between ``stream`` calls and one ``answer``."""

    def connected(self, connection: "UpstreamConnection") -> None:
        """Tell that a new connection is open."""
        ...

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        """Tell that no connection could be opened."""
        ...

    def wants_stream(self, head: ResponseHead) -> bool:
        """Say how the body of this response is wanted."""
        ...

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """Take a whole response."""
        ...

    def stream(self, data: bytes) -> None:
        """Take a raw read of a streamed body, chunk framing included."""
        ...

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """Tell that the connection ended before the response did (``is_clean``: by a FIN)."""
        ...

    def malformed(self, reason: str) -> None:
        """Tell that the response cannot be read."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica; serves one request at a time."""

    __slots__ = (
        "_body",
        "_head",
        "_is_streaming",
        "_receiver",
        "address",
        "has_answered",
        "idle_since_s",
        "is_paused",
        "is_reused",
        "pool",
        "transport",
    )

    def __init__(self, pool: "UpstreamPool", address: tuple[str, int]) -> None:
        self.pool = pool
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self.is_paused = False
        self.is_reused = False
        self.has_answered = False
        self._receiver: Receiver | None = None
        self._head: ResponseHead | None = None
        self._body = bytearray()
        self._is_streaming = False

    def send(self, receiver: Receiver, head: bytes, body: bytes = b"") -> None:
        """Write a whole request; what comes back goes to ``receiver``."""
        assert self._receiver is None, "one request at a time"
        assert self.transport is not None, "not connected"
        self._receiver = receiver
        self.has_answered = False
        self._head = None
        if len(body) < JOINED_BODY_MAX:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        if self.transport is not None and not self.transport.is_closing() and not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing() and self.is_paused:
            self.is_paused = False
            self.transport.resume_reading()

    def release(self) -> None:
        """The response is over: become idle, or close when the peer said so."""
        self._receiver = None
        self._is_streaming = False
        self._body.clear()
        if self.is_paused:
            # The last write of a stream may have filled the client's buffer; the next request must be read too.
            self.resume()
        if self._head is None or self._head.is_last:
            self.abort()
        else:
            self.pool.put(self)

    def linger(self, follow: Callable[[bytes], bool]) -> None:
        """The answer is complete but the end of its framing has not come yet; wait for it, then become idle.

        ``follow`` takes each read of the framing and says whether it has ended.
        """
        self._receiver = _Leftover(self, follow)
        self.pool.linger(self)
        self.resume()

    def abort(self) -> None:
        """Drop the connection at once; the engine sees it and stops generating."""
        self._receiver = None
        if self.transport is not None:
            self.transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take a read: the hot path of streams is its first two lines."""
        receiver = self._receiver
        if self._is_streaming and receiver is not None:
            receiver.stream(data)
            return
        if receiver is None:
            # Nobody asked: a second response, or one after we gave up.
            self.abort()
            return
        self.has_answered = True
        try:
            self._take(receiver, data)
        except MalformedResponseError as error:
            self.abort()
            receiver.malformed(str(error))

    def eof_received(self) -> bool:
        """Let the transport close itself."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits here."""
        self.pool.forget(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        head = self._head
        if exc is None and head is not None and not self._is_streaming and head.length is None and not head.is_chunked:
            receiver.answer(head, bytes(self._body))
        else:
            receiver.lost(is_clean=exc is None, has_answered=self.has_answered)

    def _take(self, receiver: Receiver, data: bytes) -> None:
        body = self._body
        if self._head is None:
            if body:
                body += data
                data = bytes(body)
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > HEAD_BYTES_MAX:
                    raise MalformedResponseError("response head too long")
                if not body:
                    body += data
                return
            body.clear()
            head = parse_head(data[:end])
            data = data[end + 4 :]
            if 100 <= head.status < 200:
                self.has_answered = False
                if data:
                    self._take(receiver, data)
                return
            self._head = head
            if receiver.wants_stream(head):
                self._is_streaming = True
                if data:
                    receiver.stream(data)
                return
        self._take_body(receiver, data)

    def _take_body(self, receiver: Receiver, data: bytes) -> None:
        head = self._head
        assert head is not None, "a body follows a head"
        body = self._body
        if head.length is not None:
            if not body and len(data) == head.length:
                whole = data
            else:
                body += data
                if len(body) < head.length:
                    return
                whole = bytes(body[: head.length])
                head.is_last = head.is_last or len(body) > head.length
        else:
            body += data
            if len(body) > BODY_BYTES_MAX:
                raise MalformedResponseError("response too long")
            if not head.is_chunked:
                return
            # Looking is cheap, joining is not: a long body that comes in many reads (a copied stream) is joined only
            # at its end.
            if len(body) > JOIN_BYTES_MAX and body.find(b"\r\n\r\n", max(0, len(body) - len(data) - 3)) < 0:
                return
            if (decoded := join_chunks(body)) is None:
                return
            whole, end = decoded
            head.is_last = head.is_last or end < len(body)
        self.release()
        receiver.answer(head, whole)


class _Leftover:
    """Reads the end of a stream whose client has been served."""

    __slots__ = ("_connection", "_follow", "_length")

    def __init__(self, connection: UpstreamConnection, follow: Callable[[bytes], bool]) -> None:
        self._connection = connection
        self._follow = follow
        self._length = 0

    def stream(self, data: bytes) -> None:
        """Release the connection at the end of the body; anything longer is not worth waiting for."""
        self._length += len(data)
        try:
            has_ended = self._follow(data)
        except MalformedResponseError:
            self._connection.abort()
            return
        if has_ended:
            self._connection.release()
        elif self._length > LEFTOVER_BYTES_MAX:
            self._connection.abort()

    def connected(self, connection: UpstreamConnection) -> None:
        """Cannot happen: the connection is open."""

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        """Cannot happen: the connection is open."""

    def wants_stream(self, head: ResponseHead) -> bool:
        """Cannot happen: the head was read."""
        return True

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """Cannot happen: the body is a stream."""

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """Nobody waits for this connection any more."""

    def malformed(self, reason: str) -> None:
        """Nobody waits for this connection any more."""


class UpstreamPool:
    """All connections to replicas of one gateway worker."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._idle: dict[tuple[str, int], list[UpstreamConnection]] = {}
        self._lingering: set[UpstreamConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def take(self, address: tuple[str, int]) -> UpstreamConnection | None:
        """Return an idle connection, or None."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.is_reused = True
                return connection
        return None

    def open(self, address: tuple[str, int], receiver: Receiver, *, timeout_s: float) -> None:
        """Open a new connection and hand it to ``receiver.connected`` or call ``receiver.unreachable``."""
        self._start(self._open(address, receiver, timeout_s))

    def put(self, connection: UpstreamConnection) -> None:
        """Keep an idle connection."""
        self._lingering.discard(connection)
        connection.idle_since_s = self._clock.monotonic_s()
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = []
        idle.append(connection)

    def linger(self, connection: UpstreamConnection) -> None:
        """Watch a connection that waits for the end of a stream, so that it does not wait for ever."""
        connection.idle_since_s = self._clock.monotonic_s()
        self._lingering.add(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a closed connection."""
        self._lingering.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

    def close_old(self, now_s: float) -> None:
        """Close connections that were idle too long, and forget addresses without any."""
        for connection in list(self._lingering):
            if now_s - connection.idle_since_s > IDLE_S_MAX:
                self._lingering.discard(connection)
                connection.abort()
        for address, idle in list(self._idle.items()):
            while idle and now_s - idle[0].idle_since_s > IDLE_S_MAX:
                idle.pop(0).abort()
            if not idle:
                del self._idle[address]

    async def close(self) -> None:
        """Close everything."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in [*self._lingering, *(one for idle in self._idle.values() for one in idle)]:
            connection.abort()
        self._lingering.clear()
        self._idle.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, address: tuple[str, int], receiver: Receiver, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: UpstreamConnection(self, address), *address)
        except TimeoutError:
            receiver.unreachable(address, CONNECT_TIMEOUT)
        except OSError as error:
            receiver.unreachable(address, error.strerror or "connection refused")
        else:
            receiver.connected(connection)
