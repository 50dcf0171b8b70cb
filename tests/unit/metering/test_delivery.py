"""What gateways journal reaches the ledger once, through crashes, locks and torn files."""

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from tests.conformance.backends import open_fresh
from tests.support.waiting import eventually_async

from modelyard.clock import ManualClock
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.metering import delivery as delivering
from modelyard.metering.delivery import BATCH, Delivery, backlog_bytes
from modelyard.metering.journal import Journal, segments
from modelyard.stores import JournalPosition, StoreUnavailableError
from modelyard.stores.sql import SqlUsageStore

WITHIN_S = 20.0


class Books:
    """Journals under one root, and the ledger that they go to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "journal"
        self.database = open_fresh("sqlite", folder, timeout_s=0.3)
        self.store = SqlUsageStore(self.database)
        self.delivery = self.a_delivery()

    def a_delivery(self) -> Delivery:
        return Delivery(self.root, self.store, 0.01)

    def journal(self, worker: str, requests: Iterable[str], *, settled: bool = True) -> None:
        """Write one more segment, as a worker's run from start to end does."""
        journal = Journal(self.root / worker, sync_s=0.01, clock=ManualClock(), soon=lambda flush: flush())
        for rid in requests:
            journal.begin(
                Intent(rid, 1e6, "t", "k", "ep", "smol", "ver", "/v1/chat/completions", False, 1, 9, Price()),
                lambda is_written: None,
            )
            if settled:
                journal.settle(
                    Settle(rid, 1e6, 1, 0, 2, UsageStatus.SUCCESS, 200, "", None, 1.0, "rep", 1, is_estimated=False),
                    lambda: None,
                )
        journal.close()

    def segments(self, worker: str) -> list[str]:
        """Return the numbers of the segments, counted from the first; the clock of these tests stands still."""
        first = int(ManualClock().unix_s())
        return [str(int(path.stem) - first + 1) for path in segments(self.root / worker)]

    async def billed(self) -> int:
        (total,) = await self.store.usage(tenant_id=None, key_id=None, model=None, since=0, until=math.inf, group_by=())
        assert total.completion_tokens == 2 * total.requests
        return total.requests


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    opened = Books(tmp_path)
    yield opened
    await opened.database.close()


