"""Room on a full fleet: idle replicas go for a deployment that somebody waits for (``policy/eviction.py``)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelyard.policy import eviction
from modelyard.policy.asks import Ask
from modelyard.policy.eviction import Eviction, Resident, Wanted
from modelyard.sim.fleet.stock import Replica, State

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World

TRIES_MOST = 4
"""Evictions that are looked for in one tick: each looks at every replica of the kind."""


class Room:
    """Who waits for room since when, and what goes for them."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._tried_s = -1.0
        self._tries = 0
        self.evicted = 0

    def found(self, at: int) -> None:
        """A deployment has what it waited for."""
        self._since_s.pop(at, None)

    def make(self, world: "World", at: int, now_s: float) -> list[Replica]:
        """Return the idle replicas to stop so that another one of ``at`` has room; nobody waits for it: none."""
        waiting_s = now_s - self._since_s.setdefault(at, now_s)
        if now_s != self._tried_s:
            self._tried_s, self._tries = now_s, 0
        columns = world.columns
        if columns.waiting[at] <= 0 or self._tries >= TRIES_MOST:
            return []
        self._tries += 1
        one = world.population.deployments[at].profile
        wanted = Wanted(
            ask=Ask(memory_bytes=one.memory_bytes, count=one.accelerators, kinds=frozenset({one.kind})),
            name=world.population.deployments[at].name,
            reload_s=world.events.expected_load_s(one),
            queued=int(columns.waiting[at]),
            rate_per_s=float(columns.rate[at]),
            waiting_s=waiting_s,
        )
        residents = [_resident(world, replica, now_s) for replica in self._candidates(world, at, one.kind)]
        answer = eviction.evict(wanted, world.stock.cluster, residents)
        if not isinstance(answer, Eviction):
            return []
        self.evicted += len(answer.replica_ids)
        return [world.stock.replicas[int(id)] for id in answer.replica_ids]

    def _candidates(self, world: "World", at: int, kind: str) -> list[Replica]:
        """Return the ready replicas of others on accelerators of one kind."""
        kinds: Mapping[int, str] = world.kinds
        return [
            replica
            for replica in world.stock.replicas.values()
            if replica.state is State.READY and 0 <= replica.deployment != at and kinds[replica.deployment] == kind
        ]


def _resident(world: "World", replica: Replica, now_s: float) -> Resident:
    at, columns = replica.deployment, world.columns
    is_idle = columns.flying[at] <= (columns.ready[at] - 1) * columns.slots[at] and columns.waiting[at] == 0
    # What runs there would have to move; a replica is idle if the others bear all of it.
    is_idle = bool(is_idle and (columns.ready[at] > 1 or columns.flying[at] == 0))
    return Resident(
        replica_id=str(replica.number),
        name=world.population.deployments[at].name,
        tenant_id=str(at),
        placement=replica.placement,
        is_idle=is_idle,
        resident_s=now_s - replica.since_s,
        idle_s=now_s - float(columns.asked_s[at]),
        reload_s=world.events.expected_load_s(world.population.deployments[at].profile),
        rate_per_s=float(columns.rate[at]),
    )
