"""``RequestStore`` in SQL: kept requests and their answers; what their ends are told goes to ``events.py``."""

from collections.abc import Collection

import sqlalchemy as sa

from modelyard.domain.requests import Finish, KeptRequest, RequestStatus, RequestWebhook
from modelyard.stores.sql import schema, schema_events
from modelyard.stores.sql.database import CHUNK, Database
from modelyard.stores.sql.mapping import Values
from modelyard.stores.sql.request_events import tell_end
from modelyard.stores.sql.webhook_rows import delivery_of

_TABLE = schema.kept_requests
_DELIVERIES = schema_events.webhook_deliveries
_OPEN = (RequestStatus.QUEUED.value, RequestStatus.RUNNING.value)
_WITHOUT_ANSWER = [column for column in _TABLE.c if column.name != "answer"]

_TOLD = {f"told_{column.name}": column for column in _DELIVERIES.c}
"""Columns of the delivery to the URL that came with a request."""
_WITH_DELIVERY = _TABLE.outerjoin(
    _DELIVERIES, (_DELIVERIES.c.event_id == _TABLE.c.webhook_event_id) & _DELIVERIES.c.webhook_id.is_(None)
)
_LABELLED = [column.label(name) for name, column in _TOLD.items()]


class SqlRequestStore:
    """Kept requests in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, request: KeptRequest) -> KeptRequest | None:
        """Add ``request``, or return the one that has its tenant, key and idempotency key."""
        key = request.idempotency_key
        mine = (
            (_TABLE.c.owner_id == request.tenant_id)
            & (_TABLE.c.api_key_id == request.key_id)
            & (_TABLE.c.idempotency_key == key)
        )

        def claim(connection: sa.Connection) -> KeptRequest | None:
            if key is not None:
                row = connection.execute(sa.select(_TABLE).where(mine)).mappings().first()
                if row is not None and (row["expires_at"] > request.created_at or row["status"] in _OPEN):
                    return request_of(row)
                if row is not None:
                    connection.execute(sa.delete(_TABLE).where(_TABLE.c.request_id == row["request_id"]))
            connection.execute(sa.insert(_TABLE).values(_values(request)))
            return None

        return await self._database.write(claim)

    async def begin(self, request_ids: Collection[str]) -> None:
        """Note that engines have these; what is over stays so."""
        if not request_ids:
            return
        is_queued = _TABLE.c.status == RequestStatus.QUEUED.value
        begun = sa.update(_TABLE).values(status=RequestStatus.RUNNING.value)
        wanted = sorted(request_ids)

        def begin(connection: sa.Connection) -> None:
            for start in range(0, len(wanted), CHUNK):
                chunk = _TABLE.c.request_id.in_(wanted[start : start + CHUNK])
                connection.execute(begun.where(is_queued, chunk))

        await self._database.write(begin)

    async def finish(self, finish: Finish, *, now: float) -> bool:
        """End a request that is not over; say whether it was."""
        is_open = (_TABLE.c.request_id == finish.id) & _TABLE.c.status.in_(_OPEN)
        changes: Values = {
            "status": finish.status.value,
            "finished_at": now,
            "http_status": finish.http_status,
            "content_type": finish.content_type,
            "answer": finish.answer,
            "answer_bytes": len(finish.answer),
            "error_code": finish.code,
        }
        if finish.is_released:
            changes["idempotency_key"] = None

        def end(connection: sa.Connection) -> bool:
            if finish.is_dropped:
                return bool(connection.execute(sa.delete(_TABLE).where(is_open)).rowcount)
            if finish.is_released:
                # Nothing is left to show of one that was not detached.
                gone = connection.execute(sa.delete(_TABLE).where(is_open, ~_TABLE.c.is_detached))
                if gone.rowcount:
                    return True
            if not connection.execute(sa.update(_TABLE).where(is_open).values(changes)).rowcount:
                return False
            tell_end(connection, finish.id)
            return True

        return await self._database.write(end)

    async def request(self, request_id: str, *, tenant_id: str | None) -> KeptRequest | None:
        """Return the request of this id (of this tenant) with its answer."""
        query = sa.select(_TABLE, *_LABELLED).select_from(_WITH_DELIVERY).where(_TABLE.c.request_id == request_id)
        if tenant_id is not None:
            query = query.where(_TABLE.c.owner_id == tenant_id)

        def read(connection: sa.Connection) -> KeptRequest | None:
            row = connection.execute(query).mappings().first()
            return None if row is None else request_of(row)

        return await self._database.read(read)

    async def detached(self, *, tenant_id: str | None, limit: int, after: KeptRequest | None) -> list[KeptRequest]:
        """Return detached requests without their answers, newest first."""
        query = sa.select(*_WITHOUT_ANSWER, *_LABELLED).select_from(_WITH_DELIVERY).where(_TABLE.c.is_detached)
        if tenant_id is not None:
            query = query.where(_TABLE.c.owner_id == tenant_id)
        if after is not None:
            place = sa.tuple_(_TABLE.c.created_at, _TABLE.c.request_id)
            query = query.where(place < sa.tuple_(sa.literal(after.created_at), sa.literal(after.id)))
        query = query.order_by(_TABLE.c.created_at.desc(), _TABLE.c.request_id.desc()).limit(limit)
        return await self._all(query)

    async def open_requests(self) -> list[KeptRequest]:
        """Return what is queued or running, of all tenants."""
        return await self._all(sa.select(*_WITHOUT_ANSWER).where(_TABLE.c.status.in_(_OPEN)))

    async def cancelled(self, instance: str, *, since: float) -> list[str]:
        """Return the requests of a gateway process that were cancelled since then."""
        query = sa.select(_TABLE.c.request_id).where(
            _TABLE.c.instance == instance,
            _TABLE.c.status == RequestStatus.CANCELLED.value,
            _TABLE.c.finished_at >= since,
        )
        return await self._database.read(lambda c: list(c.execute(query).scalars()))

    async def held(self, tenant_id: str) -> tuple[int, int]:
        """Return how many requests and bytes of answers are kept of a tenant."""
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_TABLE.c.answer_bytes), 0)).where(
            _TABLE.c.owner_id == tenant_id
        )

        def read(connection: sa.Connection) -> tuple[int, int]:
            count, size = connection.execute(query).one()
            return int(count), int(size)

        return await self._database.read(read)

    async def forget(self, *, before: float) -> int:
        """Delete what expired before then and is over; return how many."""
        gone = sa.delete(_TABLE).where(_TABLE.c.expires_at <= before, _TABLE.c.status.not_in(_OPEN))
        return await self._database.write(lambda c: c.execute(gone).rowcount)

    async def forget_request(self, request_id: str) -> None:
        """Delete one."""
        await self._database.write(lambda c: c.execute(sa.delete(_TABLE).where(_TABLE.c.request_id == request_id)))

    async def _all(self, query: sa.Select[tuple[object, ...]]) -> list[KeptRequest]:
        return await self._database.read(lambda c: [request_of(row) for row in c.execute(query).mappings()])


def _values(request: KeptRequest) -> Values:
    webhook = request.webhook
    return {
        "request_id": request.id,
        "owner_id": request.tenant_id,
        "api_key_id": request.key_id,
        "instance": request.instance,
        "route": request.route,
        "model_name": request.model,
        "fingerprint": request.fingerprint,
        "idempotency_key": request.idempotency_key,
        "is_detached": request.is_detached,
        "status": request.status.value,
        "created_at": request.created_at,
        "expires_at": request.expires_at,
        "finished_at": request.finished_at,
        "http_status": request.http_status,
        "content_type": request.content_type,
        "answer": request.answer,
        "answer_bytes": len(request.answer),
        "error_code": request.code,
        "webhook_url": None if webhook is None else webhook.url,
        "webhook_event_id": "" if webhook is None else webhook.event_id,
        # Where a release before this one keeps what became of the webhook.
        "webhook_status": "",
        "webhook_due": None,
        "webhook_since": None,
        "webhook_tries": 0,
        "webhook_attempts": "[]",
    }


def request_of(row: sa.RowMapping) -> KeptRequest:
    """Return the request of a row, with or without its answer."""
    webhook = None
    if row["webhook_url"] is not None:
        told = {column.name: row.get(name) for name, column in _TOLD.items()}
        told["type"] = f"request.{row['status']}"
        delivery = None if told["delivery_id"] is None else delivery_of(told)
        webhook = RequestWebhook(row["webhook_url"], row["webhook_event_id"], delivery)
    return KeptRequest(
        id=row["request_id"],
        tenant_id=row["owner_id"],
        key_id=row["api_key_id"],
        instance=row["instance"],
        route=row["route"],
        model=row["model_name"],
        fingerprint=row["fingerprint"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        is_detached=row["is_detached"],
        idempotency_key=row["idempotency_key"],
        status=RequestStatus(row["status"]),
        finished_at=row["finished_at"],
        http_status=row["http_status"],
        content_type=row["content_type"],
        answer=row.get("answer", b""),
        code=row["error_code"],
        webhook=webhook,
    )
