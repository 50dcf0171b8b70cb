"""What gateways told of releases and endpoints lately: the windows that scaling and canaries are judged by.

A report has totals that only grow. Each is kept as it came, and every
``TICK_S`` what changed is put aside (packed, some 130 bytes), so that a window
is the difference of two looks and hearing a report costs one assignment a
release. A gateway that begins anew, or counts a release anew after a long
quiet time, begins a new series at 0; a controller that begins anew takes the
first report of each gateway as its starting point.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from modelyard.clock import Clock
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.signals import ReleaseCounts, Window
from modelyard.policy.windows import Sums, increase, total, went_back, window_of

TICK_S = 5.0
KEPT_S = 1200.0
"""How far back windows reach."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReleaseCounts).decode


class _Series:
    """What one gateway counted of one release, from one start to the next."""

    __slots__ = ("first", "is_over", "looks", "newest", "times")

    def __init__(self, newest: ReleaseCounts, *, is_known: bool) -> None:
        self.newest = newest
        self.first: ReleaseCounts | None = newest if is_known else None
        """What was counted before anybody looked; None: nothing."""
        self.times: deque[float] = deque()
        self.looks: deque[bytes] = deque()
        self.is_over = False

    def look(self, now_s: float) -> None:
        """Put the present totals aside."""
        self.times.append(now_s)
        self.looks.append(_encode(self.newest))

    def forget(self, before_s: float) -> bool:
        """Drop what no window reaches; say whether nothing is left that one would."""
        # The last look before the horizon is where the longest window begins.
        while len(self.times) > 1 and self.times[1] <= before_s:
            self.times.popleft()
            self.looks.popleft()
        return self.is_over and (not self.times or self.times[-1] <= before_s)

    def since(self, start_s: float) -> Sums:
        """Return what was counted after ``start_s``, the time of a tick."""
        at = bisect_right(self.times, start_s)
        return increase(_decode(self.looks[at - 1]) if at else self.first, self.newest)


class _Endpoint:
    """What was asked of one endpoint."""

    __slots__ = ("arrivals", "depths", "heard", "queued_max", "totals")

    def __init__(self) -> None:
        self.heard: dict[str, EndpointDemand] = {}
        """What each gateway last told."""
        self.arrivals = 0
        self.totals: deque[tuple[float, int]] = deque()
        self.queued_max = 0
        self.depths: deque[tuple[float, int]] = deque()

    def queued(self) -> int:
        return sum(demand.queued for demand in self.heard.values())


