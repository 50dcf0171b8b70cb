"""Every ``BillingStore``: prices keep their past, credit is drawn once, invoices are the ledger and never change."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.billing import (
    Account,
    AuditEntry,
    BillingEvent,
    BillingPlan,
    Budget,
    Channel,
    CreditKind,
    Grant,
    Notice,
    NoticeStatus,
)
from modelyard.domain.invoices import CreditNote, Invoice, InvoiceStatus, Party, Tax
from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Intent, JournalRecord, Price, Settle, UsageStatus
from modelyard.policy.invoicing import Terms
from modelyard.stores import AlreadyExistsError, BillingStore, JournalPosition, UsageStore
from modelyard.stores.sql import Database, SqlBillingStore, SqlUsageStore

NOV = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()
OCT = datetime(2026, 10, 31, 23, 59, 59, tzinfo=UTC).timestamp()
DEC = datetime(2026, 12, 2, tzinfo=UTC).timestamp()
DOLLAR = 10**9
PRICE = Price(input=DOLLAR * 10**6)
"""A dollar a token."""
CENTS = Price(input=DOLLAR * 10**4)
WHO = AuditEntry(NOV, "key-1", "platform", "test", "")


@dataclass
class Books:
    """The ledger and what is made of it, on one database."""

    database: Database
    usage: UsageStore = field(init=False)
    store: BillingStore = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.usage, self.store = SqlUsageStore(self.database), SqlBillingStore(self.database)

    async def use(
        self,
        tokens: int,
        *,
        at: float = NOV,
        tenant: str = "ten-a",
        key: str = "k1",
        price: Price = PRICE,
        model: str = "chat",
    ) -> str:
        """Bill one request of so many tokens."""
        self.count += 1
        rid = f"req_{self.count}"
        intent = Intent(rid, at, tenant, key, "ep", model, "ver", "/v1/x", False, tokens, tokens, price)
        settle = Settle(rid, at + 1, tokens, 0, 0, UsageStatus.SUCCESS, 200, "", None, 1.0, "rep", 1, False)
        records: Sequence[JournalRecord] = [intent, settle]
        await self.usage.apply(records, JournalPosition("gateway-0", "1.journal", self.count))
        return rid

    async def draft(self, month: str = "2026-11", *, tenant: str = "ten-a", now: float = DEC) -> Invoice | None:
        return await self.store.draft_invoice(
            tenant, month, terms, invoice_id=f"inv-{tenant}-{month}-{self.count}-{now}", now=int(now)
        )

    async def issue(self, invoice: Invoice | None, *, now: float = DEC) -> Invoice | None:
        assert invoice is not None
        return await self.store.issue_invoice(invoice.id, terms, WHO, prefix="INV-", now=int(now), due_at=int(now) + 9)

    async def invoiced(self, month: str = "2026-11", *, tenant: str = "ten-a") -> Invoice:
        found = await self.issue(await self.draft(month, tenant=tenant))
        assert found is not None
        return found

    async def pays(self, plan: BillingPlan, *, tenant: str = "ten-a", now: float = NOV) -> Account:
        return await self.store.put_account(Account(tenant, plan), WHO, now=now)

    async def grant(
        self, dollars: int, *, tenant: str = "ten-a", now: float = NOV, expires: float | None = None
    ) -> Grant:
        self.count += 1
        expires_at = None if expires is None else int(expires)
        grant = Grant(f"grant-{self.count}", tenant, dollars * DOLLAR, int(now), expires_at)
        await self.store.add_grant(grant, WHO, now=now)
        return grant

    async def left(self, tenant: str = "ten-a") -> int:
        return sum(grant.left_nanousd for grant in await self.store.grants(tenant_id=tenant)) // DOLLAR


def terms(account: Account) -> Terms:
    return Terms("USD", Party("us"), Party(account.name or account.tenant_id), Tax("VAT", 200_000))


def a_price(number: int, *, since: int, model: str = "chat") -> PriceEntry:
    return PriceEntry(f"price-{number}", model, Price(input=number), since)


@pytest.fixture(params=BACKENDS)
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Books]:
    database = open_fresh(request.param, tmp_path)
    yield Books(database)
    await database.close()


# --- prices ---


async def test_a_price_that_has_begun_cannot_be_replaced_and_one_to_come_can(books: Books) -> None:
    store, now = books.store, int(NOV)
    await store.put_price(a_price(1, since=now), WHO, now=now)
    assert await store.put_price(a_price(2, since=now + 1), WHO, now=now) is None
    with pytest.raises(AlreadyExistsError):
        await store.put_price(a_price(3, since=now), WHO, now=now)
    assert await store.put_price(a_price(4, since=now + 1), WHO, now=now) == a_price(2, since=now + 1)
    assert await store.prices() == [a_price(1, since=now), a_price(4, since=now + 1)]
    assert [one.subject for one in await store.audit(limit=9, after=0, prefix="")] == ["price-4", "price-2", "price-1"]


async def test_an_ended_price_stays_and_one_to_come_goes(books: Books) -> None:
    store, now = books.store, int(NOV)
    begun, coming = a_price(1, since=now - 5), a_price(2, since=now + 5)
    for price in (begun, coming):
        await store.put_price(price, WHO, now=now - 6)
        assert await store.end_price(price.id, WHO, now=now) == price
        assert await store.end_price(price.id, WHO, now=now) is None
    assert await store.prices() == [msgspec.structs.replace(begun, effective_until=now)]


# --- credit ---


async def test_credit_is_drawn_once_by_what_is_used_after_it_was_given(books: Books) -> None:
    await books.use(7)
    await books.grant(10)
    assert await books.store.book(now=NOV) == []
    await books.use(3)
    assert await books.store.book(now=NOV) == ["ten-a"]
    assert await books.store.book(now=NOV) == []
    assert await books.left() == 7
    await books.use(2, at=OCT)
    await books.store.book(now=NOV)
    entries = await books.store.credit_entries("ten-a", limit=9)
    assert {(one.kind, one.amount_nanousd // DOLLAR) for one in entries} == {
        (CreditKind.GRANT, 10),
        (CreditKind.DRAW, 5),
    }
    assert await books.store.credit_entries("ten-b", limit=9) == []


async def test_what_a_prepaid_tenant_may_spend_is_not_changed_by_booking_it(books: Books) -> None:
    await books.use(100)
    await books.pays(BillingPlan.PREPAID)
    await books.grant(10)

    async def most() -> int:
        (account,) = await books.store.accounts()
        return account.accounted_nanousd // DOLLAR + await books.left()

    assert await most() == 110, "all that was, and the credit"
    for _ in range(4):
        await books.use(2)
        assert await most() == 110
        await books.store.book(now=NOV)
        assert await most() == 110
    await books.use(5)
    await books.store.book(now=NOV)
    assert (await most(), await books.left()) == (113, 0), "what was used without credit is over the limit for good"
    await books.grant(4)
    assert await most() == 117


async def test_credit_expires_after_what_was_used_by_then_is_drawn(books: Books) -> None:
    await books.grant(10, expires=NOV + 60)
    await books.use(4)
    assert await books.store.book(now=NOV + 61) == ["ten-a"]
    assert await books.left() == 0
    (grant,) = await books.store.grants(tenant_id="ten-a")
    assert (grant.drawn_nanousd, grant.expired_nanousd) == (4 * DOLLAR, 6 * DOLLAR)


async def test_totals_go_with_the_positions_that_they_were_taken_at(books: Books) -> None:
    await books.use(3, at=OCT)
    await books.use(4, key="k2")
    rows, positions = await books.usage.spent(["ten-a"], day=int(NOV // 86400), totals_of=["ten-a"])
    assert {(row.key_id, row.month_nanousd // DOLLAR, row.total_nanousd // DOLLAR) for row in rows} == {
        ("k1", 0, 3),
        ("k2", 4, 4),
    }
    assert positions == [JournalPosition("gateway-0", "1.journal", 2)]


# --- budgets and what is told ---


async def test_an_occasion_is_told_once_whoever_tells_it(books: Books) -> None:
    events = [BillingEvent(f"evt-{n}", "ten-a", "t", int(NOV), "once", {"n": n}) for n in range(8)]
    notices = [[Notice(f"ntc-{n}", event, Channel.EMAIL, "a@b.c", due_at=NOV)] for n, event in enumerate(events)]
    told = await asyncio.gather(*map(books.store.add_event, events, notices))
    assert sum(told) == 1
    (event,) = await books.store.billing_events(tenant_id="ten-a", limit=9)
    (notice,) = await books.store.due_notices(now=NOV, limit=9)
    assert notice.event == event
    assert await books.store.due_notices(now=NOV - 1, limit=9) == []
    await books.store.put_notice(msgspec.structs.replace(notice, due_at=None, status=NoticeStatus.SENT, tries=1))
    assert await books.store.due_notices(now=NOV, limit=9) == []
    assert [one.status for one in await books.store.notices(event.id)] == [NoticeStatus.SENT]


async def test_budgets_are_kept_by_tenant(books: Books) -> None:
    mine = Budget("bud-1", "ten-a", DOLLAR, emails=("a@b.c",), thresholds=(1, 2))
    await books.store.put_budget(mine, WHO)
    await books.store.put_budget(Budget("bud-2", "ten-b", DOLLAR), WHO)
    mine = msgspec.structs.replace(mine, is_hard=True)
    await books.store.put_budget(mine, WHO)
    assert await books.store.budgets(tenant_id="ten-a") == [mine]
    await books.store.remove_budget("bud-1", WHO)
    assert [one.id for one in await books.store.budgets(tenant_id=None)] == ["bud-2"]


# --- invoices ---


async def test_an_invoice_is_what_the_ledger_has_of_its_tenant_and_months(books: Books) -> None:
    await books.use(3)
    await books.use(2, price=CENTS)
    await books.use(5, at=OCT)
    await books.use(1, at=DEC)
    await books.use(50, tenant="ten-b")
    invoice = await books.invoiced()
    assert [(one.month, one.amount, one.is_adjustment) for one in invoice.lines] == [
        ("2026-10", 500, True),
        ("2026-11", 2, False),
        ("2026-11", 300, False),
    ]
    assert (invoice.subtotal, invoice.tax, invoice.total) == (802, 160, 962)
    assert (invoice.number, invoice.status, invoice.buyer.name) == ("INV-000001", InvoiceStatus.ISSUED, "ten-a")
    assert await books.draft() is None, "nothing is left"
    assert await books.store.open_months(before="2026-12") == [("ten-b", "2026-11")]
    assert await books.store.open_months(before="2027-01") == [("ten-a", "2026-12"), ("ten-b", "2026-11")]


async def test_what_comes_late_is_on_the_next_invoice_and_the_issued_one_stays(books: Books) -> None:
    await books.use(3)
    first = await books.invoiced()
    await books.use(2)
    await books.use(1, at=DEC)
    assert await books.store.invoice(first.id, tenant_id=None) == first
    second = await books.invoiced("2026-12")
    assert [(one.month, one.amount, one.is_adjustment) for one in second.lines] == [
        ("2026-11", 200, True),
        ("2026-12", 100, False),
    ]
    assert await books.store.invoice("INV-000001", tenant_id="ten-a") == first
    assert second.number == "INV-000002"


async def test_late_costs_of_an_invoiced_month_are_due_with_the_next_month_even_if_that_had_none(books: Books) -> None:
    await books.use(3)
    await books.invoiced()
    await books.use(2)
    assert await books.store.open_months(before="2026-12") == []
    assert await books.store.open_months(before="2027-01") == [("ten-a", "2026-12")]


async def test_an_issued_invoice_can_neither_be_issued_nor_drafted_again(books: Books) -> None:
    await books.use(3)
    draft = await books.draft()
    issued = await books.issue(draft)
    assert issued is not None
    assert await books.issue(draft) is None
    await books.use(4)
    again = await books.draft()
    assert again is not None
    assert (again.id != issued.id, again.subtotal) == (True, 400)
    assert await books.store.invoice(issued.id, tenant_id=None) == issued


async def test_a_draft_grows_and_keeps_its_id_and_goes_when_nothing_is_left(books: Books) -> None:
    await books.use(3)
    first = await books.draft()
    await books.use(4)
    second = await books.draft()
    assert first is not None
    assert second is not None
    assert (second.id, first.subtotal, second.subtotal) == (first.id, 300, 700)
    await books.invoiced("2026-12")
    assert await books.store.invoice(first.id, tenant_id=None) is None, "the later one has it all"
    assert await books.issue(first) is None
    assert len(await books.store.invoices(tenant_id=None, month=None, limit=9, after="")) == 1


async def test_less_than_half_a_cent_waits_for_the_next_invoice(books: Books) -> None:
    await books.use(4, price=Price(input=DOLLAR * 10**3))
    assert await books.draft() is None
    await books.use(4, at=DEC, price=Price(input=DOLLAR * 10**3))
    invoice = await books.invoiced("2026-12")
    assert (invoice.subtotal_nanousd, invoice.subtotal) == (8_000_000, 1)


async def test_numbers_have_no_gap_and_no_twin_when_many_are_issued_at_once(books: Books) -> None:
    tenants = [f"ten-{n}" for n in range(12)]
    for tenant in tenants:
        await books.use(1, tenant=tenant)
    drafts = [await books.draft(tenant=tenant) for tenant in tenants]
    issued = await asyncio.gather(*(books.issue(draft) for draft in [*drafts, *drafts]))
    numbers = sorted(invoice.number for invoice in issued if invoice is not None)
    assert numbers == [f"INV-{n:06}" for n in range(1, 13)]


async def test_drawn_credit_is_applied_once_and_oldest_invoices_first(books: Books) -> None:
    await books.grant(5)
    await books.use(3)
    await books.store.book(now=NOV)
    first = await books.invoiced()
    assert (first.credit, first.tax, first.total) == (300, 0, 0)
    await books.use(4, at=DEC)
    await books.store.book(now=DEC)
    second = await books.invoiced("2026-12")
    assert (second.subtotal, second.credit, second.tax, second.total) == (400, 200, 40, 240)


async def test_a_tenant_that_was_free_owes_nothing_for_what_it_used_then(books: Books) -> None:
    await books.pays(BillingPlan.FREE)
    await books.use(3)
    await books.pays(BillingPlan.PAY_AS_YOU_GO)
    await books.use(2)
    assert (await books.invoiced()).subtotal == 200
    await books.use(1)
    await books.store.waive("ten-a", until="2026-11")
    assert await books.draft() is None


async def test_credit_notes_take_back_no_more_than_the_invoice_however_many_come_at_once(books: Books) -> None:
    await books.use(10)
    invoice = await books.invoiced()

    def note(number: int, total: int) -> CreditNote:
        return CreditNote(
            id=f"cn-{number}", tenant_id="ten-a", invoice_id=invoice.id, invoice_number="", number="", sequence=0,
            currency="", total=total, tax=0, reason="r", issued_at=int(DEC) + number,
        )  # fmt: skip

    def tax_of(of: Invoice, credited: int, tax: int) -> int:
        return (of.tax * (credited + 500)) // of.total - tax

    added = await asyncio.gather(
        *(books.store.add_credit_note(note(n, 500), WHO, prefix="CN-", tax_of=tax_of) for n in range(5))
    )
    assert [one is not None for one in added].count(True) == 2, "1200 were asked for"
    notes = await books.store.credit_notes(tenant_id="ten-a", invoice_id=invoice.id)
    assert sorted(one.number for one in notes) == ["CN-000001", "CN-000002"]
    assert {(one.invoice_number, one.currency) for one in notes} == {("INV-000001", "USD")}
    assert await books.store.invoice(invoice.id, tenant_id=None) == invoice
    assert await books.store.credit_notes(tenant_id="ten-b", invoice_id=None) == []
    for one in notes:
        for reference in (one.id, one.number):
            assert await books.store.credit_note(reference, tenant_id="ten-a") == one
            assert await books.store.credit_note(reference, tenant_id="ten-b") is None
    late = await books.store.add_credit_note(note(9, 201), WHO, prefix="CN-", tax_of=lambda *_: 0)
    assert late is None


async def test_nobody_sees_anothers_and_pages_follow_one_another(books: Books) -> None:
    await books.use(9, tenant="ten-b")
    other = await books.invoiced(tenant="ten-b")
    for month, at in (("2026-10", OCT), ("2026-11", NOV), ("2026-12", DEC)):
        await books.use(1, at=at)
        await books.invoiced(month)
    seen: list[str] = []
    after = ""
    while page := await books.store.invoices(tenant_id="ten-a", month=None, limit=2, after=after):
        seen += [invoice.month for invoice in page]
        after = page[-1].id
    assert seen == ["2026-12", "2026-11", "2026-10"]
    last = [await books.store.last_invoiced(tenant) for tenant in ("ten-a", "ten-b", "ten-c")]
    assert last == ["2026-12", other.month, ""]
    assert await books.store.invoice(other.id, tenant_id="ten-a") is None
    assert await books.store.invoice(other.number, tenant_id="ten-a") is None
    november = await books.store.invoices(tenant_id=None, month="2026-11", limit=9, after="")
    assert {one.tenant_id for one in november} == {"ten-a", "ten-b"}


async def test_a_replayed_journal_is_on_no_invoice_twice(books: Books) -> None:
    await books.use(3)
    await books.invoiced()
    books.count -= 1
    await books.use(3)
    assert await books.draft() is None


TENANTS = ["ten-a", "ten-b"]
MONTHS = {"2026-10": OCT, "2026-11": NOV, "2026-12": DEC}


class BooksMachine(RuleBasedStateMachine):
    """Use, credit, drafts and invoices in any order: the ledger is what is invoiced and what is open, to the nano."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.books = Books(open_fresh("sqlite", Path(self.folder.name)))
        self.used = dict.fromkeys(TENANTS, 0)
        self.issued: dict[str, Invoice] = {}
        self.now = DEC

    def do(self, work):  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(work)

    @rule(tenant=st.sampled_from(TENANTS), month=st.sampled_from(sorted(MONTHS)), tokens=st.integers(0, 50),
          price=st.sampled_from([PRICE, CENTS, Price(input=333_333_333), Price(request=1_234_567)]))  # fmt: skip
    def use(self, tenant: str, month: str, tokens: int, price: Price) -> None:
        rid = self.do(self.books.use(tokens, tenant=tenant, at=MONTHS[month], price=price))
        (row,) = self.do(self.books.usage.rows(tenant_id=tenant, since=0.0, limit=1, request_id=rid))
        self.used[tenant] += row.cost_nanousd

    @rule(tenant=st.sampled_from(TENANTS), dollars=st.integers(1, 30), lasts=st.none() | st.integers(1, 5))
    def grant(self, tenant: str, dollars: int, lasts: int | None) -> None:
        expires = None if lasts is None else self.now + lasts
        self.do(self.books.grant(dollars, tenant=tenant, now=self.now, expires=expires))

    @rule(seconds=st.integers(0, 3))
    def book(self, seconds: int) -> None:
        self.now += seconds
        self.do(self.books.store.book(now=self.now))

    @rule(tenant=st.sampled_from(TENANTS), month=st.sampled_from(sorted(MONTHS)))
    def draft(self, tenant: str, month: str) -> None:
        self.do(self.books.draft(month, tenant=tenant, now=self.now))

    @rule(tenant=st.sampled_from(TENANTS), month=st.sampled_from(sorted(MONTHS)))
    def issue(self, tenant: str, month: str) -> None:
        draft = self.do(self.books.draft(month, tenant=tenant, now=self.now))
        if draft is not None:
            invoice = self.do(self.books.issue(draft, now=self.now))
            assert invoice is not None
            self.issued[invoice.id] = invoice

    @invariant()
    def the_ledger_is_what_is_invoiced_and_what_is_open(self) -> None:
        for tenant in TENANTS:
            mine = [invoice for invoice in self.issued.values() if invoice.tenant_id == tenant]
            left = self.do(self.books.store.uninvoiced(tenant, until="9999-12"))
            billed = sum(invoice.subtotal_nanousd for invoice in mine)
            assert billed + sum(one.cost_nanousd for one in left) == self.used[tenant]
            assert all(sum(line.amount for line in invoice.lines) == invoice.subtotal for invoice in mine)
            grants = self.do(self.books.store.grants(tenant_id=tenant))
            applied = sum(invoice.credit_nanousd for invoice in mine)
            assert applied <= sum(grant.drawn_nanousd for grant in grants) <= self.used[tenant]

    @invariant()
    def what_is_issued_stays_and_its_numbers_have_no_gap(self) -> None:
        for invoice in self.issued.values():
            assert self.do(self.books.store.invoice(invoice.id, tenant_id=invoice.tenant_id)) == invoice
        assert sorted(one.sequence for one in self.issued.values()) == list(range(1, len(self.issued) + 1))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.do(self.books.database.close())
            self.loop.close()
            self.folder.cleanup()


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(
    deadline=None, max_examples=12, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
