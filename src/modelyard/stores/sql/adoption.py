"""Webhooks of requests that a release before this one ended, which kept them in the rows of the requests.

The tables are made when the first process of this release opens the database,
while a controller of that release may still lead and go on writing there: so
this is done when this one leads, and again at its every start.
"""

import sqlalchemy as sa

from modelyard.domain.requests import RequestStatus
from modelyard.stores.sql import schema, schema_events
from modelyard.stores.sql.events import add_row, delivery_values
from modelyard.stores.sql.request_events import end_of

_TABLE = schema.kept_requests
_ENDED = [status.value for status in RequestStatus if status.is_over]


def adopt(connection: sa.Connection, limit: int) -> int:
    """Make an event and a delivery of each; return how many there were."""
    columns = [column for column in _TABLE.c if column.name != "answer"]
    query = sa.select(*columns).where(
        _TABLE.c.webhook_status.in_(["pending", "delivered", "failed"]), _TABLE.c.status.in_(_ENDED)
    )
    rows = connection.execute(query.limit(limit)).mappings().all()
    for row in rows:
        event = end_of(row)
        if add_row(connection, event):
            state = {
                "status": row["webhook_status"],
                "due_at": row["webhook_due"],
                "since": row["webhook_since"],
                "tries": row["webhook_tries"],
                "attempts": row["webhook_attempts"],
            }
            delivery = delivery_values(event, webhook_id=None, url=row["webhook_url"]) | state
            connection.execute(sa.insert(schema_events.webhook_deliveries).values(delivery))
        done = sa.update(_TABLE).where(_TABLE.c.request_id == row["request_id"])
        connection.execute(done.values(webhook_status="", webhook_due=None))
    return len(rows)
