"""What gateways told of releases and endpoints lately: the windows that scaling and canaries are judged by.

A report has totals that only grow. Each is kept as it came, and every
``TICK_S`` what changed is put aside (packed, some 150 bytes), so that a window
is the difference of two looks and hearing a report costs one assignment a
release. After two minutes only every sixth look is kept. A gateway that begins
anew, or counts a release anew after a long quiet time, begins a new series at
0; a controller that begins anew takes the first report of each gateway as its
starting point.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.signals import ReleaseCounts, Window
from modelyard.policy.windows import Sums, increase, total, went_back, window_of

TICK_S = 5.0
KEPT_S = 1200.0
"""How far back windows reach."""
FINE = 24
"""Ticks that are kept one by one; of older ones every ``COARSE``-th is."""
COARSE = 6

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReleaseCounts).decode


class Clock(Protocol):
    """Whatever tells the time: a policy has no clock of its own."""

    def monotonic_s(self) -> float:
        """Return seconds since some beginning."""
        ...


class _Series:
    """What one gateway counted of one release, from one start to the next."""

    __slots__ = ("coarse", "fine", "first", "is_over", "newest")

    def __init__(self, newest: ReleaseCounts, *, is_known: bool) -> None:
        self.newest = newest
        self.first: ReleaseCounts | None = newest if is_known else None
        """What was counted before anybody looked; None: nothing."""
        self.fine: deque[tuple[int, bytes]] = deque()
        self.coarse: deque[tuple[int, bytes]] = deque()
        self.is_over = False

    def look(self, tick: int) -> None:
        """Put the present totals aside."""
        counts = self.newest
        packed = _encode(
            (
                "", "", counts.requests, counts.errors, counts.ttft, counts.itl, counts.latency,
                counts.prompt_tokens, counts.completion_tokens, counts.service_s,
            )
        )  # fmt: skip
        self.fine.append((tick, packed))

    def forget(self, tick: int, first_tick: int) -> bool:
        """Drop what no window reaches; say whether nothing is left that one would."""
        fine, coarse = self.fine, self.coarse
        while len(fine) > 1 and fine[1][0] <= tick - FINE:
            look = fine.popleft()
            # The last look of a coarse span holds what was counted at its end; none is put aside where nothing changed.
            if _span(look[0]) != _span(fine[0][0]):
                coarse.append(look)
        while coarse and (coarse[1] if len(coarse) > 1 else fine[0])[0] <= first_tick:
            coarse.popleft()
        return self.is_over and (not fine or fine[-1][0] <= first_tick)

    def since(self, tick: int) -> Sums:
        """Return what was counted after a tick, which is one that ``Signals`` begins windows at."""
        for looks in (self.fine, self.coarse):
            for at, packed in reversed(looks):
                if at <= tick:
                    return increase(_decode(packed), self.newest)
        return increase(self.first, self.newest)


def _span(tick: int) -> int:
    """Return the coarse span that a tick is in; it ends with a multiple of ``COARSE``."""
    return -(-tick // COARSE)


class _Endpoint:
    """What was asked of one endpoint."""

    __slots__ = ("arrivals", "depths", "heard", "queued_max", "totals")

    def __init__(self) -> None:
        self.heard: dict[str, EndpointDemand] = {}
        """What each gateway last told."""
        self.arrivals = 0
        self.totals: deque[tuple[int, int]] = deque()
        """Arrivals by tick, where they changed."""
        self.queued_max = 0
        self.depths: deque[tuple[int, int]] = deque()

    def look(self, tick: int, first: int) -> None:
        """Put aside what was asked up to now, and drop what was before ``first``."""
        if not self.totals or self.totals[-1][1] != self.arrivals:
            self.totals.append((tick, self.arrivals))
        if self.queued_max:
            self.depths.append((tick, self.queued_max))
            self.queued_max = self.queued()
        while len(self.totals) > 1 and self.totals[1][0] <= first:
            self.totals.popleft()
        while self.depths and self.depths[0][0] <= first:
            self.depths.popleft()

    def queued(self) -> int:
        """Return how many wait, at all gateways together."""
        return sum(demand.queued for demand in self.heard.values())


class Signals:
    """Feed it reports (``hear``), ask it for windows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ticks: deque[tuple[float, int]] = deque([(clock.monotonic_s(), 0)])
        """When each tick was, and its number."""
        self._series: dict[str, dict[str, list[_Series]]] = {}
        self._living: dict[str, dict[tuple[str, str], _Series]] = {}
        self._told: set[str] = set()
        """Gateways that have told what they counted since they came."""
        self._changed: set[_Series] = set()
        self._endpoints: dict[str, _Endpoint] = {}
        self._reported: dict[str, list[EndpointDemand]] = {}
        """The endpoints of each gateway's last report; those that are not in it are gone."""

    def __repr__(self) -> str:
        return f"<Signals of {len(self._endpoints)} endpoints, {len(self._living)} gateways>"

    # --- hearing ---

    def hear(self, gateway_id: str, report: Report) -> None:
        """Take a report; an empty one says that the gateway has left."""
        now_s = self._clock.monotonic_s()
        if now_s - self._ticks[-1][0] >= TICK_S:
            self._tick(now_s)
        if not report.endpoints and not report.epoch:
            self._lose(gateway_id)
            return
        is_new = gateway_id not in self._living
        if is_new:
            self._living[gateway_id] = {}
        self._reported[gateway_id] = report.endpoints
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
        self._reported.pop(gateway_id, None)
        for endpoint in self._endpoints.values():
            endpoint.heard.pop(gateway_id, None)

    def _tick(self, now_s: float) -> None:
        tick = self._ticks[-1][1] + 1
        for series in self._changed:
            series.look(tick)
        self._changed.clear()
        self._ticks.append((now_s, tick))
        # The longest window begins at a coarse tick, so a few more than reach back far enough are kept.
        while len(self._ticks) > 2 * COARSE and self._ticks[COARSE][0] <= now_s - KEPT_S:
            self._ticks.popleft()
        first = self._ticks[0][1]
        known = {gateway: {demand.endpoint_id for demand in demands} for gateway, demands in self._reported.items()}
        for endpoint_id, endpoint in list(self._endpoints.items()):
            for gateway_id in [one for one in endpoint.heard if endpoint_id not in known[one]]:
                del endpoint.heard[gateway_id]
            endpoint.look(tick, first)
            if not endpoint.heard and endpoint.totals[-1][0] <= first:
                del self._endpoints[endpoint_id]
        self._forget(tick, first)

    def _forget(self, tick: int, first: int) -> None:
        for endpoint_id, versions in list(self._series.items()):
            for version_id, found in list(versions.items()):
                if not (left := [series for series in found if not series.forget(tick, first)]):
                    del versions[version_id]
                elif len(left) != len(found):
                    versions[version_id] = left
            if not versions:
                del self._series[endpoint_id]

    # --- asking ---

    def window(self, endpoint_id: str, version_id: str | None, seconds: float, *, guests: Iterable[str] = ()) -> Window:
        """Return what happened to a release, or to all of an endpoint (and its ``guests``), in about the last
        ``seconds``.

        The window begins at a tick, so it is up to ``TICK_S`` longer, or shorter where nobody listened yet; its own
        ``seconds`` say what it covers.
        """
        tick, covered_s = self._start(seconds)
        versions = self._series.get(endpoint_id, {})
        wanted = list(versions.values()) if version_id is None else [versions.get(version_id, [])]
        wanted += [found for guest in guests for found in self._series.get(guest, {}).values()]
        sums = total(series.since(tick) for found in wanted for series in found)
        return window_of(sums, covered_s)

    def versions(self, endpoint_id: str) -> Iterator[str]:
        """Return the versions of an endpoint of which anything was counted lately."""
        return iter(self._series.get(endpoint_id, {}))

    def arrival_rate(self, endpoint_id: str, seconds: float) -> float:
        """Return requests a second that came for an endpoint in about the last ``seconds``."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return 0.0
        tick, covered_s = self._start(seconds)
        before = next((arrivals for at, arrivals in reversed(endpoint.totals) if at <= tick), 0)
        return (endpoint.arrivals - before) / covered_s

    def queued_max(self, endpoint_id: str, seconds: float) -> int:
        """Return the most requests that waited for an endpoint at once in about the last ``seconds``."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return 0
        tick, _ = self._start(seconds)
        return max(endpoint.queued_max, endpoint.queued(), *(depth for at, depth in endpoint.depths if at > tick))

    def _start(self, seconds: float) -> tuple[int, float]:
        """Return the tick at which a window begins, and how many seconds ago that was."""
        now_s = self._clock.monotonic_s()
        newest = self._ticks[-1][1]
        for at_s, tick in reversed(self._ticks):
            # Of looks older than this only those at the ends of coarse spans are kept.
            if at_s <= now_s - seconds and (tick >= newest - FINE or tick % COARSE == 0):
                return tick, max(now_s - at_s, 1.0)
        at_s, tick = self._ticks[0]
        return tick, max(now_s - at_s, 1.0)
