"""Invoices and credit notes in SQL. What is issued is never written again: every change asks for a draft."""

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import Account
from modelyard.domain.invoices import CreditNote, Invoice, InvoiceStatus
from modelyard.policy import invoicing
from modelyard.policy.invoicing import Terms
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.billing import accounts, credit, sums
from modelyard.stores.sql.database import insert

_INVOICES = schema.invoices
_NOTES = schema.credit_notes
_SERIES = schema.billing_series

_to_json = msgspec.json.Encoder().encode
_invoice = msgspec.json.Decoder(Invoice).decode
_note = msgspec.json.Decoder(CreditNote).decode

TermsOf = Callable[[Account], Terms]


def draft(
    connection: sa.Connection, tenant_id: str, month: str, terms: TermsOf, invoice_id: str, now: int
) -> Invoice | None:
    """Draft anew; a draft of which nothing is left is forgotten."""
    is_it = sa.and_(_is_draft(), _INVOICES.c.tenant_id == tenant_id, _INVOICES.c.month == month)
    known = connection.execute(sa.select(_INVOICES.c.invoice_id).where(is_it)).scalar()
    made = _made(connection, tenant_id, month, terms, known or invoice_id, now)
    if made is None:
        connection.execute(sa.delete(_INVOICES).where(is_it))
    else:
        _write(connection, made)
    return made


def issue(
    connection: sa.Connection, invoice_id: str, terms: TermsOf, *, prefix: str, now: int, due_at: int, by: str
) -> Invoice | None:
    """Close a draft for good."""
    query = sa.select(_INVOICES.c.tenant_id, _INVOICES.c.month).where(_is_draft(), _INVOICES.c.invoice_id == invoice_id)
    row = connection.execute(query.with_for_update()).first()
    if row is None:
        return None
    made = _made(connection, row.tenant_id, row.month, terms, invoice_id, now)
    if made is None:
        connection.execute(sa.delete(_INVOICES).where(_INVOICES.c.invoice_id == invoice_id))
        return None
    sequence = _next(connection, "invoice")
    issued = msgspec.structs.replace(
        made,
        status=InvoiceStatus.ISSUED,
        sequence=sequence,
        number=f"{prefix}{sequence:06}",
        issued_at=now,
        due_at=due_at,
        issued_by=by,
    )
    sums.close(connection, row.tenant_id, row.month)
    if issued.credit_nanousd:
        credit.apply(connection, _account(connection, row.tenant_id), issued.credit_nanousd)
    _write(connection, issued)
    # Drafts of months before this one are part of it now.
    earlier = sa.and_(_is_draft(), _INVOICES.c.tenant_id == row.tenant_id, _INVOICES.c.month <= row.month)
    connection.execute(sa.delete(_INVOICES).where(earlier))
    return issued


def one(connection: sa.Connection, invoice_id: str, tenant_id: str | None) -> Invoice | None:
    """Return the invoice of this id or number."""
    is_it = sa.or_(_INVOICES.c.invoice_id == invoice_id, _INVOICES.c.number == invoice_id)
    query = sa.select(_INVOICES.c.document).where(is_it)
    if tenant_id is not None:
        query = query.where(_INVOICES.c.tenant_id == tenant_id)
    found = connection.execute(query).scalar()
    return _invoice(found) if found is not None else None


def page(connection: sa.Connection, tenant_id: str | None, month: str | None, limit: int, after: str) -> list[Invoice]:
    """Return invoices, newest month first."""
    order = (_INVOICES.c.month, _INVOICES.c.drafted_at, _INVOICES.c.invoice_id)
    query = sa.select(_INVOICES.c.document).order_by(*(column.desc() for column in order)).limit(limit)
    if tenant_id is not None:
        query = query.where(_INVOICES.c.tenant_id == tenant_id)
    if month is not None:
        query = query.where(_INVOICES.c.month == month)
    if after:
        place = sa.select(*order).where(_INVOICES.c.invoice_id == after)
        last = connection.execute(place).first()
        if last is not None:
            query = query.where(sa.tuple_(*order) < sa.tuple_(*last))
    return [_invoice(document) for document in connection.scalars(query)]


