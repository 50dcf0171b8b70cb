"""What gateways count of each release, and what comes of it: the same numbers judge a canary and size an endpoint."""

import msgspec

_RATIO = 1.25


def _bounds() -> tuple[float, ...]:
    bounds = [0.001]
    while bounds[-1] < 600.0:
        bounds.append(round(bounds[-1] * _RATIO, 6))
    return tuple(bounds)


BOUNDS_S = _bounds()
"""Upper bounds of the histograms' buckets in seconds, a quarter apart; a last bucket holds what is above."""


class ReleaseCounts(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one release since the gateway started; only differences mean something.

    Histograms count by ``BOUNDS_S`` and may end early: what is missing at their end is 0. ``errors`` are answers that
    failed for a reason of ours or the engine's (never 4xx, never a client that left).
    """

    endpoint_id: str
    version_id: str
    requests: int
    errors: int
    ttft: tuple[int, ...] = ()
    """From arrival at the gateway to the first token."""
    itl: tuple[int, ...] = ()
    """Mean time between tokens, one count a stream."""
    latency: tuple[int, ...] = ()
    """From arrival to the end of the answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    service_s: float = 0.0
    """Seconds that requests spent on replicas, added up."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a release, or a whole endpoint, in the last ``seconds``; a quantile of nothing is None."""

    seconds: float
    requests: int = 0
    errors: int = 0
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p95_s: float | None = None
    latency_p99_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    service_s: float = 0.0

    @property
    def error_share(self) -> float:
        """Share of requests that failed; 0 of none."""
        return self.errors / self.requests if self.requests else 0.0