class Signals:
    """Feed it reports (``hear``), ask it for windows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._ticks: deque[float] = deque([self._began_s])
        self._series: dict[str, dict[str, list[_Series]]] = {}
        self._living: dict[str, dict[tuple[str, str], _Series]] = {}
        self._told: set[str] = set()
        """Gateways that have told what they counted since they came."""
        self._changed: set[_Series] = set()
        self._endpoints: dict[str, _Endpoint] = {}

    def __repr__(self) -> str:
        return f"<Signals of {len(self._endpoints)} endpoints, {len(self._living)} gateways>"

    # --- hearing ---

    def hear(self, gateway_id: str, report: Report) -> None:
        """Take a report; an empty one says that the gateway has left."""
        now_s = self._clock.monotonic_s()
        if now_s - self._ticks[-1] >= TICK_S:
            self._tick(now_s)
        if not report.endpoints and not report.epoch:
            self._lose(gateway_id)
            return
        is_new = gateway_id not in self._living
        if is_new:
            self._living[gateway_id] = {}
        for demand in report.endpoints:
            self._demand(gateway_id, demand, is_new=is_new)
        if report.releases is not None:
            self._counts(gateway_id, report.releases)

    def _demand(self, gateway_id: str, demand: EndpointDemand, *, is_new: bool) -> None:
        endpoint = self._endpoints.get(demand.endpoint_id)
        if endpoint is None:
            endpoint = self._endpoints[demand.endpoint_id] = _Endpoint()
        before = endpoint.heard.get(gateway_id)
        endpoint.heard[gateway_id] = demand
        if before is not None:
            if demand.arrivals != before.arrivals:
                began = 0 if demand.arrivals < before.arrivals else before.arrivals
                endpoint.arrivals += demand.arrivals - began
        elif not is_new:
            endpoint.arrivals += demand.arrivals
        if demand.queued:
            endpoint.queued_max = max(endpoint.queued_max, endpoint.queued())

    def _counts(self, gateway_id: str, releases: Iterable[ReleaseCounts]) -> None:
        living = self._living[gateway_id]
        is_first = gateway_id not in self._told
        self._told.add(gateway_id)
        seen: dict[tuple[str, str], _Series] = {}
        for counts in releases:
            key = (counts.endpoint_id, counts.version_id)
            series = living.get(key)
            if series is None or went_back(series.newest, counts):
                if series is not None:
                    series.is_over = True
                series = self._begin(counts, is_known=is_first)
            elif counts.requests != series.newest.requests:
                series.newest = counts
                self._changed.add(series)
            seen[key] = series
        for key in living.keys() - seen.keys():
            living[key].is_over = True
        self._living[gateway_id] = seen

    def _begin(self, counts: ReleaseCounts, *, is_known: bool) -> _Series:
        series = _Series(counts, is_known=is_known)
        self._series.setdefault(counts.endpoint_id, {}).setdefault(counts.version_id, []).append(series)
        self._changed.add(series)
        return series

    def _lose(self, gateway_id: str) -> None:
        for series in self._living.pop(gateway_id, {}).values():
            series.is_over = True
        self._told.discard(gateway_id)
        for endpoint in self._endpoints.values():
            endpoint.heard.pop(gateway_id, None)

    def _tick(self, now_s: float) -> None:
        before_s = now_s - KEPT_S
        for series in self._changed:
            series.look(now_s)
        self._changed.clear()
        self._ticks.append(now_s)
        while len(self._ticks) > 1 and self._ticks[1] <= before_s:
            self._ticks.popleft()
        for endpoint_id, endpoint in list(self._endpoints.items()):
            if not endpoint.totals or endpoint.totals[-1][1] != endpoint.arrivals:
                endpoint.totals.append((now_s, endpoint.arrivals))
            if endpoint.queued_max:
                endpoint.depths.append((now_s, endpoint.queued_max))
                endpoint.queued_max = endpoint.queued()
            while len(endpoint.totals) > 1 and endpoint.totals[1][0] <= before_s:
                endpoint.totals.popleft()
            while endpoint.depths and endpoint.depths[0][0] <= before_s:
                endpoint.depths.popleft()
            if not endpoint.heard and endpoint.totals[-1][0] <= before_s:
                del self._endpoints[endpoint_id]
        self._forget(before_s)

    def _forget(self, before_s: float) -> None:
        for endpoint_id, versions in list(self._series.items()):
            for version_id, found in list(versions.items()):
                if not (left := [series for series in found if not series.forget(before_s)]):
                    del versions[version_id]
                elif len(left) != len(found):
                    versions[version_id] = left
            if not versions:
                del self._series[endpoint_id]

    # --- asking ---

    def window(self, endpoint_id: str, version_id: str | None, seconds: float) -> Window:
        """Return what happened to a release, or to all of an endpoint, in about the last ``seconds``.

        The window begins at a tick, so it is up to ``TICK_S`` longer, or shorter where nobody listened yet; its own
        ``seconds`` say what it covers.
        """
        start_s, covered_s = self._start(seconds)
        versions = self._series.get(endpoint_id, {})
        wanted = versions.values() if version_id is None else [versions.get(version_id, [])]
        sums = total(series.since(start_s) for found in wanted for series in found)
        return window_of(sums, covered_s)

    def versions(self, endpoint_id: str) -> Iterator[str]:
        """Return the versions of an endpoint of which anything was counted lately."""
        return iter(self._series.get(endpoint_id, {}))

    def arrival_rate(self, endpoint_id: str, seconds: float) -> float:
        """Return requests a second that came for an endpoint in about the last ``seconds``."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return 0.0
        start_s, covered_s = self._start(seconds)
        before = 0
        for at_s, arrivals in endpoint.totals:
            if at_s > start_s:
                break
            before = arrivals
        return (endpoint.arrivals - before) / covered_s

    def queued_max(self, endpoint_id: str, seconds: float) -> int:
        """Return the most requests that waited for an endpoint at once in about the last ``seconds``."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return 0
        start_s, _ = self._start(seconds)
        return max(endpoint.queued_max, endpoint.queued(), *(d for at_s, d in endpoint.depths if at_s > start_s))

    def _start(self, seconds: float) -> tuple[float, float]:
        """Return the tick at which a window begins, and how long ago that was."""
        now_s = self._clock.monotonic_s()
        at = bisect_right(self._ticks, now_s - seconds)
        start_s = self._ticks[at - 1] if at else self._ticks[0]
        return start_s, max(now_s - start_s, 1.0)
