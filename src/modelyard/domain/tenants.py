"""Tenants, API keys and what they may do."""

from enum import StrEnum

import msgspec

PLATFORM = "platform"
"""The tenant that ``modelyard up`` creates for its operator."""


class Scope(StrEnum):
    """What a key may do. ``manage`` covers its own tenant, ``admin`` everything."""

    INFERENCE = "inference"
    MANAGE = "manage"
    ADMIN = "admin"


class Rates(msgspec.Struct, frozen=True, omit_defaults=True):
    """Upper bounds in time; None is no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Limits(Rates, frozen=True, omit_defaults=True):
    """Upper bounds over all requests of a key or tenant; None is no bound.

    Days and months are UTC's. Money is whole nano-dollars. ``models`` bounds single models further, by endpoint name.
    """

    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None
    models: dict[str, Rates] = {}
    accelerators: int | None = None
    """Accelerators that all replicas of a tenant may have at once; of a key it means nothing."""
    nanousd_total: int | None = None
    """All that may ever be spent: what was, and the prepaid credit that is left. Set by how a tenant pays."""
    model_budgets: dict[str, int] = {}
    """Money a month for single models, by endpoint name. Set by hard budgets."""

    @property
    def has_quota(self) -> bool:
        """Say whether a sum is bounded: a day's, a month's, or all."""
        return any(quota is not None for quota in self.quotas)

    @property
    def quotas(self) -> tuple[int | None, ...]:
        """The bounds of sums: tokens of a day and a month, money of a day, of a month and in all."""
        days = (self.tokens_per_day, self.tokens_per_month, self.nanousd_per_day, self.nanousd_per_month)
        return (*days, self.nanousd_total)


def model_subject(owner_id: str, model: str) -> str:
    """Return the name of what a key or tenant spends on one model: a quota has it, and so have the sums for it."""
    return f"{owner_id}/{model}"


class Plan(StrEnum):
    """How urgent a tenant's requests are where they ask for nothing else (``service_tier``)."""

    PRIORITY = "priority"
    STANDARD = "standard"
    BATCH = "batch"


class Tenant(msgspec.Struct, frozen=True):
    """A customer; owns everything."""

    id: str
    name: str
    created_at: int
    limits: Limits = Limits()
    is_suspended: bool = False
    plan: Plan = Plan.STANDARD
    weight: float = 1.0
    """Share of a saturated endpoint against other tenants of the same plan."""


class ApiKey(msgspec.Struct, frozen=True):
    """A credential of a tenant. The secret itself is never stored.

    ``secret_hash`` is HMAC-SHA256 under the pepper. After a rotation the old
    hash stays valid until ``previous_expires_at`` (unix seconds). ``models``
    are the endpoint names that the key may use; None is all of its tenant's.
    """

    id: str
    tenant_id: str
    name: str
    secret_hash: bytes
    scopes: tuple[Scope, ...]
    created_at: int
    last4: str = ""
    limits: Limits = Limits()
    models: tuple[str, ...] | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    previous_hash: bytes | None = None
    previous_expires_at: int | None = None


class Identity(msgspec.Struct, frozen=True):
    """Who a request comes from, as the gateway found and tells the controller."""

    key_id: str
    tenant_id: str
    scopes: tuple[Scope, ...]

    def may(self, scope: Scope) -> bool:
        """Say whether this identity has ``scope``; admin has all, manage has inference."""
        if scope in self.scopes or Scope.ADMIN in self.scopes:
            return True
        return scope is Scope.INFERENCE and Scope.MANAGE in self.scopes

    @property
    def visible_tenant(self) -> str | None:
        """The tenant whose objects it sees; None is every tenant's."""
        return None if self.may(Scope.ADMIN) else self.tenant_id


IDENTITY_HEADER = "x-modelyard-identity"
"""JSON of ``Identity``; set by the gateway only, a client's own is dropped."""
INTERNAL_TOKEN_HEADER = "x-modelyard-internal-token"  # noqa: S105 - a header's name, no secret
"""Proof that a request to the controller comes from a gateway."""
