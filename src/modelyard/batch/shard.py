"""One lease of a shard: its lines, each to a gateway and its answer to the spool.

A line is answered when its answer stands in the spool. Until then it may be
asked again, by this process or by the next one: after an engine's failure a
few times, while there is no room or no gateway until the window ends. What a
gateway says of the request itself is its answer.

The lease is renewed all the while. Once that fails, because somebody else has
it or because nobody could be told in its time, nothing more is written.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelyard.batch import answers
from modelyard.batch.gateways import GatewayAwayError, Gateways, Reply, pause
from modelyard.batch.lines import Line, lines_of
from modelyard.batch.room import Room
from modelyard.batch.spool import Spool, open_spool
from modelyard.clock import Clock
from modelyard.config.batch import BatchConfig
from modelyard.domain.batches import Batch, Caller, Hold, Lease, Shard
from modelyard.stores import BatchStore, StoreUnavailableError

ENDING_S = 30.0
"""Time that lines under way get to end when their batch does."""
STOPPING_S = 2.0
"""The same when this process does: what it leaves, the next one begins anew."""
BACKOFF_S, BACKOFF_S_MAX = 0.25, 15.0
LOST_MAX = 10
"""Times that a line may be on a gateway that dies, before it is thought to be why."""
STUCK_S = 10.0
"""Without an answer for so long a shard is stuck: its model is loading or gone, or its key may send little."""
LINES_BYTES_MAX = 16 * 1024 * 1024
"""Of the lines of a shard that are under way, or wait to be asked again; one larger line is taken alone."""
INPUT = "input.jsonl"
"""The input, linked into the batch's folder: deleting the file changes nothing of the batch."""

_log = logging.getLogger(__name__)


