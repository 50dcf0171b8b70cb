"""Questions to the ledger.

A sum over a span of time comes from roll-ups as far as whole hours and days go,
and from the ledger's rows at its ends (``usage_time.py``), so that a year costs
as little as a day and both agree to the token.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import sqlalchemy as sa

from modelyard.domain.usage import MICRO_PER_UNIT, Moment, UsageBucket, UsageFilter, UsageRow
from modelyard.stores import TooManyGroupsError
from modelyard.stores.sql import mapping, retention, schema, usage_time
from modelyard.stores.sql.rollups import COUNTS, HOUR_S, PLATFORM_HOURLY, SUMS, answering
from modelyard.stores.sql.usage_time import Piece

TEN_MINUTES_S = 600
TENTHS = range(TEN_MINUTES_S, HOUR_S, TEN_MINUTES_S)
"""Ends of the first five of an hour's six parts of ten minutes."""
GROUPS_MAX = 200_000
"""Most groups of one answer: some hundred megabytes."""

_LEDGER = schema.inference_requests
_COLUMNS = {
    "tenant": "customer_id",
    "key": "api_key_id",
    "model": "model_name",
    "endpoint": "endpoint_id",
    "version": "model_id",
    "route": "route",
    "status": "status",
    "batch": "is_batch",
}
LOOKED_AT = 20_000
"""Newest rows among which those of an endpoint are looked for."""
_FILTERS = {
    "tenant_ids": "customer_id",
    "key_ids": "api_key_id",
    "models": "model_name",
    "endpoint_ids": "endpoint_id",
    "routes": "route",
}


class Question(NamedTuple):
    """What to sum: which rows of which time, by what."""

    where: UsageFilter
    since: float
    until: float
    by: tuple[str, ...]
    zone: ZoneInfo

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the ledger's columns to group by."""
        return tuple(_COLUMNS[name] for name in self.by if name in _COLUMNS)

    @property
    def named(self) -> set[str]:
        """Return all of the ledger's columns that the question names."""
        filtered = {column for name, column in _FILTERS.items() if getattr(self.where, name)}
        return {*self.columns, *filtered, *(["is_batch"] if self.where.is_batch is not None else [])}

    @property
    def time(self) -> str | None:
        """Return the finest dimension of time."""
        return next((name for name in usage_time.TIMES if name in self.by), None)


class _Total:
    """What was added up of one group."""

    __slots__ = ("counts", "units")

    def __init__(self) -> None:
        self.counts = [0] * len(COUNTS)
        self.units: dict[str, int] = {}

    def add(self, unit: str, counts: Sequence[Any]) -> None:
        self.counts = [had + int(more) for had, more in zip(self.counts, counts, strict=True)]  # Postgres: decimals
        if unit:
            self.units[unit] = self.units.get(unit, 0) + int(counts[_MICRO])


_MICRO = COUNTS.index("units_micro")
assert COUNTS[4:] == ("reasoning_tokens", "audio_input_tokens", "audio_output_tokens", "units_micro", "cost_nanousd")


