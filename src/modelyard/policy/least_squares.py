"""Least squares of a few terms none of which may be negative, from their normal equations."""

from collections.abc import Sequence
from math import sqrt

_SINGULAR = 1e-9
_GONE = 1e-100
"""Weights that were forgotten down to this have too few digits left to divide by."""


def non_negative(normal: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x, none of it below zero, with ``normal``·x closest to ``right``.

    ``normal`` is symmetric: sums of the products of terms. The term that asks most to be negative is left out until
    none does, which is not always the best of all choices but close, and takes a handful of steps. A term that was
    never there, or is forgotten, or is no more than others together, is 0.
    """
    scales = [sqrt(max(normal[term][term], 0.0)) for term in range(len(right))]
    active = [term for term, scale in enumerate(scales) if scale > _GONE]
    found = [0.0] * len(right)
    while active:
        rows = [
            [normal[row][column] / (scales[row] * scales[column]) for column in active] + [right[row] / scales[row]]
            for row in active
        ]
        values = _solve(rows)
        lowest = min(range(len(values)), key=values.__getitem__)
        if values[lowest] >= 0.0:
            for term, value in zip(active, values, strict=True):
                found[term] = value / scales[term]
            break
        del active[lowest]
    return found


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve linear equations whose right side is last, by elimination; what is not determined is 0."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        top = rows[column]
        if abs(top[column]) < _SINGULAR:
            rows[column] = [1.0 if index == column else 0.0 for index in range(size + 1)]
            continue
        for row in range(size):
            if row != column and rows[row][column]:
                factor = rows[row][column] / top[column]
                rows[row] = [value - factor * above for value, above in zip(rows[row], top, strict=True)]
    return [rows[row][-1] / rows[row][row] for row in range(size)]
