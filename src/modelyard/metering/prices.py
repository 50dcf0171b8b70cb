"""Configured prices: dollars to exact whole numbers.

People write US dollars per million tokens (``0.15``) and per unit (``0.006``);
a float of that is not 0.15, so the conversion goes through its shortest decimal
text.
"""

import re
from collections.abc import Mapping
from decimal import Decimal

from modelyard.config.billing import PriceConfig
from modelyard.domain.prices import ANY_MODEL, PriceEntry
from modelyard.domain.usage import MICRO_PER_UNIT, NANO_PER_USD, Price
from modelyard.errors import StartupError
from modelyard.policy.pricing import TOKENS_PER_PRICE, cost, micro_units

__all__ = ["ANY_MODEL", "USD_MAX", "configured", "cost", "exact_nano", "micro_units", "price_of"]

_AMOUNT = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?")

USD_MAX = 1_000_000
"""Highest price per million tokens; a dollar a token. Keeps every cost and sum within 64 bits."""

NOISE = 10**12
"""A float is less off than one part in so many."""
REQUEST_USD_MAX = 1000
"""Highest price of a request, for the same reason."""

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
        request=_nano(chosen.request, f"prices.{name}.request", most=REQUEST_USD_MAX),
        batch_micro=None if chosen.batch_factor is None else micro_of(chosen.batch_factor),
    )


def configured(prices: Mapping[str, PriceConfig]) -> list[PriceEntry]:
    """Return the configured prices as entries that began before all time.

    Raises:
        StartupError: one is no amount of money.
    """
    found = []
    for name in prices:
        model, _, version = name.partition("@")
        found.append(PriceEntry(f"configured:{name}", model, price_of(prices, name), effective_from=0, version=version))
    return found


def exact_nano(text: str) -> int | None:
    """Return an amount as people write it (``12.5``) in whole nano-units; None if it is no such amount.

    More than nine digits behind the point are no amount: they would be rounded, and nobody would see it.
    """
    match = _AMOUNT.fullmatch(text)
    return int(match[1]) * NANO_PER_USD + int((match[2] or "").ljust(9, "0")) if match else None


def nano_of(usd: float) -> int:
    """Return a configured amount in whole nano-units, by its shortest decimal text."""
    return round(Decimal(str(usd)) * NANO_PER_USD)


def micro_of(share: float) -> int:
    """Return a configured share in whole millionths, by its shortest decimal text."""
    return round(Decimal(str(share)) * MICRO_PER_UNIT)


def usd(nanousd: int) -> str:
    """Return nano-dollars as an exact decimal number of dollars, without trailing zeros."""
    whole, rest = divmod(abs(nanousd), NANO_PER_USD)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if nanousd < 0 else text


def _nano(usd: float, setting: str, *, most: int = USD_MAX) -> int:
    if not 0 <= usd <= most:
        raise StartupError(f"Bad setting '{setting}': {usd} is not between 0 and {most}.")
    exact = Decimal(str(usd)) * NANO_PER_USD
    # What a float is off by is no digit that somebody wrote.
    if abs(exact - round(exact)) * NOISE > exact:
        raise StartupError(f"Bad setting '{setting}': {usd} has more than nine digits behind the point.")
    return nano_of(usd)
