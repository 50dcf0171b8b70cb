"""Invoices for people and spreadsheets: a page that prints well, and CSV.

The page loads nothing: its style is inside of it, and its policy allows that
one style by its hash and nothing else, so names of models and tenants stay text.
"""

import base64
import csv
import hashlib
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from modelyard.domain.invoices import CreditNote, Invoice, InvoiceLine
from modelyard.domain.usage import MICRO_PER_UNIT
from modelyard.policy.money import decimal, exact

if TYPE_CHECKING:
    import jinja2

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
header { display: flex; justify-content: space-between; align-items: flex-start; }
h1 { font-size: 1.5rem; margin: 0; }
address { font-style: normal; white-space: pre-line; }
.buyer { margin: 2rem 0; }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; padding: .3rem .5rem; border-bottom: 1px solid #ddd; overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tfoot td { border-bottom: 0; }
.total td { font-weight: bold; border-top: 2px solid #111; }
.small { color: #555; font-size: 12px; }
@media print {
  @page { size: A4; margin: 18mm; }
  body { margin: 0; padding: 0; max-width: none; font-size: 11px; }
  thead { display: table-header-group; }
  tr { break-inside: avoid; }
}
"""
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'"
)
"""The page's Content-Security-Policy."""

_COLUMNS = ("invoice", "kind", "month", "model", "unit", "quantity", "price", "per", "exact", "amount", "currency")


def page(invoice: Invoice, notes: Sequence[CreditNote]) -> str:
    """Return an invoice, and what was taken back of it, as HTML."""
    title = f"Invoice {invoice.number}" if invoice.number else f"Draft, {invoice.month}"
    return _template("invoice.html").render(invoice=invoice, notes=notes, title=title)


def note_page(note: CreditNote, invoice: Invoice) -> str:
    """Return a credit note as HTML."""
    return _template("credit_note.html").render(note=note, invoice=invoice, title=f"Credit note {note.number}")


def note_table(note: CreditNote, invoice: Invoice) -> str:
    """Return the same as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("credit note", "invoice", "month", "issued", "reason", "tax", "total", "currency"))
    amounts = decimal(note.tax, note.currency), decimal(note.total, note.currency)
    names = _inert(note.number), _inert(note.invoice_number), invoice.month, _day(note.issued_at), _inert(note.reason)
    writer.writerow((*names, *amounts, note.currency))
    return out.getvalue()


def table(invoice: Invoice, notes: Sequence[CreditNote]) -> str:
    """Return the same as CSV: one row a line, then the sums; amounts are decimals."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    name = _inert(invoice.number or "draft")
    currency = invoice.currency
    for line in invoice.lines:
        writer.writerow(
            [
                name,
                _kind(line),
                line.month,
                _inert(line.model),
                line.unit,
                quantity(line.quantity_micro),
                exact(line.price_nanousd),
                line.price_per,
                exact(line.amount_nanousd),
                decimal(line.amount, currency),
                currency,
            ]
        )

    def sums(kind: str, amount: int, exactly: str = "", number: str = "") -> None:
        writer.writerow(
            [
                _inert(number) or name,
                kind,
                invoice.month,
                "",
                "",
                "",
                "",
                "",
                exactly,
                decimal(amount, currency),
                currency,
            ]
        )

    sums("subtotal", invoice.subtotal, exact(invoice.subtotal_nanousd))
    sums("credit", -invoice.credit)
    # What is contained in the lines already would be there twice for whoever adds the column up.
    sums("tax contained" if invoice.tax_rule.is_inclusive else "tax", invoice.tax)
    sums("total", invoice.total)
    for note in notes:
        sums("credit note", -note.total, number=note.number)
    return out.getvalue()


def _kind(line: InvoiceLine) -> str:
    kind = "batch" if line.is_batch else "usage"
    return kind if not line.is_adjustment else "batch adjustment" if line.is_batch else "adjustment"


def quantity(micro: int) -> str:
    """Return millionths as a number: only as many digits behind the point as there are."""
    whole, rest = divmod(micro, MICRO_PER_UNIT)
    return f"{whole}.{rest:06}".rstrip("0").rstrip(".")


def percent(rate_micro: int) -> str:
    """Return a rate in millionths in percent."""
    return exact(rate_micro * 100_000)


def _price(nano: int, per: int, unit: str) -> str:
    if per == 1:
        return f"{exact(nano)} each"
    if "tokens" in unit:
        return f"{exact(nano)} per 1M"
    # A unit is priced by itself, though it is kept for a million.
    return f"{exact(nano // per)} each" if nano % per == 0 else f"{exact(nano)} per 1M"


def _day(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")


def _inert(text: str) -> str:
    """Return a cell that no spreadsheet takes for a formula."""
    return "'" + text if text[:1] in {"=", "+", "-", "@", "\t", "\r"} else text


@lru_cache(maxsize=2)
def _template(name: str) -> "jinja2.Template":
    import jinja2  # 30 ms, and most controllers never show an invoice
    import markupsafe

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("modelyard.metering"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": decimal,
        "exact": exact,
        "quantity": lambda micro: f"{micro // MICRO_PER_UNIT:,}" + quantity(micro % MICRO_PER_UNIT)[1:],
        "percent": percent,
        "price": _price,
        "day": _day,
    }
    environment.globals["style"] = markupsafe.Markup(STYLE)  # noqa: S704 - a constant of this file
    return environment.get_template(name)
