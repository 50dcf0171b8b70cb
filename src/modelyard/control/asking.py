"""What the packer and the evictions are told: what a replica needs, and who holds memory without using it."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from modelyard.control.supplies import Offer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, Tier
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.rollouts import RolloutKind
from modelyard.policy.asks import Ask
from modelyard.policy.eviction import Resident
from modelyard.policy.rollouts import beside, carriers, spares
from modelyard.policy.takeovers import settled

RATE_IDLE_MIN_S = 30.0


def ask_of(
    endpoint: Endpoint,
    offer: Offer,
    kinds: frozenset[str],
    *,
    failed: Iterable[Replica] = (),
    crowded: frozenset[str] = frozenset(),
    is_spare: bool = False,
) -> Ask:
    """Return what a replica needs of a fleet that has accelerators of ``kinds``.

    ``failed`` are earlier ones of its place, whose nodes come last; without any ``crowded`` ones do. ``is_spare``:
    others are kept that can replace it, so that it may run on a node that can be taken away.
    """
    version, engine, settings = offer.version, offer.engine, offer.settings
    kind, count = version.gpu_type, version.gpu_count
    if not engine.needs_artifact and kind not in kinds:
        # Without weights it computes nothing, so it has whatever accelerator it is said to have.
        kind, count = "", 1
    # What is slow where others are still runs: a node where it fails must not be as good as one that is crowded.
    failed_on = frozenset(replica.placement.node_id for replica in failed if replica.placement.parts)
    return Ask(
        memory_bytes=math.ceil(settings.memory_bytes / count),
        count=count,
        kinds=frozenset({kind} if kind not in ("", "any") else ()),
        digest=version.artifact.digest,
        # Whatever nodes the endpoint asks for: it needs no more than this machine.
        pool="default" if engine.is_remote else endpoint.autoscale.node_pool,
        may_use_spot=is_spare,
        may_be_simulated=not engine.needs_artifact,
        avoid=failed_on or crowded,
        tenant_id=endpoint.tenant_id,
        tier=endpoint.autoscale.tier,
    )


def residents_of(world: World, load_s: Mapping[str, float], *, but: str) -> list[Resident]:
    """Return the ready replicas of all endpoints but one, above what each keeps whatever the traffic.

    ``load_s``: seconds that a version takes to load, as far as known. Endpoints of other tenants have no name: the
    owner of that one reads the reasons.
    """
    reader = world.endpoints[but].tenant_id if but in world.endpoints else ""
    found: list[Resident] = []
    for endpoint_id, replicas in world.replicas.items():
        endpoint = world.endpoints.get(endpoint_id)
        if endpoint is None or endpoint_id == but:
            continue
        running = {process.replica_id for process in world.processes.get(endpoint_id, ()) if process.is_running}
        versions = _evictable(endpoint)
        ready = [
            one
            for one in settled(replicas)
            if one.state is ReplicaState.READY and one.id in running and one.version_id not in versions.kept
        ]
        # Of those above the least the last ones go; the others stay whoever waits.
        spare = max(len(ready) - versions.least, 0)
        ready.sort(key=lambda one: (one.ready_at or 0.0, one.id), reverse=True)
        name = endpoint.name if endpoint.tenant_id == reader else ""
        found += [_resident(endpoint, one, world, load_s, name=name) for one in ready[:spare] if one.placement.parts]
    return found


class _Evictable(NamedTuple):
    """What may be taken of an endpoint: all but replicas of versions in ``kept``, and but ``least`` of the others."""

    kept: frozenset[str]
    least: int


def _evictable(endpoint: Endpoint) -> _Evictable:
    if endpoint.pool:
        return _Evictable(frozenset(), 0)  # whoever is asked for comes before those who wait for nobody
    rollout = endpoint.rollout
    if rollout is not None and rollout.is_open and rollout.kind is RolloutKind.ROLLING:
        # Each of its replicas is what the next step counts on.
        return _Evictable(frozenset({rollout.stable_id, rollout.candidate_id}), endpoint.scaling.floor)
    # A candidate, and what is kept to go back to, come and go with the others, never alone.
    floor = endpoint.scaling.floor
    return _Evictable(beside(endpoint) | spares(endpoint), max(floor, len(carriers(endpoint))) if floor else 0)


def _resident(
    endpoint: Endpoint, replica: Replica, world: World, load_s: Mapping[str, float], *, name: str
) -> Resident:
    demand = world.demand(endpoint.id)
    # One that was taken from a warm pool was ready long before: what counts is since when it is its endpoint's.
    resident_s = max(0.0, world.unix_s - max(replica.ready_at or world.unix_s, replica.state_since))
    # Without a request since it came it has been idle for as long as it is here.
    idle_s = resident_s if demand.idle_s is None or not math.isfinite(demand.idle_s) else demand.idle_s
    return Resident(
        replica_id=replica.id,
        name=name,
        tenant_id=endpoint.tenant_id,
        placement=replica.placement,
        is_idle=not (demand.queued or demand.in_flight),
        resident_s=resident_s,
        idle_s=idle_s,
        reload_s=load_s.get(replica.version_id, 1.0),
        # The longer nobody came, the longer nobody will: one request in as long as it has been idle.
        rate_per_s=1.0 / max(idle_s, RATE_IDLE_MIN_S),
        pin=Tier.COLD if endpoint.pool else endpoint.autoscale.tier,
    )