def dimensions(group_by: Sequence[str]) -> tuple[str, ...]:
    """Return ``group_by`` without repetitions.

    Raises:
        ValueError: a dimension that does not exist.
    """
    known = {*_COLUMNS, *usage_time.TIMES}
    if unknown := [name for name in group_by if name not in known]:
        raise ValueError(f"no such dimension: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(dict.fromkeys(group_by))


def buckets(connection: sa.Connection, asked: Question) -> list[UsageBucket]:
    """Return the sums, ordered by their groups; one bucket of zeros when nothing is grouped and nothing found.

    Raises:
        TooManyGroupsError: there are more than ``GROUPS_MAX``.
    """
    totals: dict[tuple[Any, ...], _Total] = {}
    if not asked.by:
        totals[()] = _Total()
    width = len(asked.columns)
    is_sqlite = connection.dialect.name == "sqlite"
    for piece in _pieces(connection, asked):
        for row in connection.execute(_query(piece, asked, is_sqlite=is_sqlite)):
            key = (*row[2 : 2 + width], int(row[0])) if asked.time else tuple(row[2 : 2 + width])
            total = totals.get(key)
            if total is None:
                total = totals[key] = _Total()
                if len(totals) > GROUPS_MAX:
                    raise TooManyGroupsError(f"there are more than {GROUPS_MAX:,} groups")
            total.add(row[1], row[2 + width :])
    return _named(asked, totals)


def _named(asked: Question, totals: dict[tuple[Any, ...], _Total]) -> list[UsageBucket]:
    """Return the buckets in the order of their groups, which are tuples of columns and, where asked, a moment."""
    columns = [name for name in asked.by if name in _COLUMNS]
    times = [name for name in asked.by if name in usage_time.TIMES]
    order = [(*columns, *times).index(name) for name in asked.by]
    labels: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[str, ...], _Total] = {}
    for key, total in totals.items():
        values = key[: len(columns)] if "batch" not in columns else tuple(map(_text, columns, key))
        if times:
            if (label := labels.get(key[-1])) is None:
                label = labels[key[-1]] = tuple(usage_time.label(name, key[-1], asked.zone) for name in times)
            values = (*values, *label)
        found[tuple(values[place] for place in order)] = total
    return [_bucket(dict(zip(asked.by, group, strict=True)), total) for group, total in sorted(found.items())]


def rows(
    connection: sa.Connection,
    tenant_id: str | None,
    since: float,
    limit: int,
    request_id: str | None,
    endpoint_id: str,
) -> list[UsageRow]:
    """Return ledger rows, newest first; those of an endpoint, of which there is no index, are looked for among few."""
    if endpoint_id:
        at = sa.select(_LEDGER.c.created_at).order_by(_LEDGER.c.created_at.desc()).offset(LOOKED_AT).limit(1)
        since = max(since, connection.scalar(at) or 0.0)
    query = sa.select(_LEDGER).where(_LEDGER.c.created_at >= since)
    if endpoint_id:
        query = query.where(_LEDGER.c.endpoint_id == endpoint_id)
    if tenant_id is not None:
        query = query.where(_LEDGER.c.customer_id == tenant_id)
    if request_id is not None:
        query = query.where(_LEDGER.c.request_id == request_id)
    query = query.order_by(_LEDGER.c.created_at.desc(), _LEDGER.c.request_id.desc()).limit(limit)
    return [mapping.usage_of(row) for row in connection.execute(query).mappings()]


def rows_between(
    connection: sa.Connection, where: UsageFilter, since: float, until: float, after: Moment | None, limit: int
) -> list[UsageRow]:
    """Return ledger rows, oldest first, those after a moment."""
    begin = since if after is None else max(since, after.at)
    query = sa.select(_LEDGER).where(_LEDGER.c.created_at >= begin, _LEDGER.c.created_at < until)
    if after is not None:
        is_later = sa.or_(_LEDGER.c.created_at > after.at, _LEDGER.c.request_id > after.request_id)
        query = query.where(is_later)
    query = _filtered(query, _LEDGER, where)
    query = query.order_by(_LEDGER.c.created_at, _LEDGER.c.request_id).limit(limit)
    return [mapping.usage_of(row) for row in connection.execute(query).mappings()]


def arrivals(connection: sa.Connection, endpoint_id: str, since: float, until: float) -> dict[int, int]:
    """Return the requests of each ten minutes, by their start."""
    table = _LEDGER
    # By comparison: the two dialects round a cast to integer differently.
    steps = [sa.case((table.c.created_at >= table.c.hour + sa.literal_column(str(at)), 1), else_=0) for at in TENTHS]
    slot = sum(steps[1:], steps[0]).label("slot")
    query = (
        sa.select(table.c.hour, slot, sa.func.count())
        .where(table.c.endpoint_id == endpoint_id, table.c.created_at >= since, table.c.created_at < until)
        .group_by(table.c.hour, slot)
    )
    return {int(hour) + TEN_MINUTES_S * int(step): int(number) for hour, step, number in connection.execute(query)}


