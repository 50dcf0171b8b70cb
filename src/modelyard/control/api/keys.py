"""API keys: create (shown once), list, change limits, revoke, rotate.

A key never gives more than its maker has: not a scope, not a model. A change
is at the gateways when its answer is sent.
"""

import asyncio
from typing import Annotated

import msgspec

from modelyard.control.api.access import check_title, find_key, find_tenant, missing
from modelyard.control.api.limits import LimitsBody, SpentView, spent_by
from modelyard.control.context import Context
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.tenants import ApiKey, Identity, Limits, Scope
from modelyard.errors import bad_request, conflict, invalid_value, permission_denied
from modelyard.ids import hash_secret, new_api_key
from modelyard.stores import StoreUnavailableError
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

OVERLAP_S_MAX = 30 * 86400
MODELS_MAX = 100


class CreateKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made."""

    name: Annotated[str, msgspec.Meta(description="What the key is for; shown in listings.")]
    scopes: Annotated[
        tuple[Scope, ...],
        msgspec.Meta(min_length=1, max_length=3, description="Not more than the scopes of the key you ask with."),
    ] = (Scope.INFERENCE,)
    limits: LimitsBody = LimitsBody()
    models: Annotated[
        tuple[str, ...] | None,
        msgspec.Meta(description="Endpoint names that the key may use; leave out for all of its tenant."),
    ] = None
    expires_at: Annotated[int | None, msgspec.Meta(description="Unix seconds; leave out for no expiry.")] = None
    tenant_id: Annotated[str | None, msgspec.Meta(description="Another tenant's key (admin only).")] = None


class ChangeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; what is left out stays."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    limits: Annotated[LimitsBody | msgspec.UnsetType, msgspec.Meta(description="Replaces all limits.")] = msgspec.UNSET


class RotateKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to rotate."""

    overlap_s: Annotated[
        int, msgspec.Meta(ge=0, le=OVERLAP_S_MAX, description="Seconds that the old secret stays valid.")
    ] = 3600


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    object: str = "key"
    name: str
    tenant_id: str
    prefix: str
    last4: str
    scopes: tuple[Scope, ...]
    limits: Limits
    models: tuple[str, ...] | None
    status: str
    """``active``, ``expired`` or ``revoked``."""
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    previous_expires_at: int | None
    """Until when the secret before the last rotation is valid."""
    spent: SpentView | None = None
    """Only where one key is asked for."""


class NewKey(KeyView, frozen=True, kw_only=True):
    """A key with its text, which is never shown again."""

    key: str


