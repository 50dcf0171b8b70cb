"""From what the ledger has of a month to an invoice; pure.

The sums of the ledger are exact. They are rounded once, at the subtotal, half
to even, to minor units (cents); the lines get whole cents by the largest
remainder, so that they add up to it and none is off by a cent. Credit comes off
before tax; tax is rounded once, half to even, on what is left.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from modelyard.domain.invoices import Invoice, InvoiceLine, InvoiceStatus, Party, Tax, UsageSum
from modelyard.domain.usage import MICRO_PER_UNIT
from modelyard.policy.money import allotted, divided, minor
from modelyard.policy.pricing import TOKENS_PER_PRICE

RATE_ONE = 1_000_000
"""A tax rate of 100 %."""


class Terms(NamedTuple):
    """What an invoice says beside its lines."""

    currency: str
    seller: Party
    buyer: Party
    tax: Tax


class _Part(NamedTuple):
    """One position before its cents."""

    sum: UsageSum
    unit: str
    quantity_micro: int
    price_nanousd: int
    price_per: int
    amount_nanousd: int


def draft(
    sums: Iterable[UsageSum],
    terms: Terms,
    *,
    invoice_id: str,
    tenant_id: str,
    month: str,
    credit_nanousd: int,
    now: int,
) -> Invoice:
    """Return the invoice of ``month`` for ``sums``, of which ``credit_nanousd`` at most are paid by credit."""
    parts = [part for one in sorted(sums, key=_order) for part in _parts(one)]
    exact = sum(part.amount_nanousd for part in parts)
    subtotal = minor(exact, terms.currency)
    lines = _lines(parts, subtotal, month, terms.currency)
    covered = min(exact, credit_nanousd)
    # All of it is all of it, however it was rounded.
    credit = subtotal if covered == exact else min(subtotal, minor(covered, terms.currency))
    tax, total = taxed(subtotal - credit, terms.tax)
    return Invoice(
        id=invoice_id,
        tenant_id=tenant_id,
        month=month,
        status=InvoiceStatus.DRAFT,
        currency=terms.currency,
        seller=terms.seller,
        buyer=terms.buyer,
        tax_rule=terms.tax,
        lines=tuple(lines),
        subtotal_nanousd=exact,
        subtotal=subtotal,
        credit=credit,
        credit_nanousd=covered,
        tax=tax,
        total=total,
        drafted_at=now,
    )


def due_month(sums: Iterable[UsageSum], *, last_invoiced: str, present: str) -> str:
    """Return the month that the next invoice is of: the last that is over and has none, else the present one."""
    over = (one.month for one in sums if one.cost_nanousd and last_invoiced < one.month < present)
    return max(over, default=present)


def taxed(net: int, tax: Tax) -> tuple[int, int]:
    """Return the tax on ``net`` minor units, and what is to be paid with it."""
    if tax.is_exempt or not tax.rate_micro:
        return 0, net
    if tax.is_inclusive:
        return divided(net * tax.rate_micro, RATE_ONE + tax.rate_micro), net
    amount = divided(net * tax.rate_micro, RATE_ONE)
    return amount, net + amount


def credited_tax(invoice: Invoice, total: int, *, credited: int, credited_tax: int) -> int:
    """Return the tax in a credit note of ``total``, after notes of ``credited`` in all with ``credited_tax``.

    The notes of a whole invoice have exactly its tax.
    """
    assert 0 < total <= invoice.total - credited, "no more is taken back than was asked for"
    return divided(invoice.tax * (credited + total), invoice.total) - credited_tax


def _order(one: UsageSum) -> tuple[object, ...]:
    price = one.price
    return one.month, one.model, one.unit, price.input, price.cached_input, price.output, price.unit, price.request


def _parts(one: UsageSum) -> Sequence[_Part]:
    """Return the positions of one sum: what is priced and was used; together they are its cost, to the nano."""
    price = one.price
    counted = (
        ("input tokens", one.input_tokens * MICRO_PER_UNIT, price.input, TOKENS_PER_PRICE),
        ("cached input tokens", one.cached_tokens * MICRO_PER_UNIT, price.cached_input, TOKENS_PER_PRICE),
        ("output tokens", one.output_tokens * MICRO_PER_UNIT, price.output, TOKENS_PER_PRICE),
        (one.unit, one.units_micro, price.unit, TOKENS_PER_PRICE),
        ("requests", one.requests * MICRO_PER_UNIT, price.request, 1),
    )
    parts = [
        _Part(one, unit, quantity, each, per, divided(quantity * each, per * MICRO_PER_UNIT))
        for unit, quantity, each, per in counted
        if quantity and each
    ]
    if not parts:
        # Free, or a price of which so little was used that it is nothing; still the ledger's cost, whatever it is.
        return (
            [_Part(one, "requests", one.requests * MICRO_PER_UNIT, 0, 1, one.cost_nanousd)] if one.cost_nanousd else []
        )
    # The ledger rounds each request; what that comes to, half a nano each at most, goes to the largest positions.
    off = one.cost_nanousd - sum(part.amount_nanousd for part in parts)
    for at in sorted(range(len(parts)), key=lambda at: -parts[at].amount_nanousd):
        # No position goes below nothing; what more there is to take is taken from the next.
        moved = max(off, -parts[at].amount_nanousd)
        parts[at] = parts[at]._replace(amount_nanousd=parts[at].amount_nanousd + moved)
        off -= moved
    return parts


def _lines(parts: Sequence[_Part], subtotal: int, month: str, currency: str) -> list[InvoiceLine]:
    cents = allotted([part.amount_nanousd for part in parts], subtotal, currency)
    return [
        InvoiceLine(
            month=part.sum.month,
            model=part.sum.model,
            unit=part.unit,
            quantity_micro=part.quantity_micro,
            price_nanousd=part.price_nanousd,
            price_per=part.price_per,
            amount_nanousd=part.amount_nanousd,
            amount=amount,
            is_adjustment=part.sum.month < month,
        )
        for part, amount in zip(parts, cents, strict=True)
    ]
