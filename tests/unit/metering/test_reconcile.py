"""Books that agree are found to agree to the token, and each way in which they can differ is found and named."""

import io
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from tests.conformance.backends import open_fresh
from tests.support.journals import intent_of, named, settle_of, write_run
from tests.support.stripe_stub import KEY, stripe_stub

from modelyard.clock import ManualClock
from modelyard.config.books import StripeConfig
from modelyard.domain.books import DayUse, LedgerSum, MeterStatus, ReplicaLife, ReplicaUse
from modelyard.domain.tenants import Tenant
from modelyard.domain.usage import LINE_REPEATED, Intent, Settle, UsageStatus
from modelyard.metering.delivery import Delivery
from modelyard.metering.reconcile import LISTED_MAX
from modelyard.metering.reconcile.invoices import (
    InvoiceError,
    InvoiceLine,
    compared,
    ledger_and_invoice,
    read_invoice,
)
from modelyard.metering.reconcile.journals import journals_and_ledger, rows_and_roll_ups
from modelyard.metering.reconcile.replicas import differences, ledger_and_engines
from modelyard.metering.reconcile.stripe import ledger_and_stripe
from modelyard.metering.stripe_reports import StripeReports
from modelyard.stores import JournalPosition
from modelyard.stores.sql import Database, SqlBookStore, SqlUsageStore, rollups, schema
from modelyard.stores.stripe import StripeMeters

BEGIN_S = 1_700_002_800.0  # a full hour
HOUR_S = 3600
LEDGER = schema.inference_requests


