"""F21: Stripe answers too late, not at all, 429, 500, or is down for 30 hours and for 36 days.

Nothing is charged twice, nothing is lost, and what needs a person says so.
"""

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conformance.backends import open_fresh
from tests.support.journals import intent_of, settle_of
from tests.support.stripe_stub import KEY, StripeStub, stripe_stub

from modelyard.clock import ManualClock
from modelyard.config.books import StripeConfig
from modelyard.domain.books import MeterStatus
from modelyard.domain.tenants import PLATFORM, Tenant
from modelyard.metering.reconcile.stripe import ledger_and_stripe
from modelyard.metering.stripe_reports import FAILURES_MAX, StripeReports
from modelyard.stores import JournalPosition, SinkError
from modelyard.stores import stripe as stripe_store
from modelyard.stores.sql import SqlBookStore, SqlUsageStore
from modelyard.stores.stripe import StripeMeters

HOUR_S = 3600
DAY_S = 86_400
BEGIN_S = 1_700_002_800.0  # a full hour
LARGE = 1_000_000


@dataclass
class Desk:
    """A ledger and its reports to Stripe, in virtual time."""

    books: SqlBookStore
    usage: SqlUsageStore
    clock: ManualClock
    stub: StripeStub
    reports: StripeReports
    used: int = 0

    async def use(self, tenant: str, *, at: float | None = None, tokens: int = LARGE) -> None:
        """Book one request that arrived at ``at``."""
        self.used += 1
        rid, at = f"req-{self.used}", self.clock.unix_s() if at is None else at
        records = [
            intent_of(rid, at, tenant=tenant),
            settle_of(rid, self.clock.unix_s(), prompt=tokens, completion=tokens + self.used),
        ]
        await self.usage.apply(records, JournalPosition("gateway-0", "1", self.used))

    async def owed(self, tenant: str) -> int:
        (total,) = await self.usage.usage(tenant_id=tenant, key_id=None, model=None, since=0, until=3e9, group_by=())
        return total.cost_nanousd

    async def try_report(self) -> None:
        with contextlib.suppress(SinkError):
            await self.reports.report()

    async def is_balanced(self, *tenants: str) -> None:
        for tenant in tenants:
            owed = await self.owed(tenant)
            assert owed > 0
            assert self.stub.charged(self.stub.customer_of(tenant)) == owed, tenant
        assert self.stub.wrong == []


def reports_on(
    books: SqlBookStore, clock: ManualClock, stub: StripeStub, key: str = KEY, *, prepaid: Collection[str] = ()
) -> StripeReports:
    async def tenants() -> list[Tenant]:
        return [Tenant(id=id, name=f"name of {id}", created_at=0) for id in ("ten-a", "ten-b", PLATFORM)]

    async def spared() -> Collection[str]:
        return prepaid

    return StripeReports(
        books=books,
        meters=StripeMeters(key, api_base=stub.url, timeout_s=3.0),
        settings=StripeConfig(enabled=True),
        clock=clock,
        tenants=tenants,
        spared=spared,
    )


def stored_in(folder: Path, text: str) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=BEGIN_S)


@pytest.fixture
def stub(clock: ManualClock) -> Iterator[StripeStub]:
    with stripe_stub(clock.unix_s) as running:
        yield running


@pytest.fixture
async def desk(tmp_path: Path, clock: ManualClock, stub: StripeStub) -> AsyncIterator[Desk]:
    database = open_fresh("sqlite", tmp_path)
    books = SqlBookStore(database)
    made = Desk(books, SqlUsageStore(database), clock, stub, reports_on(books, clock, stub))
    await made.reports.report()  # from this hour on, usage is Stripe's business
    yield made
    await made.reports.meters.close()
    await database.close()


async def test_each_tenant_is_a_customer_and_each_hour_an_event(desk: Desk) -> None:
    for _ in range(3):
        await desk.use("ten-a")
        await desk.use("ten-b")
        await desk.use(PLATFORM)
        desk.clock.advance(HOUR_S)
    await desk.reports.report()
    assert len(desk.stub.events) == 4, "the hour that ended just now may still get late rows"
    desk.clock.advance(HOUR_S)
    await desk.reports.report()
    await desk.is_balanced("ten-a", "ten-b")
    assert len(desk.stub.events) == 6
    assert len(desk.stub.customers) == 2, "the operator pays nobody"
    assert {one["name"] for one in desk.stub.customers.values()} == {"name of ten-a", "name of ten-b"}
    events = await desk.books.meter_events(since=0, until=2**40)
    assert all(one.status is MeterStatus.EXPORTED and one.exported_at == desk.clock.unix_s() for one in events[4:])


async def test_what_settles_late_becomes_another_part(desk: Desk) -> None:
    began = desk.clock.unix_s()
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.use("ten-a", at=began + 60)
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert [one["identifier"][-2:] for one in desk.stub.events] == ["-0", "-1"]
    assert len({one["timestamp"] for one in desk.stub.events}) == 1


