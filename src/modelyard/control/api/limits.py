"""Limits as they are asked for; shared by keys and tenants."""

from typing import Annotated

import msgspec

from modelyard.control.api.budget_spending import BoundView, bounds_of
from modelyard.control.context import Context
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.tenants import Limits, Rates
from modelyard.errors import invalid_value
from modelyard.policy.utc import day_of

MODELS_MAX = 100

_Most = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Quota = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Money = Annotated[
    int, msgspec.Meta(ge=0, le=10**18, description="Nano-dollars: 1,000,000,000 are one dollar. 0 allows nothing.")
]
_Accelerators = Annotated[
    int, msgspec.Meta(ge=0, le=10**6, description="Accelerators that its replicas may have at once; shares add up.")
]


class RatesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds in time; what is left out or null is not bounded."""

    requests_per_minute: _Most | None = None
    tokens_per_minute: _Most | None = None
    concurrency: _Most | None = None

    def rates(self) -> Rates:
        """Return the domain's value."""
        return Rates(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class LimitsBody(RatesBody, frozen=True, forbid_unknown_fields=True):
    """Upper bounds; what is left out or null is not bounded. Days and months are UTC's."""

    tokens_per_day: _Quota | None = None
    tokens_per_month: _Quota | None = None
    nanousd_per_day: _Money | None = None
    nanousd_per_month: _Money | None = None
    models: Annotated[
        dict[str, RatesBody], msgspec.Meta(description="Further bounds for single models, by endpoint name.")
    ] = {}

    def limits(self) -> Limits:
        """Return the domain's value.

        Raises:
            ApiError: 400 for a model that no endpoint could be called.
        """
        if len(self.models) > MODELS_MAX:
            raise invalid_value("limits.models", f"at most {MODELS_MAX} models")
        for name in self.models:
            if NAME_PATTERN.fullmatch(name) is None:
                raise invalid_value("limits.models", f"'{name[:100]}' is not a possible endpoint name")
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrency=self.concurrency,
            tokens_per_day=self.tokens_per_day,
            tokens_per_month=self.tokens_per_month,
            nanousd_per_day=self.nanousd_per_day,
            nanousd_per_month=self.nanousd_per_month,
            models={name: rates.rates() for name, rates in self.models.items()},
        )


class TenantLimitsBody(LimitsBody, frozen=True, forbid_unknown_fields=True):
    """Upper bounds of a tenant."""

    accelerators: _Accelerators | None = None

    def limits(self) -> Limits:
        """Return the domain's value.

        Raises:
            ApiError: 400 for a model that no endpoint could be called.
        """
        # Named, since a zero-argument super() does not find the class that a struct's own is made from.
        return msgspec.structs.replace(LimitsBody.limits(self), accelerators=self.accelerators)


class SpentView(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has for the present UTC day and month."""

    tokens_today: int = 0
    tokens_this_month: int = 0
    nanousd_today: int = 0
    nanousd_this_month: int = 0
    currency: str = "USD"
    """What amounts are in, whatever the names of fields say."""
    budgets: tuple[BoundView, ...] = ()
    """The hard budgets that bound it."""


async def spent_by(context: Context, tenant_id: str, key_id: str | None) -> SpentView:
    """Return what a key spent, or all keys of its tenant, and the hard budgets that bound that.

    Raises:
        StoreUnavailableError: the ledger cannot be read.
    """
    rows, _ = await context.usage.spent([tenant_id], day=day_of(context.clock.unix_s()))
    of_it = [row for row in rows if key_id in (None, row.key_id)]
    return SpentView(
        tokens_today=sum(row.day_tokens for row in of_it),
        tokens_this_month=sum(row.month_tokens for row in of_it),
        nanousd_today=sum(row.day_nanousd for row in of_it),
        nanousd_this_month=sum(row.month_nanousd for row in of_it),
        currency=context.config.billing.currency,
        budgets=tuple(await bounds_of(context, tenant_id, key_id)),
    )