def _pieces(connection: sa.Connection, asked: Question) -> Iterator[Piece]:
    since, until = asked.since, asked.until
    if asked.time in ("day", "month"):
        # Every day or month of the span is looked at, also of one that begins in 1970 or never ends.
        ends = sa.select(sa.func.min(PLATFORM_HOURLY.table.c.period), sa.func.max(PLATFORM_HOURLY.table.c.period))
        first, last = connection.execute(ends).one()
        if first is None:
            return iter(())
        since, until = max(since, first), min(until, last + HOUR_S)
    kept_since = retention.kept_since(connection)
    return usage_time.pieces(since, until, asked.time, asked.zone, kept_since)


def _query(piece: Piece, asked: Question, *, is_sqlite: bool) -> sa.Select[*tuple[Any, ...]]:
    """Return the question to one table: bucket, unit, groups, counts."""
    is_rows = piece.source is None
    table = _LEDGER if piece.source is None else answering(asked.named, piece.source)
    when = table.c.created_at if is_rows else table.c.period
    groups = [_column(table, name) for name in asked.columns]
    bucket = _start_of(when, piece, is_float=is_rows, is_sqlite=is_sqlite)
    requests = sa.func.count() if is_rows else sa.func.sum(table.c.requests)
    query = sa.select(
        bucket.label("bucket"), table.c.unit, *groups, requests, *(sa.func.sum(table.c[name]) for name in SUMS)
    ).where(when >= piece.since, when < piece.until)
    if piece.without is not None:
        query = query.where(when % sa.literal_column(str(usage_time.STEPS["day"])) != piece.without)
    query = query.group_by(*(["bucket"] if piece.step else []), table.c.unit, *groups)
    return _filtered(query, table, asked.where)


def _start_of(when: sa.ColumnElement[Any], piece: Piece, *, is_float: bool, is_sqlite: bool) -> sa.ColumnElement[Any]:
    """Return the start of a moment's bucket."""
    # Literals, not parameters: Postgres would not see that SELECT and GROUP BY mean the same.
    phase: sa.ColumnElement[Any] = sa.literal_column(str(piece.phase))
    step: sa.ColumnElement[Any] = sa.literal_column(str(piece.step))
    if not piece.step:
        return phase
    if not is_float:
        return when - (when - phase) % step
    steps: sa.ColumnElement[Any] = (when - phase) / step
    # SQLite cuts a cast off and has no floor() everywhere; Postgres rounds a cast.
    whole = sa.cast(steps if is_sqlite else sa.func.floor(steps), sa.BigInteger)
    return phase + step * whole


def _filtered(query: sa.Select[*tuple[Any, ...]], table: sa.Table, where: UsageFilter) -> sa.Select[*tuple[Any, ...]]:
    for name, column in _FILTERS.items():
        wanted: tuple[str, ...] = getattr(where, name)
        if len(wanted) == 1:
            query = query.where(table.c[column] == wanted[0])
        elif wanted:
            query = query.where(table.c[column].in_(wanted))
    if where.is_batch is not None:
        is_batch = _column(table, "is_batch")
        query = query.where(is_batch if where.is_batch else sa.not_(is_batch))
    return query


def _column(table: sa.Table, name: str) -> sa.ColumnElement[Any]:
    if name == "is_batch" and table is _LEDGER:
        return _LEDGER.c.batch_id != sa.literal_column("''")
    return table.c[name]


def _text(name: str, value: Any) -> str:
    return ("true" if value else "false") if name == "batch" else str(value)


def _bucket(group: dict[str, str], total: _Total) -> UsageBucket:
    # By position and without what is not there: an answer may have many ten thousand of them.
    requests, prompt, cached, completion, reasoning, heard, said, _, cost = total.counts
    units: dict[str, float] = {}
    micro: dict[str, int] = {}
    if total.units:
        micro = {unit: amount for unit, amount in sorted(total.units.items()) if amount}
        units = {unit: amount / MICRO_PER_UNIT for unit, amount in micro.items()}
    return UsageBucket(group, requests, prompt, cached, completion, cost, units, reasoning, heard, said, micro)