def named(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


async def test_without_a_journal_there_is_nothing_to_do(books: Books) -> None:
    await books.delivery.drain()
    assert books.delivery.backlog() == 0
    assert await books.billed() == 0


async def test_everything_of_every_worker_is_delivered_once(books: Books) -> None:
    books.journal("gateway-0", named("a", 30))
    books.journal("gateway-0", named("b", 20))
    books.journal("gateway-1", named("c", 10))
    await books.delivery.drain()
    assert await books.billed() == 60
    await books.delivery.drain()
    books.journal("gateway-1", named("d", 5))
    await books.delivery.drain()
    assert await books.billed() == 65
    assert books.delivery.backlog() == 0


async def test_a_new_controller_goes_on_where_the_last_one_stopped(books: Books) -> None:
    books.journal("gateway-0", named("a", 30))
    await books.delivery.drain()
    before = await books.store.positions()
    books.journal("gateway-0", named("b", 20))
    await books.a_delivery().drain()
    assert await books.billed() == 50
    assert [position.segment for position in before] < [position.segment for position in await books.store.positions()]


async def test_a_backlog_larger_than_a_batch_goes_in_parts(books: Books) -> None:
    requests = named("a", BATCH + 10)
    books.journal("gateway-0", requests)
    await books.delivery.drain()
    assert await books.billed() == len(requests)
    assert await books.store.open_requests() == 0


async def test_requests_of_a_killed_worker_are_settled_by_its_next_run(books: Books) -> None:
    books.journal("gateway-0", ["a", "b"], settled=False)
    await books.delivery.drain()
    assert await books.store.open_requests() == 2
    books.journal("gateway-0", [])
    await books.delivery.drain()
    assert await books.store.open_requests() == 0
    rows = await books.store.rows(tenant_id=None, since=0, limit=10)
    assert {row.status for row in rows} == {UsageStatus.INTERRUPTED}


async def test_delivered_segments_go_but_for_the_newest_two(books: Books) -> None:
    for run in range(5):
        books.journal("gateway-0", named(f"run{run}", 3))
    books.journal("gateway-1", ["x"])
    await books.delivery.drain()
    assert books.segments("gateway-0") == ["4", "5"]
    assert books.segments("gateway-1") == ["1"]
    assert await books.billed() == 16


async def test_while_the_ledger_is_locked_everything_waits_in_the_journal(books: Books) -> None:
    for run in range(4):
        books.journal("gateway-0", named(f"run{run}", 3))
    holder = sqlite3.connect(books.folder / "control.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailableError):
        await books.delivery.drain()
    assert books.segments("gateway-0") == ["1", "2", "3", "4"]
    assert books.delivery.backlog() > 0
    running = asyncio.create_task(books.delivery.run())
    books.journal("gateway-0", ["late"])
    with pytest.raises(StoreUnavailableError):
        await books.store.apply([], (await books.store.positions() or [_start()])[0])
    holder.execute("ROLLBACK")
    holder.close()

    async def all_billed() -> bool:
        return await books.billed() == 13

    await eventually_async(all_billed, WITHIN_S, "the backlog is delivered")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert books.delivery.backlog() == 0


async def test_a_record_that_is_not_all_there_waits_for_its_rest(books: Books) -> None:
    books.journal("gateway-0", named("a", 3))
    (path,) = segments(books.root / "gateway-0")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    await books.delivery.drain()
    await books.delivery.drain()
    assert await books.billed() == 2
    assert books.delivery.backlog() > 0
    path.write_bytes(whole)
    await books.delivery.drain()
    assert await books.billed() == 3
    assert books.delivery.backlog() == 0


async def test_a_torn_end_of_an_old_segment_does_not_hold_up_the_next(books: Books) -> None:
    books.journal("gateway-0", named("a", 3))
    (path,) = segments(books.root / "gateway-0")
    path.write_bytes(path.read_bytes()[:-5])
    books.journal("gateway-0", named("b", 3))
    await books.delivery.drain()
    settled_by_recovery = 1
    assert await books.store.open_requests() == 0
    rows = await books.store.rows(tenant_id=None, since=0, limit=10)
    assert len(rows) == 5 + settled_by_recovery
    assert [row.request_id for row in rows if row.status is UsageStatus.INTERRUPTED] == ["a-2"]


async def test_a_torn_end_that_nobody_will_finish_is_no_backlog_for_good(books: Books) -> None:
    """Nothing would be called complete, and no old row ever go, once a worker was gone that a power loss had hit."""
    books.journal("gateway-7", named("a", 3))
    (path,) = segments(books.root / "gateway-7")
    path.write_bytes(path.read_bytes() + b"\x40\x00\x00\x00half of a record")
    await books.delivery.drain()
    assert books.delivery.backlog() > 0, "it may be under way"
    books.journal("gateway-7", [])  # a start that has nothing to write
    await books.delivery.drain()
    await books.delivery.drain()
    assert books.delivery.backlog() == 0
    assert backlog_bytes(books.root, await books.store.positions()) == 0
    books.journal("gateway-7", ["b"])
    await books.a_delivery().drain()
    assert await books.billed() == 4


async def test_a_large_journal_is_read_a_piece_at_a_time(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivering, "READ_BYTES", 10_000)
    books.journal("gateway-0", named("a", 500))
    books.journal("gateway-0", named("b", 500))
    await books.delivery.drain()
    assert await books.billed() == 1000
    assert books.delivery.backlog() == 0


async def test_a_journal_that_was_replaced_is_read_from_its_start(books: Books) -> None:
    for run in range(3):
        books.journal("gateway-0", named(f"run{run}", 3))
    await books.delivery.drain()
    for path in segments(books.root / "gateway-0"):
        path.unlink()
    books.journal("gateway-0", named("anew", 4))
    await books.a_delivery().drain()
    assert await books.billed() == 13


def _start() -> JournalPosition:
    return JournalPosition("gateway-0", "0000000001.journal", 0)
