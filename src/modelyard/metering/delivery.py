"""From the journals into the ledger.

Tails the journal folder of every gateway worker and applies what is new to the
usage store, records and position in one transaction. Nothing is lost while the
store is away: the position stays, and so do the files. What was applied twice
after a crash changes nothing, so a large read is applied in parts under its
old position, and only the last part moves it.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from modelyard.domain.usage import JournalRecord, Settle
from modelyard.metering.journal import read_records, segments
from modelyard.stores import JournalPosition, StoreUnavailableError, UsageStore

BATCH = 2_000
"""Most records a transaction: tens of milliseconds, so that other writers are not held up."""
SEGMENTS_KEPT = 2
"""Newest segments of a worker that stay, delivered or not. The newest is being written; the one before may still be
the only place of an open request while a worker, killed at just that moment, was moving it to the newest."""
READ_BYTES = 8 * 1024 * 1024
"""Bytes of a journal that are in memory at a time: some ten thousand records."""
FIRST_BYTES = 256 * 1024
"""Bytes that are looked through for when the first request ended that waits."""
BACKOFF_MAX_S = 5.0

_log = logging.getLogger(__name__)


class Tail(NamedTuple):
    """What is not delivered of one segment: from ``offset`` on. ``stamp`` changes with it.

    A segment that another one follows is not written to any more.
    """

    source: str
    path: Path
    offset: int
    size: int
    stamp: tuple[int, int, bool]
    is_followed: bool


class Delivery:
    """Delivers every journal under ``journal_root`` (one folder a worker) into ``store``.

    ``needed`` says of a worker which segment others still need, and all after it; None: none.
    """

    def __init__(
        self,
        journal_root: Path,
        store: UsageStore,
        interval_s: float,
        needed: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._root = journal_root
        self._store = store
        self._interval_s = interval_s
        self._needed = needed
        self._needed_before: dict[str, str | None] = {}
        self._positions: dict[str, JournalPosition] | None = None
        self._read: dict[Path, tuple[int, int, bool]] = {}
        self._backlog = 0
        # run() and drain() take turns: two passes at once would read the same records.
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Delivery of {self._root}: {self._backlog} bytes to go>"

    async def run(self) -> None:
        """Deliver for ever, every ``interval_s``; while the store is away, pause longer and go on."""
        pause_s = self._interval_s
        while True:
            try:
                await self.drain()
            except (StoreUnavailableError, OSError) as error:
                pause_s = max(self._interval_s, min(pause_s * 2, BACKOFF_MAX_S))
                _log.warning("usage is not delivered (%s): %d bytes wait in the journal", error, self._backlog)
            else:
                pause_s = self._interval_s
            await asyncio.sleep(pause_s)

    async def drain(self) -> None:
        """Deliver all that is there now, then delete delivered segments.

        Raises:
            StoreUnavailableError: the rest stays in the journal.
            OSError: a journal cannot be read.
        """
        async with self._turn:
            if self._positions is None:
                await self._look()  # so that the backlog is known while the store is away
                self._positions = {position.source: position for position in await self._store.positions()}
            tails = await self._look()
            for tail in tails:
                await self._deliver(tail, self._positions)
            needed = {source: self._needed(source) for source in self._positions}
            if tails or needed != self._needed_before:
                await asyncio.to_thread(self._delete_delivered, dict(self._positions), needed)
                self._needed_before = needed

    def backlog(self) -> int:
        """Return the bytes that were written and not delivered at the last look."""
        return self._backlog

    async def _look(self) -> list[Tail]:
        """Return what is new, oldest first within a worker."""
        tails = await asyncio.to_thread(undelivered, self._root, dict(self._positions or {}))
        self._backlog = _bytes_of(tails)
        # An unfinished or damaged end would else be read, and complained about, at every look.
        return [tail for tail in tails if self._read.get(tail.path) != tail.stamp]

    async def _deliver(self, tail: Tail, positions: dict[str, JournalPosition]) -> None:
        start, end = -1, tail.offset
        while end != start:
            start = end
            records, end = await asyncio.to_thread(read_records, tail.path, start, READ_BYTES)
            if end != start:
                await self._apply(tail, records, start, end, positions)
        if end < tail.size and tail.is_followed:
            # Nobody will ever finish it, and it would count as a backlog for good.
            _log.error("journal %s: gave up %d damaged bytes at its end", tail.path, tail.size - end)
            await self._apply(tail, (), end, tail.size, positions)
        self._read[tail.path] = tail.stamp

    async def _apply(
        self,
        tail: Tail,
        records: Sequence[JournalRecord],
        start: int,
        end: int,
        positions: dict[str, JournalPosition],
    ) -> None:
        """Apply what stands between two offsets."""
        before = positions.get(tail.source, JournalPosition(tail.source, tail.path.name, start))
        after = JournalPosition(tail.source, tail.path.name, end)
        parts = list(_parts(records))
        for part in parts[:-1]:
            await self._store.apply(part, before)
        await self._store.apply(parts[-1] if parts else (), after)
        positions[tail.source] = after
        self._backlog = max(0, self._backlog - (end - start))

    def _delete_delivered(self, positions: Mapping[str, JournalPosition], needed: Mapping[str, str | None]) -> None:
        """Delete the segments before the position, but for the newest ones and what is needed. Blocks: for a thread."""
        for source, position in positions.items():
            wanted = needed.get(source)
            before = position.segment if wanted is None else min(position.segment, wanted)
            for path in segments(self._root / source)[:-SEGMENTS_KEPT]:
                if path.name < before:
                    path.unlink(missing_ok=True)
                    self._read.pop(path, None)


def undelivered(root: Path, positions: Mapping[str, JournalPosition]) -> list[Tail]:
    """Return what is behind ``positions`` (by worker), oldest first within a worker. Blocks: for a thread."""
    if not root.is_dir():
        return []
    found: list[Tail] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        files = list(_files(folder))
        position = positions.get(folder.name)
        if position is not None and not _is_of(position, files):
            if any(status.st_size for _, status in files):
                _log.warning("the journal of %s was replaced; it counts from its start", folder.name)
            position = None
        for path, status in files:
            offset = 0
            if position is not None and path.name <= position.segment:
                offset = position.offset if path.name == position.segment else status.st_size
            if status.st_size > offset:
                is_followed = path != files[-1][0]
                stamp = (status.st_size, status.st_mtime_ns, is_followed)
                found.append(Tail(folder.name, path, offset, status.st_size, stamp, is_followed))
    return found


def backlog_bytes(root: Path, positions: Sequence[JournalPosition]) -> int:
    """Return the bytes of all workers' segments behind ``positions``. Blocks: for a thread."""
    return _bytes_of(undelivered(root, {position.source: position for position in positions}))


