"""Invoices and credit notes: what a tenant used in a month, in money.

Two kinds of numbers: ``…_nanousd`` are the ledger's own, exact; plain amounts
are whole minor units of the currency (cents), which is what is owed.
"""

from enum import StrEnum

import msgspec

from modelyard.domain.usage import Price


class UsageSum(msgspec.Struct, frozen=True):
    """What a tenant used of one model at one price in one UTC month, as far as no invoice has it.

    ``unit`` is what ``units_micro`` counts. Requests in which nothing was counted are not in it.
    """

    month: str
    model: str
    price: Price
    unit: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    units_micro: int
    cost_nanousd: int
    is_batch: bool = False
    """It was used by lines of batches; ``price`` is what these pay."""


class InvoiceStatus(StrEnum):
    """A draft grows with what arrives; what is issued never changes."""

    DRAFT = "draft"
    ISSUED = "issued"


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One position: so much of one unit of one model at one price.

    ``price_nanousd`` is for ``price_per`` units; ``quantity_micro`` is in millionths. ``amount_nanousd`` is the
    ledger's sum, in which every request is rounded once.
    """

    month: str
    """When it was used; before the month of the invoice: an adjustment, which came too late for its own."""
    model: str
    unit: str
    quantity_micro: int
    price_nanousd: int
    price_per: int
    amount_nanousd: int
    amount: int
    is_adjustment: bool = False
    is_batch: bool = False
    """It was used by lines of batches."""


class Party(msgspec.Struct, frozen=True):
    """Who sells, or who is billed."""

    name: str = ""
    address: str = ""
    email: str = ""
    tax_id: str = ""


class Tax(msgspec.Struct, frozen=True):
    """A tax on what is owed. ``rate_micro`` is in millionths; ``is_inclusive``: prices contain it already."""

    name: str = ""
    rate_micro: int = 0
    is_inclusive: bool = False
    is_exempt: bool = False


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant owes for a month. ``number`` is "" until it is issued."""

    id: str
    tenant_id: str
    month: str
    status: InvoiceStatus
    currency: str
    seller: Party
    buyer: Party
    tax_rule: Tax
    lines: tuple[InvoiceLine, ...]
    subtotal_nanousd: int
    """The sum of the ledger's rows, exactly."""
    subtotal: int
    """The same in minor units, rounded once, half to even; the sum of the lines' amounts."""
    credit: int
    """Credit that was drawn for it, off the subtotal."""
    credit_nanousd: int
    tax: int
    total: int
    """What is to be paid."""
    drafted_at: int
    number: str = ""
    sequence: int = 0
    issued_at: int | None = None
    due_at: int | None = None
    issued_by: str = ""


class CreditNote(msgspec.Struct, frozen=True, kw_only=True):
    """Takes back a part of an issued invoice, or all of it. ``tax`` is the part of ``total`` that is tax."""

    id: str
    tenant_id: str
    invoice_id: str
    invoice_number: str
    number: str
    sequence: int
    currency: str
    total: int
    tax: int
    reason: str
    issued_at: int
    issued_by: str = ""
