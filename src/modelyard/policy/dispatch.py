"""Before one endpoint: who may start now, who waits, who is refused.

A state machine without I/O. Effects leave through ``deliver(waiter, replica)``,
which says whether the waiter was still there: a slot handed to somebody who
has gone goes to the next instead of leaking. Every request ends in exactly one
of: (1) starts at once, (2) waits and is delivered, (3) waits and leaves,
(4) waits and expires, (5) refused because the line is full.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.breaker import ejection_s
from modelyard.policy.queueing import WaitingLine
from modelyard.policy.routing import choose, pick_release

W = TypeVar("W")


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """A replica as its dispatcher sees it; only the dispatcher changes it."""

    route: ReplicaRoute
    version_id: str
    slots: int
    running: int = 0
    is_draining: bool = False
    is_gone: bool = False
    failures: int = 0
    failure_reason: str = ""
    ejected_until_s: float = 0.0
    last_dispatch: int = 0

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "draining" if self.is_draining else "ready"
        return f"<Replica {self.route.id}: {state}, {self.running}/{self.slots} slots, {self.failures} failures>"


class Verdict(enum.Enum):
    """What ``arrive`` decided when there is no replica to give."""

    WAIT = enum.auto()
    FULL = enum.auto()


@dataclass(slots=True)
class _Release:
    version_id: str
    weight: int
    replicas: list[ReplicaLoad]


class Dispatcher(Generic[W]):
    """Slots and the waiting line of one endpoint.

    ``deliver`` is called with a waiter and its replica, whose slot is already
    taken; when it returns False the slot is given on.
    """

    __slots__ = ("_by_id", "_chance", "_deliver", "_dispatches", "_releases", "endpoint_id", "is_cold", "line")

    def __init__(
        self,
        endpoint_id: str,
        *,
        places: int,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
    ) -> None:
        self.endpoint_id = endpoint_id
        self.line: WaitingLine[W] = WaitingLine(places)
        self._deliver = deliver
        self._chance = chance
        self._releases: list[_Release] = []
        self._by_id: dict[str, ReplicaLoad] = {}
        self._dispatches = 0
        self.is_cold = True
        """Whether no replica could take a request even if it were idle."""

    def __repr__(self) -> str:
        slots = sum(replica.slots for replica in self._by_id.values())
        return f"<Dispatcher {self.endpoint_id}: {self.running}/{slots} slots, {len(self.line)} waiting>"

    @property
    def replicas(self) -> Collection[ReplicaLoad]:
        """Return every replica of the last table, and gone ones that still have requests."""
        return self._by_id.values()

    @property
    def running(self) -> int:
        """Return how many requests are on replicas now."""
        return sum(replica.running for replica in self._by_id.values())

    def update(self, releases: Sequence[tuple[str, int, Sequence[tuple[ReplicaRoute, int]]]], *, now_s: float) -> None:
        """Take over ``(version_id, weight, [(replica, slots)])`` of a new table; loads of known replicas stay."""
        seen: dict[str, ReplicaLoad] = {}
        self._releases = []
        for version_id, weight, routes in releases:
            release = _Release(version_id, weight, [])
            for route, slots in routes:
                load = self._by_id.get(route.id)
                if load is None or load.route.port != route.port:
                    load = ReplicaLoad(route, version_id, slots)
                load.route, load.slots, load.is_draining, load.is_gone = route, slots, route.is_draining, False
                seen[route.id] = load
                release.replicas.append(load)
            self._releases.append(release)
        for replica_id, load in self._by_id.items():
            if replica_id not in seen and load.running:
                load.is_draining = load.is_gone = True
                seen[replica_id] = load
        self._by_id = seen
        self.is_cold = all(replica.is_draining for replica in seen.values())
        self.serve(now_s=now_s)

    def arrive(
        self, waiter: W, *, now_s: float, deadline_s: float, avoid: Collection[ReplicaLoad] = ()
    ) -> ReplicaLoad | Verdict:
        """Return the replica to use now (its slot is taken), or that the waiter stands in line, or that it is full.

        Nobody overtakes: while others wait, the newcomer waits behind them.
        """
        if not self.line.waiters and (replica := self._take(now_s, avoid)) is not None:
            return replica
        if self.line.is_full:
            return Verdict.FULL
        self.line.join(waiter, deadline_s=deadline_s)
        return Verdict.WAIT

    def retry(
        self, waiter: W, *, failed_on: Sequence[ReplicaLoad], now_s: float, deadline_s: float
    ) -> ReplicaLoad | Verdict | None:
        """Move a request off the last of ``failed_on``, whose slot is given back, to another replica or into the line.

        Returns None, and changes nothing, when no other replica could help.
        """
        if not any(
            other not in failed_on and not other.is_draining and other.ejected_until_s <= now_s
            for other in self._by_id.values()
        ):
            return None
        self.finish(failed_on[-1], now_s=now_s)
        found = self._take(now_s, failed_on)
        if found is not None:
            return found
        return self.arrive(waiter, now_s=now_s, deadline_s=deadline_s, avoid=failed_on)

    def leave(self, waiter: W) -> bool:
        """Forget a waiter that went away; say whether it was waiting."""
        return self.line.leave(waiter)

    def finish(self, replica: ReplicaLoad, *, now_s: float) -> None:
        """Give a slot back and pass it on."""
        replica.running -= 1
        assert replica.running >= 0, "finished more often than begun"
        if replica.is_gone and not replica.running and self._by_id.get(replica.route.id) is replica:
            del self._by_id[replica.route.id]
        if self.line.waiters:
            self.serve(now_s=now_s)

    def serve(self, *, now_s: float) -> None:
        """Hand free slots to those who wait, in order."""
        while (waiter := self.line.first()) is not None:
            replica = self._take(now_s, ())
            if replica is None:
                return
            self.line.leave(waiter)
            if not self._deliver(waiter, replica):
                replica.running -= 1

    def failed(self, replica: ReplicaLoad, reason: str, *, now_s: float, has_answered: bool = False) -> None:
        """Eject a replica after a lost connection, a timeout, or (``has_answered``) a bad answer.

        A replica that does answer is never the last one ejected: one request whose answer is bad must not stop all
        others of the endpoint.
        """
        replica.failures += 1
        replica.failure_reason = reason
        if has_answered and all(
            other is replica or other.is_draining or other.ejected_until_s > now_s for other in self._by_id.values()
        ):
            return
        replica.ejected_until_s = now_s + ejection_s(replica.failures)

    def succeeded(self, replica: ReplicaLoad) -> None:
        """Note a good answer."""
        replica.failures = 0
        replica.ejected_until_s = 0.0

    def _take(self, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        releases = self._releases
        if len(releases) == 1:
            replica = choose(releases[0].replicas, now_s=now_s, avoid=avoid)
        else:
            replica = self._take_by_weight(now_s, avoid)
        if replica is not None:
            self._dispatches += 1
            replica.running += 1
            replica.last_dispatch = self._dispatches
        return replica

    def _take_by_weight(self, now_s: float, avoid: Collection[ReplicaLoad]) -> ReplicaLoad | None:
        left = [release for release in self._releases if release.replicas and release.weight]
        while left:
            index = pick_release([release.weight for release in left], self._chance())
            if (replica := choose(left[index].replicas, now_s=now_s, avoid=avoid)) is not None:
                return replica
            # A release without room must not make its share of requests wait beside idle replicas of another.
            del left[index]
        return None
