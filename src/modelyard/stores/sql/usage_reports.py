"""Questions to the ledger.

A sum over a span of time is taken from the hourly roll-up for its whole hours
and from the ledger's rows for the broken hour at either end, so that a year
costs as little as a day and both agree to the token.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from modelyard.domain.usage import MICRO_PER_UNIT, UsageBucket, UsageRow
from modelyard.stores.sql import mapping, schema

HOUR_S = 3600
DAY_S = 86_400
TEN_MINUTES_S = 600
TENTHS = range(TEN_MINUTES_S, HOUR_S, TEN_MINUTES_S)
"""Ends of the first five of an hour's six parts of ten minutes."""
_LAST_S = 253_402_300_800  # the year 10000: where a date has no four digits any more

_LEDGER = schema.inference_requests
_HOURLY = schema.usage_hourly
_UNITS = schema.usage_units_hourly
_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanousd")
_COUNTS = ("requests", *_SUMS)
_COLUMNS = {"tenant": "customer_id", "key": "api_key_id", "model": "model_name", "status": "status"}


class Filters(NamedTuple):
    """What rows must match; None matches all."""

    tenant_id: str | None
    key_id: str | None
    model: str | None


class _Span(NamedTuple):
    """Part of the asked time, and the table that answers for it."""

    table: sa.Table
    since: float
    until: float


def hour_of(at: float) -> int:
    """Return the start of the UTC hour of ``at``, as unix seconds."""
    return math.floor(at / HOUR_S) * HOUR_S


def dimensions(group_by: Sequence[str]) -> tuple[str, ...]:
    """Return ``group_by`` without repetitions.

    Raises:
        ValueError: a dimension that does not exist.
    """
    known = {*_COLUMNS, "hour", "day"}
    if unknown := [name for name in group_by if name not in known]:
        raise ValueError(f"no such dimension: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(dict.fromkeys(group_by))


def buckets(
    connection: sa.Connection, filters: Filters, since: float, until: float, by: tuple[str, ...]
) -> list[UsageBucket]:
    """Return the sums, ordered by their groups; one bucket of zeros when nothing is grouped and nothing found."""
    totals: dict[tuple[str, ...], list[int]] = {}
    if not by:
        totals[()] = [0] * 5
    for span in spans(since, until):
        for row in connection.execute(_query(span, filters, by)):
            group = tuple(_label(name, value) for name, value in zip(by, row, strict=False))
            total = totals.setdefault(group, [0] * 5)
            for at, value in enumerate(row[len(by) :]):
                total[at] += int(value or 0)  # a sum of nothing is NULL; Postgres sums to a decimal
    used = _units(connection, filters, since, until, by)
    found = []
    for group, total in sorted(totals.items()):
        named = dict(zip(by, group, strict=True))
        found.append(UsageBucket(named, **dict(zip(_COUNTS, total, strict=True)), units=used.get(group, {})))
    return found


def _units(
    connection: sa.Connection, filters: Filters, since: float, until: float, by: tuple[str, ...]
) -> dict[tuple[str, ...], dict[str, float]]:
    """Return what was used of each unit, by group."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for span in spans(since, until):
        table = span.table if span.table is _LEDGER else _UNITS
        for row in connection.execute(_unit_query(span, table, filters, by)):
            used = found.setdefault(tuple(_label(name, value) for name, value in zip(by, row, strict=False)), {})
            unit, micro = row[len(by) :]
            used[unit] = used.get(unit, 0) + int(micro)
    return {
        group: {unit: micro / MICRO_PER_UNIT for unit, micro in sorted(used.items())} for group, used in found.items()
    }


def spans(since: float, until: float) -> Iterator[_Span]:
    """Divide the asked time: whole hours from the roll-up, what is left at the ends from the rows."""
    since, until = max(since, 0.0), min(until, _LAST_S)
    first = math.ceil(min(since, _LAST_S) / HOUR_S) * HOUR_S
    last = hour_of(until)
    if first >= last:
        if since < until:
            yield _Span(_LEDGER, since, until)
        return
    if since < first:
        yield _Span(_LEDGER, since, first)
    yield _Span(_HOURLY, first, last)
    if last < until:
        yield _Span(_LEDGER, last, until)


def rows(
    connection: sa.Connection, tenant_id: str | None, since: float, limit: int, request_id: str | None
) -> list[UsageRow]:
    """Return ledger rows, newest first."""
    query = sa.select(_LEDGER).where(_LEDGER.c.created_at >= since)
    if tenant_id is not None:
        query = query.where(_LEDGER.c.customer_id == tenant_id)
    if request_id is not None:
        query = query.where(_LEDGER.c.request_id == request_id)
    query = query.order_by(_LEDGER.c.created_at.desc(), _LEDGER.c.request_id.desc()).limit(limit)
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


def _query(span: _Span, filters: Filters, by: tuple[str, ...]) -> sa.Select[*tuple[Any, ...]]:
    table = span.table
    groups = [_group(table, name) for name in by]
    requests = sa.func.count() if table is _LEDGER else sa.func.sum(table.c.requests)
    when = table.c.created_at if table is _LEDGER else table.c.hour
    query = (
        sa.select(*groups, requests, *(sa.func.sum(table.c[name]) for name in _SUMS))
        .where(when >= span.since, when < span.until)
        .group_by(*groups)
    )
    return _filtered(query, table, filters)


def _unit_query(span: _Span, table: sa.Table, filters: Filters, by: tuple[str, ...]) -> sa.Select[*tuple[Any, ...]]:
    groups = [*(_group(table, name) for name in by), table.c.unit]
    when = table.c.created_at if table is _LEDGER else table.c.hour
    query = (
        sa.select(*groups, sa.func.sum(table.c.units_micro))
        .where(when >= span.since, when < span.until, table.c.units_micro > 0)
        .group_by(*groups)
    )
    return _filtered(query, table, filters)


def _filtered(query: sa.Select[*tuple[Any, ...]], table: sa.Table, filters: Filters) -> sa.Select[*tuple[Any, ...]]:
    for column, wanted in zip((table.c.customer_id, table.c.api_key_id, table.c.model_name), filters, strict=True):
        if wanted is not None:
            query = query.where(column == wanted)
    return query


def _group(table: sa.Table, name: str) -> sa.ColumnElement[object]:
    if name == "hour":
        return table.c.hour
    if name == "day":
        # A literal, not a parameter: Postgres would not see that SELECT and GROUP BY mean the same.
        return table.c.hour - table.c.hour % sa.literal_column(str(DAY_S))
    return table.c[_COLUMNS[name]]


def _label(name: str, value: object) -> str:
    if name not in {"hour", "day"}:
        return str(value)
    assert isinstance(value, int), "hours are whole seconds"
    date = datetime.fromtimestamp(value, UTC)
    return date.strftime("%Y-%m-%dT%H:00:00Z") if name == "hour" else date.strftime("%Y-%m-%d")
