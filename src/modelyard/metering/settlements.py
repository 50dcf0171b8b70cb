"""What a journal says was settled, as a stream.

A settlement needs its intent, which may stand in an earlier segment: a worker
that starts settles what its last run left open, and writes only the
settlements. So whoever goes on in the middle of a journal first reads what is
there before that place, for the intents that are still open.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from modelyard.domain.usage import Intent, Settle
from modelyard.metering.journal import Position, read_records, segments

PIECE_BYTES = 1024 * 1024
"""Bytes read at a time: some thousand records."""
BEGINNING: Position = ("", 0)

_log = logging.getLogger(__name__)


class Settlement(NamedTuple):
    """A request and how it ended."""

    intent: Intent
    settle: Settle


class Piece(NamedTuple):
    """Some settlements in their order, and the place behind them."""

    settled: list[Settlement]
    end: Position
    orphans: int = 0
    """Settlements of requests that nobody knows."""


class Follower:
    """Follows the journal of one worker in ``folder`` from ``at`` on. All methods block: for a thread."""

    def __init__(self, folder: Path, at: Position = BEGINNING) -> None:
        self._folder = folder
        self._at = at
        self._open: dict[str, Intent] = {}
        self._seen: set[str] = set()
        """Requests that were settled in this or the segment before: a settlement may be written twice."""
        self._seen_before: set[str] = set()
        self._is_primed = False

    @property
    def at(self) -> Position:
        """Return the place up to which it has read."""
        return self._at

    @property
    def source(self) -> str:
        """Return the worker's name."""
        return self._folder.name

    def pieces(self, until: Position | None = None) -> Iterator[Piece]:
        """Yield what is there from its place on, a piece at a time, up to ``until``.

        Raises:
            OSError: a segment cannot be read.
        """
        self._prime()
        for path in segments(self._folder):
            if until is not None and path.name > until[0]:
                return
            start = self._start_in(path)
            if start is None:
                continue
            end = until[1] if until is not None and path.name == until[0] else None
            yield from self._segment(path, start, end)

    def waiting_bytes(self) -> int:
        """Return the bytes behind its place."""
        waiting = 0
        for path in segments(self._folder):
            start = self._start_in(path)
            if start is not None:
                try:
                    waiting += max(0, path.stat().st_size - start)
                except FileNotFoundError:
                    continue
        return waiting

    def open_since(self) -> list[float]:
        """Return when the requests arrived that are open at its place."""
        return [intent.at for intent in self._open.values()]

    def _start_in(self, path: Path) -> int | None:
        if path.name < self._at[0]:
            return None
        return self._at[1] if path.name == self._at[0] else 0

    def _prime(self) -> None:
        """Learn which requests are open at its place."""
        if self._is_primed:
            return
        self._is_primed = True
        for path in segments(self._folder):
            if path.name > self._at[0]:
                break
            end = self._at[1] if path.name == self._at[0] else None
            self._turn_page()
            for records, _ in _read(path, 0, end):
                self._fold(records)

    def _segment(self, path: Path, start: int, end: int | None) -> Iterator[Piece]:
        if path.name != self._at[0]:
            self._turn_page()
        for records, at in _read(path, start, end):
            settled, orphans = self._fold(records)
            self._at = (path.name, at)
            if orphans:
                _log.warning("journal %s: %d settlements of requests that nobody knows", path, orphans)
            yield Piece(settled, self._at, orphans)

    def _turn_page(self) -> None:
        self._seen_before, self._seen = self._seen, set()

    def _fold(self, records: list[object]) -> tuple[list[Settlement], int]:
        settled: list[Settlement] = []
        orphans = 0
        for record in records:
            if isinstance(record, Intent):
                if record.request_id not in self._seen:
                    self._open[record.request_id] = record
            elif isinstance(record, Settle):
                request_id = record.request_id
                intent = self._open.pop(request_id, None)
                if intent is not None:
                    settled.append(Settlement(intent, record))
                    self._seen.add(request_id)
                elif request_id not in self._seen and request_id not in self._seen_before:
                    orphans += 1
        return settled, orphans


def _read(path: Path, start: int, end: int | None) -> Iterator[tuple[list[object], int]]:
    """Yield the records of a segment and the place behind them, a piece at a time."""
    at = start
    while end is None or at < end:
        size = PIECE_BYTES
        if end is not None and end - at < size:
            size = end - at
        try:
            records, after = read_records(path, at, size)
        except FileNotFoundError:  # delivered, and deleted since it was listed
            return
        if after == at:
            return
        at = after
        yield list(records), at


def sources(root: Path) -> list[Path]:
    """Return the folder of each worker."""
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