def add_note(
    connection: sa.Connection, note: CreditNote, prefix: str, tax_of: Callable[[Invoice, int, int], int]
) -> CreditNote | None:
    """Number and add; None where the invoice has less left."""
    query = sa.select(_INVOICES.c.document).where(_INVOICES.c.invoice_id == note.invoice_id)
    invoice = _invoice(connection.execute(query.with_for_update()).scalar_one())
    others = notes(connection, None, note.invoice_id)
    credited = sum(other.total for other in others)
    if invoice.status is not InvoiceStatus.ISSUED or not 0 < note.total <= invoice.total - credited:
        return None
    sequence = _next(connection, "credit_note")
    note = msgspec.structs.replace(
        note,
        sequence=sequence,
        number=f"{prefix}{sequence:06}",
        invoice_number=invoice.number,
        currency=invoice.currency,
        tax=tax_of(invoice, credited, sum(other.tax for other in others)),
    )
    values = {
        "credit_note_id": note.id,
        "tenant_id": note.tenant_id,
        "invoice_id": note.invoice_id,
        "number": note.number,
        "issued_at": note.issued_at,
        "document": _to_json(note).decode(),
    }
    connection.execute(sa.insert(_NOTES).values(values))
    return note


def note(connection: sa.Connection, reference: str, tenant_id: str | None) -> CreditNote | None:
    """Return the credit note of this id or number."""
    is_it = sa.or_(_NOTES.c.credit_note_id == reference, _NOTES.c.number == reference)
    query = sa.select(_NOTES.c.document).where(is_it)
    if tenant_id is not None:
        query = query.where(_NOTES.c.tenant_id == tenant_id)
    found = connection.execute(query).scalar()
    return _note(found) if found is not None else None


def notes(connection: sa.Connection, tenant_id: str | None, invoice_id: str | None) -> list[CreditNote]:
    """Return credit notes, oldest first."""
    query = sa.select(_NOTES.c.document).order_by(_NOTES.c.issued_at, _NOTES.c.number)
    if tenant_id is not None:
        query = query.where(_NOTES.c.tenant_id == tenant_id)
    if invoice_id is not None:
        query = query.where(_NOTES.c.invoice_id == invoice_id)
    return [_note(document) for document in connection.scalars(query)]


def _made(
    connection: sa.Connection, tenant_id: str, month: str, terms: TermsOf, invoice_id: str, now: int
) -> Invoice | None:
    """Return the invoice as it would be now; None where it would come to nothing, which waits for the next one."""
    held = _account(connection, tenant_id)
    made = invoicing.draft(
        sums.uninvoiced(connection, tenant_id, month, is_locked=True),
        terms(held),
        invoice_id=invoice_id,
        tenant_id=tenant_id,
        month=month,
        credit_nanousd=max(0, credit.unapplied(connection, held)),
        now=now,
    )
    return made if made.subtotal else None


def _account(connection: sa.Connection, tenant_id: str) -> Account:
    return accounts.stored(connection, tenant_id) or Account(tenant_id)


def _next(connection: sa.Connection, name: str) -> int:
    statement = insert(connection, _SERIES).values({"name": name, "last": 1})
    raised = statement.on_conflict_do_update(index_elements=["name"], set_={"last": _SERIES.c.last + 1})
    return int(connection.execute(raised.returning(_SERIES.c.last)).scalar_one())


def _is_draft() -> sa.ColumnElement[bool]:
    return _INVOICES.c.status == InvoiceStatus.DRAFT.value


def _write(connection: sa.Connection, invoice: Invoice) -> None:
    values = {
        "invoice_id": invoice.id,
        "tenant_id": invoice.tenant_id,
        "month": invoice.month,
        "status": invoice.status.value,
        "number": invoice.number or None,
        "drafted_at": invoice.drafted_at,
        "issued_at": invoice.issued_at,
        "document": _to_json(invoice).decode(),
    }
    statement = insert(connection, _INVOICES).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["invoice_id"], set_=values, where=_is_draft()))
