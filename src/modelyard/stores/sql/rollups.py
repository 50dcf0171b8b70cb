"""Roll-ups of the ledger: which there are, how rows are added, and which one answers a question.

All are written in the transaction that writes the rows. A roll-up knows some
dimensions; a question goes to the smallest that knows all that it names.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import sqlalchemy as sa

from modelyard.policy.utc import first_of_month
from modelyard.stores.sql import schema
from modelyard.stores.sql.mapping import Values
from modelyard.stores.sql.sums import add_to

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


class Step(IntEnum):
    """What a row of a roll-up spans, in UTC; longer ones are greater."""

    HOUR = 1
    DAY = 2
    MONTH = 3

    def start_of(self, hour: int) -> int:
        """Return where the span of this hour begins, as unix seconds."""
        match self:
            case Step.HOUR:
                return hour
            case Step.DAY:
                return hour - hour % DAY_S
            case Step.MONTH:
                return first_of_month(hour // DAY_S) * DAY_S


class Rollup(NamedTuple):
    """A table, and the span of each of its rows."""

    table: sa.Table
    step: Step

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the columns that name a row."""
        return tuple(column.name for column in self.table.primary_key)


HOURLY = Rollup(schema.usage_rollup_hourly, Step.HOUR)
DAILY = Rollup(schema.usage_rollup_daily, Step.DAY)
MONTHLY = Rollup(schema.usage_rollup_monthly, Step.MONTH)
PLATFORM_HOURLY = Rollup(schema.usage_rollup_platform_hourly, Step.HOUR)
PLATFORM_DAILY = Rollup(schema.usage_rollup_platform_daily, Step.DAY)
ROLLUPS = (HOURLY, DAILY, MONTHLY, PLATFORM_HOURLY, PLATFORM_DAILY)
_SMALLEST_FIRST = (PLATFORM_DAILY, MONTHLY, PLATFORM_HOURLY, DAILY, HOURLY)


def answering(columns: Collection[str], step: Step) -> sa.Table:
    """Return the smallest table that knows the ledger's ``columns`` and tells spans of ``step`` apart."""
    wanted = set(columns)
    return next(one.table for one in _SMALLEST_FIRST if one.step <= step and wanted <= set(one.keys))


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
    for rollup in ROLLUPS:
        add_to(connection, rollup.table, COUNTS, _folded(hours, rollup), order=_key)


def _folded(hours: dict[tuple[object, ...], list[int]], rollup: Rollup) -> dict[tuple[object, ...], list[int]]:
    if rollup is HOURLY:
        return hours
    places = [HOURLY.keys.index(name) for name in rollup.keys[1:]]
    found: dict[tuple[object, ...], list[int]] = {}
    for key, total in hours.items():
        hour = key[0]
        assert isinstance(hour, int), "hours are whole seconds"
        shorter = (rollup.step.start_of(hour), *(key[place] for place in places))
        sums = found.setdefault(shorter, [0] * len(COUNTS))
        for at, value in enumerate(total):
            sums[at] += value
    return found


def _key(item: tuple[tuple[object, ...], list[int]]) -> tuple[str, ...]:
    return tuple(map(str, item[0]))