class RevokedKey(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a revocation."""

    id: str
    object: str = "key"
    deleted: bool = True
    revoked_at: int


class Keys:
    """The routes of keys."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Changes of keys are read-check-write; one at a time, so that two cannot both revoke "the other" admin key.
        self._changing = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        example = {"name": "batch jobs", "scopes": ["inference"], "limits": {"requests_per_minute": 600}}
        changed = {"limits": {"nanousd_per_month": 20_000_000_000}}
        one = "/v1/keys/{key_id}"
        rotate = f"{one}/rotate"
        manage = Scope.MANAGE
        return [
            Route("POST", "/v1/keys", manage, "Create an API key", self.create, CreateKey, Empty, NewKey, 201, example),
            Route("GET", "/v1/keys", manage, "List API keys", self.page, Empty, Paging, Page[KeyView]),
            Route("GET", one, manage, "Get an API key", self.get, Empty, Empty, KeyView),
            Route("PATCH", one, manage, "Change an API key", self.change, ChangeKey, Empty, KeyView, 200, changed),
            Route("DELETE", one, manage, "Revoke an API key", self.revoke, Empty, Empty, RevokedKey),
            Route("POST", rotate, manage, "Rotate an API key", self.rotate, RotateKey, Empty, NewKey, 200, {}),
        ]

    async def create(self, call: Call[CreateKey, Empty]) -> NewKey:
        """Make a key; its text is in this answer and nowhere else."""
        context, wanted = self._context, call.body
        now = int(context.clock.unix_s())
        check_title("name", wanted.name)
        if wanted.expires_at is not None and wanted.expires_at <= now:
            raise invalid_value("expires_at", "it is in the past (unix seconds)")
        _check_models(wanted.models)
        tenant_id = await self._tenant_for(call.identity, wanted.tenant_id)
        await self._check_within(call.identity, wanted.scopes, wanted.models)
        text, parsed = new_api_key()
        key = ApiKey(
            id=parsed.key_id,
            tenant_id=tenant_id,
            name=wanted.name,
            secret_hash=hash_secret(context.pepper, parsed.secret),
            scopes=tuple(dict.fromkeys(wanted.scopes)),
            created_at=now,
            last4=text[-4:],
            limits=wanted.limits.limits(),
            models=wanted.models,
            expires_at=wanted.expires_at,
        )
        async with self._changing:
            await context.store.add_key(key)
            await self._publish()
        return _new(key, text, now)

    async def page(self, call: Call[Empty, Paging]) -> Page[KeyView]:
        """Return the keys of the caller's tenant, or all for an admin."""
        now = int(self._context.clock.unix_s())
        keys = await self._context.store.keys(tenant_id=call.identity.visible_tenant)
        rows, has_more = page_of(keys, limit=call.query.limit, after=call.query.after, id_of=lambda key: key.id)
        return Page([_view(key, now) for key in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> KeyView:
        """Return one key, and what it spent."""
        context = self._context
        key = await find_key(context.store, call.identity, call.path("key_id"))
        spent = await spent_by(context, key.tenant_id, key.id)
        return msgspec.structs.replace(_view(key, int(context.clock.unix_s())), spent=spent)

    async def change(self, call: Call[ChangeKey, Empty]) -> KeyView:
        """Change name or limits; at the gateways when the answer is sent. What was used of a limit stays used."""
        context, wanted = self._context, call.body
        now = int(context.clock.unix_s())
        async with self._changing:
            key = await find_key(context.store, call.identity, call.path("key_id"))
            await self._check_within(call.identity, key.scopes, key.models)
            if (status := _status(key, now)) == "revoked":
                raise conflict(f"This key is {status}; create a new one instead.")
            if wanted.name is not msgspec.UNSET:
                key = msgspec.structs.replace(key, name=check_title("name", wanted.name))
            if wanted.limits is not msgspec.UNSET:
                key = msgspec.structs.replace(key, limits=wanted.limits.limits())
            await context.store.put_key(key)
            await context.refresh()
        return _view(key, now)

    async def revoke(self, call: Call[Empty, Empty]) -> RevokedKey:
        """End a key for good; repeating it changes nothing."""
        store = self._context.store
        now = int(self._context.clock.unix_s())
        async with self._changing:
            key = await find_key(store, call.identity, call.path("key_id"))
            await self._check_within(call.identity, key.scopes, key.models)
            if key.revoked_at is None:
                if not await self._other_admin_exists(key, now):
                    raise conflict("This is the last admin key. Create another one with the scope 'admin' first.")
                key = msgspec.structs.replace(key, revoked_at=now, previous_hash=None, previous_expires_at=None)
                await store.put_key(key)
            await self._context.refresh()
        return RevokedKey(id=key.id, revoked_at=key.revoked_at or now)

    async def rotate(self, call: Call[RotateKey, Empty]) -> NewKey:
        """Give the key a new secret; the old one is valid for ``overlap_s`` more."""
        context = self._context
        now = int(context.clock.unix_s())
        async with self._changing:
            key = await find_key(context.store, call.identity, call.path("key_id"))
            # Whoever rotates a key learns its secret, so he must be entitled to all that it can do.
            await self._check_within(call.identity, key.scopes, key.models)
            if (status := _status(key, now)) != "active":
                raise conflict(f"This key is {status}; create a new one instead.")
            text, parsed = new_api_key(key.id)
            overlap_s = call.body.overlap_s
            key = msgspec.structs.replace(
                key,
                secret_hash=hash_secret(context.pepper, parsed.secret),
                last4=text[-4:],
                previous_hash=key.secret_hash if overlap_s else None,
                previous_expires_at=now + overlap_s if overlap_s else None,
            )
            await context.store.put_key(key)
            await self._publish()
        return _new(key, text, now)

    async def _publish(self) -> None:
        """Tell the gateways of a new secret; it is stored, so its text must be answered whatever happens here."""
        try:
            await self._context.refresh()
        except StoreUnavailableError:
            self._context.wake()

    async def _tenant_for(self, identity: Identity, wanted: str | None) -> str:
        if wanted is None or wanted == identity.tenant_id:
            return identity.tenant_id
        if not identity.may(Scope.ADMIN):
            raise missing("tenant", wanted)
        return (await find_tenant(self._context.store, wanted)).id

    async def _check_within(
        self, identity: Identity, scopes: tuple[Scope, ...], models: tuple[str, ...] | None
    ) -> None:
        for scope in scopes:
            if not identity.may(scope):
                raise permission_denied(scope)
        if identity.may(Scope.ADMIN):
            return
        own = await find_key(self._context.store, identity, identity.key_id)
        if own.models is not None and not set(own.models).issuperset(models if models is not None else {"*"}):
            raise bad_request(
                "model_not_allowed",
                f"Your own key is limited to {', '.join(own.models) or 'no model'}; this one would reach further.",
                param="models",
            )

    async def _other_admin_exists(self, key: ApiKey, now: int) -> bool:
        if Scope.ADMIN not in key.scopes:
            return True
        suspended = {tenant.id for tenant in await self._context.store.tenants() if tenant.is_suspended}
        return any(
            other.id != key.id
            and Scope.ADMIN in other.scopes
            and _status(other, now) == "active"
            and other.tenant_id not in suspended
            for other in await self._context.store.keys()
        )


def _check_models(models: tuple[str, ...] | None) -> None:
    if models is None:
        return
    if len(models) > MODELS_MAX:
        raise invalid_value("models", f"at most {MODELS_MAX} names")
    for place, name in enumerate(models):
        if NAME_PATTERN.fullmatch(name) is None:
            raise invalid_value(f"models[{place}]", "it is not a possible endpoint name")


def _status(key: ApiKey, now: int) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def _fields(key: ApiKey, now: int) -> dict[str, object]:
    still = key.previous_expires_at
    return {
        "id": key.id,
        "name": key.name,
        "tenant_id": key.tenant_id,
        "prefix": f"my_{key.id}",
        "last4": key.last4,
        "scopes": key.scopes,
        "limits": key.limits,
        "models": key.models,
        "status": _status(key, now),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "previous_expires_at": still if still is not None and still > now else None,
    }


def _view(key: ApiKey, now: int) -> KeyView:
    return msgspec.convert(_fields(key, now), KeyView)


def _new(key: ApiKey, text: str, now: int) -> NewKey:
    return msgspec.convert(_fields(key, now) | {"key": text}, NewKey)
