"""``BookStore`` in SQL. Questions to the ledger are in ``book_questions.py``."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from modelyard.domain.books import (
    DayUse,
    EndpointUse,
    Gap,
    LedgerEntry,
    LedgerSum,
    MeterEvent,
    MeterStatus,
    ReplicaHour,
    ReplicaLife,
    ReplicaUse,
)
from modelyard.domain.usage import UsageRow
from modelyard.stores.sql import book_questions, retention, schema_books
from modelyard.stores.sql.database import Database, insert

T = TypeVar("T")

_CURSORS = schema_books.sink_cursors
_GAPS = schema_books.sink_gaps
_LIVES = schema_books.replica_lives
_HOURS = schema_books.replica_hours
_CUSTOMERS = schema_books.stripe_customers
_EVENTS = schema_books.stripe_meter_events
_ADDED = ("present_s", "ready_s", "busy_s", "accelerator_s", "cost_nanousd")
_EVENT_KEY = ("hour", "tenant_id", "meter", "part")
_CHANGES = ("status", "tried_at", "exported_at", "reason")
_PARTS = (("its", _EVENT_KEY), ("new", _CHANGES))
_RENAMED = {"model": "model_name", "version_id": "model_id"}


class SqlBookStore:
    """The books in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- sinks ----------------------------------------------------------------------

    async def cursors(self, sink: str) -> dict[str, tuple[str, int]]:
        """Return how far a sink is: segment and offset by source."""
        query = sa.select(_CURSORS.c.source, _CURSORS.c.segment, _CURSORS.c.offset).where(_CURSORS.c.sink == sink)
        return await self._read(lambda c: {row[0]: (row[1], int(row[2])) for row in c.execute(query)})

    async def put_cursor(self, sink: str, source: str, segment: str, offset: int, *, gap: Gap | None = None) -> None:
        """Move a cursor; ``gap`` is noted in the same transaction."""
        values = {"sink": sink, "source": source, "segment": segment, "offset": offset}

        def change(connection: sa.Connection) -> None:
            statement = insert(connection, _CURSORS).values(values)
            connection.execute(statement.on_conflict_do_update(index_elements=["sink", "source"], set_=values))
            if gap is not None:
                noted = insert(connection, _GAPS).values(sink=sink, **msgspec.structs.asdict(gap))
                connection.execute(noted.on_conflict_do_nothing())

        await self._database.write(change)

    async def gaps(self, sink: str) -> list[Gap]:
        """Return what a sink still has to get from the ledger, oldest first."""
        columns = [_GAPS.c[name] for name in Gap.__struct_fields__]
        query = sa.select(*columns).where(_GAPS.c.sink == sink).order_by(_GAPS.c.since, _GAPS.c.source)
        return await self._read(lambda c: [Gap(*row) for row in c.execute(query)])

    async def close_gap(self, sink: str, gap: Gap) -> None:
        """Note that a sink has all of a gap."""
        is_it = (_GAPS.c.sink == sink, _GAPS.c.source == gap.source, _GAPS.c.segment == gap.segment)
        await self._database.write(lambda c: c.execute(sa.delete(_GAPS).where(*is_it)))

    # --- replicas -------------------------------------------------------------------

    async def put_lives(self, lives: Sequence[ReplicaLife], hours: Sequence[ReplicaHour]) -> None:
        """Add or replace lives, and add to hours, in one transaction."""

        def change(connection: sa.Connection) -> None:
            if lives:
                statement = insert(connection, _LIVES)
                replaced = {one.name: statement.excluded[one.name] for one in _LIVES.columns if not one.primary_key}
                upsert = statement.on_conflict_do_update(index_elements=["replica_id"], set_=replaced)
                connection.execute(upsert, [_values(life) for life in lives])
            if hours:
                statement = insert(connection, _HOURS)
                sums = {name: _HOURS.c[name] + statement.excluded[name] for name in _ADDED}
                upsert = statement.on_conflict_do_update(index_elements=["hour", "replica_id"], set_=sums)
                connection.execute(upsert, [_values(hour) for hour in hours])

        if lives or hours:
            await self._database.write(change)

    async def lives(self, *, since: float, until: float) -> list[ReplicaLife]:
        """Return replicas that lived at some time between, by id."""
        query = (
            sa.select(*_columns(_LIVES, ReplicaLife))
            .where(sa.or_(_LIVES.c.ended_at.is_(None), _LIVES.c.ended_at >= since), _LIVES.c.started_at < until)
            .order_by(_LIVES.c.replica_id)
        )
        return await self._read(lambda c: [ReplicaLife(*row) for row in c.execute(query)])

    async def hours(self, *, since: int, until: int) -> list[ReplicaHour]:
        """Return the hours that began between (``until`` excluded), by hour and replica."""
        query = (
            sa.select(*_columns(_HOURS, ReplicaHour))
            .where(_HOURS.c.hour >= since, _HOURS.c.hour < until)
            .order_by(_HOURS.c.hour, _HOURS.c.replica_id)
        )
        return await self._read(lambda c: [ReplicaHour(*row) for row in c.execute(query)])

    async def replica_sums(self, *, since: int, until: int) -> list[ReplicaHour]:
        """Return the same as one row a replica and owner, whose ``hour`` is the first, the latest replicas last."""
        group = [_HOURS.c[name] for name in ("replica_id", "endpoint_id", "owner_id", "model_name", "accelerator")]
        named = [column.label("model") if column.name == "model_name" else column for column in group]
        sums = [sa.func.sum(_HOURS.c[name]).label(name) for name in _ADDED]
        query = (
            sa.select(sa.func.min(_HOURS.c.hour).label("hour"), *named, *sums)
            .where(_HOURS.c.hour >= since, _HOURS.c.hour < until)
            .group_by(*group)
            .order_by(sa.func.max(_HOURS.c.hour), _HOURS.c.replica_id)
        )

        def read(connection: sa.Connection) -> list[ReplicaHour]:
            # Postgres sums whole numbers to a decimal.
            rows = connection.execute(query).mappings()
            return [ReplicaHour(**{**row, "cost_nanousd": int(row["cost_nanousd"])}) for row in rows]

        return await self._read(read)

    # --- the ledger -----------------------------------------------------------------

    async def endpoint_use(self, *, since: int, until: int) -> list[EndpointUse]:
        """Return who used what in the hours from ``since`` on, before ``until``."""
        return await self._read(lambda c: book_questions.endpoint_use(c, since, until))

    async def kept_since(self) -> int:
        """Return the hour from which on all rows are there; 0 if none was ever removed."""
        return await self._read(retention.kept_since)

    async def replica_use(self, *, since: float, until: float, margin_s: float) -> dict[str, ReplicaUse]:
        """Return what the ledger has of replicas, of the requests that arrived between; see the contract."""
        return await self._read(lambda c: book_questions.replica_use(c, (since, until), margin_s))

    async def unsure_requests(self, replica_id: str, *, since: float, until: float, limit: int) -> list[str]:
        """Return requests of a replica that were retried, cut off or estimated, newest first; see the contract."""
        return await self._read(lambda c: book_questions.unsure_of_replica(c, replica_id, (since, until), limit))

    async def entries(self, request_ids: Collection[str]) -> dict[str, LedgerEntry]:
        """Return the rows of these requests."""
        return await self._read(lambda c: book_questions.entries(c, list(request_ids)))

    async def rows_between(self, after: tuple[float, str], until: float, *, limit: int) -> list[UsageRow]:
        """Return rows behind (arrival, request id), up to those that arrived at ``until``, oldest first."""
        return await self._read(lambda c: book_questions.rows_between(c, after, until, limit))

    async def sum_since(self, since: float) -> tuple[LedgerSum, dict[str, tuple[str, int]]]:
        """Return the sum of the rows that arrived since then, and of one view how far each journal was read."""
        return await self._read(lambda c: (book_questions.sum_since(c, since), book_questions.positions(c)))

    async def ids_since(self, since: float, *, after: str, limit: int) -> list[str]:
        """Return ids of rows that arrived since then, in their order, behind ``after``."""
        return await self._read(lambda c: book_questions.ids_since(c, since, after, limit))

    async def roll_up_differences(self, *, since: int, until: int) -> list[tuple[int, LedgerSum, LedgerSum]]:
        """Return the hours whose roll-up is not the sum of their rows; see the contract."""
        return await self._read(lambda c: book_questions.roll_up_differences(c, since, until))

    async def roll_ups_apart(self, *, since: int, until: int) -> list[tuple[str, LedgerSum, LedgerSum]]:
        """Return where roll-ups do not agree with one another; see the contract."""
        return await self._read(lambda c: book_questions.roll_ups_apart(c, since, until))

    async def day_use(self, *, since: float, until: float) -> list[DayUse]:
        """Return the ledger by UTC day and version; see the contract."""
        return await self._read(lambda c: book_questions.day_use(c, since, until))

    async def unsure_of_version(self, version_id: str, *, since: float, until: float, limit: int) -> list[str]:
        """Return requests of a version that were retried, cut off or estimated, newest first."""
        return await self._read(lambda c: book_questions.unsure_of_version(c, version_id, (since, until), limit))

    async def hourly(self, *, since: int, until: int) -> dict[tuple[str, int], LedgerSum]:
        """Return the roll-up by tenant and hour."""
        return await self._read(lambda c: book_questions.hourly(c, since, until))

    # --- Stripe ---------------------------------------------------------------------

    async def customers(self) -> dict[str, str]:
        """Return Stripe's customer of each tenant that has one."""
        query = sa.select(_CUSTOMERS.c.tenant_id, _CUSTOMERS.c.customer_id)
        return await self._read(lambda c: {row[0]: row[1] for row in c.execute(query)})

    async def put_customer(self, tenant_id: str, customer_id: str) -> None:
        """Remember Stripe's customer of a tenant; one that is there stays."""
        values = {"tenant_id": tenant_id, "customer_id": customer_id}
        await self._database.write(lambda c: c.execute(insert(c, _CUSTOMERS).values(values).on_conflict_do_nothing()))

    async def meter_events(
        self,
        *,
        since: int,
        until: int,
        status: MeterStatus | None = None,
        after: MeterEvent | None = None,
        limit: int | None = None,
    ) -> list[MeterEvent]:
        """Return events of the hours between, oldest hour first: those behind ``after``, at most ``limit``."""
        key = [_EVENTS.c[name] for name in _EVENT_KEY]
        query = sa.select(*_columns(_EVENTS, MeterEvent)).where(_EVENTS.c.hour >= since, _EVENTS.c.hour < until)
        if status is not None:
            query = query.where(_EVENTS.c.status == status.value)
        if after is not None:
            query = query.where(sa.tuple_(*key) > sa.tuple_(*(sa.literal(getattr(after, one)) for one in _EVENT_KEY)))
        query = query.order_by(*key).limit(limit)
        return await self._read(lambda c: [_event(row) for row in c.execute(query).mappings()])

    async def meter_counts(self, *, since: int) -> dict[MeterStatus, int]:
        """Return how many events there are of the hours since then, by status."""
        query = sa.select(_EVENTS.c.status, sa.func.count()).where(_EVENTS.c.hour >= since).group_by(_EVENTS.c.status)
        return await self._read(lambda c: {MeterStatus(status): int(count) for status, count in c.execute(query)})

    async def add_meter_events(self, events: Sequence[MeterEvent]) -> None:
        """Add; those that are there stay."""
        rows = [_values(event) for event in events]
        if rows:
            await self._database.write(lambda c: c.execute(insert(c, _EVENTS).on_conflict_do_nothing(), rows))

    async def put_meter_events(self, events: Sequence[MeterEvent]) -> None:
        """Replace status, times and reason of those."""
        is_it = [_EVENTS.c[name] == sa.bindparam(f"its_{name}") for name in _EVENT_KEY]
        change = sa.update(_EVENTS).where(*is_it).values({name: sa.bindparam(f"new_{name}") for name in _CHANGES})
        rows = []
        for event in events:
            values = _values(event)
            its, new = ({f"{of}_{name}": values[name] for name in names} for of, names in _PARTS)
            rows.append(its | new)
        if rows:
            await self._database.write(lambda c: c.execute(change, rows))

    async def _read(self, query: Callable[[sa.Connection], T]) -> T:
        return await self._database.read(query)


def _values(record: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    return {_RENAMED.get(name, name): _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, MeterStatus) else value


def _columns(table: sa.Table, kind: type[msgspec.Struct]) -> list[sa.Column[Any]]:
    return [table.c[_RENAMED.get(name, name)] for name in kind.__struct_fields__]


def _event(row: sa.RowMapping) -> MeterEvent:
    return MeterEvent(**{**row, "status": MeterStatus(row["status"])})
