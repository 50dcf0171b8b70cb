"""What a gateway counts of each release: the numbers that size an endpoint and judge a canary.

One ``ReleaseTally`` a release, changed once an attempt: three additions, three
buckets. Nothing is counted for a token. An attempt that a replica failed, and
that went on elsewhere, counts as a failed request of the release it left: a
canary whose engine dies must not look well because others answered for it.
"""

from bisect import bisect_left

from modelyard.domain.signals import BOUNDS_S, ReleaseCounts

TOLD_S = 900.0
"""Longest without a request that a release is told of; then it is forgotten, and counts from 0 when one comes."""
GATEWAY_TIMEOUT = 504
SERVER_ERROR = 500


class ReleaseTally:
    """The totals of one release. Histograms are as long as they must be."""

    __slots__ = (
        "_told",
        "changed_s",
        "completion_tokens",
        "errors",
        "itl",
        "latency",
        "prompt_tokens",
        "requests",
        "service_s",
        "ttft",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.ttft: list[int] = []
        self.itl: list[int] = []
        self.latency: list[int] = []
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.service_s = 0.0
        self.changed_s = 0.0
        self._told: ReleaseCounts | None = None

    def __repr__(self) -> str:
        return f"<ReleaseTally: {self.requests} requests, {self.errors} errors>"

    def moved(self, service_s: float, now_s: float) -> None:
        """Count an attempt that failed and goes on elsewhere."""
        self.requests += 1
        self.errors += 1
        self.service_s += service_s
        self.changed_s = now_s

    def ended(
        self,
        status: int,
        latency_s: float,
        first_s: float | None,
        service_s: float,
        prompt_tokens: int,
        completion_tokens: int,
        now_s: float,
    ) -> None:
        """Count a request that ended; ``first_s``: from arrival to its first token. By position, for speed."""
        self.requests += 1
        self.service_s += service_s
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.changed_s = now_s
        if first_s is not None:
            _count(self.ttft, first_s)
        if status == 200:
            _count(self.latency, latency_s)
            if first_s is not None and completion_tokens > 1:
                _count(self.itl, (latency_s - first_s) / (completion_tokens - 1))
        elif status >= SERVER_ERROR:
            self.errors += 1
            if status == GATEWAY_TIMEOUT:
                # Other failures are quick, and would make a broken engine look fast.
                _count(self.latency, latency_s)

    def counts(self, endpoint_id: str, version_id: str) -> ReleaseCounts:
        """Return the totals as they are told; the same object while nothing was counted."""
        told = self._told
        if told is None or told.requests != self.requests:
            told = self._told = ReleaseCounts(
                endpoint_id,
                version_id,
                self.requests,
                self.errors,
                tuple(self.ttft),
                tuple(self.itl),
                tuple(self.latency),
                self.prompt_tokens,
                self.completion_tokens,
                self.service_s,
            )
        return told


def _count(histogram: list[int], seconds: float) -> None:
    bucket = bisect_left(BOUNDS_S, seconds)
    try:
        histogram[bucket] += 1
    except IndexError:
        # It ends with its last bucket that has anything, so that nothing has to be trimmed when it is told.
        histogram.extend([0] * (bucket - len(histogram)))
        histogram.append(1)
