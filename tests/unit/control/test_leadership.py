"""Who of several controllers leads, on a clock that the test turns and over one real database."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.conformance.backends import open_fresh
from tests.support.waiting import eventually_async

from modelyard.control import leadership
from modelyard.control.leadership import Candidate, Leadership
from modelyard.fleet import Fence
from modelyard.stores import Leader, StoreUnavailableError, SupersededError
from modelyard.stores.sql import Database, SqlControlStore, SqlLeaderStore

LEASE_S = 10.0


class TurnedClock:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s


class LookedAt(SqlLeaderStore):
    """Counts how often somebody has looked who leads."""

    looks = 0

    async def leader(self) -> Leader | None:
        found = await super().leader()
        self.looks += 1
        return found


class Rival:
    """One controller with its own connections."""

    def __init__(self, name: str, database: Database, clock: TurnedClock, gone: set[str]) -> None:
        self.fence = Fence()
        self.database = database
        self.store = LookedAt(database)
        self.lead = Leadership(
            store=self.store,
            candidate=Candidate(name, lambda holder: holder in gone),
            fence=self.fence,
            clock=clock,
            lease_s=LEASE_S,
        )

    async def becomes_leader(self) -> bool:
        """Look until it leads, if it ever does."""
        return await self._tries(within_s=20)

    async def looks_again(self) -> None:
        """Wait for a look that began after now."""
        seen = self.store.looks
        await eventually_async(lambda: self.store.looks > seen + 1, 20, "it has looked since")

    async def stays_behind(self) -> bool:
        """Look often enough to have taken a lead that is free now."""
        return not await self._tries(within_s=0.3)

    async def _tries(self, within_s: float) -> bool:
        stop = asyncio.Event()
        trying = asyncio.ensure_future(self.lead.acquire(stop))
        done, _ = await asyncio.wait([trying], timeout=within_s)
        stop.set()
        return await trying if not done else trying.result()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LOOK_S", 0.01)


@asynccontextmanager
async def rivals(folder: Path, clock: TurnedClock, gone: set[str]) -> AsyncIterator[tuple[Rival, Rival]]:
    two = Rival("a", open_fresh("sqlite", folder), clock, gone), Rival("b", open_fresh("sqlite", folder), clock, gone)
    try:
        yield two
    finally:
        for one in two:
            await one.database.close()


async def test_the_first_leads_and_the_second_waits_while_it_shows_itself(tmp_path: Path) -> None:
    clock = TurnedClock()
    async with rivals(tmp_path, clock, set()) as (first, second):
        assert await first.becomes_leader()
        waiting = asyncio.ensure_future(second.lead.acquire(asyncio.Event()))
        for _ in range(5):
            clock.now_s += LEASE_S * 0.9
            assert await first.store.beat(1)
            await second.looks_again()
        assert not waiting.done()
        clock.now_s += LEASE_S
        assert await asyncio.wait_for(waiting, 20)
        assert (first.fence.epoch, second.fence.epoch) == (1, 2)


async def test_one_whose_process_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    gone: set[str] = set()
    async with rivals(tmp_path, TurnedClock(), gone) as (first, second):
        assert await first.becomes_leader()
        assert await second.stays_behind()
        gone.add("a")
        assert await second.becomes_leader()


async def test_one_that_resigned_is_not_waited_for(tmp_path: Path) -> None:
    async with rivals(tmp_path, TurnedClock(), set()) as (first, second):
        assert await first.becomes_leader()
        await first.lead.resign()
        assert await second.becomes_leader()


async def test_who_lost_the_lead_stands_down_and_can_write_nothing(tmp_path: Path) -> None:
    gone: set[str] = set()
    async with rivals(tmp_path, TurnedClock(), gone) as (first, second):
        assert await first.becomes_leader()
        await SqlControlStore(first.database).ping()
        gone.add("a")
        assert await second.becomes_leader()
        with pytest.raises(SupersededError):
            await SqlControlStore(first.database).ping()
        await SqlControlStore(second.database).ping()
        stop = asyncio.Event()
        await asyncio.wait_for(first.lead.keep(stop), 20)
        assert stop.is_set()
        await first.lead.resign()
        leader = await second.store.leader()
        assert leader is not None
        assert (leader.holder, leader.epoch) == ("b", 2), "a resignation of the past takes nobody's lead"


async def test_of_two_that_see_a_free_lead_one_gets_it(tmp_path: Path) -> None:
    async with rivals(tmp_path, TurnedClock(), set()) as (first, second):
        got = await asyncio.gather(first.store.lead("a", after=0), second.store.lead("b", after=0))
        assert sorted(got) == [False, True]


async def test_a_store_that_is_away_costs_nobody_the_lead(tmp_path: Path) -> None:
    async with rivals(tmp_path, TurnedClock(), set()) as (first, second):
        assert await first.becomes_leader()
        await first.database.close()
        with pytest.raises(StoreUnavailableError):
            await first.store.beat(1)
        stop = asyncio.Event()
        keeping = asyncio.ensure_future(first.lead.keep(stop))
        await asyncio.sleep(0.05)
        assert not stop.is_set()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert await second.stays_behind()
