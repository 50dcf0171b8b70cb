"""Invoices and credit notes: admins draft, issue and take back; a tenant reads its own.

A draft is made anew whenever it is looked at, so it always has what the ledger
has. What is issued never changes: what was wrong is taken back by a credit note.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from modelyard.control.api import money
from modelyard.control.api.access import find_tenant, missing
from modelyard.control.api.credits import CREDIT_MAX
from modelyard.control.api.money import Amount, AuditView, TenantRef, audit_view
from modelyard.control.billing import invoice_terms
from modelyard.control.context import Context
from modelyard.domain.billing import Account
from modelyard.domain.invoices import CreditNote, Invoice, InvoiceLine, InvoiceStatus, Party, UsageSum
from modelyard.domain.tenants import Identity, Scope
from modelyard.errors import conflict, invalid_value
from modelyard.ids import new_id
from modelyard.metering import invoice_pages
from modelyard.policy import invoicing
from modelyard.policy.money import decimal, exact, nano_per_minor
from modelyard.policy.utc import day_of, month_name
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_Month = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$", description="A month, like 2026-11.")]
_MonthOrNone = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{4}-(0[1-9]|1[0-2]))?$")]
_HEADERS = {
    "content-security-policy": invoice_pages.POLICY,
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class DraftInvoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to draft: all that was used up to the end of that month and is on no invoice."""

    tenant: Annotated[str, msgspec.Meta(description="Id or name.")]
    month: _Month


class CreditInvoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to take back of an issued invoice."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    amount: Annotated[Amount | None, msgspec.Meta(description="With tax. Left out: all that is left.")] = None


class LineView(msgspec.Struct, frozen=True, kw_only=True):
    """A position. ``exact`` is the ledger's sum; ``amount`` its part of the rounded subtotal."""

    month: str
    model: str
    unit: str
    quantity: str
    price: str
    per: int
    exact: str
    amount: str
    is_adjustment: bool


class TaxView(msgspec.Struct, frozen=True, kw_only=True):
    """The tax."""

    name: str
    percent: str
    is_inclusive: bool
    is_exempt: bool
    amount: str


