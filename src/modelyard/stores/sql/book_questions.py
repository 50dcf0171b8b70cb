"""What the books ask the ledger.

Sums of hours come from the roll-up, what concerns single replicas or requests
from the rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import sqlalchemy as sa

from modelyard.domain.books import DayUse, EndpointUse, LedgerEntry, LedgerSum, ReplicaUse
from modelyard.domain.usage import EVERYTHING, UsageRow
from modelyard.policy.utc import DAY_S, day_name, first_of_month, month_name, next_month
from modelyard.stores.sql import retention, rollups, schema, schema_books, usage_reports
from modelyard.stores.sql.database import CHUNK
from modelyard.stores.sql.mapping import usage_of

_LEDGER = schema.inference_requests
_ROLL_UP, _HOUR = schema.usage_rollup_hourly, schema.usage_rollup_hourly.c.period
"""The roll-up by hour, and its column of the hour."""
_POSITIONS = schema.journal_positions
_LIVES = schema_books.replica_lives
_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanousd")
_IS_UNSURE = sa.or_(_LEDGER.c.is_estimated, _LEDGER.c.attempts > 1, _LEDGER.c.status != "success")


def _sums_of_rows() -> list[sa.ColumnElement[Any]]:
    return [sa.func.count(), *(sa.func.sum(_LEDGER.c[name]) for name in _SUMS)]


def _sum(row: Sequence[Any]) -> LedgerSum:
    """Return a sum; one of nothing is NULL, and Postgres sums to a decimal."""
    return LedgerSum(*(int(value or 0) for value in row))


def endpoint_use(connection: sa.Connection, since: int, until: int) -> list[EndpointUse]:
    """Return who used which endpoint."""
    group = (_ROLL_UP.c.endpoint_id, _ROLL_UP.c.customer_id, _ROLL_UP.c.model_name)
    names = ("requests", "prompt_tokens", "completion_tokens", "cost_nanousd")
    query = (
        sa.select(*group, *(sa.func.sum(_ROLL_UP.c[name]) for name in names))
        .where(_HOUR.between(since, until - 1))
        .group_by(*group)
        .order_by(*group)
    )
    return [EndpointUse(*row[:3], *(int(value or 0) for value in row[3:])) for row in connection.execute(query)]


def replica_use(connection: sa.Connection, between: tuple[float, float], margin_s: float) -> dict[str, ReplicaUse]:
    """Return what the ledger has of replicas; what a guest had on one is that replica's."""
    counted = _LEDGER.c.settled_at <= _LIVES.c.counted_at - margin_s
    sums = [sa.case((counted, _LEDGER.c[name]), else_=0) for name in _SUMS[:3]]
    query = (
        sa.select(
            _LIVES.c.replica_id,
            sa.func.count(),
            *map(sa.func.sum, sums),
            sa.func.sum(sa.case((_IS_UNSURE, 1), else_=0)),
            sa.func.sum(sa.case((counted, 0), else_=_LEDGER.c.completion_tokens)),
        )
        .join(_LIVES, _LIVES.c.replica_id == _host(connection, _LEDGER.c.replica_id))
        .where(_LEDGER.c.replica_id != "", *_alive(between, margin_s))
        .group_by(_LIVES.c.replica_id)
    )
    found = {row[0]: ReplicaUse(row[0], *(int(value or 0) for value in row[1:])) for row in connection.execute(query)}
    for id, requests in _wandered(connection, between, margin_s).items():
        before = found.get(id, ReplicaUse(id, 0, 0, 0, 0, 0))
        found[id] = msgspec.structs.replace(before, wandered=requests)
    return found


def _alive(between: tuple[float, float], margin_s: float) -> list[sa.ColumnElement[bool]]:
    """Return what holds of requests between that a replica may have worked on before its counters were last read."""
    arrived = _LEDGER.c.created_at
    return [
        arrived >= between[0],
        arrived < between[1],
        arrived <= _LIVES.c.counted_at + margin_s,
        _LEDGER.c.settled_at >= _LIVES.c.started_at,
    ]