@pytest.mark.parametrize("fault", ["drop", "hang", "429", "500", "500-after"])
async def test_a_try_of_which_nobody_knows_is_repeated_and_charged_once(desk: Desk, fault: str) -> None:
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    for _ in range(8):  # whichever request it hits: search, customer, event
        desk.stub.faults.append(fault)
        await desk.try_report()
        desk.clock.advance(300)
        desk.stub.released.set()
    desk.stub.faults.clear()
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert len(desk.stub.customers) == 1
    assert desk.reports.status().alarm == ""


@pytest.mark.parametrize("fault", ["drop", "500"])
async def test_down_for_thirty_hours_after_an_answer_was_lost(desk: Desk, fault: str) -> None:
    """The identifier is forgotten meanwhile: only Stripe's summary says whether the event is there."""
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults.append(fault)
    await desk.try_report()
    assert len(desk.stub.events) == (2 if fault == "drop" else 1)
    desk.stub.is_down = True
    for _ in range(30):
        await desk.use("ten-a")
        desk.clock.advance(HOUR_S)
        await desk.try_report()
    assert "Stripe takes nothing" in desk.reports.status().alarm
    # The controller is another one by now: all that it knows is in the store.
    desk.reports = reports_on(desk.books, desk.clock, desk.stub)
    desk.stub.is_down = False
    desk.clock.advance(HOUR_S)
    asked = len(desk.stub.asked)
    await desk.reports.report()
    assert any("event_summaries" in one for one in desk.stub.asked[asked:]), "it was sent again without a look"
    await desk.is_balanced("ten-a")
    assert desk.reports.status().alarm == ""


