"""How much of the journals is not yet in the ledger."""

from collections.abc import Sequence
from pathlib import Path

from modelyard.metering.journal import segments
from modelyard.stores import JournalPosition


def backlog_bytes(journal: Path, positions: Sequence[JournalPosition]) -> int:
    """Return the bytes of all workers' segments behind ``positions``; reads the file system."""
    read = {position.source: position for position in positions}
    waiting = 0
    for folder in _folders(journal):
        position = read.get(folder.name)
        for segment in segments(folder):
            size = _size(segment)
            if position is None or segment.name > position.segment:
                waiting += size
            elif segment.name == position.segment:
                waiting += max(0, size - position.offset)
    return waiting


def _folders(journal: Path) -> list[Path]:
    try:
        return [entry for entry in journal.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []


def _size(segment: Path) -> int:
    try:
        return segment.stat().st_size
    except FileNotFoundError:  # delivered and removed between the listing and here
        return 0