def _wandered(connection: sa.Connection, between: tuple[float, float], margin_s: float) -> dict[str, int]:
    """Return how many requests a replica may have worked on that the ledger has of others, or of none.

    Only of the last try is told where it was, and of a request whose gateway died not even that.
    """
    host, last = _host(connection, _LEDGER.c.replica_id), _LIVES.alias()
    query = (
        sa.select(_LIVES.c.replica_id, sa.func.count())
        .select_from(_LEDGER.outerjoin(last, last.c.replica_id == host))
        .join(_LIVES, sa.or_(_LIVES.c.endpoint_id == _LEDGER.c.endpoint_id, _LIVES.c.endpoint_id == last.c.endpoint_id))
        .where(sa.or_(_LEDGER.c.attempts > 1, sa.and_(_LEDGER.c.replica_id == "", _LEDGER.c.attempts > 0)))
        .where(host != _LIVES.c.replica_id, *_alive(between, margin_s))
        .group_by(_LIVES.c.replica_id)
    )
    return {row[0]: int(row[1]) for row in connection.execute(query)}


def _host(connection: sa.Connection, replica_id: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return the replica of a guest's id, which is ``replica/guest``; every other id is its own."""
    if connection.dialect.name == "sqlite":
        return sa.func.substr(replica_id, 1, sa.func.instr(replica_id + "/", "/") - 1)
    return sa.func.split_part(replica_id, "/", 1)


def unsure_of_replica(
    connection: sa.Connection, replica_id: str, between: tuple[float, float], limit: int
) -> list[str]:
    """Return requests that were retried, cut off or estimated there."""
    is_there = sa.or_(_LEDGER.c.replica_id == replica_id, _LEDGER.c.replica_id.startswith(f"{replica_id}/"))
    query = (
        sa.select(_LEDGER.c.request_id)
        .where(_LEDGER.c.created_at >= between[0], _LEDGER.c.created_at < between[1])
        .where(is_there, _IS_UNSURE)
        .order_by(_LEDGER.c.created_at.desc())
    )
    return list(connection.scalars(query.limit(limit)))


def unsure_of_version(
    connection: sa.Connection, version_id: str, between: tuple[float, float], limit: int
) -> list[str]:
    """Return the same of a version."""
    query = (
        sa.select(_LEDGER.c.request_id)
        .where(_LEDGER.c.created_at >= between[0], _LEDGER.c.created_at < between[1])
        .where(_LEDGER.c.model_id == version_id, _IS_UNSURE)
        .order_by(_LEDGER.c.created_at.desc())
    )
    return list(connection.scalars(query.limit(limit)))


def entries(connection: sa.Connection, request_ids: Sequence[str]) -> dict[str, LedgerEntry]:
    """Return rows by request id."""
    columns = [_LEDGER.c[name] for name in LedgerEntry.__struct_fields__]
    found: dict[str, LedgerEntry] = {}
    for chunk in _chunks(request_ids):
        query = sa.select(*columns).where(_LEDGER.c.request_id.in_(chunk))
        found.update((row[0], LedgerEntry(*row)) for row in connection.execute(query))
    return found


def rows_between(connection: sa.Connection, after: tuple[float, str], until: float, limit: int) -> list[UsageRow]:
    """Return whole rows, oldest first."""
    at, request_id = after
    is_behind = sa.or_(
        _LEDGER.c.created_at > at, sa.and_(_LEDGER.c.created_at == at, _LEDGER.c.request_id > request_id)
    )
    query = (
        sa.select(_LEDGER)
        .where(_LEDGER.c.created_at >= at, _LEDGER.c.created_at <= until, is_behind)
        .order_by(_LEDGER.c.created_at, _LEDGER.c.request_id)
        .limit(limit)
    )
    return [usage_of(row) for row in connection.execute(query).mappings()]


def sum_since(connection: sa.Connection, since: float) -> LedgerSum:
    """Return the sum of rows that arrived since then."""
    return _sum(connection.execute(sa.select(*_sums_of_rows()).where(_LEDGER.c.created_at >= since)).one())


def positions(connection: sa.Connection) -> dict[str, tuple[str, int]]:
    """Return how far each journal was read."""
    query = sa.select(_POSITIONS.c.source, _POSITIONS.c.segment, _POSITIONS.c.offset)
    return {row[0]: (row[1], int(row[2])) for row in connection.execute(query)}


def ids_since(connection: sa.Connection, since: float, after: str, limit: int) -> list[str]:
    """Return ids in their order."""
    query = (
        sa.select(_LEDGER.c.request_id)
        .where(_LEDGER.c.created_at >= since, _LEDGER.c.request_id > after)
        .order_by(_LEDGER.c.request_id)
    )
    return list(connection.scalars(query.limit(limit)))


def roll_up_differences(connection: sa.Connection, since: int, until: int) -> list[tuple[int, LedgerSum, LedgerSum]]:
    """Return hours whose rows and roll-up differ, of those whose rows are all there."""
    since = max(since, retention.kept_since(connection))
    of_rows = (
        sa.select(_LEDGER.c.hour, *_sums_of_rows())
        .where(_LEDGER.c.created_at >= since, _LEDGER.c.created_at < until)
        .group_by(_LEDGER.c.hour)
    )
    sums = [sa.func.sum(_ROLL_UP.c[name]) for name in ("requests", *_SUMS)]
    of_hours = sa.select(_HOUR, *sums).where(_HOUR.between(since, until - 1)).group_by(_HOUR)
    rows = {int(row[0]): _sum(row[1:]) for row in connection.execute(of_rows)}
    hours = {int(row[0]): _sum(row[1:]) for row in connection.execute(of_hours)}
    nothing = LedgerSum()
    both = [(hour, rows.get(hour, nothing), hours.get(hour, nothing)) for hour in sorted(rows.keys() | hours.keys())]
    return [one for one in both if one[1] != one[2]]


def roll_ups_apart(connection: sa.Connection, since: int, until: int) -> list[tuple[str, LedgerSum, LedgerSum]]:
    """Return the days and months whose roll-ups differ; every one is there for good."""
    first, last = since // DAY_S, -(-until // DAY_S)
    hourly = _by_day(connection, rollups.HOURLY, first, last)
    others = (rollups.DAILY, rollups.PLATFORM_HOURLY, rollups.PLATFORM_DAILY)
    by_day = {one.table.name: _by_day(connection, one, first, last) for one in others}
    found, nothing = [], LedgerSum()
    for day in range(first, last):
        for name, days in by_day.items():
            ours, its = hourly.get(day, nothing), days.get(day, nothing)
            if ours != its:
                found.append((f"{day_name(day)}, {name}", ours, its))
    month = first_of_month(first)
    while month < last:
        end = next_month(month)
        ours = _between(connection, rollups.DAILY, month, end)
        its = _between(connection, rollups.MONTHLY, month, end)
        if ours != its:
            found.append((f"{month_name(month)}, {rollups.MONTHLY.table.name}", ours, its))
        month = end
    return found


def _by_day(connection: sa.Connection, rollup: rollups.Rollup, first: int, last: int) -> dict[int, LedgerSum]:
    period = rollup.table.c.period
    # A literal, not a parameter: Postgres would not see that SELECT and GROUP BY mean the same.
    day = period if rollup.step is rollups.Step.DAY else period - period % sa.literal_column(str(DAY_S))
    query = sa.select(day, *_sums_of(rollup.table)).where(period >= first * DAY_S, period < last * DAY_S).group_by(day)
    return {int(row[0]) // DAY_S: _sum(row[1:]) for row in connection.execute(query)}


def _between(connection: sa.Connection, rollup: rollups.Rollup, first: int, last: int) -> LedgerSum:
    period = rollup.table.c.period
    query = sa.select(*_sums_of(rollup.table)).where(period >= first * DAY_S, period < last * DAY_S)
    return _sum(connection.execute(query).one())


def _sums_of(table: sa.Table) -> list[sa.ColumnElement[Any]]:
    return [sa.func.sum(table.c[name]) for name in ("requests", *_SUMS)]


def day_use(connection: sa.Connection, since: float, until: float) -> list[DayUse]:
    """Return sums by UTC day and version, whether or not their rows are still there."""
    asked = usage_reports.Question(EVERYTHING, since, until, ("day", "model", "version"), ZoneInfo("UTC"))
    return [
        DayUse(
            one.group["day"],
            one.group["model"],
            one.group["version"],
            LedgerSum(one.requests, one.prompt_tokens, one.cached_tokens, one.completion_tokens, one.cost_nanousd),
        )
        for one in usage_reports.buckets(connection, asked)
    ]


def hourly(connection: sa.Connection, since: int, until: int) -> dict[tuple[str, int], LedgerSum]:
    """Return the roll-up by tenant and hour."""
    sums = [sa.func.sum(_ROLL_UP.c[name]) for name in ("requests", *_SUMS)]
    group = (_ROLL_UP.c.customer_id, _HOUR)
    query = sa.select(*group, *sums).where(_HOUR.between(since, until - 1)).group_by(*group)
    return {(row[0], int(row[1])): _sum(row[2:]) for row in connection.execute(query)}


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
