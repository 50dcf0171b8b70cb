"""``WebhookStore`` in SQL: webhooks, secrets, and what is still to be told to whom."""

from collections.abc import Callable

import sqlalchemy as sa

from modelyard.domain.events import EventType, new_event
from modelyard.domain.webhooks import Delivery, DeliveryStatus, Due, Settled, SigningSecret, Webhook
from modelyard.policy.webhooks import HURRY_AFTER_S, quiet_s, types_of
from modelyard.stores import Backlog, Replayed
from modelyard.stores.sql import adoption, schema, schema_events
from modelyard.stores.sql.database import CHUNK, Database, insert
from modelyard.stores.sql.events import append, append_for, delivery_values
from modelyard.stores.sql.mapping import Values
from modelyard.stores.sql.webhook_rows import (
    backlog_query,
    delivery_of,
    due_of,
    due_query,
    event_of,
    next_due_query,
    secret_of,
    secret_values,
    state_values,
    webhook_of,
    webhook_values,
)

_EVENTS = schema_events.tenant_events
_WEBHOOKS = schema_events.webhooks
_DELIVERIES = schema_events.webhook_deliveries
_SECRETS = schema.webhook_secrets

_PENDING = _DELIVERIES.c.status == DeliveryStatus.PENDING.value
_WELL: Values = {"failing_since": None, "failures": 0, "quiet_until": None}
_ENDED: Values = {"status": DeliveryStatus.FAILED.value, "due_at": None}
_WITH_TYPE = sa.select(_DELIVERIES, _EVENTS.c.type).join(_EVENTS, _EVENTS.c.event_id == _DELIVERIES.c.event_id)


