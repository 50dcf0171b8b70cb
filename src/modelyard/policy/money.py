"""From exact nano-units to what can be paid: minor units, rounded once, half to even.

Half to even, since rounding up at every half would add up in one direction.
All in whole numbers; there is no float on the way.
"""

from collections.abc import Sequence

from modelyard.domain.usage import NANO_PER_USD

_NO_DIGITS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"
_THREE_DIGITS = "BHD IQD JOD KWD LYD OMR TND"
_DIGITS = {**dict.fromkeys(_NO_DIGITS.split(), 0), **dict.fromkeys(_THREE_DIGITS.split(), 3)}
"""Digits behind the point of the currencies that do not have two (ISO 4217)."""


def digits(currency: str) -> int:
    """Return how many digits amounts of a currency have behind the point."""
    return _DIGITS.get(currency, 2)


def divided(amount: int, divisor: int) -> int:
    """Return ``amount / divisor`` as a whole number, half to even."""
    whole, rest = divmod(amount, divisor)
    if rest * 2 > divisor or (rest * 2 == divisor and whole % 2):
        return whole + 1
    return whole


def minor(nano: int, currency: str) -> int:
    """Return an exact amount in minor units of ``currency``."""
    return divided(nano, nano_per_minor(currency))


def nano_per_minor(currency: str) -> int:
    """Return how many nano-units a minor unit is."""
    return int(NANO_PER_USD // 10 ** digits(currency))


def allotted(nanos: Sequence[int], total: int, currency: str) -> list[int]:
    """Return a whole number of minor units for each exact amount, so that they add up to ``total``.

    Each is what its amount is cut to, and those with the largest rest get one more (the largest remainder): so none is
    off by a whole unit. ``total`` is the rounded sum of ``nanos``, none of which is negative.
    """
    size = nano_per_minor(currency)
    found = [nano // size for nano in nanos]
    missing = total - sum(found)
    by_rest = sorted(range(len(nanos)), key=lambda at: (-(nanos[at] % size), at))
    assert 0 <= missing <= len(nanos), "the sum of what was cut off is less than one each"
    for at in by_rest[:missing]:
        found[at] += 1
    return found


def decimal(amount: int, currency: str) -> str:
    """Return minor units as a number with a point: 1234 is ``12.34``."""
    places = digits(currency)
    whole, rest = divmod(abs(amount), 10**places)
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole}.{rest:0{places}}" if places else f"{sign}{whole}"


def shown(nano: int, currency: str) -> str:
    """Return an exact amount as people read it: ``$0.25``, or ``0.25 EUR``. All sentences have it from here."""
    if currency == "USD":
        return f"-${exact(-nano)}" if nano < 0 else f"${exact(nano)}"
    return f"{exact(nano)} {currency}"


def exact(nano: int) -> str:
    """Return nano-units as a number with a point, all its digits and no more."""
    whole, rest = divmod(abs(nano), NANO_PER_USD)
    text = f"{whole}.{rest:09}".rstrip("0").rstrip(".")
    return f"-{text}" if nano < 0 else text
