"""Every ``UsageStore`` answers from its roll-ups what its rows say, in every time zone, and after rows were removed."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.usage import (
    Intent,
    JournalRecord,
    Moment,
    Price,
    Settle,
    Unit,
    UsageBucket,
    UsageFilter,
    UsageRow,
    UsageStatus,
)
from modelyard.stores import JournalPosition, TooManyGroupsError, UsageStore
from modelyard.stores.sql import SqlUsageStore, usage_reports

PRICE = Price(input=150_000_000, cached_input=75_000_000, output=600_000_000, unit=7_000_000)
HERE = JournalPosition("gateway-0", "0000000001.journal", 0)
EVER: dict[str, Any] = {"tenant_id": None, "key_id": None, "model": None, "since": 0.0, "until": 1e12}
HOUR = 3600
ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kolkata",  # + 5:30
    "Asia/Kathmandu",  # + 5:45
    "America/St_Johns",  # - 3:30, with summer time
    "Australia/Lord_Howe",  # + 10:30, whose summer time is half an hour
    "America/Havana",  # summer time ends at one o'clock: an hour from midnight on comes twice
    "Africa/Cairo",  # summer time begins at midnight: that hour does not exist
    "Pacific/Kiritimati",  # + 14
]


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UsageStore]:
    database = open_fresh(request.param, tmp_path)
    yield SqlUsageStore(database)
    await database.close()


def a_request(number: int, at: float, chance: random.Random) -> Sequence[JournalRecord]:
    tenant = chance.choice("ab")
    unit = chance.choice([Unit.NONE, Unit.NONE, Unit.SECONDS, Unit.IMAGES])
    prompt, completion = chance.randrange(1000), chance.randrange(1000)
    return (
        Intent(
            f"r{number:05}", at, tenant, f"k{tenant}{chance.choice('12')}", chance.choice(["ep-1", "ep-2"]),
            chance.choice(["smol", "big"]), chance.choice(["ver-1", "ver-2"]),
            chance.choice(["/v1/chat/completions", "/v1/embeddings"]), True, 9, 99, PRICE,
            batch_line=chance.choice(["", "", "batch_1/7"]),
        ),
        Settle(
            f"r{number:05}", at + 1, prompt, chance.randrange(prompt + 1), completion, chance.choice(list(UsageStatus)),
            200, "", 12.5, 345.5, "rep-1", 1, False, chance.random() * 10 if unit else 0.0, unit,
            reasoning_tokens=chance.randrange(completion + 1), audio_input_tokens=chance.randrange(prompt + 1),
            audio_output_tokens=chance.randrange(completion + 1),
        ),
    )  # fmt: skip


async def fill(store: UsageStore, moments: Sequence[float], seed: int = 1) -> list[UsageRow]:
    chance = random.Random(seed)
    records = [record for number, at in enumerate(moments) for record in a_request(number, at, chance)]
    await store.apply(records, HERE)
    return await store.rows_between(UsageFilter(), since=0.0, until=1e12, after=None, limit=100_000)


def local(name: str, row: UsageRow, zone: ZoneInfo) -> str:
    when = datetime.fromtimestamp(row.created_at, UTC)
    match name:
        case "minute":
            return when.strftime("%Y-%m-%dT%H:%M:00Z")
        case "hour":
            return when.strftime("%Y-%m-%dT%H:00:00Z")
        case "day":
            return when.astimezone(zone).strftime("%Y-%m-%d")
        case "month":
            return when.astimezone(zone).strftime("%Y-%m")
        case "batch":
            return "true" if row.batch_id else "false"
        case _:
            field = {"tenant": "tenant_id", "key": "key_id", "endpoint": "endpoint_id", "version": "version_id"}
            return str(getattr(row, field.get(name, name)))


def expected(rows: Sequence[UsageRow], names: Sequence[str], zone: ZoneInfo) -> Counter[tuple[Any, ...]]:
    """Add the rows up by hand."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        group = tuple(local(name, row, zone) for name in names)
        found[group, "requests"] += 1
        for count in COUNTED:
            found[group, count] += getattr(row, count)
        if row.unit:
            found[group, row.unit.value] += round(row.units * 1e6)
    return +found


COUNTED = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "audio_input_tokens",
    "audio_output_tokens", "cost_nanousd",
)  # fmt: skip


async def answered(store: UsageStore, names: Sequence[str], **asked: Any) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for bucket in await store.usage(**EVER | asked, group_by=names):
        group = tuple(bucket.group[name] for name in names)
        for count in ("requests", *COUNTED):
            found[group, count] += getattr(bucket, count)
        for unit, micro in bucket.units_micro.items():
            found[group, unit] += micro
    return +found


