"""Where those that sleep lie on the packer's cluster, and whether one of them could wake there.

An engine that sleeps leaves its context on its accelerators and holds no more.
Its process cannot move, so the room that it needs to wake is at that very place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from modelyard.control.world import World
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster
from modelyard.policy.fit import OVERHEAD_BYTES
from modelyard.policy.packing import find
from modelyard.policy.sleepers import Bed


def residue(placement: Placement) -> int:
    """Return the bytes that an engine which sleeps leaves on each of its accelerators: its context."""
    return min(OVERHEAD_BYTES, *(part.memory_bytes for part in placement.parts)) if placement.parts else 0


@dataclass(slots=True)
class Beds:
    """The placements of those that sleep."""

    _asleep: dict[str, Placement] = field(default_factory=dict)
    """As recorded, by replica."""
    _resting: dict[str, Placement] = field(default_factory=dict)
    """Those of them that are on the cluster so; who has its room again, or will, is not."""

    def see(self, world: World) -> None:
        """Take what a round found as the truth."""
        self._asleep = {
            one.id: one.placement
            for replicas in world.replicas.values()
            for one in replicas
            if one.state is ReplicaState.ASLEEP and one.placement.parts
        }

    def has(self, replica_id: str) -> bool:
        """Say whether a round saw a replica asleep."""
        return replica_id in self._asleep

    def all(self) -> list[tuple[Placement, int]]:
        """Return what all of them leave, for a cluster that is built anew; they are on it then."""
        self._resting = dict(self._asleep)
        return [(placement, residue(placement)) for placement in self._asleep.values()]

    def follow(self, cluster: Cluster, awake: Collection[str]) -> None:
        """Bring ``cluster`` up to what is recorded; ``awake`` have their room, or are promised it."""
        for replica_id, placement in list(self._resting.items()):
            if replica_id in awake or self._asleep.get(replica_id) is not placement:
                self.rise(cluster, replica_id)
        for replica_id in self._asleep.keys() - self._resting.keys() - set(awake):
            self.lie_down(cluster, replica_id)

    def lie_down(self, cluster: Cluster, replica_id: str) -> None:
        """Count what one leaves, if it sleeps."""
        if (placement := self._asleep.get(replica_id)) is not None:
            self._resting[replica_id] = placement
            cluster.leave(placement, residue(placement))

    def rise(self, cluster: Cluster, replica_id: str) -> None:
        """Undo ``lie_down``."""
        if (placement := self._resting.pop(replica_id, None)) is not None:
            cluster.clear(placement, residue(placement))

    def bed(
        self, cluster: Cluster, on: Mapping[str, Placement], replica: Replica, idle: Sequence[tuple[Replica, float]]
    ) -> Bed:
        """Return how one that sleeps stands; ``cluster`` is as it was then.

        ``on`` is what has its room there. ``idle`` could sleep too, with the seconds since they had a request.
        """
        mine = replica.placement
        places = set(mine.places)
        is_held = any(cluster.shares(*place) for place in places if cluster.free_bytes(*place) is not None)
        is_resting = replica.id in self._resting
        self.rise(cluster, replica.id)
        gone: list[tuple[Replica, float]] = []
        for other, idle_s in sorted(idle, key=lambda pair: (-pair[1], pair[0].id)):
            if cluster.has_room(mine):
                break
            if other.id in on and _overlaps(other.placement, places):
                cluster.give_back(other.placement)
                cluster.leave(other.placement, residue(other.placement))
                gone.append((other, idle_s))
        has_room = cluster.has_room(mine)
        for other, _ in gone:
            cluster.clear(other.placement, residue(other.placement))
            cluster.take(other.placement)
        if is_resting:
            self.lie_down(cluster, replica.id)
        ids = tuple((other.id, idle_s) for other, idle_s in gone)
        return Bed(replica_id=replica.id, is_held=is_held, in_the_way=ids if has_room else None)

    def crowding(self, cluster: Cluster, replica: Replica) -> list[str]:
        """Return the sleepers who would have to go so that one could wake; none where that is not enough."""
        places = set(replica.placement.places)
        beside = [id for id, placed in self._resting.items() if id != replica.id and _overlaps(placed, places)]
        gone: list[str] = []
        self.rise(cluster, replica.id)
        for id in sorted(beside):
            if cluster.has_room(replica.placement):
                break
            self.rise(cluster, id)
            gone.append(id)
        has_room = cluster.has_room(replica.placement)
        for id in (replica.id, *gone):
            self.lie_down(cluster, id)
        return gone if has_room else []

    def crowding_out(self, cluster: Cluster, ask: Ask) -> list[str]:
        """Return the sleepers without whose contexts ``ask`` would find room."""
        resting = dict(self._resting)
        for id in resting:
            self.rise(cluster, id)
        found = find(ask, cluster)
        for id in resting:
            self.lie_down(cluster, id)
        places = set(found.places) if found is not None else set()
        return [id for id, placed in resting.items() if _overlaps(placed, places)]


def _overlaps(placement: Placement, places: Collection[tuple[str, int]]) -> bool:
    return any(place in places for place in placement.places)
