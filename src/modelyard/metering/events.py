"""Usage events to Kafka: another projection of the journals, with a cursor of its own.

Every request that was settled is sent at least once, in the order of its
worker's journal, and the cursor moves when the broker has acknowledged it. The
journal itself is the spool while the broker is away: segments that Kafka does
not have yet stay (``Delivery`` asks ``needed``). That spool is bounded. At half of
its bound there is an alarm; beyond it the oldest segments that the ledger has
are let go, and what stood in them is noted as a gap and sent from the ledger's
rows once the broker is back. So an outage of any length loses no event and
costs the disk no more than the bound.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.domain.books import Gap
from modelyard.domain.usage import LINE_REPEATED
from modelyard.metering.booking import booked, event_of, uncharged
from modelyard.metering.delivery import SEGMENTS_KEPT
from modelyard.metering.journal import Position, segments
from modelyard.metering.settlements import BEGINNING, Follower, Piece, sources
from modelyard.stores import BookStore, EventSink, SinkError, StoreUnavailableError, UsageStore

SINK = "kafka"
WAIT_S = 1.0
"""Longest wait for acknowledgements before the spool is looked at."""
SEND_MAX = 5_000
"""Events that are sent and not acknowledged."""
PAUSE_MAX_S = 30.0
ALARM_SHARE = 0.5
ALARM_S = 900.0
"""Time without an acknowledgement before there is an alarm, whatever room is left."""
ROWS = 1_000
"""Rows of the ledger read at a time."""

_log = logging.getLogger(__name__)


class SinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink stands."""

    sink: str
    waiting_bytes: int = 0
    """Bytes of journal that it has not got."""
    bytes_max: int = 0
    gap_requests: int = 0
    """Requests that it will get from the ledger."""
    pending: int = 0
    """Events that were made and not taken."""
    sent: int = 0
    """Events since the controller started."""
    behind_since: float | None = None
    """Unix seconds since when it takes nothing."""
    alarm: str = ""
    """What somebody should do something about; empty: nothing."""


