"""A pass over a guest endpoint: how it stands, told to people and gateways.

It has no replicas to start or stop: who sits where is decided with its host
(``guests.py``). What is left of a deleted one goes with its last seat.
"""

import math

from modelyard.control.passes import Passed, Tools
from modelyard.control.remember import tell_outlook
from modelyard.control.supplies import ADAPTER_LOAD_S
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy import scaling
from modelyard.policy.actions import ForgetEndpoint
from modelyard.policy.progress import Outlook, View, outlook
from modelyard.policy.releases import main_release

HOST_GONE = "its host is gone: deploy it on another one"


async def run_guest_pass(endpoint: Endpoint, world: World, tools: Tools) -> bool:
    """Tell how ``endpoint`` stands; say whether that is news."""
    seats = world.seats.get(endpoint.id, [])
    if endpoint.is_deleted:
        if seats or tools.guests.is_seated(endpoint.id):
            return False
        return await tools.executor.carry_out(ForgetEndpoint("deleted, and it sits nowhere any more"), endpoint.id, {})
    ready = sum(seat.state is ReplicaState.READY for seat in seats)
    load_s = await tools.loads.expected_s(main_release(endpoint).version_id, ADAPTER_LOAD_S)
    told = outlook_of(endpoint, world, tools, seats, load_s)
    demand = world.demand(endpoint.id)
    tools.memories[endpoint.id] = scaling.Memory(replicas=ready, active_s=world.monotonic_s)
    seen = scaling.Seen(
        now_s=world.monotonic_s,
        replicas=len(seats),
        ready=ready,
        slots=1,
        gateways=len(world.reports),
        queued=demand.queued,
        in_flight=max(demand.in_flight - demand.queued, 0),
        idle_s=math.inf if demand.idle_s is None else demand.idle_s,
        load_s=load_s,
    )
    reason = told.progress.reason or f"seats on its host: {ready}"
    if told.failure and tools.guests.standing(endpoint.id).troubles:
        # Why others have the seats is no reason for one that could not be loaded.
        reason = "its load failed; it is tried again after a pause, and when it is asked for"
    tools.sizing.decisions[endpoint.id] = (seen, scaling.Decision(ready, reason, tools.memories[endpoint.id]))
    before, standing = tools.passed.get(endpoint.id), tools.guests.standing(endpoint.id)
    tools.passed[endpoint.id] = Passed(
        max(ready, 1),
        {},
        has_rollout=endpoint.rollout is not None and endpoint.rollout.is_live,
        no_room=dict(standing.troubles),
        is_waiting=not standing.is_over or demand.queued > 0,
        awake_at=before.awake_at if before is not None and before.replicas else world.unix_s,
    )
    return await tell_outlook(endpoint, told, world.unix_s, tools.store)


def outlook_of(endpoint: Endpoint, world: World, tools: Tools, seats: list[Replica], load_s: float) -> Outlook:
    """Return status, progress and failure of a guest."""
    standing = tools.guests.standing(endpoint.id)
    host = world.endpoints.get(endpoint.host_id)
    if host is None or host.is_deleted:
        return Outlook(EndpointStatus.FAILED, Progress(Stage.QUEUED, reason=HOST_GONE), HOST_GONE)
    is_seated = bool(seats)
    states = [one.state for one in world.replicas.get(host.id, ())]
    if not is_seated and ReplicaState.READY not in states:
        return _without_host(endpoint, host)
    waiting = next(iter(standing.waits.values()), "")
    is_wanted = is_seated or standing.fetch is not None or bool(standing.troubles)
    is_wanted |= world.demand(endpoint.id).queued > 0 or endpoint.status is EndpointStatus.PROVISIONING
    view = View(
        now_s=world.unix_s,
        wanted=int(is_wanted),
        replicas=seats,
        load_s=load_s,
        is_proven=endpoint.status is not EndpointStatus.PROVISIONING,
        size_reason=waiting or "the next request loads it",
        waiting=waiting,
        troubles=standing.troubles,
        fetch=standing.fetch,
    )
    return outlook(endpoint, view)


def _without_host(endpoint: Endpoint, host: Endpoint) -> Outlook:
    """Return how a guest stands whose host does not serve."""
    name = f"its host '{host.name}'"
    if host.failure:
        # Why is the owner's of the host to know.
        why = f": {host.failure}" if host.tenant_id == endpoint.tenant_id else ""
        failure = f"{name} cannot start{why}"
        return Outlook(EndpointStatus.FAILED, Progress(Stage.QUEUED, reason=failure), failure)
    if host.status is EndpointStatus.STOPPED:
        reason = f"asleep: {name} sleeps, a request wakes it"
        return Outlook(EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason=reason))
    is_new = endpoint.status is EndpointStatus.PROVISIONING
    progress = Progress(
        host.progress.stage if host.progress.stage is not Stage.READY else Stage.LOADING,
        percent=host.progress.percent,
        eta_s=host.progress.eta_s,
        reason=f"{name} is on its way",
    )
    return Outlook(EndpointStatus.PROVISIONING if is_new else EndpointStatus.SCALING, progress)
