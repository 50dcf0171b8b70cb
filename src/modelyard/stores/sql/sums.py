"""Adding to rows that are sums, whether they are there or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from modelyard.stores.sql.database import insert


def add_to(
    connection: sa.Connection,
    table: sa.Table,
    names: Sequence[str],
    totals: Mapping[tuple[Any, ...], Sequence[int]],
    *,
    order: Callable[[Any], Any] | None = None,
) -> None:
    """Add ``totals``, by primary key, to the columns ``names``; a row that is not there is made.

    ``order`` sorts pairs of key and total where keys cannot be compared.
    """
    if not totals:
        return
    keys = [column.name for column in table.primary_key]
    # Sorted, so that two controllers on Postgres lock the rows in one order.
    values = [
        dict(zip((*keys, *names), (*key, *total), strict=True)) for key, total in sorted(totals.items(), key=order)
    ]
    statement = insert(connection, table)
    raised = {name: table.c[name] + statement.excluded[name] for name in names}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=raised), values)
