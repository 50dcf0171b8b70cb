"""Tenants (admin only): create, list, change, suspend."""

import asyncio
from typing import Annotated

import msgspec

from modelyard.control.api.access import check_title, find_tenant
from modelyard.control.api.limits import SpentView, TenantLimitsBody, spent_by
from modelyard.control.context import Context
from modelyard.domain.tenants import PLATFORM, Limits, Plan, Scope, Tenant
from modelyard.errors import conflict
from modelyard.ids import new_id
from modelyard.stores import AlreadyExistsError
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_Weight = Annotated[
    float,
    msgspec.Meta(ge=0.01, le=1000, description="Share of a saturated endpoint against other tenants of the same plan."),
]
_PLAN = "How urgent its requests are where they ask for nothing else: priority, standard or batch."


class CreateTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant to be made."""

    name: Annotated[str, msgspec.Meta(description="Unique.")]
    limits: TenantLimitsBody = TenantLimitsBody()
    plan: Annotated[Plan, msgspec.Meta(description=_PLAN)] = Plan.STANDARD
    weight: _Weight = 1.0


class ChangeTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; what is left out stays."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    limits: Annotated[TenantLimitsBody | msgspec.UnsetType, msgspec.Meta(description="Replaces all limits.")] = (
        msgspec.UNSET
    )
    is_suspended: Annotated[
        bool | msgspec.UnsetType, msgspec.Meta(description="While true, no key of the tenant works.")
    ] = msgspec.UNSET
    plan: Annotated[Plan | msgspec.UnsetType, msgspec.Meta(description=_PLAN)] = msgspec.UNSET
    weight: _Weight | msgspec.UnsetType = msgspec.UNSET


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: str
    object: str = "tenant"
    name: str
    limits: Limits
    is_suspended: bool
    created_at: int
    plan: Plan
    weight: float
    spent: SpentView | None = None
    """Only where one tenant is asked for."""


class Tenants:
    """The routes of tenants."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._changing = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, admin = "/v1/tenants", "/v1/tenants/{tenant_id}", Scope.ADMIN
        create, change = {"name": "acme", "limits": {"concurrency": 32}}, {"is_suspended": True}
        return [
            Route("POST", every, admin, "Create a tenant", self.create, CreateTenant, Empty, TenantView, 201, create),
            Route("GET", every, admin, "List tenants", self.page, Empty, Paging, Page[TenantView]),
            Route("GET", one, admin, "Get a tenant", self.get, Empty, Empty, TenantView),
            Route("PATCH", one, admin, "Change a tenant", self.change, ChangeTenant, Empty, TenantView, 200, change),
        ]

    async def create(self, call: Call[CreateTenant, Empty]) -> TenantView:
        """Make a tenant."""
        name = check_title("name", call.body.name)
        now = int(self._context.clock.unix_s())
        wanted = call.body
        tenant = Tenant(
            id=new_id("ten-"),
            name=name,
            created_at=now,
            limits=wanted.limits.limits(),
            plan=wanted.plan,
            weight=wanted.weight,
        )
        try:
            await self._context.store.add_tenant(tenant)
        except AlreadyExistsError:
            raise _taken(name) from None
        await self._context.refresh()
        return _view(tenant)

    async def page(self, call: Call[Empty, Paging]) -> Page[TenantView]:
        """Return all tenants."""
        tenants = await self._context.store.tenants()
        rows, has_more = page_of(tenants, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        return Page([_view(tenant) for tenant in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> TenantView:
        """Return one tenant, and what it spent."""
        context = self._context
        tenant = await find_tenant(context.store, call.path("tenant_id"))
        spent = await spent_by(context, tenant.id, None)
        return msgspec.structs.replace(_view(tenant), spent=spent)

    async def change(self, call: Call[ChangeTenant, Empty]) -> TenantView:
        """Change name, limits, plan, weight or suspension; at the gateways when the answer is sent."""
        wanted, store = call.body, self._context.store
        async with self._changing:
            tenant = await find_tenant(store, call.path("tenant_id"))
            if wanted.name is not msgspec.UNSET and wanted.name != tenant.name:
                name = check_title("name", wanted.name)
                if any(other.name == name for other in await store.tenants()):
                    raise _taken(name)
                tenant = msgspec.structs.replace(tenant, name=name)
            if wanted.limits is not msgspec.UNSET:
                tenant = msgspec.structs.replace(tenant, limits=wanted.limits.limits())
            if wanted.is_suspended is not msgspec.UNSET:
                if wanted.is_suspended and tenant.id in (PLATFORM, call.identity.tenant_id):
                    # Its admin keys would stop with it, and nobody could undo this.
                    raise conflict("The operator's own tenant cannot be suspended.", param="is_suspended")
                tenant = msgspec.structs.replace(tenant, is_suspended=wanted.is_suspended)
            if wanted.plan is not msgspec.UNSET:
                tenant = msgspec.structs.replace(tenant, plan=wanted.plan)
            if wanted.weight is not msgspec.UNSET:
                tenant = msgspec.structs.replace(tenant, weight=wanted.weight)
            await store.put_tenant(tenant)
            await self._context.refresh()
        return _view(tenant)


def _taken(name: str) -> Exception:
    return conflict(f"A tenant named '{name}' exists.", param="name")


def _view(tenant: Tenant) -> TenantView:
    return TenantView(
        id=tenant.id,
        name=tenant.name,
        limits=tenant.limits,
        is_suspended=tenant.is_suspended,
        created_at=tenant.created_at,
        plan=tenant.plan,
        weight=tenant.weight,
    )
