"""``EventStore`` in SQL: the outbox.

``append`` is for other stores: called in the transaction of a cause, it makes
event and cause happen together or not at all. A delivery is made for each
webhook there and then, so that what is to be told is settled with the event,
and a webhook that is added later is told only of what comes after it.
"""

import msgspec
import sqlalchemy as sa

from modelyard.domain.events import EventData, EventType, TenantEvent, new_event
from modelyard.domain.webhooks import DeliveryStatus
from modelyard.ids import new_id
from modelyard.policy.webhooks import wants
from modelyard.stores.sql import schema_events
from modelyard.stores.sql.database import Database, insert

_EVENTS = schema_events.tenant_events
_WEBHOOKS = schema_events.webhooks
_DELIVERIES = schema_events.webhook_deliveries

_types = msgspec.json.Decoder(tuple[str, ...]).decode


class SqlEventStore:
    """Events in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, tenant_id: str, kind: EventType, data: EventData, *, now: float, key: str = "") -> str:
        """Add an event and a delivery for each webhook of its tenant that wants it; return its id."""
        event = new_event(tenant_id, kind, data, now=now, key=key)
        await self._database.write(lambda connection: append(connection, event))
        return event.id

    async def time_of(self, event_id: str, tenant_id: str) -> float | None:
        """Return when an event of a tenant happened, None where there is no such event (any more)."""
        mine = (_EVENTS.c.event_id == event_id) & (_EVENTS.c.owner_id == tenant_id)
        query = sa.select(_EVENTS.c.created_at).where(mine)
        return await self._database.read(lambda c: c.execute(query).scalar())

    async def forget_events(self, *, before: float, limit: int) -> int:
        """Delete up to ``limit`` events of before then that nobody is still to be told of; return how many."""
        is_due = sa.exists().where(_DELIVERIES.c.event_id == _EVENTS.c.event_id, _DELIVERIES.c.due_at.is_not(None))
        old = sa.select(_EVENTS.c.event_id).where(_EVENTS.c.created_at < before, ~is_due)
        gone = sa.delete(_EVENTS).where(_EVENTS.c.event_id.in_(old.order_by(_EVENTS.c.created_at).limit(limit)))
        return await self._database.write(lambda c: c.execute(gone).rowcount)


def append(connection: sa.Connection, event: TenantEvent) -> bool:
    """Add ``event`` and its deliveries in the transaction of ``connection``; say False where it is there already."""
    if not add_row(connection, event):
        return False
    listeners = sa.select(_WEBHOOKS.c.webhook_id, _WEBHOOKS.c.types).where(
        _WEBHOOKS.c.owner_id == event.tenant_id, _WEBHOOKS.c.is_enabled
    )
    wanted = [one for one, types in connection.execute(listeners).all() if wants(_types(types), event.type)]
    if wanted:
        connection.execute(sa.insert(_DELIVERIES), [delivery_values(event, webhook_id=one) for one in wanted])
    return True


def add_row(connection: sa.Connection, event: TenantEvent) -> bool:
    """Add ``event`` and no delivery; say False where it is there already."""
    row = insert(connection, _EVENTS).values(
        event_id=event.id,
        owner_id=event.tenant_id,
        type=event.type.value,
        created_at=event.created_at,
        data=event.data.decode(),
    )
    # Not every driver tells how many rows such an INSERT made.
    added = row.on_conflict_do_nothing(index_elements=["event_id"]).returning(_EVENTS.c.event_id)
    return connection.execute(added).first() is not None


def append_for(
    connection: sa.Connection, tenant_id: str, kind: EventType, data: EventData, *, now: float, key: str = ""
) -> bool:
    """Add an event that happens ``now``, as ``SqlEventStore.add`` does, in the transaction of ``connection``."""
    return append(connection, new_event(tenant_id, kind, data, now=now, key=key))


def delivery_values(event: TenantEvent, *, webhook_id: str | None, url: str = "") -> dict[str, object]:
    """Return the row of a delivery that is due at once: to a webhook, or to a ``url`` of its own."""
    return {
        "delivery_id": new_id("dlv_"),
        "event_id": event.id,
        "owner_id": event.tenant_id,
        "webhook_id": webhook_id,
        "url": url,
        "lane": webhook_id or event.tenant_id,
        "status": DeliveryStatus.PENDING.value,
        "created_at": event.created_at,
        "due_at": event.created_at,
        "since": None,
        "tries": 0,
        "attempts": "[]",
    }
