"""The routing-table feed over a unix socket: the controller pushes, gateways follow.

A frame is a 4-byte big-endian length and the msgpack of one tagged struct.
Only the newest state matters, so a connection's outbox holds one table, one
heartbeat, one set of tidings and one of leases, not a queue: a gateway that reads slowly skips what is out of
date, costs bounded memory, and delays nobody else. Questions about single requests go out between them, a bounded
number at a time; who answers too late has not answered.

What goes out of a table is the difference to the one that this connection got
before (``table_changes.py``), and the whole of it the first time: a change of
one endpoint among thousands is one endpoint's worth of work at both ends. The
gateway's end makes the whole table of it again, so that whoever follows only
ever sees tables.
"""

import asyncio
import hmac
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from modelyard.domain.demand import Hello, Report
from modelyard.domain.leases import Leases
from modelyard.domain.routing_table import Heartbeat, RoutingTable, TableChange, Tidings
from modelyard.domain.why import Ask, RequestStory, Told
from modelyard.errors import StartupError
from modelyard.stores.table_changes import change_between, changed

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Largest frame; a table of 10,000 endpoints is a few megabytes."""
HELLO_BYTES_MAX = 4096
"""Largest first frame: nothing is buffered for a peer that has not shown the token."""
HELLO_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 10.0
"""A peer that neither sends nor reads for this long is gone; both ends speak every second."""
PUBLISH_WAIT_S = 1.0
"""Longest that ``publish`` waits for gateways to take a table."""
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
ASKED_MAX = 64
"""Questions on their way to one gateway at a time; it is not asked more."""
_REPORT_BACKLOG_BYTES_MAX = 1024 * 1024

Push = RoutingTable | Heartbeat | Tidings | Leases | Ask
"""What the controller sends."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_said = msgspec.msgpack.Decoder(Report | Told).decode
_decode_push = msgspec.msgpack.Decoder(RoutingTable | TableChange | Heartbeat | Tidings | Leases | Ask).decode

_LOST = (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError, asyncio.LimitOverrunError)
"""All the ways in which a connection ends; the other side starts anew."""


def _frame(message: Hello | Report | Told | TableChange | Push) -> bytes:
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes is larger than {FRAME_BYTES_MAX}")
    return len(body).to_bytes(4, "big") + body


