"""Tidings: sums of exactly those who have quotas, before the key that needs them, and never of a day gone by."""

from pathlib import Path

from modelyard.clock import ManualClock
from modelyard.control.tidings import TidingsPublisher, spent_of
from modelyard.domain.demand import Report
from modelyard.domain.routing_table import EngineSpeed, ReplicaSnapshot, Spent, Tidings
from modelyard.domain.tenants import ApiKey, Limits, Scope, Tenant
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.policy.quotas import QuotaBook
from modelyard.policy.utc import day_number
from modelyard.stores import JournalPosition, SpentRow
from modelyard.stores.sql import SqlControlStore, SqlUsageStore, open_database

NOON = 1_795_953_600.0
NONE = Limits()
DAY = day_number("2026-11-29")
HERE = JournalPosition("gateway-0", "0000000001.journal", 70)


def a_key(key_id: str, tenant_id: str = "t", limits: Limits = NONE) -> ApiKey:
    return ApiKey(key_id, tenant_id, "k", b"x", (Scope.INFERENCE,), 0, limits=limits)


class Ear:
    """A feed that remembers."""

    def __init__(self, **refused: list[tuple[int, float]]) -> None:
        self.heard: list[Tidings] = []
        self.refused = refused
        self.days: dict[str, int] = {}

    def tell(self, tidings: Tidings) -> None:
        self.heard.append(tidings)

    def reports(self) -> dict[str, Report]:
        refusing = {name: Report([], [], refused=refused) for name, refused in self.refused.items()}
        return refusing | {name: Report([], [], day=day) for name, day in self.days.items()}


def test_only_who_has_a_quota_is_told_of_and_a_tenant_is_all_its_keys() -> None:
    tenants = [Tenant("t", "t", 0, Limits(tokens_per_day=1)), Tenant("u", "u", 0)]
    keys = [a_key("a"), a_key("b", limits=Limits(nanousd_per_day=1)), a_key("c", "u", Limits(tokens_per_month=1))]
    rows = [SpentRow("t", "a", "gateway-0", 1, 2, 3, 4), SpentRow("t", "b", "gateway-0", 10, 20, 30, 40)]
    rows += [SpentRow("t", "b", "gateway-1", 5, 5, 5, 5)]
    named = ("2026-11-29", "2026-11")
    assert spent_of(tenants, keys, rows, day=DAY) == (
        Spent("b", *named, 10, 20, 30, 40, "gateway-0"),
        Spent("b", *named, 5, 5, 5, 5, "gateway-1"),
        Spent("c", *named, 0, 0, 0, 0, ""),
        Spent("t", *named, 11, 22, 33, 44, "gateway-0"),
        Spent("t", *named, 5, 5, 5, 5, "gateway-1"),
    )


def test_of_who_pays_in_advance_all_that_was_ever_spent_is_told_and_of_nobody_else() -> None:
    tenants = [Tenant("t", "t", 0, Limits(nanousd_total=90)), Tenant("u", "u", 0, Limits(nanousd_total=0))]
    keys = [a_key("b", limits=Limits(nanousd_per_day=1))]
    rows = [SpentRow("t", "b", "gateway-0", 1, 1, 1, 1, 50), SpentRow("t", "c", "gateway-0", 0, 0, 0, 0, 7)]
    named = ("2026-11-29", "2026-11")
    assert spent_of(tenants, keys, rows, day=DAY) == (
        Spent("b", *named, 1, 1, 1, 1, "gateway-0"),
        Spent("t", *named, 1, 1, 1, 1, "gateway-0", 57),
        Spent("u", *named, 0, 0, 0, 0, "", 0),
    )