class Office:
    """Journals under one root, the ledger that they go to, and whoever compares them."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.root = folder / "journal"
        self.clock = ManualClock(start_s=BEGIN_S)
        self.database = database
        self.books = SqlBookStore(database)
        self.usage = SqlUsageStore(database)
        self.delivery = Delivery(self.root, self.usage, 0.01)

    def write(self, worker: str, requests: list[str], pairs: list[tuple[Intent, Settle]] | None = None) -> None:
        self.clock.advance(5.0)
        write_run(self.root, worker, requests, self.clock, pairs=pairs or [])

    async def change(self, statement: sa.Executable) -> None:
        await self.database.write(lambda connection: connection.execute(statement))


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    database = open_fresh("sqlite", tmp_path)
    yield Office(tmp_path, database)
    await database.close()


def aborted(chance: random.Random, number: int, at: float) -> tuple[Intent, Settle]:
    """Return a request as clients make them: many leave in the middle."""
    rid = f"mix-{number}"
    leaves = chance.random() < 0.3
    return intent_of(rid, at), settle_of(
        rid,
        at + 1,
        prompt=chance.randrange(5000),
        completion=chance.randrange(900),
        status=UsageStatus.CLIENT_CLOSED if leaves else UsageStatus.SUCCESS,
        is_estimated=leaves,
    )


async def test_nothing_agrees_with_nothing(office: Office) -> None:
    check = await journals_and_ledger(office.root, office.books)
    assert check.is_good
    assert check.compared == 0


async def test_many_requests_with_clients_that_leave_agree_to_the_token(office: Office) -> None:
    chance = random.Random(7)
    for worker in range(2):
        pairs = [aborted(chance, number + 10_000 * worker, office.clock.unix_s() + 9) for number in range(4000)]
        office.write(f"gateway-{worker}", named(f"w{worker}", 50), pairs)
    await office.delivery.drain()
    check = await journals_and_ledger(office.root, office.books)
    assert check.is_good, check.differences
    assert check.compared == 8100
    # The oldest requests arrived before the last journal began: those are compared one by one only.
    assert check.notes == ["as far back as all journals go, they have 4000 requests, and the ledger 4000"]
    rolled = await rows_and_roll_ups(office.books, since=int(BEGIN_S), until=int(BEGIN_S) + HOUR_S)
    assert rolled.is_good
    assert rolled.compared == 1


async def test_what_is_not_delivered_yet_is_no_difference(office: Office) -> None:
    office.write("gateway-0", named("a", 10))
    await office.delivery.drain()
    office.write("gateway-0", named("b", 10))
    office.write("gateway-1", named("c", 10))
    check = await journals_and_ledger(office.root, office.books)
    assert check.is_good
    assert check.compared == 10


def run_of_line(rid: str, at: float) -> tuple[Intent, Settle]:
    return msgspec.structs.replace(intent_of(rid, at), batch_line="batch_1/7"), settle_of(rid, at + 1)


async def test_a_line_of_a_batch_that_was_run_twice_is_charged_once_and_agrees(office: Office) -> None:
    runs = [run_of_line(rid, office.clock.unix_s() + 9) for rid in ("first", "again")]
    office.write("gateway-0", [], runs)
    await office.delivery.drain()
    entries = await office.books.entries(["first", "again"])
    assert entries["first"].cost_nanousd
    assert not entries["again"].cost_nanousd
    check = await journals_and_ledger(office.root, office.books)
    assert check.is_good, check.differences
    assert check.compared == 2
    # That a row says so excuses no other request.
    office.write("gateway-0", ["no-line"])
    await office.delivery.drain()
    changes = {"error_code": LINE_REPEATED, "cost_nanousd": 0}
    await office.change(sa.update(LEDGER).where(LEDGER.c.request_id == "no-line").values(changes))
    check = await journals_and_ledger(office.root, office.books)
    assert [one.request_ids for one in check.differences] == [["no-line"]]


async def test_a_changed_row_is_found_with_its_request_tokens_and_money(office: Office) -> None:
    office.write("gateway-0", named("a", 10))
    await office.delivery.drain()
    wrong = sa.update(LEDGER).where(LEDGER.c.request_id == "a-000003")
    await office.change(
        wrong.values(completion_tokens=LEDGER.c.completion_tokens - 5, cost_nanousd=LEDGER.c.cost_nanousd + 7)
    )
    check = await journals_and_ledger(office.root, office.books)
    (difference,) = check.differences
    assert difference.request_ids == ["a-000003"]
    assert (difference.tokens, difference.nanousd) == (5, -7)
    assert (check.found, check.tokens, check.nanousd) == (1, 5, -7)
    assert "completion_tokens 20 and 15" in difference.what
    rolled = await rows_and_roll_ups(office.books, since=int(BEGIN_S), until=int(BEGIN_S) + HOUR_S)
    assert (rolled.tokens, rolled.nanousd) == (-5, 7)


async def test_a_lost_row_is_found(office: Office) -> None:
    office.write("gateway-0", named("a", 10))
    await office.delivery.drain()
    await office.change(sa.delete(LEDGER).where(LEDGER.c.request_id == "a-000009"))
    check = await journals_and_ledger(office.root, office.books)
    assert [one.request_ids for one in check.differences] == [["a-000009"]]
    assert check.tokens == 30


async def test_rows_that_are_not_kept_any_more_are_no_difference(office: Office) -> None:
    office.write("gateway-0", named("old", 10))
    office.clock.advance(2 * HOUR_S)
    office.write("gateway-0", named("new", 5))
    await office.delivery.drain()
    kept_since = int(BEGIN_S) + HOUR_S
    await office.change(sa.delete(LEDGER).where(LEDGER.c.created_at < kept_since))
    assert (await journals_and_ledger(office.root, office.books)).found == 10
    check = await journals_and_ledger(office.root, office.books, kept_since=kept_since)
    assert check.is_good
    assert check.compared == 5
    span = {"since": int(BEGIN_S), "until": int(BEGIN_S) + 3 * HOUR_S}
    assert (await rows_and_roll_ups(office.books, **span)).found == 1
    assert (await rows_and_roll_ups(office.books, **span, kept_since=kept_since)).is_good


async def test_a_lost_row_hides_no_stranger(office: Office) -> None:
    office.write("gateway-0", named("a", 10))
    office.write("gateway-0", named("b", 10))
    await office.delivery.drain()
    stranger = [intent_of("stranger", office.clock.unix_s() + 10), settle_of("stranger", office.clock.unix_s() + 11)]
    await office.usage.apply(stranger, JournalPosition("gateway-9", "1700000000.journal", 1))
    await office.change(sa.delete(LEDGER).where(LEDGER.c.request_id == "b-000003"))
    check = await journals_and_ledger(office.root, office.books)
    assert sorted(one.subject for one in check.differences) == ["b-000003", "stranger"]


@pytest.mark.parametrize("name", [one.table.name for one in rollups.ROLLUPS])
async def test_a_roll_up_that_differs_from_the_others_is_found_also_where_rows_are_gone(
    office: Office, name: str
) -> None:
    office.write("gateway-0", named("old", 10))
    await office.delivery.drain()
    await office.usage.forget_rows(before=int(BEGIN_S) + HOUR_S, limit=100)
    span = {"since": int(BEGIN_S), "until": int(BEGIN_S) + 3 * HOUR_S}
    assert (await rows_and_roll_ups(office.books, **span)).is_good
    table = schema.metadata.tables[name]
    await office.change(sa.update(table).values(cost_nanousd=table.c.cost_nanousd + 7))
    check = await rows_and_roll_ups(office.books, **span)
    assert check.found
    assert {abs(one.nanousd) for one in check.differences} == {7}
    assert name in check.differences[0].subject or name in ("usage_rollup_hourly", "usage_rollup_daily")


async def test_a_row_that_no_journal_knows_is_found(office: Office) -> None:
    office.write("gateway-0", named("a", 10))
    await office.delivery.drain()
    at = office.clock.unix_s() + 10
    await office.usage.apply(
        [intent_of("stranger", at), settle_of("stranger", at)],
        JournalPosition("gateway-9", "1700000000.journal", 1),
    )
    office.write("gateway-0", named("b", 10))
    await office.delivery.drain()
    check = await journals_and_ledger(office.root, office.books)
    assert [one.request_ids for one in check.differences] == [["stranger"]]
    assert check.tokens == -30


async def test_all_differences_are_counted_and_the_first_are_listed(office: Office) -> None:
    office.write("gateway-0", named("a", 200))
    await office.delivery.drain()
    await office.change(sa.update(LEDGER).values(cost_nanousd=LEDGER.c.cost_nanousd + 1))
    check = await journals_and_ledger(office.root, office.books)
    assert (check.found, len(check.differences), check.nanousd) == (200, LISTED_MAX, -200)


# --- engines -------------------------------------------------------------------------


def life(**given: object) -> ReplicaLife:
    made = {
        "replica_id": "rep-1",
        "endpoint_id": "ep-1",
        "owner_id": "ten-a",
        "model": "smol",
        "version_id": "ver-1",
        "accelerator": "cpu",
        "accelerators": 1.0,
        "hourly_nanousd": 0,
        "started_at": BEGIN_S,
        "ready_at": BEGIN_S,
        "ended_at": BEGIN_S + 900,
        "seen_at": BEGIN_S + 900,
        "prompt_tokens": 1000,
        "generation_tokens": 2000,
        "counted_at": BEGIN_S + 900,
    }
    return ReplicaLife(**{**made, **given})  # type: ignore[arg-type]


def use(prompt: int, cached: int, completion: int, unsure: int = 0) -> dict[str, ReplicaUse]:
    return {"rep-1": ReplicaUse("rep-1", 9, prompt, cached, completion, unsure)}


@pytest.mark.parametrize(
    ("used", "of", "tokens"),
    [
        (use(1000, 0, 2000), life(), []),
        (use(1000, 0, 1980), life(), []),  # within the tolerance
        (use(1000, 0, 1900), life(), [-100]),
        (use(1000, 0, 1900, unsure=1), life(), []),  # a client left
        (use(1000, 0, 1900), life(ended_at=None), []),  # under way
        (use(1000, 0, 2001), life(), [1]),  # never more than the engine made
        (use(1000, 0, 2001, unsure=3), life(ended_at=None), [1]),
        (use(1500, 500, 2000), life(), []),  # cached prompts are not computed
        (use(1501, 500, 2000), life(), [1]),
        ({}, life(), [-2000]),
    ],
)
def test_engines_may_do_more_for_known_reasons_and_never_less(
    used: dict[str, ReplicaUse], of: ReplicaLife, tokens: list[int]
) -> None:
    assert [one.tokens for one in differences([of], used, 0.01)] == tokens


async def test_replicas_are_compared_over_their_lives_and_the_unsure_requests_named(office: Office) -> None:
    now = BEGIN_S + 100
    pairs = [(intent_of(f"r-{n}", now), settle_of(f"r-{n}", now + n, replica="rep-1")) for n in range(10)]
    pairs.append((intent_of("cut", now), settle_of("cut", now, replica="rep-1/guest", is_estimated=True)))
    pairs.append((intent_of("later", now), settle_of("later", BEGIN_S + 899.5, replica="rep-1")))
    pairs.append((intent_of("elsewhere", now), settle_of("elsewhere", now, replica="rep-10")))
    office.write("gateway-0", [], pairs)
    await office.delivery.drain()
    uncounted = life(replica_id="rep-2", prompt_tokens=None, generation_tokens=None)
    await office.books.put_lives([life(prompt_tokens=110, generation_tokens=11 * 20), uncounted], [])
    span = {"since": BEGIN_S, "until": BEGIN_S + HOUR_S, "tolerance": 0.0}
    check = await ledger_and_engines(office.books, **span)
    assert check.is_good, check.differences
    assert check.compared == 1
    assert "1 replicas have engines that count no tokens" in check.notes
    await office.books.put_lives([life(prompt_tokens=110, generation_tokens=11 * 20 - 3)], [])
    check = await ledger_and_engines(office.books, **span)
    assert [(one.subject, one.tokens, one.request_ids) for one in check.differences] == [("rep-1", 3, ["cut"])]


# --- Stripe --------------------------------------------------------------------------


async def test_what_stripe_has_is_compared_hour_by_hour(office: Office) -> None:
    async def tenants() -> list[Tenant]:
        return [Tenant(id="ten-a", name="a", created_at=0)]

    with stripe_stub(office.clock.unix_s) as stub:
        meters = StripeMeters(KEY, api_base=stub.url)
        reports = StripeReports(
            books=office.books, meters=meters, settings=StripeConfig(), clock=office.clock, tenants=tenants
        )
        await reports.report()
        for hour in range(150):  # more than a page of Stripe's
            office.write("gateway-0", named(f"h{hour}", 1))
            office.clock.advance(HOUR_S - 5)
        await office.delivery.drain()
        office.clock.advance(HOUR_S)
        await reports.report()
        span = {"since": int(BEGIN_S), "until": int(office.clock.unix_s())}
        check = await ledger_and_stripe(office.books, meters, reports.counted, **span)
        assert check.is_good, check.differences
        assert check.compared == 150
        doubled = dict(stub.events[3])
        stub.events.append(doubled)
        await office.change(
            sa.update(LEDGER).where(LEDGER.c.request_id == "h5-000000").values(cost_nanousd=LEDGER.c.cost_nanousd + 10)
        )
        hourly = schema.usage_rollup_hourly
        await office.change(
            sa.update(hourly)
            .where(hourly.c.period == int(BEGIN_S) + 5 * HOUR_S)
            .values(cost_nanousd=hourly.c.cost_nanousd + 10)
        )
        check = await ledger_and_stripe(office.books, meters, reports.counted, **span)
        assert sorted(one.nanousd for one in check.differences) == [-int(doubled["value"]), 10]
        assert f"hour {doubled['timestamp']}" in next(one.subject for one in check.differences if one.nanousd < 0)
        stub.is_down = True
        check = await ledger_and_stripe(office.books, meters, reports.counted, **span)
        assert "cannot be read" in check.problem
        assert not check.is_good
        await meters.close()
    assert {one.status for one in await office.books.meter_events(since=0, until=2**40)} == {MeterStatus.EXPORTED}


# --- a provider's invoice ------------------------------------------------------------

INVOICE = """Date,Model,Input Tokens,Output Tokens,Cost
2023-11-14,gpt-x,60,120,$0.30
2023-11-14,gpt-x,40,80,0.20
2023-11-15,gpt-x,"1,000",5,1.25
"""


def test_an_invoice_is_read_by_the_names_that_providers_use() -> None:
    assert read_invoice(io.StringIO(INVOICE)) == [
        InvoiceLine("2023-11-14", "gpt-x", 100, 200, 500_000_000),
        InvoiceLine("2023-11-15", "gpt-x", 1000, 5, 1_250_000_000),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column for model"),
        ("model,cost\nx,1\n", "prompt_tokens, completion_tokens"),
        ("model,input_tokens,output_tokens\nx,many,1\n", "line 2: 'many' is no number"),
        ("model,input_tokens,output_tokens,cost\nx,1,1,free\n", "line 2: 'free' is no amount"),
        ("model,input_tokens,output_tokens,cost\nx,1,1,NaN\n", "is no amount"),
    ],
)
def test_what_is_no_invoice_is_said_with_its_line(text: str, why: str) -> None:
    with pytest.raises(InvoiceError, match=why):
        read_invoice(io.StringIO(text))


def test_a_line_may_differ_within_the_tolerance_and_costs_what_the_invoice_says() -> None:
    line = InvoiceLine("2023-11-14", "gpt-x", 1000, 1000, 2_000_000)
    close = DayUse("2023-11-14", "chat", "ver-1", LedgerSum(1, 995, 0, 1000, 5))
    assert compared(line, [close], 0.01) is None
    less = DayUse("2023-11-14", "chat", "ver-1", LedgerSum(1, 900, 0, 1000, 5))
    difference = compared(line, [less], 0.01)
    assert difference is not None
    assert (difference.tokens, difference.nanousd) == (-100, -100_000)
    assert compared(InvoiceLine("", "gpt-x", 0, 0), [less], 0.01) is not None, "used, and not on the invoice"


async def test_the_ledger_is_set_against_an_invoice_by_the_providers_name(office: Office) -> None:
    now = BEGIN_S + 100  # 2023-11-14
    pairs = [
        (intent_of(f"p-{n}", now, version="ver-p"), settle_of(f"p-{n}", now, is_estimated=n == 4)) for n in range(10)
    ]
    pairs.append((intent_of("own", now, version="ver-own"), settle_of("own", now)))
    office.write("gateway-0", [], pairs)
    await office.delivery.drain()
    names = {"ver-p": "gpt-x"}
    span = {"since": BEGIN_S, "until": BEGIN_S + HOUR_S, "tolerance": 0.0}
    good = [InvoiceLine("2023-11-14", "gpt-x", 100, 200)]
    assert (await ledger_and_invoice(office.books, good, names, **span)).is_good
    assert (await ledger_and_invoice(office.books, [InvoiceLine("", "gpt-x", 100, 200)], names, **span)).is_good
    more = [InvoiceLine("2023-11-14", "gpt-x", 100, 230, 330_000)]
    check = await ledger_and_invoice(office.books, more, names, **span)
    assert [(one.tokens, one.nanousd, one.request_ids) for one in check.differences] == [(-30, -30_000, ["p-4"])]