class SqlWebhookStore:
    """Webhooks in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- webhooks and secrets ---------------------------------------------------------------------------------------

    async def add_webhook(self, webhook: Webhook, *, most: int) -> bool:
        """Add one; say False, and add nothing, where its tenant has ``most`` already."""
        mine = sa.select(sa.func.count()).select_from(_WEBHOOKS).where(_WEBHOOKS.c.owner_id == webhook.tenant_id)

        def add(connection: sa.Connection) -> bool:
            if connection.execute(mine).scalar_one() >= most:
                return False
            connection.execute(sa.insert(_WEBHOOKS).values(webhook_values(webhook)))
            return True

        return await self._database.write(add)

    async def webhooks(self, *, tenant_id: str | None) -> list[Webhook]:
        """Return all of a tenant (or of all), oldest first."""
        query = _of(sa.select(_WEBHOOKS), tenant_id).order_by(_WEBHOOKS.c.created_at, _WEBHOOKS.c.webhook_id)
        return await self._database.read(lambda c: [webhook_of(row) for row in c.execute(query).mappings()])

    async def webhook(self, webhook_id: str, *, tenant_id: str | None) -> Webhook | None:
        """Return the webhook of this id (of this tenant)."""
        query = _of(sa.select(_WEBHOOKS), tenant_id).where(_WEBHOOKS.c.webhook_id == webhook_id)

        def read(connection: sa.Connection) -> Webhook | None:
            row = connection.execute(query).mappings().first()
            return None if row is None else webhook_of(row)

        return await self._database.read(read)

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook | None:
        """Replace a webhook by what ``change`` makes of it, in one step; None where there is none."""
        mine = _WEBHOOKS.c.webhook_id == webhook_id

        def replace(connection: sa.Connection) -> Webhook | None:
            row = connection.execute(sa.select(_WEBHOOKS).where(mine)).mappings().first()
            if row is None:
                return None
            before = webhook_of(row)
            after = change(before)
            connection.execute(sa.update(_WEBHOOKS).where(mine).values(webhook_values(after)))
            if before.is_enabled and not after.is_enabled:
                _end_pending(connection, webhook_id)
            elif before.url != after.url:
                # What failed there says nothing of the new place: all that waits is due.
                waits = (_DELIVERIES.c.webhook_id == webhook_id) & _PENDING
                connection.execute(sa.update(_DELIVERIES).where(waits).values(due_at=_DELIVERIES.c.created_at))
            return after

        return await self._database.write(replace)

    async def remove_webhook(self, webhook_id: str) -> None:
        """Forget a webhook and its deliveries."""
        gone = sa.delete(_WEBHOOKS).where(_WEBHOOKS.c.webhook_id == webhook_id)  # they go with it: ON DELETE CASCADE
        await self._database.write(lambda c: c.execute(gone))

    async def pending(self, *, tenant_id: str | None) -> dict[str, int]:
        """Return how many deliveries are pending, by webhook id, of those that have any."""
        # Webhook by webhook, each by its index: the table has all that was told for a month.
        waits = (_DELIVERIES.c.lane == _WEBHOOKS.c.webhook_id) & (_DELIVERIES.c.due_at >= 0)
        count = sa.select(sa.func.count()).where(waits).correlate(_WEBHOOKS).scalar_subquery()
        query = _of(sa.select(_WEBHOOKS.c.webhook_id, count.label("waiting")), tenant_id)

        def read(connection: sa.Connection) -> dict[str, int]:
            rows = connection.execute(query).mappings()
            return {row["webhook_id"]: row["waiting"] for row in rows if row["waiting"]}

        return await self._database.read(read)

    async def backlog(self) -> Backlog:
        """Return what waits, of all tenants."""
        query = backlog_query()

        def read(connection: sa.Connection) -> Backlog:
            row = connection.execute(query).one()
            return Backlog(row[0], row[1])

        return await self._database.read(read)

    async def secret(self, tenant_id: str) -> SigningSecret:
        """Return what the secret of a tenant is derived from; the first one has no row."""
        query = sa.select(_SECRETS).where(_SECRETS.c.owner_id == tenant_id)

        def read(connection: sa.Connection) -> SigningSecret:
            row = connection.execute(query).mappings().first()
            return SigningSecret() if row is None else secret_of(row)

        return await self._database.read(read)

    async def put_secret(self, tenant_id: str, secret: SigningSecret) -> None:
        """Replace it."""
        changes = secret_values(secret)

        def put(connection: sa.Connection) -> None:
            row = insert(connection, _SECRETS).values(owner_id=tenant_id, **changes)
            connection.execute(row.on_conflict_do_update(index_elements=["owner_id"], set_=changes))

        await self._database.write(put)

    # --- sending ----------------------------------------------------------------------------------------------------

    async def due(self, *, now: float, limit: int, of_lane: int, of_tenant: int, is_failing: bool = False) -> list[Due]:
        """Return deliveries that are due, the longest due first: those to receivers that fail, or the others."""

        def read(connection: sa.Connection) -> list[Due]:
            query = due_query(connection, now=now, of_lane=of_lane, of_tenant=of_tenant, is_failing=is_failing)
            return [due_of(row) for row in connection.execute(query.limit(limit)).mappings()]

        return await self._database.read(read)

    async def next_due(self) -> float | None:
        """Return when the next delivery may be attempted, None if none may be."""
        query = next_due_query()
        return await self._database.read(lambda c: c.execute(query).scalar())

    async def settle(self, settled: Settled) -> None:
        """Store what an attempt came to, and what it says of its webhook, in one step."""
        delivery = settled.delivery
        change = sa.update(_DELIVERIES).where(_DELIVERIES.c.delivery_id == delivery.id)
        if not settled.attempt.is_accepted:
            # Its webhook may have been disabled meanwhile: it must not come back. And one that was asked for by hand
            # meanwhile has a new span of retries.
            change = change.where(_PENDING, _DELIVERIES.c.tries >= delivery.tries - 1)

        def settle(connection: sa.Connection) -> None:
            connection.execute(change.values(state_values(delivery)))
            if delivery.webhook_id is not None:
                _tell_webhook(connection, delivery.webhook_id, settled)

        await self._database.write(settle)

    async def add_test(self, webhook: Webhook, *, now: float, due_at: float) -> Due:
        """Add a test event and its one delivery, due at ``due_at`` for whoever finds it unsent; return it."""
        data = {"id": webhook.id, "object": "webhook"}
        event = new_event(webhook.tenant_id, EventType.WEBHOOK_TEST, data, now=now)
        values = delivery_values(event, webhook_id=webhook.id) | {"due_at": due_at}

        def add(connection: sa.Connection) -> None:
            append(connection, event)
            connection.execute(sa.insert(_DELIVERIES).values(values))

        await self._database.write(add)
        delivery = Delivery(
            id=str(values["delivery_id"]),
            event_id=event.id,
            event_type=event.type,
            tenant_id=event.tenant_id,
            created_at=now,
            webhook_id=webhook.id,
            due_at=due_at,
        )
        return Due(delivery, event, webhook.url, webhook.secret, webhook.failing_since)

    # --- looking, and by hand -----------------------------------------------------------------------------------------

    async def deliveries(
        self, webhook_id: str, *, status: DeliveryStatus | None, limit: int, after: Delivery | None
    ) -> list[Delivery]:
        """Return deliveries of a webhook older than ``after``, newest first."""
        table = _DELIVERIES
        query = _WITH_TYPE.where(table.c.webhook_id == webhook_id)
        if status is not None:
            query = query.where(table.c.status == status.value)
        if after is not None:
            place = sa.tuple_(table.c.created_at, table.c.delivery_id)
            query = query.where(place < sa.tuple_(sa.literal(after.created_at), sa.literal(after.id)))
        query = query.order_by(table.c.created_at.desc(), table.c.delivery_id.desc()).limit(limit)
        return await self._database.read(lambda c: [delivery_of(row) for row in c.execute(query).mappings()])

    async def delivery(self, delivery_id: str, *, webhook_id: str) -> Delivery | None:
        """Return the delivery of this id to this webhook."""
        mine = (_DELIVERIES.c.delivery_id == delivery_id) & (_DELIVERIES.c.webhook_id == webhook_id)

        def read(connection: sa.Connection) -> Delivery | None:
            row = connection.execute(_WITH_TYPE.where(mine)).mappings().first()
            return None if row is None else delivery_of(row)

        return await self._database.read(read)

    async def redeliver(self, delivery_id: str, *, now: float) -> None:
        """Make a delivery due, with a new span of retries."""
        mine = _DELIVERIES.c.delivery_id == delivery_id
        its_webhook = sa.select(_DELIVERIES.c.webhook_id).where(mine).scalar_subquery()
        ask_again = sa.update(_WEBHOOKS).where(_WEBHOOKS.c.webhook_id == its_webhook).values(quiet_until=None)

        def redeliver(connection: sa.Connection) -> None:
            connection.execute(sa.update(_DELIVERIES).where(mine).values(_again(now)))
            connection.execute(ask_again)

        await self._database.write(redeliver)

    async def replay(
        self, webhook: Webhook, *, since: float, after: str | None, now: float, limit: int, delivered_too: bool
    ) -> Replayed:
        """Make due what happened since then, that the webhook wants and does not have: at most ``limit``."""
        table, mine = _DELIVERIES, _DELIVERIES.c.webhook_id == webhook.id
        has_not = table.c.status.is_(None) | (table.c.status == DeliveryStatus.FAILED.value)
        if delivered_too:
            has_not |= table.c.status == DeliveryStatus.DELIVERED.value
        query = (
            sa.select(_EVENTS, table.c.delivery_id)
            .outerjoin(table, (table.c.event_id == _EVENTS.c.event_id) & mine)
            .where(_EVENTS.c.owner_id == webhook.tenant_id, _EVENTS.c.created_at >= since)
            .where(_EVENTS.c.type.in_([kind.value for kind in types_of(webhook.types)]), has_not)
        )
        if after is not None:
            then = sa.select(_EVENTS.c.created_at).where(_EVENTS.c.event_id == after).scalar_subquery()
            is_later = (_EVENTS.c.created_at == then) & (_EVENTS.c.event_id > after)
            query = query.where((_EVENTS.c.created_at > then) | is_later)
        query = query.order_by(_EVENTS.c.created_at, _EVENTS.c.event_id).limit(limit + 1)

        ask_again = sa.update(_WEBHOOKS).where(_WEBHOOKS.c.webhook_id == webhook.id).values(quiet_until=None)

        def replay(connection: sa.Connection) -> Replayed:
            connection.execute(ask_again)
            rows = connection.execute(query).mappings().all()
            chosen = rows[:limit]
            new = [
                delivery_values(event_of(row), webhook_id=webhook.id) | {"created_at": now, "due_at": now}
                for row in chosen
                if row["delivery_id"] is None
            ]
            if new:
                connection.execute(sa.insert(table), new)
            known = [row["delivery_id"] for row in chosen if row["delivery_id"] is not None]
            for start in range(0, len(known), CHUNK):
                again = sa.update(table).where(table.c.delivery_id.in_(known[start : start + CHUNK]))
                connection.execute(again.values(_again(now)))
            return Replayed(len(chosen), chosen[-1]["event_id"] if len(rows) > limit else None)

        return await self._database.write(replay)

    async def adopt(self, *, limit: int) -> int:
        """Take over webhooks of requests that a release before this one ended; return how many there were."""
        return await self._database.write(lambda connection: adoption.adopt(connection, limit))


def _of(query: sa.Select[tuple[object, ...]], tenant_id: str | None) -> sa.Select[tuple[object, ...]]:
    return query if tenant_id is None else query.where(_WEBHOOKS.c.owner_id == tenant_id)


def _again(now: float) -> Values:
    return {"status": DeliveryStatus.PENDING.value, "due_at": now, "since": None, "tries": 0}


def _end_pending(connection: sa.Connection, webhook_id: str) -> None:
    mine = _DELIVERIES.c.webhook_id == webhook_id
    connection.execute(sa.update(_DELIVERIES).where(mine, _PENDING).values(_ENDED))


def _tell_webhook(connection: sa.Connection, webhook_id: str, settled: Settled) -> None:
    """Note on a webhook what an attempt says of its receiver."""
    mine, at = _WEBHOOKS.c.webhook_id == webhook_id, settled.attempt.at
    row = connection.execute(sa.select(_WEBHOOKS).where(mine)).mappings().first()
    if row is None:
        return
    webhook = webhook_of(row)
    if settled.attempt.is_accepted:
        if webhook.failing_since is None:
            return
        connection.execute(sa.update(_WEBHOOKS).where(mine).values(_WELL))
        if at - webhook.failing_since >= HURRY_AFTER_S:
            waits = (_DELIVERIES.c.webhook_id == webhook_id) & (_DELIVERIES.c.due_at > at)
            connection.execute(sa.update(_DELIVERIES).where(waits).values(due_at=at))
        return
    if settled.delivery.event_type is EventType.WEBHOOK_TEST:
        return  # somebody tries out a receiver
    failures = webhook.failures + 1
    changes: Values = {
        "failing_since": at if webhook.failing_since is None else webhook.failing_since,
        "failures": failures,
        "quiet_until": at + quiet_s(failures, asked_s=settled.attempt.retry_after_s),
    }
    is_disabled = bool(settled.disabled_reason) and webhook.is_enabled
    if is_disabled:
        changes |= {"is_enabled": False, "disabled_reason": settled.disabled_reason}
    connection.execute(sa.update(_WEBHOOKS).where(mine).values(changes))
    if is_disabled:
        _end_pending(connection, webhook_id)
        told = {"id": webhook_id, "object": "webhook", "url": webhook.url, "reason": settled.disabled_reason}
        append_for(connection, webhook.tenant_id, EventType.WEBHOOK_DISABLED, told, now=at)
