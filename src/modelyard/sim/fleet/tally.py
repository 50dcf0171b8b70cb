"""What a simulated time came to: counts, and times to the first token as a histogram."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LATE_S = 5.0
_LEAST_S, _STEPS, _BINS = 1e-3, 40, 280
"""Bins of a fortieth of a decade, from a millisecond to three hours."""
_PER_LOG, _FIRST = _STEPS / math.log(10), _STEPS * math.log10(_LEAST_S)
PROMPTS = (0.25, 0.5, 0.8, 1.3, 2.5, 6.0)
"""Prompts by length, in means, and how many are so long: a lognormal of sigma 1 in six parts (ServeGen and Azure have
tails of this kind)."""
PROMPT_SHARES = (0.26, 0.25, 0.2, 0.155, 0.11, 0.025)


class Histogram:
    """Counts by seconds, on a logarithmic scale: quantiles are good to 6 %."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS)

    def __add__(self, other: "Histogram") -> "Histogram":
        both = Histogram()
        both.counts = self.counts + other.counts
        return both

    def __sub__(self, other: "Histogram") -> "Histogram":
        left = Histogram()
        left.counts = self.counts - other.counts
        return left

    def add(self, seconds: Floats, numbers: Floats) -> None:
        """Count ``numbers`` of each of ``seconds``."""
        at = (np.log(np.maximum(seconds, _LEAST_S)) * _PER_LOG - _FIRST).astype(np.int64)
        np.minimum(at, _BINS - 1, out=at)
        self.counts += np.bincount(at, weights=numbers, minlength=_BINS)

    def add_one(self, seconds: float, number: float) -> None:
        """Count ``number`` requests of one length."""
        self.counts[min(_BINS - 1, max(0, int(math.log10(max(seconds, _LEAST_S) / _LEAST_S) * _STEPS)))] += number

    @property
    def total(self) -> float:
        """All that were counted."""
        return float(self.counts.sum())

    def quantile(self, share: float) -> float:
        """Return the seconds that ``share`` of all are below, the middle of a bin; 0 of nothing."""
        if not self.total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.total))
        return float(_LEAST_S * 10 ** ((min(at, _BINS - 1) + 0.5) / _STEPS))

    def share_above(self, seconds: float) -> float:
        """Return the share of those that took longer."""
        if not self.total:
            return 0.0
        at = int(math.log10(seconds / _LEAST_S) * _STEPS)
        return float(self.counts[at:].sum() / self.total)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The counted time of one run. Shares are of requests, hours of accelerators."""

    endpoints: int
    deployments: int
    hours: float
    requests: float
    online_gpu_hours: float
    batch_gpu_hours: float
    """Of accelerators that did nothing but batches."""
    dedicated_gpu_hours: float
    """Of one replica each, all the time, whatever is asked: the accelerators of every deployment once."""
    usd: float
    gpus_most: int
    online_busy: float
    """Share of the online accelerators' time that requests in real time needed."""
    total_busy: float
    """With batches, over all accelerators that somebody held."""
    late: float
    """Waited for a slot, or a load, for more than five seconds."""
    dropped: float
    failed: float
    """Lost with a node, an engine, or given up."""
    ttft_p50_s: float
    ttft_p99_s: float
    """Of LLM requests that met a ready replica."""
    ttft_all_p99_s: float
    activations: int
    """Endpoints that had a request while nothing was ready for them."""
    starts: int
    no_room: int
    evicted: int
    decisions: int
    looks: int
    """Endpoints times ticks: the decisions that would have been made without skipping."""
    wakes: int = 0
    """Endpoints whose request met an engine that slept."""
    moves: int = 0
    """Replicas that were started elsewhere so that accelerators became empty, or whole."""
    stolen: int = 0
    """Replicas that were taken from a warm pool."""
    batch_requests: float = 0.0
    batch_done: float = 0.0
    lost_nodes: int = 0
    reclaimed: int = 0
    crashes: int = 0
    contention: float = 0.0
    """Share of shared accelerators' time in which more was asked of one than it has."""
    by_kind: dict[str, float] = {}
    """GPU-hours online by kind."""
    series: dict[str, list[float]] = {}
    """By ten minutes: what pictures are drawn from."""

    @property
    def gpu_hours(self) -> float:
        """Of all."""
        return self.online_gpu_hours + self.batch_gpu_hours

    @property
    def availability(self) -> float:
        """Share of requests that were answered."""
        return 1.0 - self.dropped - self.failed
