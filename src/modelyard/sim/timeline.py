"""What happens in a world of requests over time: what pictures are drawn from.

A timeline looks at the world from outside its calendar (``world.Watch``), so that a world that is watched is equal to
one that is not, to the last digit. What requests saw is put to the time at which they came.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf

from modelyard.sim.comparison import spread
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.results import Column
from modelyard.sim.world import Replica, World

POINTS = 100
"""About so many points: as many as a picture shows."""
_STEPS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
OF_WORLD = ("replicas", "loading", "running", "waiting", "busy", "kv", "tokens_s", "usd_per_hour")
OF_REQUESTS = ("requests_s", "refused", "ttft_p50_s", "ttft_p99_s")


def every_s(arrivals: Sequence[Arrival]) -> float:
    """Return how far points are to be apart."""
    span_s = arrivals[-1].at_s if arrivals else 0.0
    return next((float(step) for step in _STEPS_S if span_s / step <= POINTS), float(ceil(span_s / POINTS)))


class Timeline:
    """Columns that grow by a point every ``every_s``. ``prices`` are dollars for an hour of a replica, by version."""

    def __init__(
        self, every_s: float, prices: Mapping[str, float], progress: Callable[[float], None] | None = None
    ) -> None:
        self.every_s = every_s
        self.next_s = every_s
        self.columns: dict[str, list[float]] = {name: [] for name in ("hours", *OF_WORLD)}
        self._prices = prices
        self._progress = progress
        self._busy_s: dict[str, float] = {}
        self._tokens: dict[str, float] = {}

    def look(self, world: World) -> None:
        """Add a point: what is now, and what was since the last one."""
        now_s = self.next_s
        self.next_s = now_s + self.every_s
        replicas = [one for one in (*world.replicas.values(), *world.gone) if one.gone_s > now_s - self.every_s]
        live = [one for one in replicas if one.gone_s > now_s]
        serving = [one for one in live if one.ready_s <= now_s]
        lived = {one.id: self._lived_s(one, now_s) for one in replicas}
        busy_s = sum(self._since(self._busy_s, one.id, one.engine.busy_by(now_s)) for one in replicas)
        tokens = sum(self._since(self._tokens, one.id, one.engine.totals(now_s).generated) for one in replicas)
        usd = sum(self._prices.get(one.release.version_id, 0.0) * lived[one.id] for one in replicas)
        point = {
            "hours": now_s / 3600,
            "replicas": float(len(serving)),
            "loading": float(len(live) - len(serving)),
            "running": float(sum(one.engine.running for one in live)),
            "waiting": float(sum(front.waiting for front in world.fronts) + sum(one.engine.waiting for one in live)),
            "busy": min(1.0, busy_s / max(sum(lived.values()), 1e-9)),
            "kv": sum(one.engine.kv_usage for one in serving) / len(serving) if serving else 0.0,
            "tokens_s": tokens / self.every_s,
            "usd_per_hour": usd / self.every_s,
        }
        for name, value in point.items():
            self.columns[name].append(value)
        if self._progress is not None:
            self._progress(now_s)

    def series(self, requests: Sequence[Request]) -> dict[str, Column]:
        """Return all columns; what became of ``requests`` is put to when they came, None where nobody did."""
        places = len(self.columns["hours"])
        came: list[list[Request]] = [[] for _ in range(places)]
        for request in requests:
            if (place := int(request.arrival.at_s // self.every_s)) < places:
                came[place].append(request)
        found: dict[str, Column] = {name: list(column) for name, column in self.columns.items()}
        of_requests: dict[str, Column] = {name: [] for name in OF_REQUESTS}
        for group in came:
            begun = [request.ttft_s for request in group if request.first_s < inf]
            seconds = spread(begun)
            of_requests["requests_s"].append(len(group) / self.every_s)
            of_requests["refused"].append(sum(bool(request.refusal) for request in group) / max(1, len(group)))
            of_requests["ttft_p50_s"].append(seconds.p50 if begun else None)
            of_requests["ttft_p99_s"].append(seconds.p99 if begun else None)
        return {**found, **of_requests}

    def _lived_s(self, replica: Replica, now_s: float) -> float:
        return max(0.0, min(now_s, replica.gone_s) - max(now_s - self.every_s, replica.began_s))

    @staticmethod
    def _since(before: dict[str, float], replica_id: str, now: float) -> float:
        more = now - before.get(replica_id, 0.0)
        before[replica_id] = now
        return more
