"""Warm pools: replicas of a base that run for whoever needs one first (admin only)."""

from typing import Annotated

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.api.faults import Fault, refusal
from modelyard.control.context import Context
from modelyard.domain.catalog import NAME_PATTERN, ModelVersion
from modelyard.domain.endpoints import Autoscale, Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.tenants import Identity, Scope
from modelyard.errors import conflict
from modelyard.ids import new_id
from modelyard.policy.releases import main_release
from modelyard.stores import AlreadyExistsError, Event
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

REPLICAS_MAX = 64


class PoolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which base, and how many replicas of it wait."""

    model: Annotated[
        str, msgspec.Meta(description="NAME (the version that is served, else the newest), NAME@VERSION or an id.")
    ]
    replicas: Annotated[
        int | None, msgspec.Meta(description="Replicas that wait; null: as many as cold starts of the base ask for.")
    ] = None
    node_pool: Annotated[str, msgspec.Meta(description="Nodes that they run on.")] = "default"


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A warm pool and what it has."""

    id: str
    object: str = "pool"
    name: str
    model: str
    version: str
    replicas: int | None
    wanted: int
    reason: str
    """Why it is to have so many."""
    ready: int
    loading: int
    node_pool: str
    created_at: int


class DeletedPool(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion: what waits is stopped, what was taken goes on."""

    name: str
    object: str = "pool"
    deleted: bool = True


EXAMPLE = {"model": "smol@v1", "replicas": 2}


class WarmPools:
    """The routes of warm pools."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, admin = "/v1/pools", "/v1/pools/{pool}", Scope.ADMIN
        return [
            Route("GET", every, admin, "List warm pools", self.page, Empty, Paging, Page[PoolView]),
            Route("PUT", one, admin, "Make or change a warm pool", self.put, PoolBody, Empty, PoolView, 200, EXAMPLE),
            Route("DELETE", one, admin, "Delete a warm pool", self.delete, Empty, Empty, DeletedPool, 202),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[PoolView]:
        """Return the pools, oldest first."""
        pools = [one for one in await self._context.store.endpoints() if one.pool and not one.is_deleted]
        rows, has_more = page_of(pools, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        return Page([await self._view(one) for one in rows], has_more)

    async def put(self, call: Call[PoolBody, Empty]) -> PoolView:
        """Make the pool of this name as it is asked to be."""
        context, name, wanted = self._context, call.path("pool"), call.body
        async with context.changing:
            version = await self._version(call.identity, wanted.model)
            faults = [*_faults(name, wanted)]
            if version is None:
                faults.append(Fault("model", f"there is no version '{wanted.model[:100]}' in the registry"))
            if faults:
                raise refusal("This pool cannot be made.", faults)
            assert version is not None, "else there is a fault"
            before = await self._find(name)
            pool = _pool(name, wanted, version, call.identity, before, created_at=int(context.clock.unix_s()))
            if before is None:
                try:
                    await context.store.add_endpoint(pool)
                except AlreadyExistsError:
                    raise conflict(f"An endpoint is called '{pool.name}'; choose another name for the pool.") from None
            elif before != pool:
                await context.store.put_endpoint(pool)
            reason = f"asked for with key {call.identity.key_id}"
            await context.store.add_event(Event(context.clock.unix_s(), pool.id, "changed", reason))
        context.wake()
        return await self._view(pool)

    async def delete(self, call: Call[Empty, Empty]) -> DeletedPool:
        """Let the pool go; replicas that others took stay theirs."""
        context, name = self._context, call.path("pool")
        async with context.changing:
            pool = await self._find(name)
            if pool is None:
                raise missing("pool", name)
            await context.store.put_endpoint(msgspec.structs.replace(pool, is_deleted=True))
        context.wake()
        return DeletedPool(name=name)

    async def _find(self, name: str) -> Endpoint | None:
        pools = [one for one in await self._context.store.endpoints() if one.pool == name and not one.is_deleted]
        return pools[0] if pools else None

    async def _version(self, identity: Identity, reference: str) -> ModelVersion | None:
        """Return the version that ``reference`` names: of a bare name what an endpoint serves, else the newest.

        The caller's own wins.
        """
        served = {main_release(one).version_id for one in await self._context.store.endpoints() if _serves(one)}
        name, _, wanted = reference.partition("@")
        found = [
            one
            for one in await self._context.store.versions()
            if one.id == reference or (one.name == name and wanted in ("", one.version))
        ]
        own = identity.tenant_id
        return max(
            found, key=lambda one: (one.tenant_id == own, one.id in served, one.created_at, one.id), default=None
        )

    async def _view(self, pool: Endpoint) -> PoolView:
        store = self._context.store
        versions = {version.id: version for version in await store.versions()}
        version = versions.get(pool.releases[0].version_id) if pool.releases else None
        replicas: list[Replica] = await store.replicas(endpoint_id=pool.id)
        size = self._context.size(pool.id)
        states = [replica.state for replica in replicas]
        return PoolView(
            id=pool.id,
            name=pool.pool,
            model=version.name if version else "",
            version=version.version if version else "",
            replicas=pool.scaling.min_replicas or None,
            wanted=size[1].replicas if size else pool.scaling.min_replicas,
            reason=size[1].reason if size else "the controller has not looked at it yet",
            ready=states.count(ReplicaState.READY),
            loading=states.count(ReplicaState.LOADING) + states.count(ReplicaState.STARTING),
            node_pool=pool.autoscale.node_pool,
            created_at=pool.created_at,
        )


def _serves(endpoint: Endpoint) -> bool:
    return bool(endpoint.releases) and not endpoint.pool and not endpoint.is_deleted


def _faults(name: str, wanted: PoolBody) -> list[Fault]:
    faults = []
    if NAME_PATTERN.fullmatch(name) is None or "/" in name:
        faults.append(Fault("pool", "use 1 to 96 letters, digits, '.', '_' or '-' for its name"))
    if wanted.replicas is not None and not 1 <= wanted.replicas <= REPLICAS_MAX:
        faults.append(Fault("replicas", f"must be 1 to {REPLICAS_MAX}, or null"))
    return faults


def _pool(
    name: str, wanted: PoolBody, version: ModelVersion, identity: Identity, before: Endpoint | None, *, created_at: int
) -> Endpoint:
    size = wanted.replicas or 0
    scaling = Scaling(min_replicas=size, max_replicas=size or REPLICAS_MAX, scale_to_zero=size == 0)
    autoscale = Autoscale(node_pool=wanted.node_pool)
    if before is not None:
        return msgspec.structs.replace(before, releases=(Release(version.id),), scaling=scaling, autoscale=autoscale)
    return Endpoint(
        id=new_id("ep-"),
        tenant_id=identity.tenant_id,
        name=f"pool/{name}",
        releases=(Release(version.id),),
        scaling=scaling,
        created_at=created_at,
        autoscale=autoscale,
        pool=name,
    )
