"""Rows of webhooks, events and deliveries to nouns and back, and the query for whose turn it is."""

from typing import Any

import msgspec
import sqlalchemy as sa

from modelyard.domain.events import EventType, TenantEvent
from modelyard.domain.webhooks import Attempt, Delivery, DeliveryStatus, Due, SigningSecret, Webhook
from modelyard.stores.sql import schema, schema_events
from modelyard.stores.sql.mapping import Values

_EVENTS = schema_events.tenant_events
_WEBHOOKS = schema_events.webhooks
_DELIVERIES = schema_events.webhook_deliveries
_SECRETS = schema.webhook_secrets
_TENANTS = schema.tenants

_to_json = msgspec.json.Encoder().encode
_attempts = msgspec.json.Decoder(tuple[Attempt, ...]).decode
_types = msgspec.json.Decoder(tuple[str, ...]).decode

Row = sa.RowMapping | dict[str, Any]


def webhook_values(webhook: Webhook) -> Values:
    """Return the row of a webhook."""
    return {
        "webhook_id": webhook.id,
        "owner_id": webhook.tenant_id,
        "url": webhook.url,
        "description": webhook.description,
        "types": _to_json(webhook.types).decode(),
        "is_enabled": webhook.is_enabled,
        "disabled_reason": webhook.disabled_reason,
        "created_at": webhook.created_at,
        "failing_since": webhook.failing_since,
        "failures": webhook.failures,
        "quiet_until": webhook.quiet_until,
        **secret_values(webhook.secret),
    }


def webhook_of(row: Row) -> Webhook:
    """Return the webhook of a row."""
    return Webhook(
        id=row["webhook_id"],
        tenant_id=row["owner_id"],
        url=row["url"],
        types=_types(row["types"]),
        created_at=row["created_at"],
        description=row["description"],
        is_enabled=row["is_enabled"],
        disabled_reason=row["disabled_reason"],
        secret=secret_of(row),
        failing_since=row["failing_since"],
        failures=row["failures"],
        quiet_until=row["quiet_until"],
    )


def secret_values(secret: SigningSecret) -> Values:
    """Return the columns of a secret."""
    return {
        "salt": secret.salt,
        "previous_salt": secret.previous_salt,
        "previous_expires_at": secret.previous_expires_at,
    }


def secret_of(row: Row) -> SigningSecret:
    """Return the secret of a row; of one without, what every tenant begins with."""
    return SigningSecret(row["salt"] or "", row["previous_salt"], row["previous_expires_at"])


def state_values(delivery: Delivery) -> Values:
    """Return the columns of a delivery that attempts change."""
    return {
        "status": delivery.status.value,
        "due_at": delivery.due_at,
        "since": delivery.since,
        "tries": delivery.tries,
        "attempts": _to_json(delivery.attempts).decode(),
    }


def delivery_of(row: Row) -> Delivery:
    """Return the delivery of a row that has the ``type`` of its event."""
    return Delivery(
        id=row["delivery_id"],
        event_id=row["event_id"],
        event_type=EventType(row["type"]),
        tenant_id=row["owner_id"],
        created_at=row["created_at"],
        webhook_id=row["webhook_id"],
        url=row["url"],
        status=DeliveryStatus(row["status"]),
        due_at=row["due_at"],
        since=row["since"],
        tries=row["tries"],
        attempts=_attempts(row["attempts"]),
    )


def event_of(row: Row) -> TenantEvent:
    """Return the event of a row."""
    return TenantEvent(
        row["event_id"], row["owner_id"], EventType(row["type"]), row["created_at"], row["data"].encode()
    )


