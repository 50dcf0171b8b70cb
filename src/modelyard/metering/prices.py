"""Prices: configuration in dollars to exact whole numbers.

People write US dollars per million tokens (``0.15``) and per unit (``0.006``);
a float of that is not 0.15, so the conversion goes through its shortest decimal
text.
"""

from collections.abc import Mapping
from decimal import Decimal

from modelyard.config import PriceConfig
from modelyard.domain.usage import NANO_PER_USD, Price
from modelyard.errors import StartupError
from modelyard.policy.pricing import TOKENS_PER_PRICE, cost, micro_units

__all__ = ["ANY_MODEL", "USD_MAX", "cost", "micro_units", "price_of"]

ANY_MODEL = "*"
"""The name whose price all models have that are not named."""

USD_MAX = 1_000_000
"""Highest price per million tokens; a dollar a token. Keeps every cost and sum within 64 bits."""

UNIT_USD_MAX = 10
"""Highest price of a unit, for the same reason."""


def release_price(prices: Mapping[str, PriceConfig], name: str, version: str) -> Price | None:
    """Return the price of one version of the endpoint ``name`` (``[prices."NAME@VERSION"]``), None where it has none.

    Raises:
        StartupError: the configured price is no amount of money.
    """
    key = f"{name}@{version}"
    return price_of(prices, key) if key in prices else None


def price_of(prices: Mapping[str, PriceConfig], name: str) -> Price:
    """Return the price of the endpoint ``name``: its own, else the one of ``"*"``, else free.

    Raises:
        StartupError: the configured price is no amount of money.
    """
    chosen = prices.get(name) or prices.get(ANY_MODEL)
    if chosen is None:
        return Price()
    cached = chosen.input if chosen.cached_input is None else chosen.cached_input
    return Price(
        input=_nano(chosen.input, f"prices.{name}.input"),
        cached_input=_nano(cached, f"prices.{name}.cached_input"),
        output=_nano(chosen.output, f"prices.{name}.output"),
        unit=_nano(chosen.unit, f"prices.{name}.unit", most=UNIT_USD_MAX) * TOKENS_PER_PRICE,
    )


def usd(nanousd: int) -> str:
    """Return nano-dollars as an exact decimal number of dollars, without trailing zeros."""
    whole, rest = divmod(abs(nanousd), NANO_PER_USD)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if nanousd < 0 else text


def _nano(usd: float, setting: str, *, most: int = USD_MAX) -> int:
    if not 0 <= usd <= most:
        raise StartupError(f"Bad setting '{setting}': {usd} is not between 0 and {most} US dollars.")
    return round(Decimal(str(usd)) * NANO_PER_USD)