async def test_hours_of_more_than_35_days_ago_raise_an_alarm_and_are_not_sent(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    await desk.use("ten-a")
    lost = await desk.owed("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.is_down = True
    await desk.try_report()
    desk.clock.advance(36 * DAY_S)
    desk.stub.is_down = False
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    assert desk.stub.charged(desk.stub.customer_of("ten-a")) == await desk.owed("ten-a") - lost
    assert desk.stub.wrong == []
    assert "cannot be reported to Stripe" in desk.reports.status().alarm
    (stuck,) = await desk.books.meter_events(since=0, until=2**40, status=MeterStatus.ALARM)
    assert stuck.value == lost
    assert "35 days" in stuck.reason
    assert any("bill it by hand" in record.getMessage() for record in caplog.records)
    until = int(desk.clock.unix_s())
    meters, counted = desk.reports.meters, desk.reports.counted
    check = await ledger_and_stripe(desk.books, meters, counted, since=int(BEGIN_S), until=until)
    assert f"modelyard reconcile --billed {stuck.identifier}" in check.differences[0].what
    assert await desk.reports.note_by_hand({stuck.identifier, "modelyard-x"}) == ["modelyard-x"]
    assert desk.reports.status().alarm, "all or none"
    assert await desk.reports.note_by_hand({stuck.identifier}) == []
    assert desk.reports.status().alarm == ""
    await desk.reports.report()
    assert desk.reports.status().alarm == ""
    assert (await ledger_and_stripe(desk.books, meters, counted, since=int(BEGIN_S), until=until)).is_good


async def test_a_refused_meter_is_told_and_mended(desk: Desk) -> None:
    del desk.stub.meters["modelyard_cost"]
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    assert "modelyard_cost" in desk.reports.status().alarm
    desk.stub.meters["modelyard_cost"] = "mtr_1"
    desk.clock.advance(30 * HOUR_S)
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert desk.reports.status().alarm == ""


async def test_an_event_in_doubt_waits_while_its_meter_cannot_be_read(desk: Desk) -> None:
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults.append("drop")
    await desk.try_report()
    desk.reports = reports_on(desk.books, desk.clock, desk.stub)
    del desk.stub.meters["modelyard_cost"]
    desk.clock.advance(25 * HOUR_S)
    await desk.reports.report()
    assert "no active meter" in desk.reports.status().alarm
    assert len(desk.stub.events) == 2, "it was not sent blindly"
    desk.stub.meters["modelyard_cost"] = "mtr_1"
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert desk.reports.status().alarm == ""


async def test_a_refusal_after_a_failure_does_not_make_it_new(desk: Desk) -> None:
    """Stripe failed after it had taken the event, and refuses it later, as its meter is away: that says nothing of the
    first try, whose identifier is forgotten by the time that the meter is back."""
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults += ["", "", "500-after"]  # the search, the customer, the event
    await desk.try_report()
    assert len(desk.stub.events) == 1
    del desk.stub.meters["modelyard_cost"]
    desk.clock.advance(600)
    await desk.reports.report()
    assert "modelyard_cost" in desk.reports.status().alarm
    desk.clock.advance(30 * HOUR_S)
    desk.stub.meters["modelyard_cost"] = "mtr_1"
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert len(desk.stub.events) == 1


async def test_a_customer_that_could_not_be_made_once_is_made_the_next_time(desk: Desk) -> None:
    """Stripe says its 500 again to the same idempotency key, for a day."""
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults += ["", "500"]
    await desk.try_report()
    assert desk.stub.customers == {}
    desk.clock.advance(300)
    await desk.reports.report()
    await desk.is_balanced("ten-a")
    assert len(desk.stub.customers) == 1


async def test_an_event_that_stripe_cannot_take_holds_up_nobody_else(desk: Desk) -> None:
    await desk.use("ten-a")
    await desk.use("ten-b")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults += ["", "", "", "", "500"]  # two customers are found and made; then the first event
    with pytest.raises(SinkError, match="500"):
        await desk.reports.report()
    assert [one["customer"] for one in desk.stub.events] == [desk.stub.customer_of("ten-b")]
    assert desk.reports.status().pending == 1
    await desk.reports.report()
    await desk.is_balanced("ten-a", "ten-b")


async def test_a_stripe_that_fails_every_time_is_asked_a_few_times_only(desk: Desk) -> None:
    for _ in range(9):
        await desk.use("ten-a")
        desk.clock.advance(HOUR_S)
    desk.clock.advance(HOUR_S)
    desk.stub.faults += ["", "", *["429"] * 50]
    await desk.try_report()
    assert len(desk.stub.asked) == 2 + FAILURES_MAX


async def test_an_answer_that_never_ends_is_not_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    desk.stub.faults.append("hang")
    with monkeypatch.context() as patched:
        patched.setattr(stripe_store, "CALL_TIMEOUT_S", 0.2)
        with pytest.raises(SinkError, match=r"^Stripe did not answer"):
            await desk.reports.report()
    desk.stub.released.set()
    await desk.reports.report()
    await desk.is_balanced("ten-a")


async def test_a_controller_that_is_killed_as_it_begins_goes_on(desk: Desk) -> None:
    """It wrote down from which hour on usage is Stripe's business, and no more than that."""
    database = desk.books._database
    await database.write(lambda c: c.exec_driver_sql("DELETE FROM sink_cursors WHERE source = 'ledger'"))
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    await desk.is_balanced("ten-a")


async def test_what_was_paid_in_advance_is_never_billed_by_stripe_too(desk: Desk) -> None:
    paid_in_advance = {"ten-a"}
    desk.reports = reports_on(desk.books, desk.clock, desk.stub, prepaid=paid_in_advance)
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    assert desk.stub.events == []
    paid = await desk.owed("ten-a")
    paid_in_advance.clear()  # from now on it pays as it goes; the last 40 days are looked at again
    desk.reports = reports_on(desk.books, desk.clock, desk.stub, prepaid=paid_in_advance)
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    await desk.reports.report()
    assert desk.stub.charged(desk.stub.customer_of("ten-a")) == await desk.owed("ten-a") - paid
    meters, counted = desk.reports.meters, desk.reports.counted
    until = int(desk.clock.unix_s())
    check = await ledger_and_stripe(desk.books, meters, counted, since=int(BEGIN_S), until=until)
    assert check.is_good, check


async def test_a_wrong_key_is_said_without_showing_it(
    desk: Desk, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sk_test_another_secret_key"
    reports = reports_on(desk.books, desk.clock, desk.stub, secret)
    await desk.use("ten-a")
    desk.clock.advance(2 * HOUR_S)
    with pytest.raises(SinkError, match="STRIPE_API_KEY"):
        await reports.report()
    await reports.meters.close()
    assert secret not in caplog.text
    assert secret not in repr(reports.meters)
    assert not stored_in(tmp_path, secret)


@pytest.mark.parametrize("seed", range(2))
async def test_a_month_of_every_fault_balances(desk: Desk, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        for _ in range(chance.randrange(3)):
            late_s = chance.choice([0, 0, 0, 3 * HOUR_S, 2 * DAY_S])
            at = max(BEGIN_S, desk.clock.unix_s() - late_s)
            await desk.use(chance.choice(["ten-a", "ten-b"]), at=at, tokens=chance.randrange(1, LARGE))
        if chance.random() < 0.5:
            desk.stub.faults.append(chance.choice(["drop", "429", "500", "500-after"]))
        desk.stub.is_down = chance.random() < 0.2
        await desk.try_report()
        if chance.random() < 0.1:
            desk.reports = reports_on(desk.books, desk.clock, desk.stub)
        desk.clock.advance(chance.choice([600, HOUR_S, HOUR_S, 5 * HOUR_S, 26 * HOUR_S]))
    desk.stub.faults.clear()
    desk.stub.is_down = False
    for _ in range(3):
        desk.clock.advance(2 * HOUR_S)
        await desk.reports.report()
    await desk.is_balanced("ten-a", "ten-b")
    assert await desk.books.meter_events(since=0, until=2**40, status=MeterStatus.ALARM) == []
