"""Rows of the ledger are kept for a time; roll-ups stay.

``since`` is an hour: all rows of requests that arrived from then on are there,
and none before it is relied on, removed yet or not. It only grows, and moves
in the transaction that removes the first row before it. A record of a request
that arrived before it was delivered long ago, and its row may be gone: it must
not be billed again.
"""

import sqlalchemy as sa

from modelyard.stores.sql import schema
from modelyard.stores.sql.database import insert

_KEPT = schema.usage_rows_kept
_LEDGER = schema.inference_requests
_NAME = "inference_requests"


def kept_since(connection: sa.Connection) -> int:
    """Return the hour from which on all rows are there; 0 if none was ever removed."""
    return connection.execute(sa.select(_KEPT.c.since).where(_KEPT.c.name == _NAME)).scalar() or 0


def oldest(connection: sa.Connection) -> float | None:
    """Return when the oldest row arrived that is there."""
    return connection.execute(sa.select(sa.func.min(_LEDGER.c.created_at))).scalar()


def forget(connection: sa.Connection, before: int, limit: int) -> int:
    """Remove at most ``limit`` of the rows that arrived before ``before``, oldest first; return how many."""
    since = max(before, kept_since(connection))
    values = {"name": _NAME, "since": since}
    statement = insert(connection, _KEPT).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
    old = (
        sa.select(_LEDGER.c.request_id)
        .where(_LEDGER.c.created_at < before)
        .order_by(_LEDGER.c.created_at)
        .limit(limit)
        .scalar_subquery()
    )
    return connection.execute(sa.delete(_LEDGER).where(_LEDGER.c.request_id.in_(old))).rowcount
