"""What is shown of an endpoint: the source's row, and what is known of it now."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from modelyard.control.api.rollout_views import RolloutView, rollout_view
from modelyard.control.api.serving import ServingView, serving_view
from modelyard.control.context import Context
from modelyard.control.guests import guests_max
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.endpoints import Autoscale, Endpoint, EndpointStatus, IdleTime, Progress, Release, Tier
from modelyard.domain.fleet import NAPPING, SEAT_STATES, Replica, ReplicaState, seats_of
from modelyard.policy import scaling, tiers
from modelyard.policy.releases import main_release, serving_release
from modelyard.stores import Event, EventData

URL_HEADER = "x-modelyard-url"
"""Where the caller reached the gateway (``http://127.0.0.1:8484``); set by the gateway only."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as its owner sees it: without address and secret."""

    id: str
    state: ReplicaState
    reason: str
    slots: int
    age_s: int


class GuestView(msgspec.Struct, frozen=True, kw_only=True):
    """A guest of a host, as the reader may know it."""

    name: str
    """"" for one of another tenant."""
    model_id: str
    """Its version."""
    replica_id: str
    state: ReplicaState
    age_s: int


class ReleaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One version and its share of the traffic."""

    model_id: str
    version: str
    weight: int
    shadow: int
    """Percent of requests that are copied to it; nobody gets its answers."""
    fallback: int
    """Its turn (1 first) to answer what the releases with weight have no room for; 0: never."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, and why."""

    at: int
    kind: str
    reason: str
    replica_id: str
    data: EventData = {}
    """The numbers behind the reason; the end of a crashed replica's log."""


class SizeView(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there should be, why, and the numbers that were looked at."""

    replicas: int
    reason: str
    seen: EventData


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """How close the endpoint is to answering, and why. ``is_short``: it is not what its owner pinned."""

    tier: Tier
    reason: str
    is_short: bool


class AutoscaleView(msgspec.Struct, frozen=True, kw_only=True):
    """When the size changes and how far; see ``PATCH``, which takes the same names."""

    tier: Tier | None
    node_pool: str
    check_s: float
    up_queue: int
    up_queue_s: float
    up_utilization: float
    up_utilization_s: float
    up_latency_factor: float
    up_latency_s: float
    up_kv: float
    up_kv_s: float
    down_queue_s: float
    down_utilization: float
    down_utilization_s: float
    target_ttft_s: float
    target_latency_s: float | None
    load_share_up: float
    load_share_down: float
    backlog_s: float
    idle: IdleTime
    prewarm: bool
    prewarm_s: float
    prewarm_budget: float
    prewarm_cold_cost_s: float
    batch_scales: bool
    nap_s: float
    burst_pool: str


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: the source's row, and what is known of it now."""

    id: str
    object: str = "endpoint"
    endpoint_id: str
    name: str
    url: str
    model_id: str
    model_version: str
    framework: str
    status: EndpointStatus
    progress: Progress
    failure: str
    min_replicas: int
    max_replicas: int
    current_replicas: int
    gpu_type: str
    gpus_per_replica: int
    routes: list[str]
    """API paths that its version answers, as far as options and header tell."""
    scale_to_zero: bool
    scale_to_zero_after_idle_seconds: float
    canary_weight: int
    releases: list[ReleaseView]
    rollout: RolloutView | None
    """A rollout that is under way, or the last one that ended."""
    owner_id: str
    scaling_metric: str
    scaling_target: float
    autoscale: AutoscaleView
    tier: TierView
    size: SizeView | None
    """Null until the controller has looked at it for the first time."""
    serving: ServingView
    is_shared: bool
    is_deleted: bool
    created_at: int
    queued: int
    in_flight: int
    """Requests that run or wait."""
    idle_s: int | None
    """Whole seconds since the last request; null when no connected gateway had one."""
    host: str
    """Of a guest: the endpoint on whose replicas it sits; its ``replicas`` are its seats there."""
    host_id: str
    guests: list[GuestView]
    """Of a host: who sits on which of its replicas."""
    guests_max: int
    """Of a host: the guests that one of its replicas holds."""
    replicas: list[ReplicaView]
    events: list[EventView] | msgspec.UnsetType = msgspec.UNSET
    """The last ten; only where one endpoint is asked for."""


class Known(NamedTuple):
    """What runs: replicas of endpoints, seats of guests (as if they were replicas of theirs), and all endpoints."""

    replicas: Mapping[str, list[Replica]]
    seats: Mapping[str, list[Replica]]
    endpoints: Mapping[str, Endpoint]

    @classmethod
    def of(cls, endpoints: Iterable[Endpoint], replicas: Iterable[Replica]) -> "Known":
        """Return it all by endpoint."""
        by_endpoint: dict[str, list[Replica]] = defaultdict(list)
        for replica in replicas:
            if not replica.is_tombstone:
                by_endpoint[replica.endpoint_id].append(replica)
        return cls(by_endpoint, seats_of(replicas), {one.id: one for one in endpoints})

    def of_endpoint(self, endpoint: Endpoint) -> list[Replica]:
        """Return what answers for ``endpoint``."""
        return self.seats.get(endpoint.id, []) if endpoint.host_id else self.replicas.get(endpoint.id, [])


def endpoint_view(
    context: Context, request: Request, endpoint: Endpoint, versions: Mapping[str, ModelVersion], known: Known
) -> EndpointView:
    """Return what is shown of ``endpoint`` to who asked with ``request``."""
    now = context.clock.unix_s()
    own = known.of_endpoint(endpoint)
    host = known.endpoints.get(endpoint.host_id)
    demand = demand_of(context.gateways()).get(endpoint.id, [])
    serving = serving_release(endpoint)
    first = versions.get(serving.version_id) if serving else None
    base = request.headers.get(URL_HEADER, "").rstrip("/")
    return EndpointView(
        id=endpoint.id,
        endpoint_id=endpoint.id,
        name=endpoint.name,
        url=f"{base}/v1/models/{endpoint.id}",
        model_id=first.id if first else "",
        model_version=first.version if first else "",
        framework=first.framework if first else "",
        status=endpoint.status,
        progress=endpoint.progress,
        failure=endpoint.failure,
        min_replicas=endpoint.scaling.min_replicas,
        max_replicas=endpoint.scaling.max_replicas,
        current_replicas=sum(replica.state is ReplicaState.READY for replica in own),
        gpu_type=first.gpu_type if first else "",
        gpus_per_replica=first.gpu_count if first else 0,
        routes=_routes(context, first, versions),
        scale_to_zero=endpoint.scaling.scale_to_zero,
        scale_to_zero_after_idle_seconds=endpoint.scaling.idle_s,
        canary_weight=sum(release.weight for release in endpoint.releases if release is not serving),
        releases=[_release_view(release, versions.get(release.version_id)) for release in endpoint.releases],
        rollout=rollout_view(endpoint, versions),
        owner_id=endpoint.tenant_id,
        scaling_metric=endpoint.scaling.metric,
        scaling_target=endpoint.scaling.target_value,
        autoscale=autoscale_view(endpoint.autoscale),
        tier=tier_view(context, endpoint, versions, own),
        size=_size(context, endpoint),
        serving=serving_view(endpoint.serving),
        is_shared=endpoint.is_shared,
        is_deleted=endpoint.is_deleted,
        created_at=endpoint.created_at,
        queued=sum(one.queued for one in demand),
        in_flight=sum(one.in_flight for one in demand),
        idle_s=_idle_s(demand),
        host=host.name if host is not None else "",
        host_id=endpoint.host_id,
        guests=_guests(endpoint, known, now),
        guests_max=_guests_max(context, endpoint, first),
        replicas=[
            ReplicaView(
                id=replica.id,
                state=replica.state,
                reason=replica.reason,
                slots=replica.slots,
                age_s=max(0, int(now - replica.started_at)) if replica.started_at else 0,
            )
            for replica in own
        ],
    )


def _guests(host: Endpoint, known: Known, now: float) -> list[GuestView]:
    """Return who sits on the replicas of ``host``, by name where they are its owner's."""
    return [
        GuestView(
            name=guest.name if guest is not None and guest.tenant_id == host.tenant_id else "",
            model_id=seat.version_id if guest is not None and guest.tenant_id == host.tenant_id else "",
            replica_id=replica.id,
            state=SEAT_STATES[seat.state],
            age_s=max(0, int(now - seat.since)),
        )
        for replica in known.replicas.get(host.id, ())
        for seat in replica.guests
        for guest in (known.endpoints.get(seat.endpoint_id),)
    ]


def _guests_max(context: Context, endpoint: Endpoint, version: ModelVersion | None) -> int:
    engine = context.engines.get(version.framework) if version is not None and not endpoint.host_id else None
    return guests_max(engine, version) if engine is not None and version is not None else 0


def _routes(context: Context, version: ModelVersion | None, versions: Mapping[str, ModelVersion]) -> list[str]:
    """Return the paths of ``version``; an adapter answers those of its base."""
    engine = context.engines.get(version.framework) if version is not None else None
    if version is None or engine is None:
        return []
    version = versions.get(version.base_id, version)
    try:
        return sorted(engine.routes_of(version.options, version.facts))
    except ValueError:
        return []


def _release_view(release: Release, version: ModelVersion | None) -> ReleaseView:
    return ReleaseView(
        model_id=release.version_id,
        version=version.version if version else "",
        weight=release.weight,
        shadow=release.shadow,
        fallback=release.fallback,
    )


def autoscale_view(rules: Autoscale) -> AutoscaleView:
    """Return what is shown of ``rules``, defaults too."""
    return AutoscaleView(**msgspec.structs.asdict(rules))


def tier_view(
    context: Context, endpoint: Endpoint, versions: Mapping[str, ModelVersion], own: Iterable[Replica]
) -> TierView:
    """Return how close ``endpoint`` with its ``own`` replicas is to answering."""
    demand = demand_of(context.gateways()).get(endpoint.id, [])
    idle_s = min((one.idle_s for one in demand), default=math.inf)
    version = versions.get(main_release(endpoint).version_id) if endpoint.releases else None
    states = [replica.state for replica in own]
    ready, asleep = states.count(ReplicaState.READY), sum(state in NAPPING for state in states)
    engine = context.engines.get(version.framework) if version else None
    if version is not None and engine is not None:
        sleeps_s = engine.sleeps_after_s(version.options)
        if sleeps_s and idle_s > sleeps_s:
            ready, asleep = 0, ready + asleep
    digest = version.artifact.digest if version else ""
    standing = tiers.tier_of(
        tiers.Seen(
            ready=ready,
            loading=states.count(ReplicaState.LOADING) + states.count(ReplicaState.STARTING),
            asleep=asleep,
            in_flight=sum(one.in_flight for one in demand),
            idle_s=idle_s if math.isfinite(idle_s) else None,
            floor=endpoint.scaling.floor,
            pin=endpoint.autoscale.tier,
            cached_on=[id for id, seen in context.nodes().items() if digest and digest in seen.cached],
            is_stored=bool(digest),
            has_weights=engine is None or engine.needs_artifact,
        )
    )
    return TierView(tier=standing.tier, reason=standing.reason, is_short=standing.is_short)


def _size(context: Context, endpoint: Endpoint) -> SizeView | None:
    found = context.size(endpoint.id)
    if found is None:
        return None
    seen, decision = found
    return SizeView(replicas=decision.replicas, reason=decision.reason, seen=scaling.numbers(seen, decision.replicas))


def demand_of(gateways: Mapping[str, Report]) -> Mapping[str, list[EndpointDemand]]:
    """Return the demand for each endpoint, one entry a gateway."""
    found: dict[str, list[EndpointDemand]] = defaultdict(list)
    for report in gateways.values():
        for demand in report.endpoints:
            found[demand.endpoint_id].append(demand)
    return found


def _idle_s(demand: Iterable[EndpointDemand]) -> int | None:
    shortest = min((one.idle_s for one in demand), default=math.inf)
    return int(shortest) if math.isfinite(shortest) else None


def event_view(event: Event) -> EventView:
    """Return what is shown of ``event``."""
    return EventView(
        at=int(event.at), kind=event.kind, reason=event.reason, replica_id=event.replica_id, data=event.data
    )
