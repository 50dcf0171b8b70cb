"""Distributions of lengths as people write them: ``512``, ``uniform:100:900``, ``lognormal:512:0.6``.

Load tests and simulations draw prompts and answers from them.
"""

import re
from typing import Protocol

import msgspec

TOKENS_MAX = 1_000_000
SIGMA_MAX = 10.0
"""Of a logarithm: from a thousandth to a million times the median is 7, and some hundreds are no number any more."""


class Chance(Protocol):
    """What lengths are drawn with: a ``random.Random``."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number between two."""
        ...

    def gauss(self, mu: float, sigma: float) -> float:
        """Return a normal one."""
        ...

    def lognormvariate(self, mu: float, sigma: float) -> float:
        """Return one whose logarithm is normal."""
        ...


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of lengths: ``512``, ``uniform:100:900``, ``normal:512:128`` or ``lognormal:512:0.6``."""

    kind: str
    first: float
    second: float = 0.0

    @property
    def mean(self) -> float:
        """The length that is meant."""
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def draw(self, generator: Chance) -> int:
        """Return a length, at least 1."""
        match self.kind:
            case "uniform":
                drawn = generator.uniform(self.first, self.second)
            case "normal":
                drawn = generator.gauss(self.first, self.second)
            case "lognormal":  # the first is the median
                drawn = self.first * generator.lognormvariate(0.0, self.second)
            case _:
                drawn = self.first
        return min(max(1, round(drawn)), TOKENS_MAX)


def lengths_of(text: str) -> Lengths:
    """Return what ``text`` says.

    Raises:
        ValueError: it says nothing that is known.
    """
    kind, *numbers = text.split(":") if ":" in text else ("constant", text)
    wanted = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2}.get(kind, -1)
    if len(numbers) != wanted or not all(re.fullmatch(r"\d{1,7}(\.\d{1,6})?", number) for number in numbers):
        raise ValueError(f"'{text}' is no length; write 512, uniform:100:900, normal:512:128 or lognormal:512:0.6")
    found = Lengths(kind, *map(float, numbers))
    if found.first < 1 or (kind == "uniform" and found.second < found.first):
        raise ValueError(f"'{text}' is no length: it begins below 1, or ends before it begins")
    if kind == "lognormal" and found.second > SIGMA_MAX:
        raise ValueError(f"'{text}' is no length: its spread is above {SIGMA_MAX:g}")
    return found
