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
from modelyard.stores.sql.database import CHUNK, insert
from modelyard.stores.sql.mapping import Values

_DAILY = schema.usage_daily
_SUMS = ("tokens", "cost_nanousd")


def add(connection: sa.Connection, rows: Iterable[Values], source: str) -> None:
    """Add new rows of the ledger, which came from the journal of ``source``, to their days."""
    totals: dict[tuple[str, str, int, str], list[int]] = {}
    for row in rows:
        key = (row["customer_id"], row["api_key_id"], day_of(row["created_at"]), source)
        total = totals.setdefault(key, [0, 0])
        total[0] += row["total_tokens"]
        total[1] += row["cost_nanousd"]
    if not totals:
        return
    keys = [column.name for column in _DAILY.primary_key]
    # Sorted, so that two controllers on Postgres lock the rows in one order.
    values = [dict(zip((*keys, *_SUMS), (*key, *total), strict=True)) for key, total in sorted(totals.items())]
    statement = insert(connection, _DAILY)
    sums = {name: _DAILY.c[name] + statement.excluded[name] for name in _SUMS}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=sums), values)


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
        # Postgres sums to a decimal.
        found += [SpentRow(*row[:3], *(int(amount) for amount in row[3:])) for row in connection.execute(chunk)]
    return found


def with_totals(rows: Iterable[SpentRow], totals: Mapping[tuple[str, str, str], int]) -> list[SpentRow]:
    """Return the rows with what each key ever cost, and rows for keys that spent nothing this month."""
    left = dict(totals)
    found = [
        msgspec.structs.replace(row, total_nanousd=left.pop((row.tenant_id, row.key_id, row.source), 0)) for row in rows
    ]
    return found + [SpentRow(*key, 0, 0, 0, 0, total) for key, total in sorted(left.items())]
