"""Budgets, events and notices in SQL."""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import BillingEvent, Budget, Channel, EventData, Notice, NoticeStatus
from modelyard.policy.budgets import NOTICES_A_DAY
from modelyard.policy.utc import DAY_S
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.billing.telling import tell_webhooks
from modelyard.stores.sql.database import insert
from modelyard.stores.sql.mapping import Values

_BUDGETS = schema.budgets
_EVENTS = schema.billing_events
_NOTICES = schema.billing_notices

_TOO_MANY: dict[str, Any] = {
    "due_at": None,
    "status": NoticeStatus.FAILED,
    "error": f"more than {NOTICES_A_DAY} messages in a day",
}

_to_json = msgspec.json.Encoder().encode
_budget = msgspec.json.Decoder(Budget).decode
_data = msgspec.json.Decoder(EventData).decode


def budgets(connection: sa.Connection, tenant_id: str | None) -> list[Budget]:
    """Return the budgets (of a tenant), oldest first."""
    query = sa.select(_BUDGETS.c.details).order_by(_BUDGETS.c.created_at, _BUDGETS.c.budget_id)
    if tenant_id is not None:
        query = query.where(_BUDGETS.c.tenant_id == tenant_id)
    return [_budget(details) for details in connection.scalars(query)]


def put(connection: sa.Connection, budget: Budget) -> None:
    """Add or replace."""
    values = {
        "budget_id": budget.id,
        "tenant_id": budget.tenant_id,
        "created_at": budget.created_at,
        "details": _to_json(budget).decode(),
    }
    statement = insert(connection, _BUDGETS).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["budget_id"], set_=values))


def remove(connection: sa.Connection, budget_id: str) -> None:
    """Forget."""
    connection.execute(sa.delete(_BUDGETS).where(_BUDGETS.c.budget_id == budget_id))


def add_event(connection: sa.Connection, event: BillingEvent, notices: Sequence[Notice]) -> bool:
    """Add, unless its occasion was told; say whether it was new."""
    values = {
        "event_id": event.id,
        "tenant_id": event.tenant_id,
        "type": event.type,
        "at": event.at,
        "once": event.once,
        "data": _to_json(event.data).decode(),
    }
    statement = insert(connection, _EVENTS).values(values).on_conflict_do_nothing().returning(_EVENTS.c.event_id)
    if connection.execute(statement).scalar() is None:
        return False
    tell_webhooks(connection, event)
    if notices:
        room = NOTICES_A_DAY - _told_of(connection, event.tenant_id, event.at - DAY_S)
        kept = [one if place < room else msgspec.structs.replace(one, **_TOO_MANY) for place, one in enumerate(notices)]
        connection.execute(
            sa.insert(_NOTICES), [{"notice_id": one.id, "event_id": event.id, **_values(one)} for one in kept]
        )
    return True


def _told_of(connection: sa.Connection, tenant_id: str, since: int) -> int:
    """Return how many notices there are of a tenant's events from then on."""
    query = sa.select(sa.func.count()).select_from(_NOTICES.join(_EVENTS))
    return int(connection.execute(query.where(_EVENTS.c.tenant_id == tenant_id, _EVENTS.c.at > since)).scalar() or 0)


def events(connection: sa.Connection, tenant_id: str | None, limit: int) -> list[BillingEvent]:
    """Return the newest, newest first."""
    query = sa.select(_EVENTS).order_by(_EVENTS.c.at.desc(), _EVENTS.c.event_id).limit(limit)
    if tenant_id is not None:
        query = query.where(_EVENTS.c.tenant_id == tenant_id)
    return [_event(row._mapping) for row in connection.execute(query)]


def due(connection: sa.Connection, now: float, limit: int) -> list[Notice]:
    """Return what is due, the longest due first."""
    query = _both().where(_NOTICES.c.due_at <= now).order_by(_NOTICES.c.due_at, _NOTICES.c.notice_id).limit(limit)
    return [_notice(row._mapping) for row in connection.execute(query)]


def of_event(connection: sa.Connection, event_id: str) -> list[Notice]:
    """Return the notices about an event."""
    query = _both().where(_NOTICES.c.event_id == event_id).order_by(_NOTICES.c.notice_id)
    return [_notice(row._mapping) for row in connection.execute(query)]


def put_notice(connection: sa.Connection, notice: Notice) -> None:
    """Replace what became of it."""
    connection.execute(sa.update(_NOTICES).where(_NOTICES.c.notice_id == notice.id).values(_values(notice)))


def _both() -> sa.Select[tuple[object, ...]]:
    return sa.select(*_NOTICES.c, *(column for column in _EVENTS.c if column.name != "event_id")).join_from(
        _NOTICES, _EVENTS
    )


def _values(notice: Notice) -> Values:
    return {
        "channel": notice.channel.value,
        "target": notice.target,
        "due_at": notice.due_at,
        "since": notice.since,
        "tries": notice.tries,
        "status": notice.status.value,
        "error": notice.error,
    }


def _event(row: sa.RowMapping) -> BillingEvent:
    return BillingEvent(row["event_id"], row["tenant_id"], row["type"], row["at"], row["once"], _data(row["data"]))


def _notice(row: sa.RowMapping) -> Notice:
    return Notice(
        id=row["notice_id"],
        event=_event(row),
        channel=Channel(row["channel"]),
        target=row["target"],
        due_at=row["due_at"],
        since=row["since"],
        tries=row["tries"],
        status=NoticeStatus(row["status"]),
        error=row["error"],
    )
