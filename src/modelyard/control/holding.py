"""Who has accelerators, by what is recorded. Those that sleep have next to nothing (``beds.py``)."""

from collections.abc import Iterable

from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen, Part, Placement
from modelyard.policy.cluster import CPU
from modelyard.policy.reconcile import LIVE

HOLDING = (LIVE | {ReplicaState.DRAINING}) - {ReplicaState.ASLEEP}


def held_in(replicas: Iterable[Replica]) -> list[Placement]:
    """Return what is taken by records alone, for a look that acts on nothing."""
    return [replica.placement for replica in replicas if replica.placement.parts and replica.state in HOLDING]


def host_of(nodes: Iterable[NodeSeen]) -> tuple[str, int] | None:
    """Return the CPU that everything ran on before there were placements."""
    found = (
        (seen.node.id, one.index)
        for seen in nodes
        if not seen.node.is_simulated
        for one in seen.node.accelerators
        if one.kind == CPU
    )
    return next(found, None)


def holders(world: World, host: tuple[str, int] | None) -> Iterable[tuple[str, tuple[str, Placement]]]:
    """Yield the placement of each replica that has memory: one that ended only once its process is gone.

    One without a placement was started by an earlier release, on ``host``; it has what its version needs.
    """
    for endpoint_id, replicas in world.replicas.items():
        running = {process.replica_id for process in world.processes.get(endpoint_id, ()) if process.is_running}
        endpoint: Endpoint | None = world.endpoints.get(endpoint_id)
        tenant_id = endpoint.tenant_id if endpoint else ""
        for replica in replicas:
            if replica.state is ReplicaState.ASLEEP:
                continue
            if replica.placement.parts and (replica.state in HOLDING or replica.id in running):
                yield replica.id, (tenant_id, replica.placement)
            elif host is not None and replica.id in running:
                version = world.versions.get(replica.version_id)
                part = Part(host[0], (host[1],), version.memory_bytes if version else 0)
                yield replica.id, (tenant_id, Placement((part,)))


def moved_from(world: World) -> frozenset[str]:
    """Return the replicas that others have taken over from, or are to, by who still has room for that."""
    return frozenset(
        one.takes_over
        for replicas in world.replicas.values()
        for one in replicas
        if one.takes_over and one.state in HOLDING
    )


def kinds_of(nodes: Iterable[NodeSeen]) -> frozenset[str]:
    """Return the kinds of accelerators that there are."""
    return frozenset(one.kind for seen in nodes for one in seen.node.accelerators)


def real_kinds(nodes: Iterable[NodeSeen]) -> frozenset[str]:
    """Return the kinds that an engine with weights can run on: those that are more than declared."""
    return kinds_of(seen for seen in nodes if not seen.node.is_simulated)