class InvoiceView(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice. Amounts are decimals of the currency, as text; ``total_minor`` is the total in its minor units."""

    id: str
    object: str = "invoice"
    number: str
    status: InvoiceStatus
    tenant_id: str
    month: str
    currency: str
    seller: Party
    buyer: Party
    lines: list[LineView]
    exact: str
    subtotal: str
    credit: str
    """Paid by credit, before tax."""
    tax: TaxView
    total: str
    total_minor: int
    credited: str
    """Taken back by credit notes."""
    credit_notes: list[str]
    drafted_at: int
    issued_at: int | None
    due_at: int | None


class CreditNoteView(msgspec.Struct, frozen=True, kw_only=True):
    """A credit note. ``tax`` is the part of ``total`` that is tax."""

    id: str
    object: str = "credit_note"
    number: str
    tenant_id: str
    invoice_id: str
    invoice_number: str
    currency: str
    total: str
    tax: str
    reason: str
    issued_at: int


class InvoicesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which invoices."""

    tenant: TenantRef = ""
    month: Annotated[_MonthOrNone, msgspec.Meta(description="Only of this month, like 2026-11.")] = ""
    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class FormatQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As what."""

    format: Annotated[Literal["json", "csv", "html"], msgspec.Meta(description="html: a page to print.")] = "json"


class UpcomingQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose, and which."""

    tenant: TenantRef = ""
    month: Annotated[
        _MonthOrNone, msgspec.Meta(description="Left out: the last that is over and on no invoice, else this month.")
    ] = ""


class NotesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose."""

    tenant: TenantRef = ""
    invoice: Annotated[str, msgspec.Meta(description="Only of this invoice (id).")] = ""
    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class ChangesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of changes."""

    action: Annotated[str, msgspec.Meta(description='Only actions that begin so, like "price." or "credit.".')] = ""
    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class Invoices:
    """The routes of invoices and credit notes, and of who changed what about money."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.config.billing
        self._currency = context.config.billing.currency

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, manage, admin = "/v1/invoices", "/v1/invoices/{invoice}", Scope.MANAGE, Scope.ADMIN
        notes, changes, upcoming = f"{one}/credit-notes", "/v1/billing/changes", f"{every}/upcoming"
        draft, back = {"tenant": "acme", "month": "2026-11"}, {"reason": "outage of 3 November", "amount": "12.50"}
        listed = Page[CreditNoteView]
        return [
            Route("GET", every, manage, "List invoices", self.page, Empty, InvoicesQuery, Page[InvoiceView]),
            Route("POST", every, admin, "Draft an invoice", self.draft, DraftInvoice, Empty, InvoiceView, 201, draft),
            Route("GET", upcoming, manage, "The next one, so far", self.upcoming, Empty, UpcomingQuery, InvoiceView),
            Route("GET", one, manage, "Get an invoice", self.get, Empty, FormatQuery, InvoiceView),
            Route("POST", f"{one}/issue", admin, "Issue a draft", self.issue, Empty, Empty, InvoiceView),
            Route("POST", notes, admin, "Take back", self.credit, CreditInvoice, Empty, CreditNoteView, 201, back),
            Route("GET", "/v1/credit-notes", manage, "List credit notes", self.notes, Empty, NotesQuery, listed),
            Route("GET", changes, admin, "Who changed what", self.changes, Empty, ChangesQuery, Page[AuditView]),
        ]

    async def page(self, call: Call[Empty, InvoicesQuery]) -> Page[InvoiceView]:
        """Return invoices and drafts, newest month first."""
        query = call.query
        tenant_id = await money.tenant_of(self._context, call.identity, query.tenant)
        after = query.after
        if after:
            last = await self._context.billing.invoice(after, tenant_id=tenant_id)
            if last is None:
                raise invalid_value("after", "no object of this list has this id")
            after = last.id  # it may have been named by its number
        invoices = await self._context.billing.invoices(
            tenant_id=tenant_id, month=query.month or None, limit=query.limit + 1, after=after
        )
        notes = await self._context.billing.credit_notes(tenant_id=tenant_id, invoice_id=None)
        return Page([self._view(one, notes) for one in invoices[: query.limit]], has_more=len(invoices) > query.limit)

    async def draft(self, call: Call[DraftInvoice, Empty]) -> InvoiceView:
        """Draft the invoice of a month, or draft it anew."""
        tenant = await find_tenant(self._context.store, call.body.tenant)
        if call.body.month > month_name(day_of(self._context.clock.unix_s())):
            raise invalid_value("month", "it has not begun")
        made = await self._context.billing_desk.draft(tenant.id, call.body.month)
        if made is None:
            message = f"'{tenant.name}' owes nothing up to the end of {call.body.month} that is on no invoice."
            raise conflict(message, param="month")
        return self._view(made, [])

    async def upcoming(self, call: Call[Empty, UpcomingQuery]) -> InvoiceView:
        """Return what the next invoice would be now; nothing is stored."""
        context, wanted = self._context, call.query.month
        tenant_id = await money.owner_of(context, call.identity, call.query.tenant)
        present = month_name(day_of(context.clock.unix_s()))
        if wanted > present:
            raise invalid_value("month", "it has not begun")
        sums = await context.billing.uninvoiced(tenant_id, until=present)
        last = await context.billing.last_invoiced(tenant_id)
        due = invoicing.due_month(sums, last_invoiced=last, present=present)
        month = wanted or due
        # What the invoice before this one is to have is not on this one, too.
        mine = [one for one in sums if one.month <= month and (month <= due or one.month > due)]
        made = await self._made(tenant_id, month, mine)
        if not wanted and not made.subtotal:
            # So little waits for the invoice after it.
            made = await self._made(tenant_id, present, sums)
        return self._view(made, [])

    async def _made(self, tenant_id: str, month: str, sums: Sequence[UsageSum]) -> Invoice:
        context = self._context
        account = next((one for one in await context.billing.accounts() if one.tenant_id == tenant_id), None)
        grants = await context.billing.grants(tenant_id=tenant_id)
        drawn = sum(one.drawn_nanousd for one in grants) - (account.applied_nanousd if account is not None else 0)
        return invoicing.draft(
            sums,
            invoice_terms(self._settings, await context.store.tenants(), account or Account(tenant_id)),
            invoice_id="upcoming",
            tenant_id=tenant_id,
            month=month,
            credit_nanousd=max(0, drawn),
            now=int(context.clock.unix_s()),
        )

    async def get(self, call: Call[Empty, FormatQuery]) -> InvoiceView | Response:
        """Return an invoice, by its id or number, as JSON, CSV or a page to print."""
        invoice = await self._find(call.identity, call.path("invoice"))
        if invoice.status is InvoiceStatus.DRAFT:
            made = await self._context.billing_desk.draft(invoice.tenant_id, invoice.month)
            if made is None:
                raise missing("invoice", call.path("invoice"))
            invoice = made
        notes = await self._context.billing.credit_notes(tenant_id=None, invoice_id=invoice.id)
        if call.query.format == "csv":
            return Response(invoice_pages.table(invoice, notes), headers=dict(_HEADERS), media_type="text/csv")
        if call.query.format == "html":
            return Response(invoice_pages.page(invoice, notes), headers=dict(_HEADERS), media_type="text/html")
        return self._view(invoice, notes)

    async def issue(self, call: Call[Empty, Empty]) -> InvoiceView:
        """Number a draft and close it for good; what comes later for its month is on the next invoice."""
        invoice = await self._find(call.identity, call.path("invoice"))
        issued = await self._context.billing_desk.issue(invoice.id, key_id=call.identity.key_id)
        if issued is None:
            raise conflict("It is no draft, or nothing is owed any more.")
        return self._view(issued, [])

    async def credit(self, call: Call[CreditInvoice, Empty]) -> CreditNoteView:
        """Take back a part of an issued invoice, or what is left of it."""
        context, body = self._context, call.body
        invoice = await self._find(call.identity, call.path("invoice"))
        if invoice.status is not InvoiceStatus.ISSUED:
            raise conflict("It is a draft: it is not owed yet, and made anew from the ledger.")
        if not body.reason.isprintable():
            raise invalid_value("reason", "use printable characters")
        notes = await context.billing.credit_notes(tenant_id=None, invoice_id=invoice.id)
        left = invoice.total - sum(note.total for note in notes)
        total = left if body.amount is None else _minor(body.amount, invoice.currency)
        if not 0 < total <= left:
            raise invalid_value(
                "amount", f"{decimal(left, invoice.currency)} {invoice.currency} are left of the invoice"
            )
        note = CreditNote(
            id=new_id("cn-"),
            tenant_id=invoice.tenant_id,
            invoice_id=invoice.id,
            invoice_number=invoice.number,
            number="",
            sequence=0,
            currency=invoice.currency,
            total=total,
            tax=0,
            reason=body.reason,
            issued_at=int(context.clock.unix_s()),
            issued_by=call.identity.key_id,
        )
        added = await context.billing.add_credit_note(
            note,
            money.audit(context, call.identity, "invoice.credit", invoice.id),
            prefix=self._settings.credit_note_prefix,
            tax_of=lambda of, credited, tax: invoicing.credited_tax(of, total, credited=credited, credited_tax=tax),
        )
        if added is None:
            raise conflict("Somebody else took back a part of it just now. Look at it again.")
        return _note_view(added)

    async def notes(self, call: Call[Empty, NotesQuery]) -> Page[CreditNoteView]:
        """Return credit notes, oldest first."""
        query = call.query
        tenant_id = await money.tenant_of(self._context, call.identity, query.tenant)
        notes = await self._context.billing.credit_notes(tenant_id=tenant_id, invoice_id=query.invoice or None)
        rows, has_more = page_of(notes, limit=query.limit, after=query.after, id_of=lambda one: one.id)
        return Page([_note_view(note) for note in rows], has_more)

    async def changes(self, call: Call[Empty, ChangesQuery]) -> Page[AuditView]:
        """Return who changed prices, accounts, credit, budgets and invoices, newest first."""
        query = call.query
        after = money.change_after(query.after)
        entries = await self._context.billing.audit(limit=query.limit + 1, after=after, prefix=query.action)
        return Page([audit_view(one) for one in entries[: query.limit]], len(entries) > query.limit)

    async def _find(self, identity: Identity, reference: str) -> Invoice:
        found = await self._context.billing.invoice(reference, tenant_id=identity.visible_tenant)
        if found is None:
            raise missing("invoice", reference)
        return found

    def _view(self, invoice: Invoice, notes: list[CreditNote]) -> InvoiceView:
        currency, rule = invoice.currency, invoice.tax_rule
        mine = [note for note in notes if note.invoice_id == invoice.id]
        return InvoiceView(
            id=invoice.id,
            number=invoice.number,
            status=invoice.status,
            tenant_id=invoice.tenant_id,
            month=invoice.month,
            currency=currency,
            seller=invoice.seller,
            buyer=invoice.buyer,
            lines=[_line_view(line, currency) for line in invoice.lines],
            exact=exact(invoice.subtotal_nanousd),
            subtotal=decimal(invoice.subtotal, currency),
            credit=decimal(invoice.credit, currency),
            tax=TaxView(
                name=rule.name,
                percent=invoice_pages.percent(rule.rate_micro),
                is_inclusive=rule.is_inclusive,
                is_exempt=rule.is_exempt,
                amount=decimal(invoice.tax, currency),
            ),
            total=decimal(invoice.total, currency),
            total_minor=invoice.total,
            credited=decimal(sum(note.total for note in mine), currency),
            credit_notes=[note.number for note in mine],
            drafted_at=invoice.drafted_at,
            issued_at=invoice.issued_at,
            due_at=invoice.due_at,
        )


def _minor(amount: Amount, currency: str) -> int:
    """Return an amount in minor units; what is finer is none."""
    nano, size = money.nano("amount", amount, most=CREDIT_MAX), nano_per_minor(currency)
    if nano % size:
        raise invalid_value("amount", f"{currency} has no such small amounts")
    return nano // size


def _line_view(line: InvoiceLine, currency: str) -> LineView:
    return LineView(
        month=line.month,
        model=line.model,
        unit=line.unit,
        quantity=invoice_pages.quantity(line.quantity_micro),
        price=exact(line.price_nanousd),
        per=line.price_per,
        exact=exact(line.amount_nanousd),
        amount=decimal(line.amount, currency),
        is_adjustment=line.is_adjustment,
    )


def _note_view(note: CreditNote) -> CreditNoteView:
    return CreditNoteView(
        id=note.id,
        number=note.number,
        tenant_id=note.tenant_id,
        invoice_id=note.invoice_id,
        invoice_number=note.invoice_number,
        currency=note.currency,
        total=decimal(note.total, note.currency),
        tax=decimal(note.tax, note.currency),
        reason=note.reason,
        issued_at=note.issued_at,
    )
