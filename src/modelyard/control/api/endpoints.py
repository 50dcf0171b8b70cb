"""Endpoints: list, get, change, delete, events."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from modelyard.control.api.access import callable_endpoints, find_endpoint
from modelyard.control.api.endpoint_changes import CHANGE_EXAMPLE, ChangeEndpoint, changed
from modelyard.control.api.endpoint_views import EndpointView, EventView, Known, endpoint_view, event_view
from modelyard.control.api.faults import Fault, refusal
from modelyard.control.api.hosting import guests_of, named, stranding
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import Scope
from modelyard.errors import conflict
from modelyard.policy.rollouts import NotPossibleError, check_free, settled
from modelyard.stores import Event
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EVENTS_SHOWN = 10
EVENTS_MAX = 200


class DeletedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion: no new requests, running ones are finished, then it is gone."""

    id: str
    object: str = "endpoint"
    deleted: bool = True


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many events."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=EVENTS_MAX, description="The newest so many, oldest first.")] = 50


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether guests that sit on it may lose their host."""

    force: Annotated[bool, msgspec.Meta(description="Also while guests sit on its replicas.")] = False


class Endpoints:
    """The routes of endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes; the events come first, since a name may hold a slash."""
        every, one, manage = "/v1/endpoints", "/v1/endpoints/{endpoint:path}", Scope.MANAGE
        summary = "Change an endpoint"
        return [
            Route("GET", every, manage, "List endpoints", self.page, Empty, Paging, Page[EndpointView]),
            Route("GET", f"{one}/events", manage, "Events", self.events, Empty, EventsQuery, Page[EventView]),
            Route("GET", one, manage, "Get an endpoint by id or name", self.get, Empty, Empty, EndpointView),
            Route("PATCH", one, manage, summary, self.change, ChangeEndpoint, Empty, EndpointView, 200, CHANGE_EXAMPLE),
            Route("DELETE", one, manage, "Delete an endpoint", self.delete, Empty, DeleteQuery, DeletedEndpoint, 202),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[EndpointView]:
        """Return the endpoints of the caller's tenant, or all for an admin."""
        store = self._context.store
        tenant_id = call.identity.visible_tenant
        endpoints = await callable_endpoints(store, tenant_id)
        rows, has_more = page_of(endpoints, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        versions = {version.id: version for version in await store.versions(tenant_id=tenant_id)}
        replicas = await store.replicas()
        known = Known.of(await store.endpoints(), replicas)
        return Page([endpoint_view(self._context, call.request, one, versions, known) for one in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> EndpointView:
        """Return one endpoint with its last events."""
        endpoint = await find_endpoint(self._context.store, call.identity, call.path("endpoint"))
        return await whole_view(self._context, call.request, endpoint)

    async def change(self, call: Call[ChangeEndpoint, Empty]) -> EndpointView:
        """Change how an endpoint is served and sized, and the shares of its releases; what is left out stays."""
        context, store = self._context, self._context.store
        async with context.changing:
            endpoint = await find_living(context, call)
            names = {one.id: one.version for one in await store.versions(tenant_id=endpoint.tenant_id)}
            after, faults = changed(endpoint, call.body, names, context.config.gateway)
            faults += await self._stranding(endpoint, after)
            if faults:
                raise refusal("This endpoint cannot be changed so.", faults)
            if after.releases != endpoint.releases:
                _check_free(endpoint, names)
                after = settled(
                    after, {one.version_id for one in after.releases if one.weight or one.shadow or one.fallback}
                )
            if after != endpoint:
                await store.put_endpoint(after)
                reason = f"asked for with key {call.identity.key_id}"
                await store.add_event(Event(context.clock.unix_s(), endpoint.id, "changed", reason))
            # Also when nothing is new: it may be the second try of a change that never reached the gateways.
            context.wake()
            await context.refresh()
        return await whole_view(context, call.request, after)

    async def _stranding(self, endpoint: Endpoint, after: Endpoint) -> list[Fault]:
        """Return why the guests of a host would have no place on a release that is to answer now."""
        before = {one.version_id for one in endpoint.releases if one.weight}
        new = {one.version_id for one in after.releases if one.weight} - before
        versions = await self._context.store.versions(tenant_id=endpoint.tenant_id) if new else []
        for version in versions:
            engine = self._context.engines.get(version.framework)
            if version.id in new and engine is not None:
                faults = await stranding(self._context, endpoint, engine, version)
                if faults:
                    return [Fault("releases", f"version '{version.version}': {faults[0].reason}")]
        return []

    async def delete(self, call: Call[Empty, DeleteQuery]) -> DeletedEndpoint:
        """Mark the endpoint deleted and take it from the gateways; the reconciler drains and removes it."""
        context = self._context
        async with context.changing:
            endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
            guests = await guests_of(context, endpoint.id)
            if guests and not endpoint.is_deleted and not call.query.force:
                raise conflict(
                    f"{len(guests)} guests sit on the replicas of '{endpoint.name}' ({named(guests, call.identity)}). "
                    "Delete them first, or delete it with ?force=true, which leaves them without a host."
                )
            if not endpoint.is_deleted:
                await context.store.put_endpoint(msgspec.structs.replace(endpoint, is_deleted=True))
                reason = f"asked for with key {call.identity.key_id}"
                await context.store.add_event(Event(context.clock.unix_s(), endpoint.id, "deleted", reason))
        context.wake()
        await context.refresh()
        return DeletedEndpoint(id=endpoint.id)

    async def events(self, call: Call[Empty, EventsQuery]) -> Page[EventView]:
        """Return what happened to an endpoint, oldest first."""
        store = self._context.store
        endpoint = await find_endpoint(store, call.identity, call.path("endpoint"))
        events = await store.events(endpoint.id, limit=call.query.limit)
        return Page([event_view(event) for event in events])


def _check_free(endpoint: Endpoint, names: Mapping[str, str]) -> None:
    try:
        check_free(endpoint, names)
    except NotPossibleError as error:
        raise conflict(f"The shares cannot be changed: {error}.", param="releases") from None


async def find_living(context: Context, call: Call[Any, Empty]) -> Endpoint:
    """Return the endpoint that a call names.

    Raises:
        ApiError: 404, or 409 for one that is being deleted.
    """
    endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
    if endpoint.is_deleted:
        raise conflict(f"Endpoint '{endpoint.name}' is being deleted.")
    return endpoint


async def whole_view(context: Context, request: Request, endpoint: Endpoint) -> EndpointView:
    """Return what is shown of one endpoint, with its last events."""
    store = context.store
    versions = {version.id: version for version in await store.versions(tenant_id=endpoint.tenant_id)}
    known = Known.of(await store.endpoints(), await store.replicas())
    view = endpoint_view(context, request, endpoint, versions, known)
    events = await store.events(endpoint.id, limit=EVENTS_SHOWN)
    return msgspec.structs.replace(view, events=[event_view(event) for event in events])
