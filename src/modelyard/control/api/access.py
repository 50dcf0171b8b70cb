"""Whose objects a caller may see. Another tenant's object is as good as none: 404."""

from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import ApiKey, Identity, Tenant
from modelyard.errors import ApiError, conflict, invalid_value, not_found
from modelyard.stores import ControlStore

NAME_LENGTH_MAX = 100
SHOWN_MAX = 10
"""Most endpoints that are named where a name is not enough."""


def missing(noun: str, reference: str) -> ApiError:
    """Return the 404 for ``reference``, the same for what is absent and what is another tenant's."""
    return not_found(f"{noun} '{reference[:200]}'")


def check_title(param: str, text: str) -> str:
    """Return ``text`` when it may name a tenant or key.

    Raises:
        ApiError: 400; control and direction characters could forge a line of a listing.
    """
    if not 0 < len(text) <= NAME_LENGTH_MAX or not text.isprintable() or text != text.strip():
        raise invalid_value(param, f"use 1 to {NAME_LENGTH_MAX} printable characters, without spaces around them")
    return text


async def find_endpoint(store: ControlStore, identity: Identity, reference: str) -> Endpoint:
    """Return the endpoint with this id or name; a caller's own name wins over another tenant's.

    Raises:
        ApiError: 404; 409 where several other tenants have one of this name.
    """
    seen = [one for one in await callable_endpoints(store, identity.visible_tenant) if reference in (one.id, one.name)]

    def preference(one: Endpoint) -> tuple[bool, bool, bool]:
        # An endpoint that drains has given its name away already.
        return one.id == reference, one.tenant_id == identity.tenant_id, not one.is_deleted

    if not seen:
        raise missing("endpoint", reference)
    best = max(map(preference, seen))
    alike = sorted((one for one in seen if preference(one) == best), key=lambda one: one.created_at)
    if len({one.tenant_id for one in alike}) > 1:
        names = {tenant.id: tenant.name for tenant in await store.tenants()}
        whose = ", ".join(f"{one.id} of {names.get(one.tenant_id, one.tenant_id)}" for one in alike[:SHOWN_MAX])
        more = f" and {len(alike) - SHOWN_MAX} more" if len(alike) > SHOWN_MAX else ""
        message = f"{len(alike)} tenants have an endpoint '{reference[:200]}': {whose}{more}. Give the id of one."
        raise conflict(message)
    return alike[-1]


async def callable_endpoints(store: ControlStore, tenant_id: str | None) -> list[Endpoint]:
    """Return the endpoints of a tenant (or of all) without warm pools, which answer nobody."""
    return [one for one in await store.endpoints(tenant_id=tenant_id) if not one.pool]


async def find_key(store: ControlStore, identity: Identity, key_id: str) -> ApiKey:
    """Return the key with this id.

    Raises:
        ApiError: 404.
    """
    for key in await store.keys(tenant_id=identity.visible_tenant):
        if key.id == key_id:
            return key
    raise missing("key", key_id)


async def find_tenant(store: ControlStore, reference: str) -> Tenant:
    """Return the tenant with this id or name, whoever asks.

    Raises:
        ApiError: 404.
    """
    tenants = await store.tenants()
    # An id first: nobody may hide a tenant by taking its id for a name.
    by_id = [tenant for tenant in tenants if tenant.id == reference]
    for tenant in by_id or [tenant for tenant in tenants if tenant.name == reference]:
        return tenant
    raise missing("tenant", reference)
