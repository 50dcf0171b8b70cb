"""Where replicas go: the packer's cluster of one round, and what is promised between two of them.

A round builds the cluster from what is recorded (``see``). A pass that places
a replica takes the room at once, and holds it while its artifact is fetched:
the promise is kept here until the record with the placement is stored, or the
pass does not ask for it again. Nothing here is state that a crash could lose:
a controller that starts anew places what was not recorded once more.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from modelyard.control.supplies import Offer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen, Placement
from modelyard.policy.cluster import Cluster
from modelyard.policy.packing import Ask, NoRoom, place
from modelyard.policy.reconcile import LIVE

_HOLDING = LIVE | {ReplicaState.DRAINING}


class Placer:
    """Places replicas on the nodes of the fleet; every call is synchronous, so that two passes never take one room."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._nodes: dict[str, NodeSeen] = {}
        self._kinds: frozenset[str] = frozenset()
        self._promised: dict[str, tuple[str, Ask, Placement]] = {}
        """By replica id: its endpoint, what was asked and what was given, not in the cluster's records yet."""
        self._asked: dict[str, set[str]] = defaultdict(set)
        """Replica ids that the running pass of an endpoint asked for."""

    def __repr__(self) -> str:
        return f"<Placer of {len(self._nodes)} nodes, {len(self._promised)} promises>"

    @property
    def nodes(self) -> Mapping[str, NodeSeen]:
        """The fleet's nodes by id, as last seen."""
        return self._nodes

    @property
    def cluster(self) -> Cluster:
        """What is free where, now; look, do not change."""
        return self._cluster

    def see(self, world: World, nodes: Iterable[NodeSeen]) -> None:
        """Take what a round found as the truth, and what was promised since on top."""
        self._nodes = {seen.node.id: seen for seen in nodes}
        self._kinds = kinds_of(self._nodes.values())
        held = dict(_held(world))
        for replica_id in held.keys() & self._promised.keys():
            del self._promised[replica_id]
        promises = [placement for _, _, placement in self._promised.values()]
        self._cluster = Cluster.of(self._nodes.values(), [*held.values(), *promises])

    def begin(self, endpoint_id: str) -> None:
        """A pass over an endpoint begins: what it does not ask for again by ``end`` is not promised any more."""
        self._asked[endpoint_id] = set()

    def end(self, endpoint_id: str, recorded: Iterable[str]) -> None:
        """The pass is over; ``recorded`` are the replicas whose placement is stored now, which the next round sees."""
        asked = self._asked.pop(endpoint_id, set()) | set(recorded)
        for replica_id in [id for id, (of, _, _) in self._promised.items() if of == endpoint_id and id not in asked]:
            self.give_up(replica_id)

    def place(self, replica: Replica, ask: Ask) -> Placement | NoRoom:
        """Return where ``replica`` goes, and hold the room; the same again while the same is asked."""
        self._asked[replica.endpoint_id].add(replica.id)
        if replica.placement.parts:
            return replica.placement  # it was recorded with it and not started
        promised = self._promised.get(replica.id)
        if promised is not None and promised[1] == ask and self._is_there(promised[2]):
            return promised[2]
        self.give_up(replica.id)
        found = place(ask, self._cluster)
        if isinstance(found, Placement):
            self._cluster.take(found)
            self._promised[replica.id] = (replica.endpoint_id, ask, found)
        return found

    def give_up(self, replica_id: str) -> None:
        """Let go of the room of a replica that is not started after all."""
        promised = self._promised.pop(replica_id, None)
        if promised is not None:
            self._cluster.give_back(promised[2])

    def ask_of(self, endpoint: Endpoint, offer: Offer, failed: Iterable[Replica] = ()) -> Ask:
        """Return what a replica of a version needs; ``failed`` are earlier ones of its place, whose nodes come last."""
        avoid = frozenset(replica.placement.node_id for replica in failed if replica.placement.parts)
        return ask_of(endpoint, offer, self._kinds, avoid)

    def _is_there(self, placement: Placement) -> bool:
        return all(part.node_id in self._nodes and self._nodes[part.node_id].is_ready for part in placement.parts)


def _held(world: World) -> Iterable[tuple[str, Placement]]:
    """Yield the placement of each replica that has memory: one that ended only once its process is gone."""
    for endpoint_id, replicas in world.replicas.items():
        running = {process.replica_id for process in world.processes.get(endpoint_id, ()) if process.is_running}
        for replica in replicas:
            if replica.placement.parts and (replica.state in _HOLDING or replica.id in running):
                yield replica.id, replica.placement


def ask_of(endpoint: Endpoint, offer: Offer, kinds: frozenset[str], avoid: frozenset[str] = frozenset()) -> Ask:
    """Return what a replica needs of a fleet that has accelerators of ``kinds``."""
    version, engine, settings = offer.version, offer.engine, offer.settings
    kind, count = version.gpu_type, version.gpu_count
    if not engine.needs_artifact and kind not in kinds:
        # Without weights it computes nothing, so it has whatever accelerator it is said to have.
        kind, count = "", 1
    return Ask(
        memory_bytes=math.ceil(settings.memory_bytes / count),
        count=count,
        kinds=frozenset({kind} if kind not in ("", "any") else ()),
        digest=version.artifact.digest,
        pool=endpoint.autoscale.node_pool,
        may_be_simulated=not engine.needs_artifact,
        avoid=avoid,
        tenant_id=endpoint.tenant_id,
        tier=endpoint.autoscale.tier,
    )


def kinds_of(nodes: Iterable[NodeSeen]) -> frozenset[str]:
    """Return the kinds of accelerators that there are."""
    return frozenset(one.kind for seen in nodes for one in seen.node.accelerators)


def real_kinds(nodes: Iterable[NodeSeen]) -> frozenset[str]:
    """Return the kinds that an engine with weights can run on: those that are more than declared."""
    return kinds_of(seen for seen in nodes if not seen.node.is_simulated)


def held_in(replicas: Iterable[Replica]) -> list[Placement]:
    """Return what is taken by records alone, for a look that acts on nothing."""
    return [replica.placement for replica in replicas if replica.placement.parts and replica.state in _HOLDING]
