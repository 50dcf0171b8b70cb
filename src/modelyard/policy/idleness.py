"""How long to stay awake without a request, learned from the gaps there were.

The hybrid histogram of "Serverless in the Wild" (ATC'20): gaps between
requests are counted by the minute. Where they gather (the histogram is far
from flat) the endpoint stays awake until the 99th percentile of them; where
even the shortest are long it sleeps at once and wakes shortly before the 5th
percentile. Where the gaps say nothing, the fixed time stands.
"""

import math

import msgspec

BIN_S = 60.0
BINS = 240
"""Gaps of more than four hours are for ``policy/forecast.py``, which knows the hour of the day."""
GAPS_MIN = 10
SPREAD_MIN = 2.0
"""Coefficient of variation of the bins above which the histogram says something."""
MARGIN = 0.1
SHORTEST_S = 30.0
_COUNT_MAX = 10_000
"""At so many gaps all counts are halved: what was a year ago fades."""


class Gaps(msgspec.Struct, frozen=True):
    """Gaps by the minute, ``beyond`` those that are longer; ``counts`` ends with its last used bin."""

    counts: tuple[int, ...] = ()
    beyond: int = 0

    @property
    def total(self) -> int:
        """All gaps that were seen."""
        return sum(self.counts) + self.beyond


class Awake(msgspec.Struct, frozen=True):
    """When an endpoint without requests is awake: until ``sleep_s``, and again from ``wake_s`` to ``until_s``."""

    sleep_s: float
    wake_s: float = math.inf
    until_s: float = 0.0
    reason: str = ""

    def is_awake(self, quiet_s: float) -> bool:
        """Say whether it is, after ``quiet_s`` without a request."""
        return quiet_s < self.sleep_s or self.wake_s <= quiet_s < self.until_s


def with_gap(gaps: Gaps, gap_s: float) -> Gaps:
    """Return ``gaps`` and one more."""
    at = int(max(gap_s, 0.0) / BIN_S)
    if gaps.total >= _COUNT_MAX:
        gaps = Gaps(tuple(count // 2 for count in gaps.counts), gaps.beyond // 2)
    if at >= BINS:
        return Gaps(gaps.counts, gaps.beyond + 1)
    counts = [*gaps.counts, *[0] * (at + 1 - len(gaps.counts))]
    counts[at] += 1
    return Gaps(tuple(counts), gaps.beyond)


def awake(gaps: Gaps, fixed_s: float) -> Awake:
    """Return when to be awake; ``fixed_s`` stands where the gaps say nothing."""
    total = gaps.total
    if total < GAPS_MIN:
        return Awake(fixed_s, reason=f"{total} gaps seen, {GAPS_MIN} are needed to learn from")
    spread = _spread(gaps.counts)
    if spread <= SPREAD_MIN:
        return Awake(fixed_s, reason=f"{total} gaps without a pattern")
    if gaps.beyond / total > 0.5:
        return Awake(fixed_s, reason=f"most of {total} gaps are longer than {BINS * BIN_S / 3600:g} h")
    early_s = _quantile_bin(gaps, 0.05) * BIN_S
    late_s = (_quantile_bin(gaps, 0.99) + 1) * BIN_S
    until_s = late_s * (1 + MARGIN)
    text = f"of {total} gaps 5 % are below {early_s:.0f} s and 99 % below {late_s:.0f} s"
    wake_s = early_s * (1 - MARGIN)
    if wake_s > 2 * fixed_s:
        return Awake(max(SHORTEST_S, min(fixed_s, BIN_S)), wake_s, until_s, text)
    return Awake(max(until_s, SHORTEST_S), reason=text)


def priced(gaps: Gaps, fixed_s: float, worth_s: float) -> Awake:
    """Return how long to stay awake so that waiting for nothing and cold starts, at ``worth_s`` each, cost least.

    Over the gaps there were, a gap that ends in time costs its own length, a longer one the time and a cold start.
    """
    total = gaps.total
    if total < GAPS_MIN:
        return Awake(fixed_s, reason=f"{total} gaps seen, {GAPS_MIN} are needed to learn from")
    worth, left, waited = worth_s / BIN_S, total, 0.0
    least, best = worth * total, 0
    for at, count in enumerate(gaps.counts, 1):
        left -= count
        waited += count / 2 + left  # those that end in this minute wait half of it, the others all of it
        if (cost := waited + worth * left) < least:
            least, best = cost, at
    text = f"of {total} gaps, with a cold start worth {worth_s:.0f} s"
    return Awake(max(best * BIN_S * (1 + MARGIN), SHORTEST_S), reason=text)


def _spread(counts: tuple[int, ...]) -> float:
    """Return the coefficient of variation over all bins, those after the last used one too."""
    mean = sum(counts) / BINS
    if mean == 0:
        return 0.0
    squares = sum(count * count for count in counts) / BINS
    return math.sqrt(max(squares - mean * mean, 0.0)) / mean


def _quantile_bin(gaps: Gaps, share: float) -> int:
    """Return the bin below whose end ``share`` of the gaps within the histogram lie."""
    wanted = share * sum(gaps.counts)
    seen = 0
    for at, count in enumerate(gaps.counts):
        seen += count
        if seen >= wanted and count:
            return at
    return max(len(gaps.counts) - 1, 0)
