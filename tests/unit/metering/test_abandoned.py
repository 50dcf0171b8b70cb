"""Journals of workers that are gone: settled by whoever finds them, never while their worker lives."""

import asyncio
import os
import threading
from pathlib import Path

from tests.support.waiting import eventually_async
from tests.unit.metering.test_journal import at_once, intent, read_all, settled

from modelyard.clock import ManualClock
from modelyard.domain.usage import Mark, Settle, UsageStatus
from modelyard.metering.abandoned import settle_abandoned
from modelyard.metering.journal import Journal


def journal(folder: Path) -> Journal:
    return Journal(folder, sync_s=0.01, clock=ManualClock(), soon=at_once)


async def looking(root: Path) -> "asyncio.Task[None]":
    return asyncio.create_task(settle_abandoned(root, clock=ManualClock(), interval_s=0.01))


def die(book: Journal) -> None:
    """Leave as a killed process does."""
    os.close(book._fd)
    os.close(book._lock)


async def test_what_a_killed_worker_left_open_is_settled(tmp_path: Path) -> None:
    book = journal(tmp_path / "gateway-1b")
    book.begin(intent(), lambda _: None)
    book.mark(Mark("r1", 3, 2))
    die(book)
    task = await looking(tmp_path)
    await eventually_async(lambda: len(read_all(tmp_path / "gateway-1b")) == 3, 20, "settled")
    last = read_all(tmp_path / "gateway-1b")[-1]
    assert isinstance(last, Settle)
    assert (last.status, last.completion_tokens) == (UsageStatus.INTERRUPTED, 2)
    await eventually_async(lambda: (tmp_path / "gateway-1b" / "lock").stat().st_size == 0, 20, "clean")
    files = sorted((tmp_path / "gateway-1b").iterdir())
    await asyncio.sleep(0.1)
    assert sorted((tmp_path / "gateway-1b").iterdir()) == files, "and then left alone"
    task.cancel()


async def test_a_living_worker_is_left_alone(tmp_path: Path) -> None:
    book = journal(tmp_path / "gateway-0")
    book.begin(intent(), lambda _: None)
    task = await looking(tmp_path)
    await asyncio.sleep(0.1)
    assert read_all(tmp_path / "gateway-0") == [intent()]
    book.settle(settled(), lambda: None)
    book.close()
    await asyncio.sleep(0.1)
    assert read_all(tmp_path / "gateway-0") == [intent(), settled()]
    task.cancel()


async def test_a_worker_that_starts_waits_for_who_settles_its_folder(tmp_path: Path) -> None:
    first = journal(tmp_path)
    closing = threading.Timer(0.2, first.close)
    closing.start()
    journal(tmp_path).close()
    closing.join()