def around_the_changes(year: int = 2026) -> list[float]:
    """Moments of a year: at random, and beside each half-hour of the days when clocks are put forward or back."""
    chance = random.Random(7)
    start = datetime(year, 1, 1, tzinfo=UTC).timestamp()
    moments = [start + chance.random() * 365 * 24 * HOUR for _ in range(100)]
    for month, day in ((3, 8), (3, 29), (4, 5), (4, 24), (10, 4), (10, 25), (10, 29), (11, 1), (12, 31)):
        midnight = datetime(year, month, day, tzinfo=UTC).timestamp()
        moments += [midnight + half * 1800 + beside for half in range(-4, 48) for beside in (-0.5, 0.5)]
    return moments


@pytest.mark.parametrize("tz", ZONES)
async def test_days_and_months_are_those_of_the_zone(store: UsageStore, tz: str) -> None:
    rows, zone = await fill(store, around_the_changes()), ZoneInfo(tz)
    for names in (("day",), ("month", "model"), ("key", "day")):
        assert await answered(store, names, tz=tz) == expected(rows, names, zone), names
    chance = random.Random(tz)
    for _ in range(2):
        since, until = sorted(chance.choice(rows).created_at + chance.uniform(-9e3, 9e3) for _ in range(2))
        inside = [row for row in rows if since <= row.created_at < until]
        for names in (("day",), ("tenant", "month"), ()):
            assert await answered(store, names, tz=tz, since=since, until=until) == expected(inside, names, zone)


async def test_every_dimension_and_filter_agrees_with_the_rows(store: UsageStore) -> None:
    rows, utc = await fill(store, around_the_changes()[:300]), ZoneInfo("UTC")
    dimensions = ("tenant", "key", "model", "endpoint", "version", "route", "status", "batch", "minute", "hour", "day")
    for name in dimensions:
        assert await answered(store, (name,)) == expected(rows, (name,), utc)
        assert await answered(store, (name, "month")) == expected(rows, (name, "month"), utc)
    since, until = sorted((rows[40].created_at, rows[200].created_at))
    for where, keep in (
        (UsageFilter(tenant_ids=("a",)), lambda row: row.tenant_id == "a"),
        (UsageFilter(key_ids=("ka1", "kb2")), lambda row: row.key_id in ("ka1", "kb2")),
        (UsageFilter(models=("smol",), is_batch=True), lambda row: row.model == "smol" and row.batch_id),
        (UsageFilter(is_batch=False), lambda row: not row.batch_id),
        (UsageFilter(routes=("/v1/embeddings",)), lambda row: row.route == "/v1/embeddings"),
        (UsageFilter(endpoint_ids=("ep-2", "ep-9")), lambda row: row.endpoint_id == "ep-2"),
    ):
        chosen = [row for row in rows if keep(row) and since <= row.created_at < until]
        assert chosen
        for names in (("day", "key"), ("model",), ("status", "minute")):
            found = await answered(store, names, where=where, since=since, until=until)
            assert found == expected(chosen, names, utc), (where, names)
        pages = await store.rows_between(where, since=since, until=until, after=None, limit=1000)
        assert pages == chosen


@pytest.mark.parametrize("units", [True, False])
async def test_a_sum_has_what_was_asked_of_it_whether_or_not_anything_has_units(store: UsageStore, units: bool) -> None:
    chance = random.Random(5)
    records: list[JournalRecord] = []
    for number, at in enumerate(around_the_changes()[::9]):
        intent, settle = a_request(number, at, chance)
        assert isinstance(settle, Settle)
        records += [intent, settle if units else msgspec.structs.replace(settle, units=0.0, unit=Unit.NONE)]
    await store.apply(records, HERE)
    rows = await store.rows_between(UsageFilter(), since=0.0, until=1e12, after=None, limit=100_000)
    assert any(row.unit for row in rows) is units
    for names in ((), ("month",), ("tenant",), ("tenant", "day"), ("day", "tenant"), ("model", "hour", "status")):
        everything = expected(rows, names, ZoneInfo("UTC"))
        assert await answered(store, names) == everything
        wanted = ("cost_nanousd", "requests", "units_micro")
        kinds = {"cost_nanousd", "requests", *(unit.value for unit in Unit)}
        assert await answered(store, names, counts=wanted) == Counter(
            {key: amount for key, amount in everything.items() if key[1] in kinds}
        )
        assert await answered(store, names, counts=("prompt_tokens",)) == Counter(
            {key: amount for key, amount in everything.items() if key[1] == "prompt_tokens"}
        )
    assert await store.usage(**EVER | {"until": 5.0}, group_by=("tenant",)) == []
    [nothing] = await store.usage(**EVER | {"until": 5.0}, group_by=())
    assert nothing == UsageBucket({}, 0, 0, 0, 0, 0)