async def _read_frame(reader: asyncio.StreamReader, *, bytes_max: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > bytes_max:
        raise EOFError(f"a frame of {length} bytes is larger than {bytes_max}")
    return await reader.readexactly(length)


class _TableFrames:
    """Frames of the newest table, made when they are needed, once for all gateways that need the same."""

    def __init__(self) -> None:
        self._newest: RoutingTable | None = None
        self._frames: dict[int, bytes] = {}
        """By the revision that they change; 0: the whole table."""

    def __call__(self, table: RoutingTable, known: RoutingTable | None) -> bytes:
        """Return what brings a gateway that has ``known`` to ``table``."""
        if table is not self._newest:
            self._newest, self._frames = table, {}
        base = known.revision if known is not None else 0
        if (frame := self._frames.get(base)) is None:
            change = change_between(known, table) if known is not None else None
            frame = self._frames[base] = (
                self(table, None)
                if known is not None and change is None
                else _frame(change if change is not None else table)
            )
        return frame


class _Connection:
    """The server's side of one gateway."""

    __slots__ = (
        "_asked", "_beat", "_filled", "_frames", "_known", "_leases", "_questions", "_table", "_taken", "_tidings",
        "gateway_id", "report", "writer",
    )  # fmt: skip

    def __init__(self, gateway_id: str, writer: asyncio.StreamWriter, frames: _TableFrames) -> None:
        self._frames = frames
        self._known: RoutingTable | None = None
        """The last table that was sent here."""
        self.gateway_id = gateway_id
        self.writer = writer
        self.report: Report | None = None
        self._table: RoutingTable | None = None
        self._beat: bytes | None = None
        self._tidings: bytes | None = None
        self._leases: bytes | None = None
        self._questions: list[bytes] = []
        self._asked: dict[int, asyncio.Future[RequestStory | None]] = {}
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()

    @property
    def is_behind(self) -> bool:
        """Say whether a table is still on its way."""
        return not self._taken.is_set()

    def put_table(self, table: RoutingTable) -> None:
        """Send this table next, instead of an older one that has not gone yet."""
        self._table = table
        self._taken.clear()
        self._filled.set()

    def put_beat(self, frame: bytes) -> None:
        """Send this heartbeat next, instead of an older one that has not gone yet."""
        self._beat = frame
        self._filled.set()

    def put_tidings(self, frame: bytes) -> None:
        """Send these tidings next, before a table that waits too, instead of older ones that have not gone yet."""
        self._tidings = frame
        self._filled.set()

    def put_leases(self, frame: bytes) -> None:
        """Send these leases next, instead of older ones that have not gone yet."""
        self._leases = frame
        self._filled.set()

    async def ask(self, question: Ask) -> RequestStory | None:
        """Return what the gateway remembers of a request; None at once when it is asked too much, or leaves."""
        if len(self._asked) >= ASKED_MAX or len(self._questions) >= ASKED_MAX:
            return None
        answer: asyncio.Future[RequestStory | None] = asyncio.get_running_loop().create_future()
        self._asked[question.number] = answer
        self._questions.append(_frame(question))
        self._filled.set()
        try:
            return await answer
        finally:
            del self._asked[question.number]

    def take_told(self, told: Told) -> None:
        """Hand an answer to who asked; nobody may be waiting any more."""
        answer = self._asked.get(told.number)
        if answer is not None and not answer.done():
            answer.set_result(told.story)

    def give_up(self) -> None:
        """Let nobody wait for this connection any more."""
        self._taken.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    async def until_taken(self) -> None:
        """Wait until the newest table is out, or the connection is gone."""
        await self._taken.wait()

    async def send_all(self) -> None:
        """Send the outbox until the connection is lost or this is cancelled."""
        # High water zero makes drain() wait until the kernel has it all, so that at most one old table is under way.
        self.writer.transport.set_write_buffer_limits(high=0)
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                table, self._table = self._table, None
                beat, self._beat = self._beat, None
                tidings, self._tidings = self._tidings, None
                leases, self._leases = self._leases, None
                questions, self._questions = self._questions, []
                change = None
                if table is not None:
                    change, self._known = self._frames(table, self._known), table
                # Sums for a key before the key itself: its first request must not be turned away for want of them.
                for frame in (tidings, change, beat, leases, *questions):
                    if frame is not None:
                        self.writer.write(frame)
                async with asyncio.timeout(SILENCE_S):
                    await self.writer.drain()
                if self._table is None:
                    self._taken.set()
        except ValueError as error:
            _log.error("gateway %s cannot be told: %s", self.gateway_id, error)
        finally:
            self.writer.transport.abort()  # wakes the reading side, which ends the connection


class FeedServer:
    """The controller's end (``TableFeed``), on the unix socket ``path``."""

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token.encode()
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[str, Report], None]] = []
        self._table: RoutingTable | None = None
        self._frames = _TableFrames()
        self._beat: bytes | None = None
        self._tidings: bytes | None = None
        self._questions = 0

    async def start(self) -> None:
        """Listen. A socket file that a killed controller left behind is replaced.

        Raises:
            StartupError: the socket cannot be made.
        """
        try:
            listener = _bind(self._path)
        except OSError as error:
            raise StartupError(
                f"Cannot listen on {self._path}: {error}. Choose a shorter or writable --data-dir."
            ) from error
        self._inode = self._path.stat().st_ino
        self._server = await asyncio.start_unix_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is None:
            return
        self._server.close()
        if is_same_file(self._path, self._inode):  # a controller that took over has its own there
            self._path.unlink(missing_ok=True)
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def publish(self, table: RoutingTable) -> None:
        """Push a new table to all gateways, and to each that connects later.

        Returns when the gateways have it, so that a key created before is known after. A gateway that was behind
        already is not waited for, any other for at most a second.
        """
        self._table = table
        prompt = [connection for connection in self._connections if not connection.is_behind]
        for connection in self._connections:
            connection.put_table(table)
        if prompt:
            with suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_WAIT_S):
                    await asyncio.gather(*(connection.until_taken() for connection in prompt))

    def beat(self, heartbeat: Heartbeat) -> None:
        """Push a heartbeat."""
        self._beat = _frame(heartbeat)
        for connection in self._connections:
            connection.put_beat(self._beat)

    def tell(self, tidings: Tidings) -> None:
        """Push tidings to all gateways, and to each that connects later."""
        self._tidings = _frame(tidings)
        for connection in self._connections:
            connection.put_tidings(self._tidings)

    def lease(self, gateway_id: str, leases: Leases) -> None:
        """Push leases to one gateway; nothing happens when it is not connected."""
        for connection in self._connections:
            if connection.gateway_id == gateway_id:
                connection.put_leases(_frame(leases))

    async def ask(self, request_id: str, *, timeout_s: float) -> RequestStory | None:
        """Return what the first gateway that remembers a request tells of it; None: none does, or not in time."""
        self._questions += 1
        question = Ask(self._questions, request_id)
        loop = asyncio.get_running_loop()
        asking = [loop.create_task(connection.ask(question)) for connection in self._connections]
        try:
            for answer in asyncio.as_completed(asking, timeout=timeout_s):
                if (story := await answer) is not None:
                    return story
        except TimeoutError:
            _log.info("a gateway did not answer within %g s what it remembers of a request", timeout_s)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return None

    def reports(self) -> dict[str, Report]:
        """Return the last report of each connected gateway by its id; an empty one before its first."""
        return {connection.gateway_id: connection.report or Report([], []) for connection in self._connections}

    def on_report(self, listener: Callable[[str, Report], None]) -> None:
        """Call ``listener(gateway_id, report)`` at every report, and with an empty report when a gateway leaves."""
        self._listeners.append(listener)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if hello := await self._hello(reader):
                await self._talk(_Connection(hello.gateway_id, writer, self._frames), reader)
        finally:
            writer.transport.abort()

    async def _hello(self, reader: asyncio.StreamReader) -> Hello | None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = _decode_hello(await _read_frame(reader, bytes_max=HELLO_BYTES_MAX))
        except _LOST:
            _log.warning("a peer of the feed did not introduce itself")
            return None
        if not hmac.compare_digest(hello.token.encode(), self._token):
            _log.warning("refused a peer of the feed: wrong token")
            return None
        return hello

    async def _talk(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        # A gateway that reconnects before we noticed its loss is one gateway, not two.
        for other in [other for other in self._connections if other.gateway_id == connection.gateway_id]:
            self._connections.discard(other)
            other.writer.transport.abort()
        self._connections.add(connection)
        if self._table is not None:
            connection.put_table(self._table)
        if self._beat is not None:  # a gateway may judge unknown keys from its first second on
            connection.put_beat(self._beat)
        if self._tidings is not None:
            connection.put_tidings(self._tidings)
        _log.info("gateway %s follows the feed", connection.gateway_id)
        sending = asyncio.get_running_loop().create_task(connection.send_all())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frame = await _read_frame(reader, bytes_max=FRAME_BYTES_MAX)
                said = _decode_said(frame)
                if isinstance(said, Told):
                    connection.take_told(said)
                    continue
                connection.report = said
                self._tell(connection.gateway_id, said)
        except _LOST as error:
            _log.info("gateway %s left the feed: %s", connection.gateway_id, type(error).__name__)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            connection.give_up()
            if connection in self._connections:
                self._connections.discard(connection)
                self._tell(connection.gateway_id, Report([], []))

    def _tell(self, gateway_id: str, report: Report) -> None:
        for listener in self._listeners:
            listener(gateway_id, report)


def is_same_file(path: Path, inode: int) -> bool:
    """Say whether the file at ``path`` is that of ``inode``."""
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before we listen
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener


class FeedClient:
    """A gateway's end (``TableFollower``). It reconnects for ever, with a growing pause up to a second."""

    def __init__(self, path: Path, token: str, gateway_id: str, *, chance: random.Random | None = None) -> None:
        self._path = path
        self._hello = _frame(Hello(token, gateway_id))
        self._chance = chance or random.Random()
        self._writer: asyncio.StreamWriter | None = None
        self._closed = asyncio.Event()

    async def updates(self) -> AsyncIterator[Push | None]:
        """Yield what arrives; None when a connection that had brought something was lost. Ends at ``close``."""
        pause_s = PAUSE_FIRST_S
        while not self._closed.is_set():
            had_something = False
            try:
                async with aclosing(self._follow()) as messages:
                    async for message in messages:
                        had_something = True
                        yield message
            except _LOST as error:
                _log.debug("the feed is not there: %s", error)
            if self._closed.is_set():
                return
            if had_something:
                pause_s = PAUSE_FIRST_S
                yield None
            await self._pause(pause_s * self._chance.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def send(self, report: Report | Told) -> None:
        """Send at once if connected, else drop it (the next report has the whole state)."""
        writer = self._writer
        if writer is None or writer.transport.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _REPORT_BACKLOG_BYTES_MAX:
            return  # the controller hangs; it will get a later report
        writer.write(_frame(report))

    async def close(self) -> None:
        """Disconnect and stop; ``updates`` ends."""
        self._closed.set()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _follow(self) -> AsyncGenerator[Push, None]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(os.fspath(self._path))
        try:
            writer.write(self._hello)
            self._writer = writer
            table: RoutingTable | None = None
            while not self._closed.is_set():
                async with asyncio.timeout(SILENCE_S):
                    frame = await _read_frame(reader, bytes_max=FRAME_BYTES_MAX)
                push = _decode_push(frame)
                if isinstance(push, TableChange):
                    if table is None:
                        raise EOFError("a change of a table that never came")
                    push = table = changed(table, push)
                elif isinstance(push, RoutingTable):
                    table = push
                yield push
        finally:
            self._writer = None
            writer.transport.abort()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
