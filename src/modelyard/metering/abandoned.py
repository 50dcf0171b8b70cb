"""Journals whose worker is gone for good.

A worker settles at its start what its last run left open. One that was killed
while it was being relieved (``modelyard restart``), or whose number is no
longer used, has no next start; so every worker looks for such folders now and
then. A folder's lock says whether somebody writes into it, and what stands in
the lock's file whether its last writer ended well.
"""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from modelyard.clock import Clock
from modelyard.metering.journal import Journal, JournalLockedError

LOOK_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


async def settle_abandoned(root: Path, *, clock: Clock, interval_s: float = LOOK_INTERVAL_S) -> None:
    """Settle open work in abandoned folders of ``root``, until cancelled.

    A folder must be found so twice: a worker that was killed is started again at once, and then settles its own.
    """
    found: frozenset[Path] = frozenset()
    while True:
        await asyncio.sleep(interval_s)
        found = await asyncio.to_thread(_look, root, found, clock)


def _look(root: Path, found_before: Collection[Path], clock: Clock) -> frozenset[Path]:
    found: set[Path] = set()
    try:
        unclean = [folder for folder in root.iterdir() if _ended_badly(folder)]
    except OSError as error:
        _log.warning("the journals cannot be looked at: %s", error.strerror)
        return frozenset()
    for folder in unclean:
        if folder in found_before:
            _settle(folder, clock)
        else:
            found.add(folder)
    return frozenset(found)


def _ended_badly(folder: Path) -> bool:
    try:
        return (folder / "lock").stat().st_size > 0
    except OSError:
        return False


def _settle(folder: Path, clock: Clock) -> None:
    """Do what a next start would: its records are the last ones of the folder."""
    try:
        journal = Journal(folder, sync_s=1.0, clock=clock, soon=lambda _: None, patience_s=0.0)
    except JournalLockedError:
        return  # it lives
    except OSError as error:
        _log.warning("the abandoned journal %s cannot be settled: %s", folder.name, error.strerror)
        return
    journal.close()
    if journal.recovered:
        _log.warning("%d requests of %s, which is gone, were billed by their last mark", journal.recovered, folder.name)
