"""What the books ask the ledger.

Sums of hours come from the roll-up, what concerns single replicas or requests
from the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from modelyard.domain.books import DayUse, EndpointUse, LedgerEntry, LedgerSum, ReplicaUse
from modelyard.domain.fleet import replica_of
from modelyard.domain.usage import UsageRow
from modelyard.policy.utc import day_name
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import CHUNK
from modelyard.stores.sql.mapping import usage_of

DAY_S = 86_400

_LEDGER = schema.inference_requests
_ROLL_UP, _HOUR = schema.usage_rollup_hourly, schema.usage_rollup_hourly.c.period
"""The roll-up by hour, and its column of the hour."""
_POSITIONS = schema.journal_positions
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


def replica_use(connection: sa.Connection, lives: Mapping[str, tuple[float, float]]) -> dict[str, ReplicaUse]:
    """Return what the ledger has of replicas; what a guest had on one is that replica's."""
    found = {id: [0, 0, 0, 0, 0] for id in lives}
    if not lives:
        return {}
    # Requests arrive before they settle, and hardly more than a day.
    earliest = min(since for since, _ in lives.values()) - DAY_S
    query = sa.select(
        _LEDGER.c.replica_id,
        _LEDGER.c.settled_at,
        _LEDGER.c.prompt_tokens,
        _LEDGER.c.cached_tokens,
        _LEDGER.c.completion_tokens,
        sa.case((_IS_UNSURE, 1), else_=0),
    ).where(_LEDGER.c.created_at >= earliest, _LEDGER.c.replica_id != "")
    for id, settled_at, *counts in connection.execute(query):
        replica_id = replica_of(id)
        life = lives.get(replica_id)
        if life is not None and life[0] <= settled_at <= life[1]:
            total = found[replica_id]
            for at, value in enumerate((1, *counts)):
                total[at] += value
    return {id: ReplicaUse(id, *total) for id, total in found.items()}


def unsure_of_replica(connection: sa.Connection, replica_id: str, limit: int) -> list[str]:
    """Return requests that were retried, cut off or estimated there."""
    is_there = sa.or_(_LEDGER.c.replica_id == replica_id, _LEDGER.c.replica_id.startswith(f"{replica_id}/"))
    query = sa.select(_LEDGER.c.request_id).where(is_there, _IS_UNSURE).order_by(_LEDGER.c.created_at.desc())
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
    """Return hours whose rows and roll-up differ."""
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


def day_use(connection: sa.Connection, since: float, until: float) -> list[DayUse]:
    """Return sums by UTC day and version."""
    # A literal, not a parameter: Postgres would not see that SELECT and GROUP BY mean the same.
    day = _LEDGER.c.hour - _LEDGER.c.hour % sa.literal_column(str(DAY_S))
    group = (day, _LEDGER.c.model_name, _LEDGER.c.model_id)
    query = (
        sa.select(*group, *_sums_of_rows())
        .where(_LEDGER.c.created_at >= since, _LEDGER.c.created_at < until)
        .group_by(*group)
        .order_by(*group)
    )
    return [DayUse(day_name(int(row[0]) // DAY_S), row[1], row[2], _sum(row[3:])) for row in connection.execute(query)]


def hourly(connection: sa.Connection, since: int, until: int) -> dict[tuple[str, int], LedgerSum]:
    """Return the roll-up by tenant and hour."""
    sums = [sa.func.sum(_ROLL_UP.c[name]) for name in ("requests", *_SUMS)]
    group = (_ROLL_UP.c.customer_id, _HOUR)
    query = sa.select(*group, *sums).where(_HOUR.between(since, until - 1)).group_by(*group)
    return {(row[0], int(row[1])): _sum(row[2:]) for row in connection.execute(query)}


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