class UsageEvents:
    """Sends what is settled in the journals under ``root``; ``open_sink`` makes a connection (in a thread)."""

    def __init__(
        self,
        *,
        root: Path,
        books: BookStore,
        usage: UsageStore,
        open_sink: Callable[[], EventSink],
        clock: Clock,
        interval_s: float,
        spool_bytes_max: int,
    ) -> None:
        self._root = root
        self._books = books
        self._usage = usage
        self._open_sink = open_sink
        self._clock = clock
        self._interval_s = interval_s
        self._bytes_max = spool_bytes_max
        self._sink: EventSink | None = None
        self._cursors: dict[str, Position] | None = None
        self._followers: dict[str, Follower] = {}
        self._waiting_bytes = 0
        self._gap_requests = 0
        self._sent = 0
        self._behind_since: float | None = None
        self._failure = ""
        """Why the last drain failed."""
        self._is_alarmed = False

    def __repr__(self) -> str:
        return f"<UsageEvents of {self._root}: {self._sent} sent, {self._waiting_bytes} bytes to go>"

    def needed(self, source: str) -> str | None:
        """Return the first segment of a worker that must stay; None: none, "": all."""
        if self._cursors is None:
            return ""
        return self._cursors.get(source, BEGINNING)[0]

    def status(self) -> SinkStatus:
        """Return how it stands."""
        return SinkStatus(
            sink=SINK,
            waiting_bytes=self._waiting_bytes,
            bytes_max=self._bytes_max,
            gap_requests=self._gap_requests,
            sent=self._sent,
            behind_since=self._behind_since,
            alarm=self._alarm(),
        )

    async def run(self) -> None:
        """Send for ever; while the broker or the store is away, pause longer and go on."""
        pause_s = self._interval_s
        try:
            while True:
                try:
                    await self.drain()
                except (StoreUnavailableError, SinkError, OSError) as error:
                    pause_s = max(self._interval_s, min(pause_s * 2, PAUSE_MAX_S))
                    await self._note_failure(error)
                    _log.warning("usage events are not sent (%s): %d bytes wait", error, self._waiting_bytes)
                    await self._begin_again()
                else:
                    pause_s = self._interval_s
                await asyncio.sleep(pause_s)
        finally:
            if self._sink is not None:
                self._sink.close()

    async def drain(self) -> None:
        """Send all that is there now.

        Raises:
            StoreUnavailableError: the cursor cannot be read or moved.
            SinkError: the broker refuses for good what was sent.
            OSError: a journal cannot be read.
        """
        if self._cursors is None:
            cursors = await self._books.cursors(SINK)
            self._gap_requests = sum(gap.requests for gap in await self._books.gaps(SINK))
            self._cursors = cursors
        if self._sink is None:
            self._sink = await asyncio.to_thread(self._open_sink)
        for folder in await asyncio.to_thread(sources, self._root):
            await self._drain_source(folder)
        await self._fill_gaps()
        self._behind_since, self._failure = None, ""
        await self._look_after_spool()

    async def _drain_source(self, folder: Path) -> None:
        source = folder.name
        await self._check_cursor(folder)
        while True:
            follower = self._follower(folder)
            pieces = follower.pieces()
            while (piece := await asyncio.to_thread(_next, pieces)) is not None:
                events = await self._events(source, piece)
                if events is None:
                    self._followers.pop(source, None)  # the next time from the cursor on
                    return
                await self._send(events)
                is_there = await self._advance(source, piece.end)
                self._sent += len(events)  # whoever sees them counted may kill this process: they are not sent again
                if not is_there:
                    break  # what follows was let go meanwhile: go on behind it
            else:
                return

    async def _check_cursor(self, folder: Path) -> None:
        """Begin anew with a journal that was lost or restored: its segments may stand before the cursor."""
        assert self._cursors is not None, "read before anything is sent"
        at = self._cursors.get(folder.name, BEGINNING)
        if await asyncio.to_thread(_is_replaced, folder, at):
            _log.warning("the journal of %s was replaced; Kafka gets it from its start", folder.name)
            self._followers.pop(folder.name, None)
            self._cursors[folder.name] = BEGINNING

    async def _events(self, source: str, piece: Piece) -> list[tuple[bytes, bytes]] | None:
        """Return the events of a piece; None while only the ledger can say what they are, and has not read so far.

        A line of a batch may have been run twice, and is charged once: which run that is, the ledger decides.
        """
        lines = [one.settle.request_id for one in piece.settled if one.intent.batch_line]
        repeated: set[str] = set()
        if lines:
            read = {one.source: (one.segment, one.offset) for one in await self._usage.positions()}
            if read.get(source, BEGINNING) < piece.end:
                return None
            entries = await self._books.entries(lines)
            repeated = {id for id, entry in entries.items() if entry.error_code == LINE_REPEATED}
        return await asyncio.to_thread(_made, piece, repeated)  # thousands, while it catches up

    async def _advance(self, source: str, end: Position) -> bool:
        """Move a cursor; say whether it stands there now."""
        assert self._cursors is not None, "read before anything is sent"
        if end < self._cursors.get(source, BEGINNING):
            self._followers.pop(source, None)
            return False
        await self._books.put_cursor(SINK, source, *end)
        self._cursors[source] = end
        return True

    def _follower(self, folder: Path) -> Follower:
        assert self._cursors is not None, "read before anything is sent"
        if folder.name not in self._followers:
            self._followers[folder.name] = Follower(folder, self._cursors.get(folder.name, BEGINNING))
        return self._followers[folder.name]

    async def _send(self, events: Sequence[tuple[bytes, bytes]]) -> None:
        sink = self._sink
        assert sink is not None, "opened before anything is sent"
        for start in range(0, len(events), SEND_MAX):
            part = events[start : start + SEND_MAX]
            is_done = await asyncio.to_thread(sink.send, part, wait_s=WAIT_S)
            while not is_done:
                since = self._clock.unix_s()
                await self._look_after_spool()
                self._behind_since = self._behind_since or since
                is_done = await asyncio.to_thread(sink.wait, WAIT_S)
            self._behind_since = None

    async def _note_failure(self, error: Exception) -> None:
        """Look after the spool too: brokers that refuse at once fill it as those do that say nothing."""
        self._failure = str(error)
        self._behind_since = self._behind_since or self._clock.unix_s()
        if self._cursors is not None:
            with contextlib.suppress(StoreUnavailableError, OSError):
                await self._look_after_spool()

    async def _begin_again(self) -> None:
        """Forget what is under way; everything behind the cursors is sent once more.

        The cursors stay: without them all journals are kept, and brokers that always refuse would fill the disk.
        """
        self._followers.clear()
        sink, self._sink = self._sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)

    # --- the bounded spool ----------------------------------------------------------

    async def _look_after_spool(self) -> None:
        waiting = await asyncio.to_thread(self._waiting)
        self._waiting_bytes = sum(waiting.values())
        while self._waiting_bytes > self._bytes_max and await self._let_go(max(waiting, key=lambda one: waiting[one])):
            waiting = await asyncio.to_thread(self._waiting)
            self._waiting_bytes = sum(waiting.values())
        is_alarmed = bool(self._alarm())
        if is_alarmed and not self._is_alarmed:
            _log.error("%s", self._alarm())
        self._is_alarmed = is_alarmed

    def _waiting(self) -> dict[str, int]:
        assert self._cursors is not None, "read before anything is sent"
        return {
            folder.name: Follower(folder, self._cursors.get(folder.name, BEGINNING)).waiting_bytes()
            for folder in sources(self._root)
        }

    async def _let_go(self, source: str) -> bool:
        """Give up the oldest segment of a worker, if the ledger has it; say whether it was given up."""
        assert self._cursors is not None, "read before anything is sent"
        at = self._cursors.get(source, BEGINNING)
        booked_to = {one.source: one.segment for one in await self._usage.positions()}.get(source, "")
        there = await asyncio.to_thread(segments, self._root / source)
        old = [path for path in there[:-SEGMENTS_KEPT] if at[0] <= path.name < booked_to]
        if not old:
            return False
        following = there[there.index(old[0]) + 1].name
        gap = await asyncio.to_thread(_gap_in, self._root / source, at, (old[0].name, old[0].stat().st_size))
        await self._books.put_cursor(SINK, source, following, 0, gap=gap)
        self._cursors[source] = (following, 0)
        _log.error("journal %s: given up for Kafka; %d events will be sent from the ledger", old[0], gap.requests)
        self._gap_requests += gap.requests
        return True

    async def _fill_gaps(self) -> None:
        """Send from the ledger what was given up."""
        sent_to = 0.0
        for gap in await self._books.gaps(SINK):
            # The oldest first: what workers of the same time lost is one span, and is sent once.
            after = (max(gap.since, sent_to), "")
            while rows := await self._books.rows_between(after, gap.until, limit=ROWS):
                await self._send([event_of(row) for row in rows])
                self._sent += len(rows)
                after = (rows[-1].created_at, rows[-1].request_id)
            sent_to = max(sent_to, gap.until)
            await self._books.close_gap(SINK, gap)
        self._gap_requests = 0

    def _alarm(self) -> str:
        share = self._waiting_bytes / self._bytes_max
        for_s = self._clock.unix_s() - self._behind_since if self._behind_since is not None else 0.0
        if share < ALARM_SHARE and not self._gap_requests and for_s < ALARM_S:
            return ""
        more = f", and {self._gap_requests} events will be sent from the ledger" if self._gap_requests else ""
        trouble = (self._sink.trouble if self._sink is not None else "") or self._failure
        said = f" It says: {trouble.rstrip('.')}." if trouble else ""
        return (
            f"Kafka has been behind for {for_s / 60:.0f} minutes: its spool is {share:.0%} full{more}.{said} "
            "Check the brokers, or raise 'kafka.spool_bytes_max'."
        )


def _made(piece: Piece, repeated: set[str]) -> list[tuple[bytes, bytes]]:
    rows = (booked(*one) for one in piece.settled)
    return [event_of(uncharged(row) if row.request_id in repeated else row) for row in rows]


def _next(pieces: Iterator[Piece]) -> Piece | None:
    return next(pieces, None)


def _is_replaced(folder: Path, at: Position) -> bool:
    """Say whether ``at`` can be no place in these segments: numbers only grow, and so do files. Blocks."""
    there = segments(folder)
    if not there or there[-1].name < at[0]:
        return bool(there)
    try:
        return any(path.name == at[0] and path.stat().st_size < at[1] for path in there)
    except FileNotFoundError:  # delivered, and deleted since it was listed
        return False


def _gap_in(folder: Path, at: Position, end: Position) -> Gap:
    """Return when the requests arrived that were settled there, or are open at its end."""
    follower = Follower(folder, at)
    arrived: list[float] = []
    count = 0
    for piece in follower.pieces(end):
        if piece.settled:
            times = [one.intent.at for one in piece.settled]
            arrived += [min(times), max(times)]
            count += len(times)
    arrived += follower.open_since()
    return Gap(folder.name, end[0], min(arrived, default=0.0), max(arrived, default=0.0), count)
