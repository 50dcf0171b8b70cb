"""What a request costs.

Whole nano-dollars, rounded once a ledger row and half to even, so that sums of
rows are exact and no direction of rounding adds up.
"""

from modelyard.domain.usage import Price

TOKENS_PER_PRICE = 1_000_000
"""A ``Price`` is for this many tokens."""


def cost(price: Price, prompt: int, cached: int, completion: int) -> int:
    """Return nano-dollars. ``cached`` tokens are some of the ``prompt`` tokens, and billed at ``cached_input``."""
    assert min(prompt, cached, completion) >= 0, "tokens are counted, never owed"
    cached = min(cached, prompt)
    total = (prompt - cached) * price.input + cached * price.cached_input + completion * price.output
    whole, rest = divmod(total, TOKENS_PER_PRICE)
    if rest * 2 > TOKENS_PER_PRICE or (rest * 2 == TOKENS_PER_PRICE and whole % 2 == 1):
        return whole + 1
    return whole
