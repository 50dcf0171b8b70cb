"""Requests that came, from what gateways count: how many since the last look, and how many a second.

A gateway counts from its start, so only differences mean something. What it
had counted before this controller first heard of it is not known to be new;
one that joins later counts whole. Lines of batches are left out: they have a
day, and nobody has to be awake before they come.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

from modelyard.domain.demand import Report

KEPT_S = 120.0
SETTLED_S = 30.0
"""After this time a gateway that nobody knows is a new one."""


class Arrivals:
    """Differences of counters; ``now_s`` is monotonic."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._counted: dict[tuple[str, str], int] = {}
        self._recent: dict[str, deque[tuple[float, int]]] = defaultdict(deque)
        """Requests of each endpoint and when they were told, for rates."""

    def __repr__(self) -> str:
        return f"<Arrivals of {len(self._recent)} endpoints>"

    def take(self, reports: Mapping[str, Report], now_s: float) -> dict[str, int]:
        """Return the new requests of each endpoint that had some."""
        new: dict[str, int] = defaultdict(int)
        is_settled = now_s - self._began_s > SETTLED_S
        counted: dict[tuple[str, str], int] = {}
        for gateway_id, report in reports.items():
            for row in report.endpoints:
                key = (gateway_id, row.endpoint_id)
                arrivals = row.arrivals - row.batch_arrivals
                before = self._counted.get(key, 0 if is_settled else arrivals)
                # A smaller count is of a gateway that began anew.
                fresh = arrivals - before if arrivals >= before else arrivals
                counted[key] = arrivals
                if fresh:
                    new[row.endpoint_id] += fresh
        # A gateway that is away for a moment comes back with its count; one that is gone for good costs a few words.
        self._counted |= counted
        for endpoint_id, number in new.items():
            self._recent[endpoint_id].append((now_s, number))
        self._forget(now_s)
        return new

    def rate(self, endpoint_id: str, now_s: float, seconds: float = 60.0) -> float | None:
        """Return requests/s of the last ``seconds`` (at most 120); None before there were so many."""
        if now_s - self._began_s < seconds:
            return None
        recent = self._recent.get(endpoint_id, ())
        return sum(number for at_s, number in recent if at_s > now_s - seconds) / seconds

    def _forget(self, now_s: float) -> None:
        for endpoint_id, recent in list(self._recent.items()):
            while recent and recent[0][0] < now_s - KEPT_S:
                recent.popleft()
            if not recent:
                del self._recent[endpoint_id]
