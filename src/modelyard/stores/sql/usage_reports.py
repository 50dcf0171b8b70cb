"""Questions to the ledger.

A sum over a span of time comes from roll-ups as far as whole hours and days go,
and from the ledger's rows at its ends (``usage_time.py``), so that a year costs
as little as a day and both agree to the token.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import sqlalchemy as sa

from modelyard.domain.usage import MICRO_PER_UNIT, Moment, UsageBucket, UsageFilter, UsageRow
from modelyard.stores import TooManyGroupsError
from modelyard.stores.sql import mapping, retention, schema, usage_time
from modelyard.stores.sql.rollups import COUNTS, DAY_S, HOUR_S, PLATFORM_DAILY, PLATFORM_HOURLY, Step, answering
from modelyard.stores.sql.usage_time import Piece

TEN_MINUTES_S = 600
TENTHS = range(TEN_MINUTES_S, HOUR_S, TEN_MINUTES_S)
"""Ends of the first five of an hour's six parts of ten minutes."""
STEP_S = {Step.HOUR: HOUR_S, Step.DAY: DAY_S}
"""Seconds from one row of a roll-up to the next."""
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
    counts: frozenset[str] = frozenset(COUNTS)
    """What is wanted of a sum; the rest is 0."""

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


_Key = tuple[Any, ...]
"""A group: the start of its bucket where the question has a dimension of time, and its values of the columns."""
_Sum = tuple[Any, ...]
"""What one unit of a group came to: the unit, and counts."""


class _Totals:
    """What was added up, by group. Most groups have one sum, and there may be very many groups."""

    def __init__(self, asked: Question) -> None:
        self._width = len(asked.columns) + (asked.time is not None)
        self._sums: dict[_Key, _Sum | list[_Sum]] = {}
        if not asked.by:
            self._sums[()] = ("", *([0] * len(COUNTS)))

    def add(self, rows: Iterable[Any]) -> None:
        """Take in rows of a key, a unit and counts.

        Raises:
            TooManyGroupsError: there are more groups than an answer may have.
        """
        width, sums = self._width, self._sums
        for row in rows:
            key, more = row[:width], row[width:]
            known = sums.setdefault(key, more)
            if known is more:
                if len(sums) > GROUPS_MAX:
                    raise TooManyGroupsError(f"there are more than {GROUPS_MAX:,} groups")
            elif isinstance(known, list):
                known.append(more)
            else:
                sums[key] = [known, more]

    def items(self) -> Iterator[tuple[_Key, _Sum, dict[str, int]]]:
        """Yield the key, the sum and the units of each group."""
        for key, found in self._sums.items():
            if isinstance(found, tuple):
                yield key, found, {found[0]: found[_MICRO]} if found[0] and found[_MICRO] else _NO_UNITS
            else:
                units: dict[str, int] = {}
                for unit, *counts in found:
                    units[unit] = units.get(unit, 0) + counts[_MICRO - 1]
                units.pop("", None)
                total = tuple(map(sum, zip(*(one[1:] for one in found), strict=True)))
                yield key, ("", *total), {unit: amount for unit, amount in sorted(units.items()) if amount}


_NO_UNITS: dict[str, int] = {}
_NONE_USED: dict[str, float] = {}
_MICRO = COUNTS.index("units_micro") + 1
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
    totals = _Totals(asked)
    pieces = list(_pieces(connection, asked))
    has_units = "units_micro" in asked.counts and _has_units(connection, asked)
    is_sqlite = connection.dialect.name == "sqlite"
    for piece in pieces:
        # Without any group there would be a sum of nothing, too.
        by_unit = has_units or piece.source is None or not (piece.step or asked.columns)
        totals.add(connection.execute(_query(piece, asked, by_unit=by_unit, is_sqlite=is_sqlite)))
    return _named(asked, totals)


def _has_units(connection: sa.Connection, asked: Question) -> bool:
    """Say whether anything of that time was counted in units. If not, sums by unit would be for nothing, and slow."""
    table = PLATFORM_DAILY.table
    since = max(0, math.floor(asked.since / DAY_S) * DAY_S)
    query = sa.select(sa.true()).where(table.c.period >= since, table.c.period < asked.until, table.c.unit != "")
    return connection.execute(query.limit(1)).first() is not None


