"""How much of what is free could not be used by what is typically asked for.

Fragmentation Gradient Descent (Weng et al., ATC'23): of a block, what a
typical ask cannot use is its fragment: all that is free where the ask does
not fit at all, else what is free on accelerators that could not be part of
it. The expectation over the mix of typical asks is the block's fragmentation,
in accelerators; a placement that raises it least leaves most for the others.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from modelyard.policy.cluster import MANY_CORES, QUANTA


class Typical(msgspec.Struct, frozen=True):
    """An ask that is typical, as ``Ask`` has it, and how many there are of it, by any measure."""

    memory_bytes: int
    count: int = 1
    kinds: frozenset[str] = frozenset()
    """Empty: any."""
    number: float = 1.0
    cores_milli: int = 0


Mix = tuple[Typical, ...]

STANDARD_MIX: Mix = tuple(
    Typical(gib * 1024**3, count, number=number)
    for gib, count, number in (
        (2, 1, 4.0),
        (8, 1, 3.0),
        (20, 1, 2.0),
        (60, 1, 1.0),
        (20, 2, 0.5),
        (60, 4, 0.5),
        (60, 8, 0.25),
    )
)
"""What is assumed before anything was asked for: many small models, some of one accelerator, few of several."""


class _Asks(NamedTuple):
    """A mix as it looks to one kind of accelerator."""

    lost: tuple[float, ...]
    """By free quanta of an accelerator: the quanta that asks for one accelerator are expected not to be able to use."""
    several: tuple[tuple[int, int, float], ...]
    """Asks for several whole ones: quanta of each, how many, and their share of the mix."""


class Fragmentation:
    """The fragmentation of blocks under one mix; remembers every state that it was asked for."""

    __slots__ = ("_cores", "_known", "_of_shape", "mix")

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self._of_shape: dict[tuple[str, int, int], _Asks] = {}
        self._known: dict[tuple[str, int, tuple[int, ...], int], float] = {}
        self._cores = sorted({typical.cores_milli for typical in mix} | {0})

    def of(self, kind: str, memory_bytes: int, quanta: tuple[int, ...], cores: int = MANY_CORES) -> float:
        """Return expected accelerators of a block that a typical ask could not use; ``quanta`` as of ``BlockClass``.

        Where too few ``cores`` are free on its node for an ask, that one could use none of them.
        """
        able = bisect_right(self._cores, cores)
        key = (kind, memory_bytes, quanta, able)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _expected(self._asks(kind, memory_bytes, able), quanta)
        return known

    def _asks(self, kind: str, memory_bytes: int, able: int) -> _Asks:
        found = self._of_shape.get((kind, memory_bytes, able))
        if found is None:
            cores = self._cores[able - 1]
            found = self._of_shape[kind, memory_bytes, able] = _asks_of(self.mix, kind, memory_bytes, cores)
        return found


def _asks_of(mix: Mix, kind: str, memory_bytes: int, cores: int) -> _Asks:
    total = sum(typical.number for typical in mix) or 1.0
    # What fits no accelerator of this kind loses all that is free, as an ask for more than there is would.
    single = [0.0] * (QUANTA + 2)
    several: dict[tuple[int, int], float] = {}
    for typical in mix:
        fits = (not typical.kinds or kind in typical.kinds) and typical.memory_bytes <= memory_bytes
        fits = fits and typical.cores_milli <= cores
        need = -(-typical.memory_bytes * QUANTA // max(memory_bytes, 1)) if fits else QUANTA + 1
        if fits and typical.count > 1:
            several[need, typical.count] = several.get((need, typical.count), 0.0) + typical.number / total
        else:
            single[need] += typical.number / total
    lost = tuple(free * sum(single[free + 1 :]) for free in range(QUANTA + 1))
    return _Asks(lost, tuple((need, count, share) for (need, count), share in several.items()))


def _expected(asks: _Asks, quanta: tuple[int, ...]) -> float:
    lost = sum([asks.lost[state >> 1] for state in quanta])
    if asks.several:
        free = sum([state >> 1 for state in quanta])
        empty = [state >> 1 for state in quanta if state & 1]
        for need, count, share in asks.several:
            usable = [one for one in empty if one >= need] if len(empty) >= count else []
            lost += share * (free - sum(usable) if len(usable) >= count else free)
    return lost / QUANTA


def mix_of(asks: Mapping[Typical, float]) -> Mix:
    """Return the mix of what was asked for, each with its number, in an order that stays the same."""
    ordered = sorted(
        asks.items(),
        key=lambda item: (item[0].memory_bytes, item[0].count, item[0].cores_milli, sorted(item[0].kinds)),
    )
    return tuple(msgspec.structs.replace(typical, number=number) for typical, number in ordered if number > 0)
