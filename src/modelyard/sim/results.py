"""What was tried and what it came to, in one form for both levels: figures by seed, and what happened over time.

Commands print it, and ``--json`` is it, so that names here are a promise.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

Column = list[float | None]
"""A value at each time; None where there was nothing to measure."""


class Figure(msgspec.Struct, frozen=True):
    """One line of the table. ``unit`` is ``s``, ``ms``, ``share`` (0 to 1), ``usd``, ``hours``, ``rate`` (a second) or
    ``count``; ``better`` is ``less``, ``more`` or ``""`` where neither is."""

    key: str
    label: str
    unit: str
    better: str = ""


class Ran(msgspec.Struct, frozen=True):
    """One variant with one seed. ``series`` has equally long columns; ``hours`` is when (from the beginning)."""

    seed: int
    figures: dict[str, float]
    series: dict[str, Column]


class Tried(msgspec.Struct, frozen=True):
    """One variant with all its seeds, in their order."""

    name: str
    runs: tuple[Ran, ...]

    def values(self, key: str) -> list[float]:
        """Return a figure by seed, of those that have it."""
        return [run.figures[key] for run in self.runs if key in run.figures]

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure over the seeds, None where there is none."""
        found = self.values(key)
        return fmean(found) if found else None


class Results(msgspec.Struct, frozen=True):
    """All variants side by side; the first is what the others are compared with."""

    title: str
    level: str
    """``request`` or ``fleet``."""
    figures: tuple[Figure, ...]
    tried: tuple[Tried, ...]
    notes: tuple[str, ...] = ()
    """What a reader has to know of the numbers."""

    @property
    def seeds(self) -> list[int]:
        """The seeds that each variant ran with."""
        return [run.seed for run in self.tried[0].runs] if self.tried else []


def present(figures: Sequence[Figure], runs: Sequence[Mapping[str, float]]) -> tuple[Figure, ...]:
    """Return those of ``figures`` that any run has."""
    return tuple(figure for figure in figures if any(figure.key in run for run in runs))
