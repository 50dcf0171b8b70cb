"""Endpoints: list, get, delete, events."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from modelyard.control.api.access import find_endpoint
from modelyard.control.api.deploy import URL_HEADER
from modelyard.control.context import Context
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.tenants import Scope
from modelyard.stores import Event
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EVENTS_SHOWN = 10
EVENTS_MAX = 200


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as its owner sees it: without address and secret."""

    id: str
    state: ReplicaState
    reason: str
    slots: int
    age_s: int


class ReleaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One version and its share of the traffic."""

    model_id: str
    version: str
    weight: int


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, and why."""

    at: int
    kind: str
    reason: str
    replica_id: str


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
    scale_to_zero: bool
    scale_to_zero_after_idle_seconds: float
    canary_weight: int
    releases: list[ReleaseView]
    owner_id: str
    is_shared: bool
    is_deleted: bool
    created_at: int
    queued: int
    in_flight: int
    idle_s: int | None
    """Whole seconds since the last request; null when no connected gateway had one."""
    replicas: list[ReplicaView]
    events: list[EventView] | msgspec.UnsetType = msgspec.UNSET
    """The last ten; only where one endpoint is asked for."""


class DeletedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion: no new requests, running ones are finished, then it is gone."""

    id: str
    object: str = "endpoint"
    deleted: bool = True


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many events."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=EVENTS_MAX, description="The newest so many, oldest first.")] = 50


class Endpoints:
    """The routes of endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes; the events come first, since a name may hold a slash."""
        every, one, manage = "/v1/endpoints", "/v1/endpoints/{endpoint:path}", Scope.MANAGE
        return [
            Route("GET", every, manage, "List endpoints", self.page, Empty, Paging, Page[EndpointView]),
            Route("GET", f"{one}/events", manage, "Events", self.events, Empty, EventsQuery, Page[EventView]),
            Route("GET", one, manage, "Get an endpoint by id or name", self.get, Empty, Empty, EndpointView),
            Route("DELETE", one, manage, "Delete an endpoint", self.delete, Empty, Empty, DeletedEndpoint, 202),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[EndpointView]:
        """Return the endpoints of the caller's tenant, or all for an admin."""
        store = self._context.store
        tenant_id = call.identity.visible_tenant
        endpoints = await store.endpoints(tenant_id=tenant_id)
        rows, has_more = page_of(endpoints, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        versions = {version.id: version for version in await store.versions(tenant_id=tenant_id)}
        replicas = await store.replicas()
        return Page([self._view(call, one, versions, replicas) for one in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> EndpointView:
        """Return one endpoint with its last events."""
        store = self._context.store
        endpoint = await find_endpoint(store, call.identity, call.path("endpoint"))
        versions = {version.id: version for version in await store.versions(tenant_id=endpoint.tenant_id)}
        replicas = await store.replicas(endpoint_id=endpoint.id)
        view = self._view(call, endpoint, versions, replicas)
        events = await store.events(endpoint.id, limit=EVENTS_SHOWN)
        return msgspec.structs.replace(view, events=[_event(event) for event in events])

    async def delete(self, call: Call[Empty, Empty]) -> DeletedEndpoint:
        """Mark the endpoint deleted and take it from the gateways; the reconciler drains and removes it."""
        context = self._context
        endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
        if not endpoint.is_deleted:
            await context.store.put_endpoint(msgspec.structs.replace(endpoint, is_deleted=True))
            event = Event(context.clock.unix_s(), endpoint.id, "deleted", f"asked for with key {call.identity.key_id}")
            await context.store.add_event(event)
        context.wake()
        await context.refresh()
        return DeletedEndpoint(id=endpoint.id)

    async def events(self, call: Call[Empty, EventsQuery]) -> Page[EventView]:
        """Return what happened to an endpoint, oldest first."""
        store = self._context.store
        endpoint = await find_endpoint(store, call.identity, call.path("endpoint"))
        events = await store.events(endpoint.id, limit=call.query.limit)
        return Page([_event(event) for event in events])

    def _view(
        self,
        call: Call[Empty, Paging] | Call[Empty, Empty],
        endpoint: Endpoint,
        versions: Mapping[str, ModelVersion],
        replicas: Iterable[Replica],
    ) -> EndpointView:
        now = self._context.clock.unix_s()
        own = [one for one in replicas if one.endpoint_id == endpoint.id and not one.is_tombstone]
        demand = demand_of(self._context.gateways()).get(endpoint.id, [])
        first = versions.get(endpoint.releases[0].version_id) if endpoint.releases else None
        base = call.request.headers.get(URL_HEADER, "").rstrip("/")
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
            scale_to_zero=endpoint.scaling.scale_to_zero,
            scale_to_zero_after_idle_seconds=endpoint.scaling.idle_s,
            canary_weight=sum(release.weight for release in endpoint.releases[1:]),
            releases=[
                ReleaseView(
                    model_id=release.version_id, version=version.version if version else "", weight=release.weight
                )
                for release in endpoint.releases
                for version in (versions.get(release.version_id),)
            ],
            owner_id=endpoint.tenant_id,
            is_shared=endpoint.is_shared,
            is_deleted=endpoint.is_deleted,
            created_at=endpoint.created_at,
            queued=sum(one.queued for one in demand),
            in_flight=sum(one.in_flight for one in demand),
            idle_s=_idle_s(demand),
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


def _event(event: Event) -> EventView:
    return EventView(at=int(event.at), kind=event.kind, reason=event.reason, replica_id=event.replica_id)
