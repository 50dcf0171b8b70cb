"""Credit notes: admins take back a part of an issued invoice, or all of it; a tenant reads its own."""

import asyncio
from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from modelyard.control.api import money
from modelyard.control.api.access import missing
from modelyard.control.api.credits import CREDIT_MAX
from modelyard.control.api.money import Amount, TenantRef
from modelyard.control.context import Context
from modelyard.domain.invoices import CreditNote, Invoice, InvoiceStatus
from modelyard.domain.tenants import Identity, Scope
from modelyard.errors import conflict, invalid_value
from modelyard.metering import invoice_pages
from modelyard.policy import invoicing
from modelyard.policy.money import decimal, nano_per_minor
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

HEADERS = {
    "content-security-policy": invoice_pages.POLICY,
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Of pages and tables of money."""


class CreditInvoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to take back of an issued invoice."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    amount: Annotated[Amount | None, msgspec.Meta(description="With tax. Left out: all that is left.")] = None


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


class NotesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose."""

    tenant: TenantRef = ""
    invoice: Annotated[str, msgspec.Meta(description="Only of this invoice (id or number).")] = ""
    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class FormatQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As what."""

    format: Annotated[Literal["json", "csv", "html"], msgspec.Meta(description="html: a page to print.")] = "json"


class CreditNotes:
    """The routes of credit notes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.config.billing
        self._changing = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        of_invoice, every, manage = "/v1/invoices/{invoice}/credit-notes", "/v1/credit-notes", Scope.MANAGE
        one, listed = f"{every}/{{note}}", Page[CreditNoteView]
        back = {"reason": "outage of 3 November", "amount": "12.50"}
        return [
            Route(
                "POST", of_invoice, Scope.ADMIN, "Take back", self.add, CreditInvoice, Empty, CreditNoteView, 201, back
            ),
            Route("GET", every, manage, "List credit notes", self.page, Empty, NotesQuery, listed),
            Route("GET", one, manage, "Get a credit note", self.get, Empty, FormatQuery, CreditNoteView),
        ]

    async def add(self, call: Call[CreditInvoice, Empty]) -> CreditNoteView:
        """Take back a part of an issued invoice, or what is left of it; the same idempotency key does it once."""
        context, body = self._context, call.body
        invoice = await self._invoice(call.identity, call.path("invoice"))
        if invoice.status is not InvoiceStatus.ISSUED:
            raise conflict("It is a draft: it is not owed yet, and made anew from the ledger.")
        if not body.reason.isprintable():
            raise invalid_value("reason", "use printable characters")
        once = money.once(call, "cn-", invoice.id)
        async with self._changing:
            known = money.repeated(once, await context.billing.credit_notes(tenant_id=None, invoice_id=None))
            return _view(known or await self._added(call, invoice, once.id))

    async def _added(self, call: Call[CreditInvoice, Empty], invoice: Invoice, note_id: str) -> CreditNote:
        context, body = self._context, call.body
        notes = await context.billing.credit_notes(tenant_id=None, invoice_id=invoice.id)
        left = invoice.total - sum(note.total for note in notes)
        total = left if body.amount is None else _minor(body.amount, invoice.currency)
        if not 0 < total <= left:
            raise invalid_value(
                "amount", f"{decimal(left, invoice.currency)} {invoice.currency} are left of the invoice"
            )
        note = CreditNote(
            id=note_id,
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
        return added

    async def page(self, call: Call[Empty, NotesQuery]) -> Page[CreditNoteView]:
        """Return credit notes, oldest first."""
        query = call.query
        tenant_id = await money.tenant_of(self._context, call.identity, query.tenant)
        invoice_id = (await self._invoice(call.identity, query.invoice)).id if query.invoice else None
        notes = await self._context.billing.credit_notes(tenant_id=tenant_id, invoice_id=invoice_id)
        rows, has_more = page_of(notes, limit=query.limit, after=query.after, id_of=lambda one: one.id)
        return Page([_view(note) for note in rows], has_more)

    async def get(self, call: Call[Empty, FormatQuery]) -> CreditNoteView | Response:
        """Return a credit note, by its id or number, as JSON, CSV or a page to print."""
        reference = call.path("note")
        note = await self._context.billing.credit_note(reference, tenant_id=call.identity.visible_tenant)
        if note is None:
            raise missing("credit note", reference)
        if call.query.format == "json":
            return _view(note)
        invoice = await self._invoice(call.identity, note.invoice_id)
        if call.query.format == "csv":
            return Response(invoice_pages.note_table(note, invoice), headers=dict(HEADERS), media_type="text/csv")
        return Response(invoice_pages.note_page(note, invoice), headers=dict(HEADERS), media_type="text/html")

    async def _invoice(self, identity: Identity, reference: str) -> Invoice:
        found = await self._context.billing.invoice(reference, tenant_id=identity.visible_tenant)
        if found is None:
            raise missing("invoice", reference)
        return found


def _minor(amount: Amount, currency: str) -> int:
    """Return an amount in minor units; what is finer is none."""
    nano, size = money.nano("amount", amount, most=CREDIT_MAX), nano_per_minor(currency)
    if nano % size:
        raise invalid_value("amount", f"{currency} has no such small amounts")
    return nano // size


def _view(note: CreditNote) -> CreditNoteView:
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
