"""The end of a kept request as an event of its tenant, in the transaction that ends it."""

from typing import Any

import sqlalchemy as sa

from modelyard.domain.events import EventType, TenantEvent, new_event
from modelyard.stores.sql import schema, schema_events
from modelyard.stores.sql.events import append, delivery_values

_TABLE = schema.kept_requests
_ABOUT = [
    _TABLE.c[name]
    for name in ("request_id", "owner_id", "model_name", "status", "finished_at", "webhook_url", "webhook_event_id")
]


def tell_end(connection: sa.Connection, request_id: str) -> None:
    """Append the end of a detached request, with a delivery to the URL that came with it, if any."""
    query = sa.select(*_ABOUT).where(_TABLE.c.request_id == request_id, _TABLE.c.is_detached)
    row = connection.execute(query).mappings().first()
    if row is None:
        return
    event = end_of(row)
    if append(connection, event) and row["webhook_url"] is not None:
        values = delivery_values(event, webhook_id=None, url=row["webhook_url"])
        connection.execute(sa.insert(schema_events.webhook_deliveries).values(values))


def end_of(row: sa.RowMapping | dict[str, Any]) -> TenantEvent:
    """Return the event of a request that is over. One with a webhook has named the event's id to its caller."""
    kind = EventType(f"request.{row['status']}")
    data = {"id": row["request_id"], "status": row["status"], "model": row["model_name"], "object": "request"}
    event = new_event(row["owner_id"], kind, data, now=row["finished_at"], key=row["request_id"])
    return TenantEvent(row["webhook_event_id"] or event.id, event.tenant_id, kind, event.created_at, event.data)