async def test_sums_come_with_their_position_once_each_and_of_the_newest_day_seen(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    store, usage, ear, clock = SqlControlStore(database), SqlUsageStore(database), Ear(), ManualClock(NOON)
    await store.add_tenant(Tenant("t", "t", 0))
    publisher = TidingsPublisher(store=store, usage=usage, feed=ear, clock=clock)  # type: ignore[arg-type]
    await publisher.publish()
    await store.add_key(a_key("a", limits=Limits(tokens_per_day=100)))
    await publisher.refresh()
    assert ear.heard[-1].spent == (Spent("a", "2026-11-29", "2026-11", 0, 0, 0, 0, ""),)
    intent = Intent("r", NOON, "t", "a", "ep", "m", "v", "/x", False, 1, 9, Price(1_000_000, 0, 1_000_000))
    settle = Settle("r", NOON, 3, 0, 4, UsageStatus.SUCCESS, 200, "", 1.0, 2.0, "rep", 1, False)
    await usage.apply([intent, settle], HERE)
    await publisher.publish()
    told = Tidings(
        spent=(Spent("a", "2026-11-29", "2026-11", 7, 7, 7, 7, "gateway-0"),),
        delivered={"gateway-0": ("0000000001.journal", 70)},
    )
    assert ear.heard[-1] == told
    count = len(ear.heard)
    clock.start_s -= 3 * 86_400
    await publisher.publish()
    assert len(ear.heard) == count, "neither told again nor of an earlier day"
    await database.close()


async def test_a_day_that_only_a_gateway_has_seen_is_told_of_so_that_it_takes_the_sums(tmp_path: Path) -> None:
    """A wall clock that was ahead for a moment and came back: a key that is made after it has a quota, too."""
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    store, usage, ear, clock = SqlControlStore(database), SqlUsageStore(database), Ear(), ManualClock(NOON)
    await store.add_tenant(Tenant("t", "t", 0))
    await store.add_key(a_key("a", limits=Limits(tokens_per_day=100)))
    book = QuotaBook(worker=0, workers=1)
    book.required = ("", 0)
    quota = book.quota("a", Limits(tokens_per_day=100), is_tenants=False)
    assert quota is not None
    book.advance(NOON + 2 * 86_400)
    publisher = TidingsPublisher(store=store, usage=usage, feed=ear, clock=clock)  # type: ignore[arg-type]
    for ear.days, is_known in (({}, False), ({"gateway-0": book.number_of_day, "other": DAY}, True)):
        await publisher.publish()
        book.hear(ear.heard[-1].spent, ear.heard[-1].delivered)
        assert quota.is_known is is_known
    assert ear.heard[-1].spent == (Spent("a", "2026-12-01", "2026-12", 0, 0, 0, 0, ""),)
    await database.close()


async def test_snapshots_go_along(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    ear, snapshot = Ear(), ReplicaSnapshot("r", 0.1, running=3)
    publisher = TidingsPublisher(
        store=SqlControlStore(database),
        usage=SqlUsageStore(database),
        feed=ear,  # type: ignore[arg-type]
        clock=ManualClock(NOON),
        snapshots=lambda: [snapshot],
    )
    await publisher.publish()
    assert ear.heard == [Tidings((snapshot,))]
    await database.close()


async def test_speeds_of_engines_are_told_now_and_then(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    ear, clock, speed = Ear(), ManualClock(NOON), EngineSpeed("ver-1", 0.02, 1e-4, 1e-4, 1e-8)
    publisher = TidingsPublisher(
        store=SqlControlStore(database),
        usage=SqlUsageStore(database),
        feed=ear,  # type: ignore[arg-type]
        clock=clock,
        speeds=lambda: [speed],
    )
    for _ in range(21):
        await publisher.publish()
        clock.advance(1.0)
    assert ear.heard == [Tidings(speeds=(speed,))] * 3
    await database.close()


async def test_what_one_gateway_refuses_all_are_told_once(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    ear = Ear(one=[(7, 9.0)], other=[(7, 12.0), (3, 1.0)])
    publisher = TidingsPublisher(
        store=SqlControlStore(database),
        usage=SqlUsageStore(database),
        feed=ear,  # type: ignore[arg-type]
        clock=ManualClock(NOON),
    )
    await publisher.publish()
    await publisher.publish()
    assert ear.heard == [Tidings(refused=((3, 1.0), (7, 12.0)))]
    await database.close()


def test_of_who_has_a_budget_for_a_model_what_that_model_cost_is_told() -> None:
    tenants = [Tenant("t", "t", 0, Limits(model_budgets={"chat": 9, "other": 9}))]
    keys = [a_key("a", limits=Limits(model_budgets={"chat": 5}, tokens_per_day=1)), a_key("b")]
    rows = [SpentRow("t", "a", "gateway-0", 1, 2, 3, 4), SpentRow("t", "b", "gateway-1", 1, 1, 1, 8)]
    rows += [SpentRow("t", "a", "gateway-0", 0, 0, 0, 4, model="chat")]
    rows += [SpentRow("t", "b", "gateway-1", 0, 0, 0, 7, model="chat")]
    rows += [SpentRow("t", "b", "gateway-1", 0, 0, 0, 1, model="unasked")]
    named = ("2026-11-29", "2026-11")
    assert spent_of(tenants, keys, rows, day=DAY) == (
        Spent("a", *named, 1, 2, 3, 4, "gateway-0"),
        Spent("a/chat", *named, 0, 0, 0, 4, "gateway-0"),
        Spent("t/chat", *named, 0, 0, 0, 4, "gateway-0"),
        Spent("t/chat", *named, 0, 0, 0, 7, "gateway-1"),
        Spent("t/other", *named, 0, 0, 0, 0, ""),
    )
