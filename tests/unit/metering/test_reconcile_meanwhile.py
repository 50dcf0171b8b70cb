"""Work goes on while the books are compared: what comes late, and what is not kept any more, is no difference."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.backends import open_fresh
from tests.support.journals import intent_of, named, settle_of
from tests.support.stripe_stub import KEY, stripe_stub
from tests.unit.metering.test_reconcile import BEGIN_S, HOUR_S, Office, life

from modelyard.config.books import StripeConfig
from modelyard.domain.tenants import Tenant
from modelyard.domain.usage import Intent, Settle
from modelyard.metering.journal import segments
from modelyard.metering.reconcile import journals as comparing
from modelyard.metering.reconcile.invoices import InvoiceLine, ledger_and_invoice
from modelyard.metering.reconcile.journals import journals_and_ledger, rows_and_roll_ups
from modelyard.metering.reconcile.replicas import ledger_and_engines
from modelyard.metering.reconcile.stripe import ledger_and_stripe
from modelyard.metering.stripe_reports import StripeReports
from modelyard.stores.sql import SqlBookStore
from modelyard.stores.stripe import StripeMeters


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    database = open_fresh("sqlite", tmp_path)
    yield Office(tmp_path, database)
    await database.close()


async def test_rows_that_go_while_the_books_are_compared_are_no_difference(office: Office) -> None:
    """The mark is asked again: what it was at the beginning may be an hour ago."""
    office.write("gateway-0", named("old", 10))
    office.clock.advance(2 * HOUR_S)
    office.write("gateway-0", named("new", 5))
    await office.delivery.drain()
    await office.usage.forget_rows(before=int(BEGIN_S) + HOUR_S, limit=3)
    check = await journals_and_ledger(office.root, office.books)
    assert check.is_good, check.differences
    span = {"since": int(BEGIN_S), "until": int(BEGIN_S) + 3 * HOUR_S}
    assert (await rows_and_roll_ups(office.books, **span)).is_good


async def test_a_journal_that_goes_and_requests_that_come_meanwhile_are_no_difference(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.write("gateway-0", named("a", 10))
    office.write("gateway-0", named("b", 10))
    await office.delivery.drain()
    real_sum, real_ids = SqlBookStore.sum_since, comparing._ids
    looks: list[int] = []

    async def deleted_meanwhile(books: SqlBookStore, since: float) -> Any:
        found = await real_sum(books, since)
        segments(office.root / "gateway-0")[0].unlink()
        return found

    def written_meanwhile(*given: Any) -> set[str]:
        known = real_ids(*given)
        if not looks:
            office.write("gateway-0", named("late", 5))
        looks.append(len(known))
        return known

    async def delivered_first(books: SqlBookStore, since: float, *, after: str, limit: int) -> list[str]:
        await office.delivery.drain()
        return await real_page(books, since, after=after, limit=limit)

    real_page = SqlBookStore.ids_since
    monkeypatch.setattr(SqlBookStore, "sum_since", deleted_meanwhile)
    monkeypatch.setattr(SqlBookStore, "ids_since", delivered_first)
    monkeypatch.setattr(comparing, "_ids", written_meanwhile)
    # All rows of this second count, also those of the segment that goes.
    monkeypatch.setattr(comparing, "_begin", lambda folders: int(segments(folders[0])[0].stem) - 1)
    check = await journals_and_ledger(office.root, office.books)
    assert len(looks) == 2
    assert check.is_good, check.differences


async def test_a_replica_some_of_whose_rows_are_gone_is_not_compared(office: Office) -> None:
    day = 86_400
    pairs = [(intent_of("old", BEGIN_S + 10), settle_of("old", BEGIN_S + 20, replica="rep-1"))]
    pairs.append((intent_of("new", BEGIN_S + 9 * day), settle_of("new", BEGIN_S + 9 * day + 5, replica="rep-1")))
    pairs.append((intent_of("its", BEGIN_S + 9 * day), settle_of("its", BEGIN_S + 9 * day + 5, replica="rep-2")))
    office.write("gateway-0", [], pairs)
    await office.delivery.drain()
    long = life(ended_at=None, counted_at=BEGIN_S + 9 * day + 60, prompt_tokens=20, generation_tokens=200_000)
    young = life(
        replica_id="rep-2", started_at=BEGIN_S + 8 * day, ended_at=None, counted_at=BEGIN_S + 9 * day + 60,
        prompt_tokens=10, generation_tokens=20,
    )  # fmt: skip
    await office.books.put_lives([long, young], [])
    span = {"since": BEGIN_S + 9 * day, "until": BEGIN_S + 9 * day + 100, "tolerance": 0.0}
    check = await ledger_and_engines(office.books, **span)
    assert [(one.subject, one.tokens) for one in check.differences] == [("rep-1", 40 - 200_000)]
    await office.usage.forget_rows(before=int(BEGIN_S) + 6 * day, limit=100)
    check = await ledger_and_engines(office.books, **span)
    assert check.is_good, check.differences
    assert check.compared == 1
    assert "1 replicas began before the rows that are still kept" in check.notes


async def test_what_settles_late_is_no_difference_to_stripe(office: Office) -> None:
    async def tenants() -> list[Tenant]:
        return [Tenant(id="ten-a", name="a", created_at=0)]

    def late(rid: str) -> list[tuple[Intent, Settle]]:
        return [(intent_of(rid, BEGIN_S + 60), settle_of(rid, office.clock.unix_s()))]

    with stripe_stub(office.clock.unix_s) as stub:
        meters = StripeMeters(KEY, api_base=stub.url)
        reports = StripeReports(
            books=office.books, meters=meters, settings=StripeConfig(), clock=office.clock, tenants=tenants
        )
        await reports.report()
        office.write("gateway-0", named("a", 1))
        await office.delivery.drain()
        office.clock.advance(2 * HOUR_S)
        await reports.report()
        for rid, waits in (("late", "to be reported"), ("later", "for what is under way")):
            office.write("gateway-0", [], late(rid))
            await office.delivery.drain()
            await reports.catch_up()
            span = {"since": int(BEGIN_S), "until": int(office.clock.unix_s())}
            check = await ledger_and_stripe(office.books, meters, reports.counted, **span)
            assert check.is_good, check.differences
            assert any(waits in note for note in check.notes), check.notes
        for _ in range(2):
            await reports.report()
            await reports.catch_up()
        await reports.report()
        check = await ledger_and_stripe(office.books, meters, reports.counted, **span)
        assert (check.is_good, check.notes) == (True, [])
        await meters.close()


async def test_an_invoice_is_compared_with_what_was_used_also_where_its_rows_are_gone(office: Office) -> None:
    pairs = [(intent_of(f"p-{n}", BEGIN_S + 100, version="ver-p"), settle_of(f"p-{n}", BEGIN_S)) for n in range(10)]
    office.write("gateway-0", [], pairs)
    await office.delivery.drain()
    await office.usage.forget_rows(before=int(BEGIN_S) + HOUR_S, limit=100)
    span = {"since": BEGIN_S, "until": BEGIN_S + HOUR_S, "tolerance": 0.0}
    lines = [InvoiceLine("2023-11-14", "gpt-x", 100, 200)]
    assert (await ledger_and_invoice(office.books, lines, {"ver-p": "gpt-x"}, **span)).is_good
