"""Prices that are kept in the store, beside the configured ones: for whom, for what, and from when to when.

An entry never changes what was billed: it cannot begin in the past, and one
that has begun is ended, not removed. So the list is its own history.
"""

import msgspec

from modelyard.domain.usage import Price

ANY_MODEL = "*"
"""The name of an entry for all models."""


class PriceEntry(msgspec.Struct, frozen=True):
    """One price: of a model (endpoint name) or all, of one version or all, for one tenant or all ("").

    It applies to requests that arrive from ``effective_from`` (unix seconds) on, until ``effective_until`` if that is
    set. Two entries for the same never begin in the same second.
    """

    id: str
    model: str
    price: Price
    effective_from: int
    effective_until: int | None = None
    tenant_id: str = ""
    version: str = ""
    created_at: int = 0
    created_by: str = ""
    """The key that set it."""

    @property
    def subject(self) -> tuple[str, str, str]:
        """What it prices: tenant, model, version."""
        return self.tenant_id, self.model, self.version


class Tariff(msgspec.Struct, frozen=True, array_like=True):
    """A price of one endpoint as gateways know it. "" is any tenant, and any version; ``until`` 0 is no end."""

    tenant_id: str
    version_id: str
    since: int
    until: int
    price: Price
