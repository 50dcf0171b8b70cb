"""Every ``BillingStore``: who owes what as plans change, credit that is taken back, what is told with an invoice."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.conformance.backends import BACKENDS, database_url, open_fresh
from tests.conformance.test_billing_stores import DEC, DOLLAR, NOV, WHO, Books, terms

from modelyard.domain.billing import BillingEvent, BillingPlan, Channel, CreditKind, Notice, NoticeStatus
from modelyard.domain.invoices import Invoice
from modelyard.domain.tenants import PLATFORM
from modelyard.policy.budgets import NOTICES_A_DAY
from modelyard.stores.sql import open_database

DAY = 86_400


@pytest.fixture(params=BACKENDS)
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Books]:
    database = open_fresh(request.param, tmp_path)
    yield Books(database)
    await database.close()


async def owed(books: Books, tenant: str = "ten-a") -> int:
    return sum(one.cost_nanousd for one in await books.store.uninvoiced(tenant, until="9999-12")) // DOLLAR


async def test_a_tenant_that_becomes_free_owes_what_it_used_before(books: Books) -> None:
    await books.use(3)
    await books.pays(BillingPlan.FREE, now=NOV + 60)
    await books.use(50, at=NOV + 61)
    assert await owed(books) == 3
    await books.use(2, at=NOV + 59)
    assert await owed(books) == 5, "delivered late, used in time"
    assert await books.store.open_months(before="2026-12") == [("ten-a", "2026-11")]
    assert (await books.invoiced()).subtotal == 500
    assert await books.draft() is None


async def test_what_a_free_tenant_used_is_not_owed_though_it_is_delivered_when_it_pays(books: Books) -> None:
    await books.pays(BillingPlan.FREE, now=NOV)
    await books.use(3, at=NOV + 1)
    await books.pays(BillingPlan.PREPAID, now=NOV + 60)
    await books.use(7, at=NOV + 59)
    await books.use(1, at=NOV + 60)
    assert await owed(books) == 1
    await books.pays(BillingPlan.PAY_AS_YOU_GO, now=NOV + 70)
    await books.use(2, at=NOV + 69)
    assert await owed(books) == 3, "from one paying plan to another nothing is forgiven"


async def test_no_invoice_can_be_drafted_of_what_nobody_has_to_pay(books: Books) -> None:
    await books.pays(BillingPlan.FREE)
    for tenant in ("ten-a", PLATFORM):
        await books.use(30, tenant=tenant)
        assert await books.draft(tenant=tenant) is None
    assert await books.store.open_months(before="2027-01") == []


async def test_free_use_draws_no_credit(books: Books) -> None:
    await books.pays(BillingPlan.FREE)
    await books.grant(10)
    await books.use(4)
    assert await books.store.book(now=NOV) == []
    assert await books.left() == 10
    account = await books.pays(BillingPlan.PREPAID, now=NOV + 1)
    assert (account.accounted_nanousd // DOLLAR, await books.left()) == (4, 10)
    await books.use(3, at=NOV + 2)
    await books.store.book(now=NOV + 3)
    assert await books.left() == 7
    invoice = await books.invoiced()
    assert (invoice.subtotal, invoice.credit, invoice.total) == (300, 300, 0)


async def test_credit_that_is_taken_back_is_what_was_not_used(books: Books) -> None:
    grant, other = await books.grant(10), await books.grant(5)
    await books.use(4)
    ended = await books.store.end_grant(grant.id, WHO, now=NOV + 5)
    assert ended is not None
    assert (ended.drawn_nanousd // DOLLAR, ended.expired_nanousd // DOLLAR, ended.left_nanousd) == (4, 6, 0)
    assert await books.left() == 5
    kinds = {(one.grant_id, one.kind) for one in await books.store.credit_entries("ten-a", limit=9)}
    assert (grant.id, CreditKind.EXPIRY) in kinds
    assert await books.store.end_grant(grant.id, WHO, now=NOV + 6) is None
    assert await books.store.end_grant("grant-none", WHO, now=NOV + 6) is None
    await books.use(5)
    await books.store.book(now=NOV + 7)
    (last,) = [one for one in await books.store.grants(tenant_id="ten-a") if one.id == other.id]
    assert last.drawn_nanousd == 5 * DOLLAR


def a_notice(number: int, event: BillingEvent) -> Notice:
    return Notice(f"ntc-{event.id}-{number}", event, Channel.EMAIL, "m@acme.example", due_at=NOV)


async def test_an_invoice_is_issued_with_what_tells_of_it_or_not_at_all(books: Books) -> None:
    await books.use(3)
    draft = await books.draft()
    assert draft is not None

    def told(issued: Invoice) -> tuple[BillingEvent, Sequence[Notice]]:
        event = BillingEvent(
            "evt-1", "ten-a", "some.event", int(DEC), f"invoice/{issued.id}", {"number": issued.number}
        )
        return event, [a_notice(1, event)]

    def fails(issued: Invoice) -> tuple[BillingEvent, Sequence[Notice]]:
        raise RuntimeError("the process dies here")

    for tell in (fails, told):
        given = {"prefix": "INV-", "now": int(DEC), "due_at": int(DEC) + DAY}
        if tell is fails:
            with pytest.raises(RuntimeError):
                await books.store.issue_invoice(draft.id, terms, WHO, **given, told=tell)  # type: ignore[arg-type]
            assert await books.store.billing_events(tenant_id="ten-a", limit=9) == []
            assert await owed(books) == 3
        else:
            issued = await books.store.issue_invoice(draft.id, terms, WHO, **given, told=tell)  # type: ignore[arg-type]
            assert issued is not None
            assert issued.number == "INV-000001", "the first try used none up"
    (event,) = await books.store.billing_events(tenant_id="ten-a", limit=9)
    assert event.data == {"number": "INV-000001"}
    assert len(await books.store.due_notices(now=NOV, limit=9)) == 1


async def test_a_tenant_cannot_make_a_mailer_of_the_platform(books: Books) -> None:
    async def tell(number: int, at: float, *, tenant: str = "ten-a") -> list[NoticeStatus]:
        event = BillingEvent(f"evt-{tenant}-{number}", tenant, "t", int(at), f"once-{tenant}-{number}", {})
        assert await books.store.add_event(event, [a_notice(n, event) for n in range(90)])
        return [one.status for one in await books.store.notices(event.id)]

    assert NOTICES_A_DAY == 200
    for number in range(2):
        assert set(await tell(number, NOV)) == {NoticeStatus.PENDING}
    assert (await tell(2, NOV + 60)).count(NoticeStatus.PENDING) == 20
    assert set(await tell(3, NOV + DAY - 1)) == {NoticeStatus.FAILED}
    assert set(await tell(1, NOV, tenant="ten-b")) == {NoticeStatus.PENDING}
    assert set(await tell(4, NOV + 2 * DAY)) == {NoticeStatus.PENDING}
    assert len(await books.store.due_notices(now=NOV, limit=1000)) == 90 * 2 + 20 + 90 + 90


async def test_two_controllers_that_issue_the_same_drafts_make_one_series_without_gap_or_twin(tmp_path: Path) -> None:
    """On one database, each with its own connections, as in the moment in which one takes over from the other."""
    first = Books(open_fresh("sqlite", tmp_path))
    second = Books(open_database(database_url("sqlite", tmp_path), timeout_s=20.0))
    tenants = [f"ten-{number}" for number in range(10)]
    try:
        for tenant in tenants:
            await first.use(2, tenant=tenant)
            await first.grant(1, tenant=tenant)
            await first.use(1, tenant=tenant)
        drafts = [await first.draft(tenant=tenant) for tenant in tenants]
        both = (first, second)
        await asyncio.gather(*(one.store.book(now=NOV) for one in both))
        issued = await asyncio.gather(*(one.issue(draft) for draft in drafts for one in both))
        made = [invoice for invoice in issued if invoice is not None]
        assert sorted(invoice.number for invoice in made) == [f"INV-{number:06}" for number in range(1, 11)]
        assert {(invoice.subtotal, invoice.credit) for invoice in made} == {(300, 100)}
        for tenant in tenants:
            assert await owed(first, tenant) == 0
            (grant,) = await second.store.grants(tenant_id=tenant)
            assert grant.drawn_nanousd == DOLLAR, "drawn once, though both booked"
    finally:
        await first.database.close()
        await second.database.close()
