"""What happens to replicas and nodes by itself: loads end, engines crash, nodes fail, spot nodes are taken back."""

import heapq
import random
from collections.abc import Iterator

from modelyard.sim.fleet.models import Profile
from modelyard.sim.fleet.scenario import DAY_S, Faults
from modelyard.sim.fleet.stock import Replica, State, Stock

_FAILS, _RETURNS, _WARNED, _TAKEN = range(4)


class Events:
    """Moments to come, in order; ties by the order in which they were foreseen."""

    def __init__(self, faults: Faults, stock: Stock, chance: random.Random, begin_s: float) -> None:
        self._faults = faults
        self._stock = stock
        self._chance = chance
        self._loads: list[tuple[float, int, Replica]] = []
        self._drains: list[tuple[float, int, float, Replica]] = []
        self._nodes: list[tuple[float, int, int, str]] = []
        self._number = 0
        self.failures = self.reclaims = self.crashes = 0
        for node in stock.nodes.values():
            self._foresee(node.id, begin_s)

    # --- loads and drains ------------------------------------------------------------------

    def expected_load_s(self, one: Profile) -> float:
        """Return what a start of a model is expected to take: from a disk, as most are."""
        loading = self._stock.loading
        return loading.engine_s + one.weights_bytes / loading.disk

    def load(self, replica: Replica, now_s: float) -> None:
        """A replica begins to load."""
        ready_s = now_s + self._stock.loading.engine_s + replica.load_s
        heapq.heappush(self._loads, (ready_s, replica.number, replica))

    def wake(self, replica: Replica, now_s: float) -> float:
        """A replica begins to wake up; return how long that takes."""
        loading = self._stock.loading
        seconds = loading.wake_s + self._stock.weights[replica.deployment] / loading.memory
        heapq.heappush(self._loads, (now_s + seconds, replica.number, replica))
        return seconds

    def loaded(self, now_s: float) -> Iterator[Replica]:
        """Yield those that have loaded, or are awake, by now."""
        while self._loads and self._loads[0][0] <= now_s:
            replica = heapq.heappop(self._loads)[2]
            if replica.state in (State.LOADING, State.WAKING, State.MOVING):
                yield replica

    def drain(self, replica: Replica, until_s: float) -> None:
        """A replica drains until then."""
        self._number += 1
        heapq.heappush(self._drains, (until_s, self._number, replica.since_s, replica))

    def drained(self, now_s: float) -> Iterator[Replica]:
        """Yield those that have drained by now, and were not taken back meanwhile."""
        while self._drains and self._drains[0][0] <= now_s:
            _, _, since_s, replica = heapq.heappop(self._drains)
            if replica.state is State.DRAINING and replica.since_s == since_s:
                yield replica

    # --- faults ----------------------------------------------------------------------------

    def broken(self, now_s: float, tick_s: float) -> Iterator[tuple[Replica, bool]]:
        """Yield replicas that are lost now; or, where True, whose node will go within its notice."""
        while self._nodes and self._nodes[0][0] <= now_s:
            _, _, what, node_id = heapq.heappop(self._nodes)
            yield from self._happen(what, node_id, now_s)
        crashes = self._faults.engine_per_day * tick_s / DAY_S * len(self._stock.replicas)
        if crashes and self._chance.random() < crashes:
            numbers = list(self._stock.replicas)
            replica = self._stock.replicas[numbers[self._chance.randrange(len(numbers))]]
            if replica.state is State.READY:
                self.crashes += 1
                yield replica, False

    def _happen(self, what: int, node_id: str, now_s: float) -> Iterator[tuple[Replica, bool]]:
        faults, stock = self._faults, self._stock
        if what == _RETURNS:
            stock.open(node_id)
            self._foresee(node_id, now_s)
        elif what == _WARNED:
            self.reclaims += 1
            yield from ((one, True) for one in stock.close(node_id, "it will be taken back"))
            self._push(now_s + faults.notice_s, _TAKEN, node_id)
        else:
            self.failures += what == _FAILS
            yield from ((one, False) for one in stock.close(node_id, "it failed"))
            self._push(now_s + (faults.repair_s if what == _FAILS else faults.away_s), _RETURNS, node_id)

    def _foresee(self, node_id: str, now_s: float) -> None:
        """Draw what happens next to a node."""
        faults, node = self._faults, self._stock.nodes[node_id]
        fails_s = self._in_s(faults.node_per_day)
        taken_s = self._in_s(faults.reclaim_per_day) if node.is_spot else float("inf")
        soonest_s = min(fails_s, taken_s)
        if soonest_s < float("inf"):
            self._push(now_s + soonest_s, _FAILS if fails_s <= taken_s else _WARNED, node_id)

    def _in_s(self, per_day: float) -> float:
        return self._chance.expovariate(per_day / DAY_S) if per_day > 0 else float("inf")

    def _push(self, at_s: float, what: int, node_id: str) -> None:
        self._number += 1
        heapq.heappush(self._nodes, (at_s, self._number, what, node_id))
