"""How many requests come for every endpoint in every tick.

Counts are negative binomial with the slot's mean, and with the variance that the client's CV gives to the counts of a
renewal process; a CV of 1 is Poisson's. Drawn for ten minutes at once.
"""

import math

import numpy as np
from numpy.typing import NDArray

from modelyard.sim.fleet.population import Population
from modelyard.sim.rates import SLOT_S

_RARE = 60.0
"""Up to so many clumps in ten minutes it is cheaper to draw each than to draw every tick."""
_NEARLY = 1e-3
"""An excess of variance over the mean that is Poisson's, but for rounding."""


class Arrivals:
    """Counts by tick, from ``begin_s`` (seconds of the trace) on. ``active`` are the endpoints that send any now."""

    def __init__(self, population: Population, *, seed: int, begin_s: float, tick_s: float) -> None:
        self._population = population
        self._seed = seed
        self._begin_s = begin_s
        self._tick_s = tick_s
        self._slot = -1
        self._first = 0
        self._rows: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.active: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.rate = np.zeros(population.endpoints)
        self.burst = np.ones(population.endpoints)

    def at(self, tick: int) -> NDArray[np.int64]:
        """Return the counts of the ``active`` endpoints in a tick; ticks are asked for in order."""
        slot = int((self._begin_s + tick * self._tick_s) // SLOT_S)
        if slot != self._slot:
            self._draw(slot, tick)
        row: NDArray[np.int64] = self._rows[tick - self._first]
        return row

    def _draw(self, slot: int, tick: int) -> None:
        # A generator of its own for each slot: what is drawn does not depend on where a run began.
        chance = np.random.Generator(np.random.PCG64([self._seed, slot]))
        self.rate, self.burst = self._population.rate(slot), self._population.burst(slot)
        self.active = np.flatnonzero(self.rate > 0)
        # Where a slot is no whole number of ticks, some have one more; and sums of fractions are not exact.
        ticks = math.floor(SLOT_S / self._tick_s) + (0 if SLOT_S % self._tick_s == 0 and self._tick_s % 1 == 0 else 2)
        mean = self.rate[self.active] * self._tick_s
        excess = np.maximum(self.burst[self.active] - 1.0, _NEARLY)
        self._slot, self._first = slot, tick
        self._rows = np.zeros((ticks, len(self.active)), dtype=np.int64)
        # A negative binomial is a Poisson number of clumps, whose sizes follow the logarithmic series.
        clumps = mean / excess * np.log1p(excess)
        is_rare = clumps * ticks < _RARE
        rare, dense = np.flatnonzero(is_rare), np.flatnonzero(~is_rare)
        number = chance.poisson(clumps[rare] * ticks)
        who = np.repeat(rare, number)
        sizes = chance.logseries(np.repeat(excess[rare] / (1 + excess[rare]), number))
        np.add.at(self._rows, (chance.integers(0, ticks, len(who)), who), sizes)
        shape = np.broadcast_to(mean[dense] / excess[dense], (ticks, len(dense)))
        self._rows[:, dense] = chance.poisson(chance.gamma(shape) * excess[dense])
