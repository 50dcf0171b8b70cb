"""What keys spent by day: the roll-up that quotas are checked against.

Written in the transaction that writes the ledger's rows and the journal's
position, so that a sum and the position that is read with it belong together.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec
import sqlalchemy as sa

from modelyard.policy.utc import day_of, first_of_month, next_month
from modelyard.stores import SpentRow
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import CHUNK
from modelyard.stores.sql.mapping import Values
from modelyard.stores.sql.sums import add_to

_DAILY = schema.usage_daily
_MODELS = schema.usage_model_months
_SUMS = ("tokens", "cost_nanousd")


def add(connection: sa.Connection, rows: Iterable[Values], source: str) -> None:
    """Add new rows of the ledger, which came from the journal of ``source``, to their days and to months of models."""
    days: dict[tuple[str, str, int, str], list[int]] = {}
    models: dict[tuple[str, str, int, str, str], list[int]] = {}
    for row in rows:
        owner, day = (row["customer_id"], row["api_key_id"]), day_of(row["created_at"])
        total = days.setdefault((*owner, day, source), [0, 0])
        total[0] += row["total_tokens"]
        total[1] += row["cost_nanousd"]
        if row["cost_nanousd"]:
            models.setdefault((*owner, first_of_month(day), row["model_name"], source), [0])[0] += row["cost_nanousd"]
    add_to(connection, _DAILY, _SUMS, days)
    add_to(connection, _MODELS, _SUMS[1:], models)


def sums(connection: sa.Connection, tenant_ids: Collection[str], day: int) -> list[SpentRow]:
    """Return what each key of these tenants spent on ``day`` and in its month, by source."""
    wanted = sorted(tenant_ids)
    of_day = [sa.func.sum(sa.case((_DAILY.c.day == day, _DAILY.c[name]), else_=0)) for name in _SUMS]
    of_month = [sa.func.sum(_DAILY.c[name]) for name in _SUMS]
    group = (_DAILY.c.customer_id, _DAILY.c.api_key_id, _DAILY.c.source)
    query = (
        sa.select(*group, of_day[0], of_month[0], of_day[1], of_month[1])
        .where(_DAILY.c.day >= first_of_month(day), _DAILY.c.day < next_month(day))
        .group_by(*group)
        .order_by(*group)
    )
    found: list[SpentRow] = []
    for start in range(0, len(wanted), CHUNK):
        chunk = query.where(_DAILY.c.customer_id.in_(wanted[start : start + CHUNK]))
        for owner, key_id, source, *amounts in connection.execute(chunk):
            # Postgres sums to a decimal.
            tokens, month_tokens, cost, month_cost = map(int, amounts)
            found.append(SpentRow(owner, key_id, source, tokens, month_tokens, cost, month_cost))
    return found


def by_model(connection: sa.Connection, tenant_ids: Collection[str], day: int) -> list[SpentRow]:
    """Return what each key of these tenants spent on each model in the month of ``day``, by source."""
    group = (_MODELS.c.customer_id, _MODELS.c.api_key_id, _MODELS.c.source, _MODELS.c.model_name)
    query = sa.select(*group, _MODELS.c.cost_nanousd).where(_MODELS.c.month == first_of_month(day)).order_by(*group)
    wanted = sorted(tenant_ids)
    found: list[SpentRow] = []
    for start in range(0, len(wanted), CHUNK):
        chunk = query.where(_MODELS.c.customer_id.in_(wanted[start : start + CHUNK]))
        for tenant_id, key_id, source, model, cost in connection.execute(chunk):
            found.append(SpentRow(tenant_id, key_id, source, 0, 0, 0, cost, model=model))
    return found


def with_totals(rows: Iterable[SpentRow], totals: Mapping[tuple[str, str, str], int]) -> list[SpentRow]:
    """Return the rows with what each key ever cost, and rows for keys that spent nothing this month."""
    left = dict(totals)
    found = [
        msgspec.structs.replace(row, total_nanousd=left.pop((row.tenant_id, row.key_id, row.source), 0)) for row in rows
    ]
    return found + [SpentRow(*key, 0, 0, 0, 0, total) for key, total in sorted(left.items())]