class Backlog(NamedTuple):
    """What waits in the journals: how much, and when the first of it ended (None: that cannot be read)."""

    bytes: int
    since: float | None


def backlog(root: Path, positions: Sequence[JournalPosition]) -> Backlog:
    """Return what of all workers' segments is behind ``positions``. Blocks: for a thread."""
    tails = undelivered(root, {position.source: position for position in positions})
    ended: list[float] = []
    for tail in tails:
        with contextlib.suppress(OSError):
            records, _ = read_records(tail.path, tail.offset, FIRST_BYTES)
            ended += [record.at for record in records if isinstance(record, Settle)][:1]
    return Backlog(_bytes_of(tails), min(ended, default=None))


def _bytes_of(tails: Sequence[Tail]) -> int:
    return sum(tail.size - tail.offset for tail in tails)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in segments(folder):
        # One that was delivered may be deleted between the listing and here.
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _is_of(position: JournalPosition, files: Sequence[tuple[Path, os.stat_result]]) -> bool:
    """Say whether ``position`` can be a place in these segments; numbers only grow, and so do files."""
    if not files:
        return True
    if files[-1][0].name < position.segment:
        return False
    return all(status.st_size >= position.offset for path, status in files if path.name == position.segment)


def _parts(records: Sequence[JournalRecord]) -> Iterator[Sequence[JournalRecord]]:
    for start in range(0, len(records), BATCH):
        yield records[start : start + BATCH]
