"""Old rows go in steps, however the clock leaps, and never while records wait."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.conformance.backends import open_fresh

from modelyard.clock import ManualClock
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.metering import retention
from modelyard.metering.retention import Retention
from modelyard.stores import JournalPosition
from modelyard.stores.sql import Database, SqlUsageStore

DAY = 86_400
START = 20_000 * DAY
HERE = JournalPosition("gateway-0", "1.journal", 0)


class Books:
    """A ledger with a request an hour, and the sweep of all that is older than ten days."""

    def __init__(self, database: Database) -> None:
        self.store = SqlUsageStore(database)
        self.clock = ManualClock(start_s=START)
        self.waiting = 0
        self.retention = Retention(self.store, self.clock, lambda: self.waiting, keep_days=10)

    async def fill(self, days: int) -> None:
        records: list[Intent | Settle] = []
        for hour in range(-days * 24, 0):
            rid, at = f"r{hour}", START + hour * 3600.0
            records.append(Intent(rid, at, "t", "k", "ep", "m", "v", "/v1/x", False, 1, 1, Price(output=1_000_000)))
            records.append(Settle(rid, at + 1, 1, 0, 1, UsageStatus.SUCCESS, 200, "", None, 1.0, "r", 1, False))
        await self.store.apply(records, HERE)

    async def rows(self) -> int:
        return len(await self.store.rows(tenant_id=None, since=0, limit=10_000))

    async def total(self) -> int:
        [total] = await self.store.usage(
            tenant_id=None, key_id=None, model=None, since=0, until=START + 99 * DAY, group_by=()
        )
        return total.requests


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    database = open_fresh("sqlite", tmp_path)
    yield Books(database)
    await database.close()


async def test_rows_older_than_asked_go_and_sums_stay(books: Books) -> None:
    await books.fill(days=12)
    removed = [await books.retention.sweep() for _ in range(3)]
    assert removed == [24, 24, 0], "a day at a time, until only ten days are left"
    assert await books.rows() == 240
    assert await books.total() == 288


async def test_a_clock_that_leaps_a_year_takes_a_day_more_in_an_hour(books: Books) -> None:
    await books.fill(days=10)
    assert await books.retention.sweep() == 0
    books.clock.elapsed_s += 365 * DAY
    assert await books.retention.sweep() == 24
    books.clock.elapsed_s -= 366 * DAY
    assert await books.retention.sweep() == 0
    assert await books.rows() == 216


async def test_nothing_goes_while_records_wait_in_a_journal(books: Books) -> None:
    await books.fill(days=12)
    books.waiting = 1
    assert await books.retention.sweep() == 0
    assert await books.store.kept_since() == 0


async def test_steps_are_small_and_let_others_write_between_them(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    await books.fill(days=12)
    monkeypatch.setattr(retention, "STEP_ROWS", 5)
    monkeypatch.setattr(retention, "STEP_PAUSE_S", 0.02)
    sweeping = asyncio.create_task(books.retention.sweep())
    seen = set()
    while not sweeping.done():
        await books.store.apply([], HERE)
        seen.add(await books.rows())
    assert await sweeping == 24
    assert len(seen) > 1, "others write while rows are removed"


async def test_an_empty_ledger_is_left_alone(books: Books) -> None:
    assert await books.retention.sweep() == 0
    assert await books.store.kept_since() == 0
