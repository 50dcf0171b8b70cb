"""How many retries an endpoint bears: a share of its requests, so that a failure does not become a storm.

When engines answer 503 because they are overloaded, each retry is load on top;
with three attempts a request the load triples just when it must fall, and may
stay there after the cause has gone (Bronson et al., "Metastable Failures in
Distributed Systems", HotOS '21). So within any ten seconds at most a share of
the requests may be retries, and credit older than that is void: an idle hour
must not pay for a storm. (Finagle's ``RetryBudget``; Envoy's retry budget.)
"""

ATTEMPTS_MAX = 3
"""Replicas that one request is sent to, at most."""
WINDOW_BUCKETS = 10
"""Seconds, one bucket each, that credit lasts."""
RESERVE = 5
"""Retries in ten seconds that even a quiet endpoint may make; a share of few requests is less than one."""


class RetryBudget:
    """The retries of one endpoint. ``share``: retries allowed per request, 0 to 1; 0 allows none but the reserve.

    Within any ten seconds (in whole seconds): retries ≤ max(reserve, share · requests) + granted. ``deposit`` needs
    no clock, because ``roll`` is called by the gateway's sweep; without it credit only expires too early.
    """

    __slots__ = ("_buckets", "_granted", "_retried", "_second", "_sums", "requests", "reserve", "share")

    def __init__(self, share: float, *, reserve: int = RESERVE) -> None:
        self.share = share
        self.reserve = reserve
        self.requests = 0
        """Requests since the last roll; hot callers may add to it themselves instead of calling ``deposit``."""
        self._retried = 0
        self._granted = 0
        self._second = 0
        self._buckets: list[tuple[int, int, int]] = []
        """(requests, retries, grants) of past seconds, the newest last."""
        self._sums = (0, 0, 0)

    def __repr__(self) -> str:
        return f"<RetryBudget: {self.retries} of {self.allowed} retries used>"

    @property
    def retries(self) -> int:
        """Return the retries in the window."""
        return self._sums[1] + self._retried

    @property
    def allowed(self) -> int:
        """Return how many retries the window bears in all."""
        earned = int(self.share * (self._sums[0] + self.requests) + 1e-9)
        return max(self.reserve, earned) + self._sums[2] + self._granted

    def deposit(self) -> None:
        """Count a request (its first attempt only)."""
        self.requests += 1

    def grant(self, requests: int) -> None:
        """Allow ``requests`` retries more: those that were on a replica when it was lost.

        They are no storm: the replica that made them fail is ejected, and cannot do it again before it was probed.
        Call it once an ejection, with what ran there.
        """
        self._granted += requests

    def has_left(self, now_s: float) -> bool:
        """Say whether one more retry may be made."""
        self.roll(now_s)
        return self.retries < self.allowed

    def take(self, now_s: float) -> bool:
        """Say whether one more retry may be made, and count it if so."""
        if not self.has_left(now_s):
            return False
        self._retried += 1
        return True

    def roll(self, now_s: float) -> None:
        """Move the window on to ``now_s``; what was noted since the last call counts for the second of that call."""
        second = int(now_s)
        steps = second - self._second
        if steps <= 0:
            return
        self._second = second
        buckets = self._buckets
        if steps >= WINDOW_BUCKETS:
            buckets.clear()
        else:
            buckets.append((self.requests, self._retried, self._granted))
            buckets.extend([(0, 0, 0)] * (steps - 1))
            del buckets[: max(0, len(buckets) - (WINDOW_BUCKETS - 1))]
        self.requests = self._retried = self._granted = 0
        self._sums = (sum(b[0] for b in buckets), sum(b[1] for b in buckets), sum(b[2] for b in buckets))