async def test_rows_come_in_pages_each_once_also_those_of_one_moment(store: UsageStore) -> None:
    rows = await fill(store, [5000.0] * 7 + [5000.5] * 3 + [6000.0])
    found: list[UsageRow] = []
    after: Moment | None = None
    while page := await store.rows_between(UsageFilter(), since=5000, until=6000, after=after, limit=2):
        found += page
        after = Moment(page[-1].created_at, page[-1].request_id)
    assert found == rows[:-1]


async def test_rows_are_removed_in_steps_and_every_sum_of_whole_hours_stays(store: UsageStore) -> None:
    rows, utc = await fill(store, around_the_changes()[::4]), ZoneInfo("UTC")
    before = await answered(store, ("key", "hour", "version", "batch"))
    cut = int(rows[len(rows) // 2].created_at // HOUR * HOUR)
    old = [row for row in rows if row.created_at < cut]
    assert (await store.kept_since(), await store.oldest_row()) == (0, rows[0].created_at)
    removed = []
    while not removed or removed[-1]:
        removed.append(await store.forget_rows(before=cut, limit=40))
        assert await store.kept_since() == cut, "from the first step on, so that no sum is made of half of the rows"
        assert await answered(store, ("key", "hour", "version", "batch")) == before
    assert sum(removed) == len(old)
    assert max(removed) == 40
    assert await store.oldest_row() == next(row.created_at for row in rows if row.created_at >= cut)
    for names in (("day",), ("month", "tenant"), ()):
        assert await answered(store, names) == expected(rows, names, utc)
    kept = [row for row in rows if row.created_at >= cut]
    assert await answered(store, ("minute",), since=cut) == expected(kept, ("minute",), utc)


@pytest.mark.parametrize("tz", ["Asia/Kolkata", "Australia/Lord_Howe"])
async def test_spans_that_follow_one_another_add_up_where_rows_are_gone(store: UsageStore, tz: str) -> None:
    rows = await fill(store, around_the_changes())
    await store.forget_rows(before=int(rows[-1].created_at // HOUR * HOUR), limit=10_000)
    chance = random.Random(3)
    cuts = [0.0, *sorted(row.created_at + chance.random() * 60 for row in chance.sample(rows, 20)), 1e12]
    total: Counter[Any] = Counter()
    by_day: Counter[Any] = Counter()
    for since, until in pairwise(cuts):
        total += await answered(store, (), since=since, until=until)
        by_day += await answered(store, ("day",), since=since, until=until, tz=tz)
    assert total == expected(rows, (), ZoneInfo("UTC"))
    assert by_day == await answered(store, ("day",), tz=tz)
    # A day begins less than an hour early: only requests of that hour may have moved to it.
    exact = expected(rows, ("day",), ZoneInfo(tz))
    moved = sum(abs(by_day[group] - exact[group]) for group in by_day.keys() | exact.keys() if group[1] == "requests")
    first_hour = {int(start // HOUR) % 24 for start in (18.5 * HOUR, 13.5 * HOUR)}
    assert 0 < moved <= 2 * sum(int(row.created_at // HOUR) % 24 in first_hour for row in rows)


async def test_what_was_delivered_before_the_kept_rows_is_never_billed_again(store: UsageStore) -> None:
    chance = random.Random(2)
    old, young = a_request(1, 10 * HOUR, chance), a_request(2, 20 * HOUR, chance)
    await store.apply([*old, *young], HERE)
    before = await answered(store, ("tenant",))
    await store.forget_rows(before=15 * HOUR, limit=10)
    await store.apply([*old, *young], HERE)
    await store.apply(old[:1], HERE)
    assert await answered(store, ("tenant",)) == before
    assert await store.open_requests() == 0
    assert [row.request_id for row in await store.rows(tenant_id=None, since=0, limit=9)] == ["r00002"]
    await store.forget_rows(before=5 * HOUR, limit=10)
    assert await store.kept_since() == 15 * HOUR, "it never goes back"


async def test_an_answer_of_too_many_groups_is_refused(store: UsageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(store, [float(HOUR * number) for number in range(30)])
    monkeypatch.setattr(usage_reports, "GROUPS_MAX", 29)
    with pytest.raises(TooManyGroupsError, match="29"):
        await store.usage(**EVER, group_by=("hour",))


async def test_broken_counts_of_parts_are_no_more_than_their_whole(store: UsageStore) -> None:
    intent, settle = a_request(1, 10 * HOUR, random.Random(1))
    assert isinstance(settle, Settle)
    settle = msgspec.structs.replace(
        settle,
        prompt_tokens=5,
        completion_tokens=6,
        reasoning_tokens=99,
        audio_input_tokens=2**62,
        audio_output_tokens=-1,
    )
    await store.apply([intent, settle], HERE)
    [row] = await store.rows(tenant_id=None, since=0, limit=1)
    assert (row.reasoning_tokens, row.audio_input_tokens, row.audio_output_tokens) == (6, 5, 0)
