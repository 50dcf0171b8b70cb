"""What happens in a world of requests over time: what pictures are drawn from.

A timeline looks at the world from outside its calendar (``world.Watch``), so that a world that is watched is equal to
one that is not, to the last digit. What requests saw is put to the time at which they came.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

from modelyard.sim.comparison import spread
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.results import Column
from modelyard.sim.tasks import Totals
from modelyard.sim.world import Replica, World

POINTS = 100
"""About so many points: as many as a picture shows."""
POINTS_MAX = 4 * POINTS
"""An even number; from there on they are twice as far apart."""
_STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600)
OF_WORLD = ("replicas", "loading", "running", "waiting", "busy", "kv", "tokens_s", "usd_per_hour")
_MOMENTS = ("hours", "running", "waiting")
"""Of the point itself; all else are means since the one before."""
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
        self._seen: dict[str, _Seen] = {}

    def look(self, world: World) -> None:
        """Add a point: means since the last one, and who runs and waits now."""
        now_s = self.next_s
        begin_s, self.next_s = now_s - self.every_s, now_s + self.every_s
        replicas = [one for one in (*world.replicas.values(), *world.gone) if one.gone_s > begin_s]
        live = [one for one in replicas if one.gone_s > now_s]
        lived_s = serving_s = busy_s = held = room = tokens = usd = 0.0
        for one in replicas:
            own_s = _within(begin_s, now_s, one.began_s, one.gone_s)
            done = self._since(one, now_s)
            lived_s += own_s
            serving_s += _within(begin_s, now_s, one.ready_s, one.gone_s)
            busy_s += done.busy_s
            held += done.held
            room += own_s * one.engine.spec.kv_tokens
            tokens += done.tokens
            usd += self._prices.get(one.release.version_id, 0.0) * own_s
        point = {
            "hours": now_s / 3600,
            "replicas": serving_s / self.every_s,
            "loading": (lived_s - serving_s) / self.every_s,
            "running": float(sum(one.engine.running for one in live)),
            "waiting": float(sum(front.waiting for front in world.fronts) + sum(one.engine.waiting for one in live)),
            "busy": min(1.0, busy_s / max(lived_s, 1e-9)),
            "kv": min(1.0, held / max(room, 1e-9)),
            "tokens_s": tokens / self.every_s,
            "usd_per_hour": usd / self.every_s,
        }
        for name, value in point.items():
            self.columns[name].append(value)
        if len(self.columns["hours"]) >= POINTS_MAX:
            self._coarsen()
        if self._progress is not None:
            self._progress(now_s)

    def _coarsen(self) -> None:
        """Make one point of two: what is left to do when all has come may take many times as long."""
        for name, column in self.columns.items():
            pairs = zip(column[::2], column[1::2], strict=True)
            self.columns[name] = [later if name in _MOMENTS else (before + later) / 2 for before, later in pairs]
        self.every_s *= 2
        self.next_s = (len(self.columns["hours"]) + 1) * self.every_s

    def finish(self, world: World, end_s: float) -> None:
        """See to it that there is a point, however early all was over."""
        if not self.columns["hours"] and end_s > 0:
            self.every_s = self.next_s = end_s
            self.look(world)

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

    def _since(self, replica: Replica, now_s: float) -> "_Done":
        """Return what a replica did since the last look."""
        engine, before = replica.engine, self._seen.get(replica.id, _Seen(0.0, Totals()))
        seen = self._seen[replica.id] = _Seen(engine.busy_by(now_s), engine.totals(now_s))
        busy_s = seen.busy_s - before.busy_s
        iterations = seen.totals.iterations - before.totals.iterations
        held = seen.totals.kv_tokens - before.totals.kv_tokens
        return _Done(
            busy_s, held / iterations * busy_s if iterations else 0.0, seen.totals.generated - before.totals.generated
        )


class _Seen(NamedTuple):
    """What an engine had done by a look."""

    busy_s: float
    totals: Totals


class _Done(NamedTuple):
    """What it did between two."""

    busy_s: float
    held: float
    """Tokens in its cache, times seconds."""
    tokens: float


def _within(begin_s: float, end_s: float, since_s: float, until_s: float) -> float:
    """Return how much of the time from ``since_s`` until ``until_s`` is in a span."""
    return max(0.0, min(end_s, until_s) - max(begin_s, since_s))
