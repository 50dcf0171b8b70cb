"""What a request costs.

Whole nano-dollars, rounded once a ledger row and half to even, so that sums of
rows are exact and no direction of rounding adds up.
"""

from modelyard.domain.usage import MICRO_PER_UNIT, Price

TOKENS_PER_PRICE = 1_000_000
"""A ``Price`` is for this many tokens, or units."""
TOKENS_MAX = 2**31 - 1
"""Most tokens of one kind in one row. A broken engine's number must neither be billed nor overflow a sum."""

UNITS_MAX = 100_000_000.0
"""Most units of one row, for the same reason."""


def cost(price: Price, prompt: int, cached: int, completion: int, micro_units: int = 0) -> int:
    """Return nano-dollars. ``cached`` tokens are some of the ``prompt`` tokens, and billed at ``cached_input``.

    The price of a request is due where anything was counted: one that failed before its first token is free.
    """
    assert min(prompt, cached, completion, micro_units) >= 0, "tokens and units are counted, never owed"
    cached = min(cached, prompt)
    total = (prompt - cached) * price.input + cached * price.cached_input + completion * price.output
    if price.request and (prompt or completion or micro_units):
        total += price.request * TOKENS_PER_PRICE
    if not micro_units:
        return _rounded(total, TOKENS_PER_PRICE)
    return _rounded(total * MICRO_PER_UNIT + micro_units * price.unit, TOKENS_PER_PRICE * MICRO_PER_UNIT)


def dearest(one: Price, other: Price) -> Price:
    """Return a price that is below neither, whatever is used how much."""
    return Price(
        max(one.input, other.input),
        max(one.cached_input, other.cached_input),
        max(one.output, other.output),
        max(one.unit, other.unit),
        max(one.request, other.request),
    )


def batch_price(price: Price, factor_micro: int) -> Price:
    """Return what a line of a batch costs, as a price of its own: whole nano-dollars, so that costs stay exact.

    ``factor_micro`` applies where the price has no ``batch_micro`` of its own; what is returned has the one that it is
    made with.
    """
    factor = factor_micro if price.batch_micro is None else price.batch_micro
    parts = (price.input, price.cached_input, price.output, price.unit, price.request)
    input_, cached, output, unit, request = (_rounded(part * factor, MICRO_PER_UNIT) for part in parts)
    return Price(input_, cached, output, unit, request, factor)


def micro_units(units: float) -> int:
    """Return ``units`` in whole millionths, within what can be billed; what is no number is nothing."""
    return round(min(units, UNITS_MAX) * MICRO_PER_UNIT) if units > 0 else 0


def _rounded(total: int, divisor: int) -> int:
    whole, rest = divmod(total, divisor)
    if rest * 2 > divisor or (rest * 2 == divisor and whole % 2 == 1):
        return whole + 1
    return whole


def countable(tokens: int) -> int:
    """Return what the ledger makes of a number of tokens."""
    return min(max(tokens, 0), TOKENS_MAX)


def billed(price: Price, prompt: int, cached: int, completion: int, units: float = 0.0) -> tuple[int, int]:
    """Return the tokens and nano-dollars of the ledger's row for this usage."""
    prompt, completion = countable(prompt), countable(completion)
    return prompt + completion, cost(price, prompt, min(countable(cached), prompt), completion, micro_units(units))
