"""Every second of every replica is booked once, through restarts of the controller and over the ends of hours."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import open_fresh

from modelyard.clock import ManualClock
from modelyard.control.replica_book import INTERVAL_S, ReplicaBook
from modelyard.domain.books import ReplicaHour, ReplicaLife
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import ReplicaReport, Report
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.domain.tenants import Tenant
from modelyard.engines import EngineLoad
from modelyard.policy.gpu_costs import HOUR_S
from modelyard.stores import StoreUnavailableError
from modelyard.stores.sql import Database, SqlBookStore, SqlControlStore

BEGIN_S = 1_700_002_800.0  # a full hour
USD = 1_000_000_000
GIB = 1024**3


class SetClock(ManualClock):
    """A clock whose date can be set; the monotonic one goes on."""

    shift_s = 0.0

    def unix_s(self) -> float:
        return self.start_s + self.elapsed_s + self.shift_s


class Floor:
    """A stored endpoint with replicas, and the book of them."""

    def __init__(self, database: Database) -> None:
        self.clock = SetClock(start_s=BEGIN_S)
        self.store = SqlControlStore(database)
        self.books = SqlBookStore(database)
        self.loads: dict[str, EngineLoad] = {}
        self.reports: dict[str, Report] = {}
        self.book = self.new_book()

    def new_book(self) -> ReplicaBook:
        node = Node("n", (Accelerator(0, "h100", 80 * GIB),), price_nanousd=4 * USD)
        return ReplicaBook(
            store=self.store,
            books=self.books,
            nodes=lambda: {"n": NodeSeen(node=node)},
            latest=lambda one: (self.clock.monotonic_s() - 1.0, self.loads[one]) if one in self.loads else None,
            reports=lambda: self.reports,
            prices={},
            clock=self.clock,
        )

    async def put(
        self, state: ReplicaState, *, id: str = "rep-1", started: float = BEGIN_S, ready: float | None = None
    ) -> None:
        placement = Placement((Part("n", (0,), 40 * GIB),))
        await self.store.put_replica(
            Replica(
                id,
                "ep-1",
                "ver-1",
                0,
                1,
                state,
                self.clock.unix_s(),
                started_at=started,
                ready_at=ready,
                placement=placement,
            )
        )

    async def looks(self, count: int, every_s: float = INTERVAL_S) -> None:
        for _ in range(count):
            self.clock.advance(every_s)
            await self.book.note()

    async def hours(self) -> list[ReplicaHour]:
        """Return what is booked, that of the last looks too."""
        await self.book._write()
        return await self.books.hours(since=0, until=2**40)

    async def lives(self) -> list[ReplicaLife]:
        await self.book._write()
        return await self.books.lives(since=0, until=2**40)


@pytest.fixture
async def floor(tmp_path: Path) -> AsyncIterator[Floor]:
    database = open_fresh("sqlite", tmp_path)
    made = Floor(database)
    await made.store.add_tenant(Tenant(id="ten-a", name="a", created_at=0))
    version = ModelVersion(
        id="ver-1",
        tenant_id="ten-a",
        name="m",
        version="v1",
        framework="simulated",
        artifact=Artifact(""),
        options={},
        created_at=0,
    )
    await made.store.add_deployment(
        version, Endpoint("ep-1", "ten-a", "m", (Release("ver-1"),), Scaling(), created_at=0)
    )
    yield made
    await database.close()


async def test_a_life_is_booked_by_the_hour_with_its_share_and_price(floor: Floor) -> None:
    await floor.put(ReplicaState.LOADING)
    await floor.looks(6)
    ready = floor.clock.unix_s()
    await floor.put(ReplicaState.READY, ready=ready)
    await floor.looks(360)  # an hour, from a minute past one
    await floor.put(ReplicaState.STOPPED, ready=ready)
    await floor.looks(3)
    first, second = await floor.hours()
    assert (first.hour, second.hour) == (BEGIN_S, BEGIN_S + HOUR_S)
    assert (first.present_s, first.ready_s, first.busy_s) == (HOUR_S, HOUR_S - 60, 0)
    assert (second.present_s, second.ready_s) == (60, 60)
    assert first.accelerator_s == HOUR_S / 2, "it has half of the memory"
    assert first.cost_nanousd == pytest.approx(2 * USD, rel=1e-6)
    (life,) = await floor.lives()
    assert (life.ended_at, life.ready_at, life.owner_id, life.accelerator) == (ready + HOUR_S, ready, "ten-a", "h100")


async def test_busy_is_when_an_engine_or_a_gateway_says_so(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(2)
    floor.loads["rep-1"] = EngineLoad(running=1)
    await floor.looks(3)
    floor.loads.clear()
    floor.reports["g"] = Report([], [ReplicaReport("rep-1/guest@1", 2, 0, "")])
    await floor.looks(4)
    floor.reports.clear()
    await floor.looks(1)
    (booked,) = await floor.hours()
    assert (booked.present_s, booked.busy_s) == (100, 70)


async def test_a_controller_that_was_away_books_the_time_between_once_and_as_idle(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    floor.loads["rep-1"] = EngineLoad(running=1)
    await floor.looks(13)  # of which the first and the seventh were written, and then it was killed
    floor.clock.advance(600)
    floor.book = floor.new_book()
    await floor.book.note()
    await floor.book.note()
    await floor.looks(2)
    (booked,) = await floor.hours()
    assert booked.present_s == 750
    assert booked.busy_s == 150


async def test_a_store_that_is_away_costs_no_second_and_books_none_twice(
    floor: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailableError("locked")

    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(3)
    with monkeypatch.context() as patched:
        patched.setattr(SqlBookStore, "put_lives", away)
        for _ in range(9):
            with contextlib.suppress(StoreUnavailableError):
                await floor.looks(1)
        await floor.put(ReplicaState.STOPPED, ready=BEGIN_S)
        with pytest.raises(StoreUnavailableError):
            await floor.looks(1)
    await floor.looks(2)
    (booked,) = await floor.hours()
    assert booked.present_s == 120
    (life,) = await floor.lives()
    assert life.ended_at == BEGIN_S + 120


async def test_nothing_is_booked_before_the_fleet_was_looked_at(floor: Floor) -> None:
    """Its price would be wrong for good."""
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    nodes, floor.book._nodes = floor.book._nodes, dict
    await floor.looks(3)
    assert await floor.lives() == []
    floor.book._nodes = nodes
    await floor.looks(3)
    (booked,) = await floor.hours()
    assert booked.present_s == 60
    assert booked.cost_nanousd > 0


async def test_counters_are_kept_with_the_moment_of_their_page_and_never_go_back(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    floor.loads["rep-1"] = EngineLoad(prompt_tokens_total=50.0, generation_tokens_total=70.0)
    await floor.looks(1)
    floor.loads["rep-1"] = EngineLoad(prompt_tokens_total=40.0, generation_tokens_total=90.0)
    await floor.looks(1)
    at = floor.clock.unix_s() - 1.0
    del floor.loads["rep-1"]
    await floor.looks(5)
    (life,) = await floor.lives()
    assert (life.prompt_tokens, life.generation_tokens, life.counted_at) == (50, 90, at)


async def test_what_was_over_before_the_book_or_has_not_begun_is_not_booked(floor: Floor) -> None:
    await floor.put(ReplicaState.FAILED, id="rep-old")
    await floor.put(ReplicaState.STARTING, id="rep-new", started=0.0)
    await floor.looks(3)
    assert await floor.lives() == []


async def test_a_replica_that_goes_with_its_endpoint_ends(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(3)
    await floor.store.remove_endpoint("ep-1")
    await floor.looks(3)
    (life,) = await floor.lives()
    assert life.ended_at == BEGIN_S + 30
    (booked,) = await floor.hours()
    assert booked.present_s == 30


async def test_a_clock_that_is_set_back_books_nothing_twice(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(6)
    floor.clock.elapsed_s -= 30
    await floor.book.note()
    await floor.looks(6)
    (booked,) = await floor.hours()
    assert booked.present_s == 90


async def test_one_that_is_taken_from_a_warm_pool_is_its_takers_from_then_on(floor: Floor) -> None:
    """Also in the hour in which it is taken, and after a restart of the controller."""
    version = ModelVersion(
        id="ver-2",
        tenant_id="ten-b",
        name="taker",
        version="v1",
        framework="simulated",
        artifact=Artifact(""),
        options={},
        created_at=0,
    )
    await floor.store.add_tenant(Tenant(id="ten-b", name="b", created_at=0))
    taker = Endpoint("ep-2", "ten-b", "taker", (Release("ver-2"),), Scaling(), created_at=0)
    await floor.store.add_deployment(version, taker)
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(12)
    await floor.hours()  # what was until here is written
    (record,) = await floor.store.replicas()
    taken = msgspec.structs.replace(record, endpoint_id="ep-2", version_id="ver-2", model_name="m")
    await floor.store.put_replica(taken)
    await floor.looks(6)
    await floor.hours()
    floor.book = floor.new_book()
    await floor.looks(6)
    found = {(one.endpoint_id, one.owner_id, one.model): one.present_s for one in await floor.hours()}
    assert found == {("ep-1", "ten-a", "m"): 120, ("ep-2", "ten-b", "taker"): 120}
    (life,) = await floor.lives()
    assert (life.replica_id, life.endpoint_id, life.owner_id) == ("rep-1", "ep-2", "ten-b")


async def test_hours_are_summed_by_replica_and_owner(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.put(ReplicaState.READY, id="rep-2", ready=BEGIN_S)
    floor.loads["rep-2"] = EngineLoad(running=1)
    await floor.looks(720)  # two hours
    hours = await floor.hours()
    sums = await floor.books.replica_sums(since=0, until=2**40)
    assert [(one.replica_id, one.hour) for one in sums] == [("rep-1", BEGIN_S), ("rep-2", BEGIN_S)]
    for field in ("present_s", "ready_s", "busy_s", "accelerator_s", "cost_nanousd"):
        assert sum(getattr(one, field) for one in sums) == pytest.approx(sum(getattr(one, field) for one in hours))
    assert await floor.books.replica_sums(since=int(BEGIN_S) + 2 * HOUR_S, until=2**40) == []


@pytest.mark.parametrize("shift_s", [-HOUR_S, -7, 86_400, 40 * 86_400])
async def test_a_wall_clock_that_is_set_and_comes_back_adds_and_takes_no_second(floor: Floor, shift_s: float) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(6)
    floor.clock.shift_s = shift_s
    await floor.put(ReplicaState.READY, id="rep-2", started=floor.clock.unix_s(), ready=floor.clock.unix_s())
    await floor.looks(6)
    await floor.put(ReplicaState.STOPPED, id="rep-2", started=floor.clock.unix_s() - 60)
    await floor.looks(1)
    floor.clock.shift_s = 0.0
    await floor.looks(6)
    await floor.put(ReplicaState.STOPPED, ready=BEGIN_S)
    await floor.looks(3)
    booked = {one: [hour for hour in await floor.hours() if hour.replica_id == one] for one in ("rep-1", "rep-2")}
    assert sum(hour.present_s for hour in booked["rep-1"]) == 190
    assert sum(hour.ready_s for hour in booked["rep-1"]) == 190
    assert sum(hour.cost_nanousd for hour in booked["rep-1"]) == pytest.approx(190 / HOUR_S * 2 * USD, rel=1e-6)
    assert sum(hour.present_s for hour in booked["rep-2"]) == 60


async def test_a_replica_that_ends_behind_a_clock_that_was_set_back_has_its_own_seconds(floor: Floor) -> None:
    floor.clock.shift_s = HOUR_S
    await floor.put(ReplicaState.READY, started=floor.clock.unix_s(), ready=floor.clock.unix_s())
    await floor.looks(6)
    floor.clock.shift_s = 0.0
    await floor.looks(6)
    await floor.put(ReplicaState.STOPPED, started=BEGIN_S + HOUR_S, ready=BEGIN_S + HOUR_S)
    await floor.looks(2)
    hours = await floor.hours()
    assert sum(hour.present_s for hour in hours) == pytest.approx(120, abs=INTERVAL_S)


async def test_a_controller_that_begins_again_behind_a_clock_that_was_ahead_goes_on_at_once(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    floor.clock.shift_s = 86_400
    await floor.looks(6)
    await floor.hours()
    floor.clock.shift_s = 0.0
    floor.book = floor.new_book()
    await floor.book.note()
    before = sum(hour.present_s for hour in await floor.hours())
    await floor.looks(6)
    assert sum(hour.present_s for hour in await floor.hours()) == before + 60


async def test_while_its_engine_sleeps_it_costs_nothing(floor: Floor) -> None:
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(6)
    await floor.put(ReplicaState.ASLEEP, ready=BEGIN_S)
    await floor.looks(30)
    await floor.put(ReplicaState.READY, ready=BEGIN_S)
    await floor.looks(4)
    (booked,) = await floor.hours()
    assert (booked.present_s, booked.ready_s, booked.accelerator_s) == (100, 100, 50)
    (life,) = await floor.lives()
    assert life.ended_at is None
