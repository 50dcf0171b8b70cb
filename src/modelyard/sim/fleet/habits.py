"""The gaps between requests that deployments had before a run begins, as a controller that ran for days knows them.

Production keeps gaps with the forecast's profile (``Seen.gaps``), so an endpoint that learns its idle time has days of
them behind it. A run that began without any would show learned idle times as they are in the first hours only.
"""

import numpy as np

from modelyard.policy.idleness import BIN_S, BINS, Gaps
from modelyard.sim.fleet.arrivals import Arrivals
from modelyard.sim.fleet.population import Floats, Population
from modelyard.sim.rates import SLOT_S

_TICKS = round(SLOT_S / BIN_S)


def gaps_before(population: Population, *, begin_s: float, days: float, seed: int) -> list[Gaps]:
    """Return the gaps of every deployment in the ``days`` before ``begin_s`` (seconds of the trace), by the minute."""
    last = int(begin_s // SLOT_S)
    first = max(last - round(days * 86_400 / SLOT_S), 0)
    number = len(population.deployments)
    arrivals = Arrivals(population, seed=seed, begin_s=first * SLOT_S, tick_s=BIN_S)
    chance = np.random.Generator(np.random.PCG64([seed, first]))
    counts = np.zeros((number, BINS + 1), dtype=np.int64)
    asked_s = np.full(number, np.nan)
    for tick in range((last - first) * _TICKS):
        came = arrivals.at(tick)
        where = population.deployment[arrivals.active]
        requests = np.bincount(where, weights=came, minlength=number).astype(np.float64)
        at = np.flatnonzero(requests)
        begin, end = _edges(requests[at], chance)
        gap_s = (tick + begin) * BIN_S - asked_s[at]
        # Shorter ones are of no interest to whoever sleeps; the first request ends none.
        ended = np.flatnonzero(gap_s >= BIN_S)
        bins = np.minimum((gap_s[ended] / BIN_S).astype(np.int64), BINS)
        counts[at[ended], bins] += 1
        asked_s[at] = (tick + end) * BIN_S
    return [_gaps(row) for row in counts]


def _edges(requests: Floats, chance: np.random.Generator) -> tuple[Floats, Floats]:
    """Return where in a minute the first and the last of so many requests are, as shares of it."""
    end = chance.random(len(requests)) ** (1.0 / requests)
    others = np.maximum(requests - 1.0, 1.0)
    begin = end * (1.0 - chance.random(len(requests)) ** (1.0 / others))
    return np.where(requests > 1.0, begin, end), end


def _gaps(row: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Gaps:
    used = np.flatnonzero(row[:BINS])
    return Gaps(tuple(row[: used[-1] + 1].tolist()) if len(used) else (), int(row[BINS]))
