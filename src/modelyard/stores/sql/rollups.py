"""Roll-ups of the ledger: which there are, how rows are added, and which one answers a question.

All are written in the transaction that writes the rows. A roll-up knows some
dimensions; a question goes to the smallest that knows all that it names.
"""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

import sqlalchemy as sa

from modelyard.stores.sql import schema
from modelyard.stores.sql.database import insert
from modelyard.stores.sql.mapping import Values

HOUR_S = 3600
DAY_S = 86_400

SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "audio_input_tokens",
    "audio_output_tokens",
    "units_micro",
    "cost_nanousd",
)
"""What is added up beside the number of requests."""
COUNTS = ("requests", *SUMS)
_owners_and_kinds = itemgetter("customer_id", "api_key_id", "model_name", "endpoint_id", "model_id", "route", "status")


class Rollup(NamedTuple):
    """A table and the seconds that each of its rows spans."""

    table: sa.Table
    step_s: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the columns that name a row."""
        return tuple(column.name for column in self.table.primary_key)


HOURLY = Rollup(schema.usage_rollup_hourly, HOUR_S)
DAILY = Rollup(schema.usage_rollup_daily, DAY_S)
PLATFORM = Rollup(schema.usage_rollup_platform, HOUR_S)


def answering(columns: Collection[str], *, by_day: bool) -> sa.Table:
    """Return the table that answers for whole UTC hours, or ``by_day``, of what the ledger's ``columns`` name."""
    if set(columns) <= set(PLATFORM.keys):
        return PLATFORM.table
    return DAILY.table if by_day else HOURLY.table


def add(connection: sa.Connection, rows: Sequence[Values]) -> None:
    """Add new rows of the ledger to all roll-ups."""
    if not rows:
        return
    hours: dict[tuple[object, ...], list[int]] = {}
    for row in rows:
        key = (row["hour"], *_owners_and_kinds(row), bool(row["batch_id"]), row["unit"])
        total = hours.setdefault(key, [0] * len(COUNTS))
        total[0] += 1
        for at, name in enumerate(SUMS, 1):
            total[at] += row[name]
    for rollup in (HOURLY, DAILY, PLATFORM):
        _upsert(connection, rollup, _folded(hours, rollup))


def _folded(hours: dict[tuple[object, ...], list[int]], rollup: Rollup) -> dict[tuple[object, ...], list[int]]:
    if rollup is HOURLY:
        return hours
    places = [HOURLY.keys.index(name) for name in rollup.keys[1:]]
    found: dict[tuple[object, ...], list[int]] = {}
    for key, total in hours.items():
        hour = key[0]
        assert isinstance(hour, int), "hours are whole seconds"
        shorter = (hour - hour % rollup.step_s, *(key[place] for place in places))
        sums = found.setdefault(shorter, [0] * len(COUNTS))
        for at, value in enumerate(total):
            sums[at] += value
    return found


def _upsert(connection: sa.Connection, rollup: Rollup, totals: dict[tuple[object, ...], list[int]]) -> None:
    names = (*rollup.keys, *COUNTS)
    # Sorted, so that two controllers on Postgres lock the rows in one order.
    values = [dict(zip(names, (*key, *total), strict=True)) for key, total in sorted(totals.items(), key=_key)]
    statement = insert(connection, rollup.table)
    sums = {name: rollup.table.c[name] + statement.excluded[name] for name in COUNTS}
    connection.execute(statement.on_conflict_do_update(index_elements=list(rollup.keys), set_=sums), values)


def _key(item: tuple[tuple[object, ...], list[int]]) -> tuple[str, ...]:
    return tuple(map(str, item[0]))