class _Request(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_request = msgspec.json.Decoder(_Request).decode


@dataclass(frozen=True, slots=True)
class Tools:
    """What every shard of a process shares."""

    store: BatchStore
    gateways: Gateways
    room: Room
    settings: BatchConfig
    folder: Path
    """Of all batches."""
    line_bytes_max: int
    clock: Clock
    free_bytes: Callable[[], Awaitable[int]]
    """How much may still be written."""
    stop: asyncio.Event
    """The process is to end."""
    nudge: Callable[[], asyncio.Event]
    """An event that is set when somebody changed a batch."""


class ShardRun:
    """The work on one shard under one lease."""

    def __init__(self, tools: Tools, lease: Lease) -> None:
        assert lease.shard is not None, "a lease of a shard"
        self._tools = tools
        self.batch: Batch = lease.batch
        self.shard: Shard = lease.shard
        self._token = lease.token
        self._until_s = tools.clock.monotonic_s() + tools.settings.lease_s
        self._hold = Hold.HELD
        self._ending_s = float("inf")
        self._spool: Spool | None = None
        self._has_room = True
        self._answered_s = tools.clock.monotonic_s()
        self._bytes = 0
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ShardRun {self.batch.id}/{self.shard.number}: {self._hold.value}, {self._spool}>"

    def is_stuck(self, now_s: float) -> bool:
        """Say whether nothing has come back for long."""
        return now_s - self._answered_s > STUCK_S

    async def run(self) -> None:
        """Answer all lines, or as many as the lease, the window and the process allow."""
        folder = self._tools.folder / self.batch.id
        try:
            spool = await asyncio.to_thread(open_spool, folder, self.shard.number, self._token)
        except OSError as error:
            _log.warning("%s: its answers cannot be written: %s", self, error)
            return
        self._spool = spool
        try:
            async with asyncio.TaskGroup() as group:
                beat = group.create_task(self._beat())
                await self._answer_all(folder, group)
                beat.cancel()
            await self._hand_in()
        except* OSError as errors:
            # The disk is full or the input is gone: the lease ends by itself, and another process may have more luck.
            _log.warning("%s: given up: %s", self, errors.exceptions[0])
        finally:
            spool.close()

    # --- the lease ---

    async def _beat(self) -> None:
        interval_s = max(0.2, min(2.0, self._tools.settings.lease_s / 4))
        while self._hold is not Hold.LOST:
            await pause(interval_s, self._tools.nudge())
            await self._renew()

    async def _renew(self) -> None:
        """Renew the lease; what is told to be done is on the disk first."""
        tools, spool = self._tools, self._spool
        assert spool is not None, "a lease is renewed while its spool is open"
        progress = spool.progress
        lease_s = tools.settings.lease_s
        begun_s = tools.clock.monotonic_s()
        try:
            await asyncio.to_thread(spool.sync)
            self._has_room = await tools.free_bytes() > 0
            until = tools.clock.unix_s() + lease_s
            hold = await tools.store.keep_shard(self.shard, self._token, progress, until=until)
        except (StoreUnavailableError, OSError) as error:
            _log.warning("%s: not renewed: %s", self, error)
            # Whoever looks at the store now may take it: what comes later must not be taken for ours.
            hold = Hold.LOST if tools.clock.monotonic_s() > self._until_s else self._hold
        else:
            self._until_s = begun_s + lease_s
        if hold is not self._hold:
            _log.info("%s: its lease is %s", self, hold.value)
            self._hold = hold
            self._end_soon()

    async def _hand_in(self) -> None:
        spool, tools = self._spool, self._tools
        assert spool is not None, "it ran"
        if self._hold is Hold.LOST:
            return
        await asyncio.to_thread(spool.sync)
        is_done = len(spool.done) == self.shard.lines
        hand_in = tools.store.finish_shard if is_done else tools.store.leave_shard
        while tools.clock.monotonic_s() < self._until_s:
            try:
                hold = await hand_in(self.shard, self._token, spool.progress)
            except StoreUnavailableError as error:
                _log.warning("%s: not handed in yet: %s", self, error)
                await asyncio.sleep(BACKOFF_S)
            else:
                _log.info("%s: handed in, %s", self, "lost" if hold is Hold.LOST else "done" if is_done else "in part")
                return

    # --- when to end ---

    def _is_over(self) -> bool:
        """Say whether no line may be begun any more."""
        # On a full disk what is under way still finds its place in the spare room; more would be run for nothing.
        if self._hold is Hold.HELD and self._has_room and not self._tools.stop.is_set():
            return self._tools.clock.unix_s() >= self.batch.expires_at
        return True

    def _end_soon(self) -> None:
        left_s = STOPPING_S if self._tools.stop.is_set() else ENDING_S
        self._ending_s = min(self._ending_s, self._tools.clock.monotonic_s() + left_s)

    async def _answer_all(self, folder: Path, group: asyncio.TaskGroup) -> None:
        """Answer the lines that nobody answered yet; returns when none of them is under way any more."""
        spool = self._spool
        assert spool is not None, "it is open"
        running: set[asyncio.Task[None]] = set()
        key = (self.batch.tenant_id, self.batch.model)
        with (folder / INPUT).open("rb") as file:
            lines = enumerate(self._lines(file), self.shard.first)
            while not self._is_over():
                found = await asyncio.to_thread(next, lines, None)
                if found is None:
                    break
                ordinal, line = found
                if ordinal in spool.done:
                    continue
                # Those that wait to be asked again hold no place, but they hold their lines.
                while running and self._is_full(len(running), line) and not self._is_over():
                    await asyncio.wait(set(running), timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                if not await self._take(key):
                    break
                task = group.create_task(self._answer(ordinal, line, key))
                running.add(task)
                task.add_done_callback(running.discard)
                # It begins before anything could cancel it: one that never began would not give its place back.
                await asyncio.sleep(0)
            await self._finish_off(running)

    def _is_full(self, running: int, line: Line) -> bool:
        return running >= self._tools.settings.concurrency or self._bytes + line.size > LINES_BYTES_MAX

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        shard = self.shard
        return lines_of(file, start=shard.offset, length=shard.size, longest=self._tools.line_bytes_max)

    async def _finish_off(self, running: set["asyncio.Task[None]"]) -> None:
        """Wait for what is under way, not longer than it may."""
        tools = self._tools
        while running:
            if self._is_over():
                self._end_soon()
            if self._hold is Hold.LOST or tools.clock.monotonic_s() >= self._ending_s:
                for task in running:
                    task.cancel()
            await asyncio.wait(set(running), timeout=0.1)

    # --- a line ---

    async def _answer(self, ordinal: int, line: Line, key: tuple[str, str]) -> None:
        """Get the answer of a line, whose place is taken, and keep it."""
        self._bytes += line.size
        try:
            await self._get(ordinal, line, key)
        finally:
            self._bytes -= line.size

    async def _get(self, ordinal: int, line: Line, key: tuple[str, str]) -> None:
        assert line.text is not None, "a file with a line too long is not run"
        request = _request(line.text)
        id_ = answers.line_id(self.batch.id, ordinal)
        caller = Caller(self.batch.key_id, f"{self.batch.id}/{ordinal}")
        reply = await self._ask(caller, bytes(request.body), key)
        if reply is None:
            return
        if isinstance(reply, answers.LineError):
            answer = answers.unanswered(id_, request.custom_id, reply.code, reply.message)
        else:
            answer = answers.answered(id_, request.custom_id, reply.status, reply.request_id, reply.body)
        spool = self._spool
        assert spool is not None, "it is open"
        self._answered_s = self._tools.clock.monotonic_s()
        if self._hold is not Hold.LOST:
            spool.add(ordinal, answer.text, is_error=answer.is_error, tokens=answer.tokens)

    async def _ask(self, caller: Caller, body: bytes, key: tuple[str, str]) -> Reply | answers.LineError | None:
        """Return what is the answer of a line; None where it has none and its time is over."""
        failures = lost = 0
        room = self._tools.room
        while True:
            reply: Reply | None = None
            try:
                reply = await self._tools.gateways.ask("POST", self.batch.endpoint, caller, body)
            except GatewayAwayError as error:
                lost += error.was_sent
                _log.info("%s: line %s got no answer: %s", self, caller.line, error)
            finally:
                if reply is None:
                    room.dropped(key)
                elif _has_no_room(reply):
                    room.turned_away(key, reply.retry_after_s)
                else:
                    room.answered(key, reply)
            if lost > LOST_MAX:
                return answers.LineError("server_error", "The platform lost this request again and again.")
            if reply is not None and not _has_no_room(reply):
                failures += reply.status >= 500
                if reply.status < 500 or not reply.should_retry or failures > self._tools.settings.retries_max:
                    return reply
            tries = failures if reply is not None else lost
            await pause(min(BACKOFF_S * 2 ** min(tries, 8), BACKOFF_S_MAX), self._tools.stop)
            if not await self._take(key):
                return None

    async def _take(self, key: tuple[str, str]) -> bool:
        """Wait for a place, one line after the other: whoever looks for one looks often, and it is the same for all."""
        async with self._turn:
            return await self._tools.room.take(key, self._is_over)


def _has_no_room(reply: Reply) -> bool:
    """Say whether a gateway asks to come again later: a limit, a full line, a model that loads."""
    if reply.status == 429:
        return reply.should_retry
    return reply.status == 503 and reply.retry_after_s is not None and reply.should_retry