def _named(asked: Question, totals: _Totals) -> list[UsageBucket]:
    """Return the buckets in the order of their groups."""
    columns = [name for name in asked.by if name in _COLUMNS]
    times = [name for name in asked.by if name in usage_time.TIMES]
    order = [(*times, *columns).index(name) for name in asked.by]
    is_ordered, has_flag = order == sorted(order), "batch" in columns
    labels: dict[int, tuple[str, ...]] = {}
    found: list[tuple[tuple[str, ...], UsageBucket]] = []
    for key, total, units in totals.items():
        values = key[1:] if times else key
        if has_flag:
            values = tuple(map(_text, columns, values))
        if times:
            if (label := labels.get(key[0])) is None:
                label = labels[key[0]] = tuple(usage_time.label(name, key[0], asked.zone) for name in times)
            values = label + values
        group = values if is_ordered else tuple([values[place] for place in order])
        found.append((group, _bucket(dict(zip(asked.by, group, strict=True)), total, units)))
    found.sort(key=itemgetter(0))
    return [bucket for _, bucket in found]


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
    """Return the requests of each ten minutes, by their start; no lines of batches, as in ``control/arrivals.py``."""
    table = _LEDGER
    # By comparison: the two dialects round a cast to integer differently.
    steps = [sa.case((table.c.created_at >= table.c.hour + sa.literal_column(str(at)), 1), else_=0) for at in TENTHS]
    slot = sum(steps[1:], steps[0]).label("slot")
    query = (
        sa.select(table.c.hour, slot, sa.func.count())
        .where(table.c.endpoint_id == endpoint_id, table.c.created_at >= since, table.c.created_at < until)
        .where(sa.not_(_column(table, "is_batch")))
        .group_by(table.c.hour, slot)
    )
    return {int(hour) + TEN_MINUTES_S * int(step): int(number) for hour, step, number in connection.execute(query)}


def _pieces(connection: sa.Connection, asked: Question) -> Iterator[Piece]:
    since, until = asked.since, asked.until
    if asked.time in ("day", "month"):
        # Every day or month of the span is looked at, also of one that begins in 1970 or never ends.
        period = PLATFORM_HOURLY.table.c.period
        # One by one: SQLite looks at all rows for both together, and at one row for one.
        first, last = (connection.execute(sa.select(end(period))).scalar() for end in (sa.func.min, sa.func.max))
        if first is None or last is None:
            return iter(())
        since, until = max(since, first), min(until, last + HOUR_S)
    kept_since = retention.kept_since(connection)
    return usage_time.pieces(since, until, asked.time, asked.zone, kept_since)


def _query(piece: Piece, asked: Question, *, by_unit: bool, is_sqlite: bool) -> sa.Select[*tuple[Any, ...]]:
    """Return the question to one table: bucket (where the question has a time), groups, unit, counts."""
    is_rows = piece.source is None
    table = _LEDGER if piece.source is None else answering(asked.named, piece.source)
    when = table.c.created_at if is_rows else table.c.period
    groups = [_column(table, name) for name in asked.columns]
    buckets = [_start_of(when, piece, is_sqlite=is_sqlite).label("bucket")] if asked.time else []
    unit: sa.ColumnElement[Any] = table.c.unit if by_unit else sa.literal_column("''")
    nothing: sa.ColumnElement[Any] = sa.literal_column("0")
    counts = [_count(table, name, is_sqlite=is_sqlite) if name in asked.counts else nothing for name in COUNTS]
    query = sa.select(*buckets, *groups, unit.label("unit"), *counts).where(when >= piece.since, when < piece.until)
    if piece.without is not None:
        query = query.where(when % sa.literal_column(str(usage_time.STEPS["day"])) != piece.without)
    # In the order of the primary keys, so that SQLite need not sort.
    query = query.group_by(*(buckets if piece.step else []), *groups, *([table.c.unit] if by_unit else []))
    return _filtered(query, table, asked.where)


def _count(table: sa.Table, name: str, *, is_sqlite: bool) -> sa.ColumnElement[Any]:
    """Return a sum over a table's rows."""
    if name == "requests" and table is _LEDGER:
        return sa.func.count()
    total = sa.func.sum(table.c[name])
    return total if is_sqlite else sa.cast(total, sa.BigInteger)  # Postgres sums to a decimal


def _start_of(when: sa.ColumnElement[Any], piece: Piece, *, is_sqlite: bool) -> sa.ColumnElement[Any]:
    """Return the start of a moment's bucket."""
    if piece.source is not None and piece.step == STEP_S.get(piece.source) and not piece.phase:
        return when
    # Literals, not parameters: Postgres would not see that SELECT and GROUP BY mean the same.
    phase: sa.ColumnElement[Any] = sa.literal_column(str(piece.phase))
    step: sa.ColumnElement[Any] = sa.literal_column(str(piece.step))
    if not piece.step:
        return phase
    if piece.source is not None:
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


def _bucket(group: dict[str, str], total: _Sum, micro: dict[str, int]) -> UsageBucket:
    # By position and without what is not there: an answer may have many ten thousand of them.
    _, requests, prompt, cached, completion, reasoning, heard, said, _, cost = total
    units = {unit: amount / MICRO_PER_UNIT for unit, amount in micro.items()} if micro else _NONE_USED
    return UsageBucket(group, requests, prompt, cached, completion, cost, units, reasoning, heard, said, micro)
