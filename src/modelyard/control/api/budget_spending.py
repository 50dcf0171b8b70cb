"""What was spent of budgets this month, for whoever looks at a budget, a tenant or a key."""

from collections.abc import Mapping, Sequence

import msgspec

from modelyard.control.context import Context
from modelyard.domain.billing import Budget
from modelyard.policy import budgets as budgeting
from modelyard.policy.money import exact
from modelyard.policy.utc import day_of


class BoundView(msgspec.Struct, frozen=True, kw_only=True):
    """A hard budget that bounds a tenant or a key, and what was spent of it this month (UTC)."""

    id: str
    is_tenants: bool
    """What all keys of the tenant spend; else this key's."""
    model: str
    """"": all."""
    amount: str
    spent: str


async def spent_of(context: Context, budgets: Sequence[Budget]) -> Mapping[str, int]:
    """Return by the id of each budget what was spent of it this month.

    Raises:
        StoreUnavailableError: the ledger cannot be read.
    """
    owners = {one.tenant_id for one in budgets}
    if not owners:
        return {}
    of_models = {one.tenant_id for one in budgets if one.model}
    rows, _ = await context.usage.spent(owners, day=day_of(context.clock.unix_s()), models_of=of_models)
    sums = budgeting.sums((row.tenant_id, row.key_id, row.model, row.month_nanousd) for row in rows)
    return {one.id: sums.get((one.tenant_id, one.key_id, one.model), 0) for one in budgets}


async def bounds_of(context: Context, tenant_id: str, key_id: str | None) -> list[BoundView]:
    """Return the hard budgets of a tenant, and of one of its keys."""
    mine = [
        one
        for one in await context.billing.budgets(tenant_id=tenant_id)
        if one.is_hard and one.key_id in ("", key_id or "")
    ]
    spent = await spent_of(context, mine)
    return [
        BoundView(
            id=one.id,
            is_tenants=not one.key_id,
            model=one.model,
            amount=exact(one.amount_nanousd),
            spent=exact(spent[one.id]),
        )
        for one in mine
    ]
