"""What the policies are shown: the world of one endpoint in their words."""

import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from modelyard.control.observer import Observer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, EndpointStatus
from modelyard.domain.fleet import THERE, Replica, ReplicaState
from modelyard.policy import scaling
from modelyard.policy.reconcile import LIVE, ReplicaSeen, Situation, Stray, Vital
from modelyard.policy.rollouts import beside, spares
from modelyard.policy.takeovers import takeovers

_PROVEN = frozenset({EndpointStatus.RUNNING, EndpointStatus.SCALING, EndpointStatus.STOPPED})


def is_proven(endpoint: Endpoint) -> bool:
    """Say whether the endpoint is known to have been ready once: only such a one gets out of provisioning."""
    return endpoint.status in _PROVEN


def size_of(endpoint: Endpoint, world: World, *, slots: int) -> scaling.Seen:
    """Return what the scaling policy sees of ``endpoint``, whose replicas take ``slots`` requests at once."""
    running = {process.replica_id for process in world.processes.get(endpoint.id, ()) if process.is_running}
    spare = beside(endpoint) | spares(endpoint)
    replicas = world.replicas.get(endpoint.id, ())
    moving = takeovers(replicas)
    live = [
        replica
        for replica in replicas
        if replica.state in LIVE
        and replica.id not in moving
        and replica.version_id not in spare  # they take no demand off the others, or are there for a while only
        and (replica.id in running or replica.state is ReplicaState.STARTING)
    ]
    # What engines, signals and forecasts know on top of this is added in ``control/sizing.py``.
    demand = world.demand(endpoint.id)
    there = sum(replica.state in THERE for replica in live)
    is_any_awake = any(replica.state is ReplicaState.READY for replica in live)
    return scaling.Seen(
        now_s=world.monotonic_s,
        replicas=len(live),
        # Who sleeps is there within seconds: it is neither missing nor loading.
        ready=there,
        slots=slots,
        gateways=len(world.reports),
        queued=demand.queued,
        # To a gateway a request in line is in flight, too; to the policy it wants one slot, not two.
        in_flight=max(demand.in_flight - demand.queued, 0),
        idle_s=math.inf if demand.idle_s is None else demand.idle_s,
        wait_s=demand.wait_s if is_any_awake or not there else 0.0,
        is_proven=is_proven(endpoint),
        is_deleted=endpoint.is_deleted,
    )


def situation_of(
    endpoint: Endpoint,
    wanted: Mapping[str, int],
    reason: str,
    world: World,
    observer: Observer,
    *,
    is_first: bool,
    evicted: Collection[str] = (),
    taken: Collection[str] = (),
) -> Situation:
    """Return what the reconcile policy sees of ``endpoint``.

    ``evicted`` are replicas that go first, ``taken`` those that began here and are another endpoint's now.
    """
    processes = {process.replica_id: process for process in world.processes.get(endpoint.id, ())}
    replicas = []
    for record in world.replicas.get(endpoint.id, ()):
        if record.id in taken:
            continue
        process = processes.pop(record.id, None)
        vital, vital_reason = observer.vital(record.id)
        replicas.append(
            ReplicaSeen(
                record=record,
                is_known=process is not None,
                is_running=process is not None and process.is_running,
                exit_reason=process.exit_reason if process else "",
                last_lines=process.last_lines if process else (),
                vital=vital,
                vital_reason=vital_reason,
                in_flight=world.in_flight(record.id),
                is_busy=record.id in world.busy,
                is_evicted=record.id in evicted,
            )
        )
    return Situation(
        endpoint_id=endpoint.id,
        now_s=world.unix_s,
        # A version that is not in the registry can only be removed.
        wanted={version_id: number for version_id, number in wanted.items() if version_id in world.versions},
        replicas=replicas,
        size_reason=reason,
        taken_ids=taken,
        beside=frozenset(release.version_id for release in endpoint.releases if release.fallback),
        strays=strays_of(endpoint.id, world),
        is_deleted=endpoint.is_deleted,
        is_first=is_first,
    )


def holding_back(situation: Situation, is_held: Callable[[Replica], bool]) -> Situation:
    """Return ``situation`` without the readiness of replicas that callers are not to know yet."""
    replicas = [
        msgspec.structs.replace(seen, vital=Vital.LOADING)
        if seen.record.state is ReplicaState.LOADING and seen.vital is Vital.READY and is_held(seen.record)
        else seen
        for seen in situation.replicas
    ]
    return msgspec.structs.replace(situation, replicas=replicas)


def with_moves(situation: Situation, because: Mapping[str, str]) -> Situation:
    """Return ``situation`` with the replicas that are to move: why, by their id."""
    replicas = [
        msgspec.structs.replace(seen, moves_because=why) if (why := because.get(seen.record.id)) else seen
        for seen in situation.replicas
    ]
    return msgspec.structs.replace(situation, replicas=replicas) if because else situation


def strays_of(endpoint_id: str, world: World) -> list[Stray]:
    """Return the processes of an endpoint that no record knows; one that is being ended already is none."""
    recorded = {replica.id for replica in world.replicas.get(endpoint_id, ())}
    return [
        Stray(process.replica_id, process.is_running)
        for process in world.processes.get(endpoint_id, ())
        if process.replica_id not in recorded and process.replica_id not in world.busy
    ]
