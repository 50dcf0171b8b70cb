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
    """Return nano-dollars. ``cached`` tokens are some of the ``prompt`` tokens, and billed at ``cached_input``."""
    assert min(prompt, cached, completion, micro_units) >= 0, "tokens and units are counted, never owed"
    cached = min(cached, prompt)
    total = (prompt - cached) * price.input + cached * price.cached_input + completion * price.output
    if not micro_units:
        return _rounded(total, TOKENS_PER_PRICE)
    return _rounded(total * MICRO_PER_UNIT + micro_units * price.unit, TOKENS_PER_PRICE * MICRO_PER_UNIT)


def discounted(price: Price, factor_micro: int) -> Price:
    """Return ``factor_micro`` millionths of a price, each of its parts rounded half to even."""
    if factor_micro == MICRO_PER_UNIT:
        return price
    return Price(
        _rounded(price.input * factor_micro, MICRO_PER_UNIT),
        _rounded(price.cached_input * factor_micro, MICRO_PER_UNIT),
        _rounded(price.output * factor_micro, MICRO_PER_UNIT),
        _rounded(price.unit * factor_micro, MICRO_PER_UNIT),
    )


def dearest(one: Price, other: Price) -> Price:
    """Return a price that is below neither, whatever is used how much."""
    return Price(
        max(one.input, other.input),
        max(one.cached_input, other.cached_input),
        max(one.output, other.output),
        max(one.unit, other.unit),
    )


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