def due_query(
    connection: sa.Connection, *, now: float, of_lane: int, of_tenant: int, is_failing: bool
) -> sa.Select[Any]:
    """Return the query for what is due, the longest due first, and no more of one lane or tenant than it may have.

    Lanes are gone through, each by its index: a look must cost the same however much waits for those that fail.
    """
    table, lanes, waiting = _DELIVERIES, _lanes(is_failing=is_failing), _DELIVERIES.alias("waiting")
    next_ones = (
        sa.select(waiting.c.delivery_id)
        .where(waiting.c.lane == lanes.c.lane, waiting.c.due_at <= now)
        # A URL of a request has no row that says whether its receiver fails: it is asked once among the others.
        .where(waiting.c.webhook_id.is_not(None) | ((waiting.c.tries > 0) if is_failing else (waiting.c.tries == 0)))
        .order_by(waiting.c.due_at, waiting.c.created_at, waiting.c.delivery_id)
        .limit(of_lane)
        .correlate(lanes)
    )
    if connection.dialect.name == "sqlite":
        source = lanes.join(table, table.c.delivery_id.in_(next_ones))
    else:
        # Postgres would ask such an IN of every pair; SQLite, which goes by the index, knows no LATERAL.
        picked = next_ones.lateral("picked")
        source = lanes.join(picked, sa.true()).join(table, table.c.delivery_id == picked.c.delivery_id)
    turn = (table.c.due_at, table.c.created_at, table.c.delivery_id)
    place = sa.func.row_number().over(partition_by=table.c.owner_id, order_by=turn).label("place")
    columns = [column for column in lanes.c if column.name not in ("lane", "quiet_until")]
    found = (
        sa.select(
            table,
            _EVENTS.c.type,
            _EVENTS.c.data,
            _EVENTS.c.created_at.label("happened_at"),
            *columns,
            place,
        )
        .select_from(source)
        .join(_EVENTS, _EVENTS.c.event_id == table.c.event_id)
        .where(sa.func.coalesce(lanes.c.quiet_until, 0) <= now)
        .subquery()
    )
    return (
        sa.select(found)
        .where(found.c.place <= of_tenant)
        .order_by(found.c.due_at, found.c.created_at, found.c.delivery_id)
    )


def next_due_query() -> sa.Select[Any]:
    """Return the query for when the next delivery may be attempted."""
    lanes, first = _lanes(is_failing=None), sa.func.min(_DELIVERIES.c.due_at)
    due = sa.select(first).where(_DELIVERIES.c.lane == lanes.c.lane).correlate(lanes).scalar_subquery()
    each = sa.select(due.label("due_at"), sa.func.coalesce(lanes.c.quiet_until, 0).label("quiet_until")).subquery()
    at = sa.case((each.c.due_at < each.c.quiet_until, each.c.quiet_until), else_=each.c.due_at)
    return sa.select(sa.func.min(at)).where(each.c.due_at.is_not(None))


def backlog_query() -> sa.Select[int, float | None]:
    """Return the query for how many deliveries wait and when the oldest was made: lane by lane, as above."""
    lanes = _lanes(is_failing=None)
    waits = (_DELIVERIES.c.lane == lanes.c.lane) & (_DELIVERIES.c.due_at >= 0)
    return sa.select(sa.func.count(), sa.func.min(_DELIVERIES.c.created_at)).select_from(lanes.join(_DELIVERIES, waits))


def _lanes(*, is_failing: bool | None) -> sa.Subquery:
    """Return who takes turns: each webhook, and each tenant for the URLs that came with its requests."""
    webhooks = sa.select(
        _WEBHOOKS.c.webhook_id.label("lane"),
        _WEBHOOKS.c.url.label("receiver"),
        _WEBHOOKS.c.salt,
        _WEBHOOKS.c.previous_salt,
        _WEBHOOKS.c.previous_expires_at,
        _WEBHOOKS.c.failing_since,
        _WEBHOOKS.c.quiet_until,
    )
    if is_failing is not None:
        fails = _WEBHOOKS.c.failing_since
        webhooks = webhooks.where(fails.is_not(None) if is_failing else fails.is_(None))
    nothing = sa.cast(sa.null(), sa.Double)
    tenants = sa.select(
        _TENANTS.c.tenant_id,
        sa.cast(sa.null(), sa.Text),
        _SECRETS.c.salt,
        _SECRETS.c.previous_salt,
        _SECRETS.c.previous_expires_at,
        nothing,
        nothing,
    ).outerjoin(_SECRETS, _SECRETS.c.owner_id == _TENANTS.c.tenant_id)
    return sa.union_all(webhooks, tenants).subquery("lanes")


def due_of(row: Row) -> Due:
    """Return what is due, of a row of ``due_query``."""
    event = event_of({**row, "created_at": row["happened_at"]})
    return Due(delivery_of(row), event, row["receiver"] or row["url"], secret_of(row), row["failing_since"])
