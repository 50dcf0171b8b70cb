"""Every ``UsageStore`` bills each request once, however often and in whatever pieces it is told."""

import itertools
import math
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.usage import Intent, JournalRecord, Mark, Price, Settle, Unit, UsageRow, UsageStatus
from modelyard.policy.pricing import cost
from modelyard.policy.utc import day_of, month_name
from modelyard.stores import JournalPosition, SpentRow, StoreUnavailableError, UsageStore
from modelyard.stores.sql import SqlUsageStore

PRICE = Price(input=150_000_000, cached_input=75_000_000, output=600_000_000)
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
HERE = JournalPosition("gateway-0", "0000000001.journal", 0)
EVER = {"tenant_id": None, "key_id": None, "model": None, "since": 0.0, "until": math.inf}


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UsageStore]:
    database = open_fresh(request.param, tmp_path)
    yield SqlUsageStore(database)
    await database.close()


def an_intent(request_id: str, *, at: float = NOON, tenant: str = "t1", key: str = "k1", model: str = "smol") -> Intent:
    return Intent(
        request_id, at, tenant, key, f"ep-{model}", model, f"ver-{model}", "/v1/chat/completions", True, 9, 99, PRICE
    )


def a_settle(
    request_id: str,
    *,
    at: float = NOON + 1,
    tokens: tuple[int, int, int] = (10, 4, 20),
    status: UsageStatus = UsageStatus.SUCCESS,
) -> Settle:
    return Settle(request_id, at, *tokens, status, 200, "", 12.5, 345.5, "rep-1", 1, False)


async def test_a_settled_request_is_one_priced_row(store: UsageStore) -> None:
    await store.apply([an_intent("r1"), Mark("r1", 10, 5), a_settle("r1")], HERE)
    expected = UsageRow(
        request_id="r1",
        tenant_id="t1",
        key_id="k1",
        endpoint_id="ep-smol",
        model="smol",
        version_id="ver-smol",
        replica_id="rep-1",
        route="/v1/chat/completions",
        is_stream=True,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=20,
        cost_nanousd=6 * 150 + 4 * 75 + 20 * 600,
        status=UsageStatus.SUCCESS,
        http_status=200,
        error_code="",
        ttft_ms=12.5,
        latency_ms=345.5,
        attempts=1,
        is_estimated=False,
        created_at=NOON,
        settled_at=NOON + 1,
    )
    assert await store.rows(tenant_id=None, since=0, limit=10) == [expected]
    assert await store.open_requests() == 0


async def test_a_request_that_moved_is_billed_as_whoever_answered(store: UsageStore) -> None:
    moved = msgspec.structs.replace(a_settle("r1"), version_id="ver-other", price=Price(1_000_000, 0, 2_000_000))
    await store.apply([an_intent("r1")], HERE)
    await store.apply([moved], HERE)
    (row,) = await store.rows(tenant_id=None, since=0, limit=10)
    assert (row.version_id, row.cost_nanousd) == ("ver-other", 6 * 1 + 20 * 2)


async def test_units_are_billed_beside_tokens_and_summed_by_kind(store: UsageStore) -> None:
    price = Price(input=150_000_000, unit=100_000 * 1_000_000)
    for rid, units, unit in (("r1", 2.5, Unit.SECONDS), ("r2", 3, Unit.IMAGES), ("r3", 0.25, Unit.SECONDS)):
        intent = msgspec.structs.replace(an_intent(rid), price=price)
        settle = msgspec.structs.replace(a_settle(rid, tokens=(10, 0, 0)), units=units, unit=unit)
        await store.apply([intent, settle], HERE)
        await store.apply([intent, settle], HERE)
    rows = {row.request_id: row for row in await store.rows(tenant_id=None, since=0, limit=10)}
    assert (rows["r1"].units, rows["r1"].unit, rows["r1"].cost_nanousd) == (2.5, Unit.SECONDS, 1500 + 250_000)
    for since in (0.0, NOON - 1):  # from the roll-up of hours, and from the rows
        [total] = await store.usage(**{**EVER, "since": since}, group_by=())
        assert total.units == {"images": 3.0, "seconds": 2.75}
        [entry] = await store.usage(**{**EVER, "since": since}, group_by=("model", "day"))
        assert entry.units == total.units
    [nothing] = await store.usage(**{**EVER, "model": "other"}, group_by=())
    assert nothing.units == {}


@pytest.mark.parametrize("units", [math.nan, -1.0, 1e-9])
async def test_a_broken_number_of_units_is_none(store: UsageStore, units: float) -> None:
    settle = msgspec.structs.replace(a_settle("r1"), units=units, unit=Unit.SECONDS)
    await store.apply([an_intent("r1"), settle], HERE)
    [row] = await store.rows(tenant_id=None, since=0, limit=10)
    assert (row.units, row.unit) == (0.0, Unit.NONE)


async def test_the_first_settle_closes_a_request_for_good(store: UsageStore) -> None:
    await store.apply([an_intent("r1"), a_settle("r1"), a_settle("r1", tokens=(9, 9, 9))], HERE)
    await store.apply([a_settle("r1", tokens=(999, 0, 999))], HERE)
    await store.apply([an_intent("r1")], HERE)
    await store.apply([an_intent("r1"), Mark("r1", 7, 7), a_settle("r1", tokens=(999, 0, 999))], HERE)
    assert [row.completion_tokens for row in await store.rows(tenant_id=None, since=0, limit=10)] == [20]
    assert [bucket.requests for bucket in await store.usage(**EVER, group_by=())] == [1]
    assert await store.open_requests() == 0


async def test_an_intent_is_open_until_a_later_batch_settles_it(store: UsageStore) -> None:
    await store.apply([an_intent("r1"), an_intent("r2")], HERE)
    await store.apply([Mark("r1", 10, 5)], HERE)
    assert await store.open_requests() == 2
    assert await store.rows(tenant_id=None, since=0, limit=10) == []
    await store.apply([a_settle("r1")], HERE)
    assert await store.open_requests() == 1
    assert [row.request_id for row in await store.rows(tenant_id=None, since=0, limit=10)] == ["r1"]


async def test_a_settle_that_nobody_began_is_dropped_and_counted(
    store: SqlUsageStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.apply([a_settle("ghost"), Mark("ghost", 1, 1)], HERE)
    assert await store.rows(tenant_id=None, since=0, limit=10) == []
    assert store.unknown_settles == 1
    assert "ghost" in caplog.text


async def test_a_broken_number_of_an_engine_blocks_nothing(store: UsageStore) -> None:
    await store.apply(
        [an_intent("r1"), a_settle("r1", tokens=(-5, 2**62, 2**63)), an_intent("r2"), a_settle("r2")], HERE
    )
    rows = {row.request_id: row for row in await store.rows(tenant_id=None, since=0, limit=10)}
    assert (rows["r1"].prompt_tokens, rows["r1"].cached_tokens, rows["r1"].completion_tokens) == (0, 0, 2**31 - 1)
    assert rows["r2"].completion_tokens == 20


async def test_positions_move_with_the_records_and_one_a_source(store: UsageStore) -> None:
    assert await store.positions() == []
    moved = JournalPosition("gateway-0", "0000000002.journal", 2**40)
    other = JournalPosition("gateway-1", "0000000001.journal", 7)
    await store.apply([], other)
    await store.apply([an_intent("r1")], HERE)
    await store.apply([a_settle("r1")], moved)
    assert await store.positions() == [moved, other]


async def test_thousands_of_records_go_in_one_transaction(store: UsageStore) -> None:
    requests = [f"r{number:05}" for number in range(3_000)]
    await store.apply([an_intent(rid) for rid in requests], HERE)
    await store.apply([a_settle(rid) for rid in requests], HERE)
    whole = [
        record for rid in requests for record in (an_intent(f"{rid}x"), Mark(f"{rid}x", 1, 1), a_settle(f"{rid}x"))
    ]
    await store.apply(whole, HERE)
    (total,) = await store.usage(**EVER, group_by=())
    assert (total.requests, total.completion_tokens) == (6_000, 120_000)
    assert await store.open_requests() == 0


async def test_rows_are_newest_first_and_filtered(store: UsageStore) -> None:
    for at, tenant in enumerate(["t1", "t2", "t1", "t1"]):
        await store.apply([an_intent(f"r{at}", at=NOON + at, tenant=tenant), a_settle(f"r{at}")], HERE)

    async def found(**asked: object) -> list[str]:
        return [row.request_id for row in await store.rows(**{"tenant_id": None, "since": 0, "limit": 9} | asked)]

    assert await found() == ["r3", "r2", "r1", "r0"]
    assert await found(limit=2) == ["r3", "r2"]
    assert await found(tenant_id="t1", since=NOON + 1) == ["r3", "r2"]
    assert await found(request_id="r1") == ["r1"]
    assert await found(request_id="r1", tenant_id="t1") == []


async def test_sums_are_grouped_by_what_was_asked(store: UsageStore) -> None:
    await store.apply(
        [
            *(an_intent("r1", at=NOON), a_settle("r1")),
            *(an_intent("r2", at=NOON + 3_599.9, key="k2"), a_settle("r2", status=UsageStatus.ERROR)),
            *(an_intent("r3", at=NOON + 3_600, model="big"), a_settle("r3")),
            *(an_intent("r4", at=NOON + 43_200, tenant="t2"), a_settle("r4")),
        ],
        HERE,
    )

    async def groups(*names: str, **filters: object) -> list[tuple[dict[str, str], int]]:
        buckets = await store.usage(**EVER | filters, group_by=names)
        return [(bucket.group, bucket.requests) for bucket in buckets]

    assert await groups("hour") == [
        ({"hour": "2026-11-29T12:00:00Z"}, 2),
        ({"hour": "2026-11-29T13:00:00Z"}, 1),
        ({"hour": "2026-11-30T00:00:00Z"}, 1),
    ]
    assert await groups("day") == [({"day": "2026-11-29"}, 3), ({"day": "2026-11-30"}, 1)]
    assert await groups("model", "status") == [
        ({"model": "big", "status": "success"}, 1),
        ({"model": "smol", "status": "error"}, 1),
        ({"model": "smol", "status": "success"}, 2),
    ]
    assert await groups("tenant", "key", tenant_id="t1") == [
        ({"tenant": "t1", "key": "k1"}, 2),
        ({"tenant": "t1", "key": "k2"}, 1),
    ]
    assert await groups("key", model="smol", key_id="k2") == [({"key": "k2"}, 1)]
    assert await groups("day", tenant_id="nobody") == []
    assert await groups(tenant_id="nobody") == [({}, 0)]
    assert await groups(since=NOON + 3_599.9, until=NOON + 3_600) == [({}, 1)]
    with pytest.raises(ValueError, match="colour"):
        await groups("colour")


async def test_a_locked_ledger_loses_nothing(tmp_path: Path) -> None:
    database = open_fresh("sqlite", tmp_path, timeout_s=1.0)
    store = SqlUsageStore(database)
    await store.apply([an_intent("r1")], HERE)
    holder = sqlite3.connect(tmp_path / "control.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    moved = JournalPosition("gateway-0", "0000000001.journal", 99)
    with pytest.raises(StoreUnavailableError):
        await store.apply([a_settle("r1")], moved)
    assert await store.open_requests() == 1
    assert await store.positions() == [HERE]
    holder.execute("ROLLBACK")
    holder.close()
    await store.apply([a_settle("r1")], moved)
    assert [bucket.requests for bucket in await store.usage(**EVER, group_by=())] == [1]
    await database.close()


times = st.floats(NOON - 7_300, NOON + 7_300, allow_nan=False)
tokens = st.integers(0, 1_000)


@st.composite
def journals(draw: st.DrawFn) -> list[JournalRecord]:
    """A journal as a gateway writes it: each request begins before it goes on, and they interleave."""
    streams: list[list[JournalRecord]] = []
    for number in range(draw(st.integers(1, 8))):
        rid = f"r{number}"
        key, model, status = (
            draw(st.sampled_from(["k1", "k2"])),
            draw(st.sampled_from("ab")),
            draw(st.sampled_from(UsageStatus)),
        )
        stream: list[JournalRecord] = [an_intent(rid, at=draw(times), tenant=f"t-{key}", key=key, model=model)]
        stream += [Mark(rid, draw(tokens), draw(tokens)) for _ in range(draw(st.integers(0, 2)))]
        counts = (draw(tokens), draw(tokens), draw(tokens))
        stream += [a_settle(rid, tokens=counts, status=status)] * draw(st.integers(0, 2))
        streams.append(stream)
    order = draw(st.permutations([at for at, stream in enumerate(streams) for _ in stream]))
    return [streams[at].pop(0) for at in order]


async def deliver(store: UsageStore, journal: Sequence[JournalRecord], cuts: Sequence[int]) -> None:
    edges = [0, *sorted(min(cut, len(journal)) for cut in cuts), len(journal)]
    for start, end in itertools.pairwise(edges):
        await store.apply(journal[start:end], HERE)


@given(
    journal=journals(),
    first=st.lists(st.integers(0, 40), max_size=5),
    again=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=3)), max_size=3),
    span=st.tuples(times, times),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
async def test_any_split_and_any_replay_gives_the_same_books(
    journal: list[JournalRecord],
    first: list[int],
    again: list[tuple[int, list[int]]],
    span: tuple[float, float],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = open_fresh("sqlite", Path(folder))
        try:
            store = SqlUsageStore(database)
            await deliver(store, journal, first)
            for start, cuts in again:
                await deliver(store, journal[start:], cuts)
            await the_books_are_those_of(journal, store, since=min(span), until=max(span))
        finally:
            await database.close()  # also of an example that fails: whoever shrinks it tries many


async def the_books_are_those_of(
    journal: Sequence[JournalRecord], store: SqlUsageStore, *, since: float, until: float
) -> None:
    intents = {record.request_id: record for record in journal if isinstance(record, Intent)}
    settles: dict[str, Settle] = {}
    for record in journal:
        if isinstance(record, Settle):
            settles.setdefault(record.request_id, record)
    rows = {row.request_id: row for row in await store.rows(tenant_id=None, since=0, limit=1_000)}
    assert rows.keys() == settles.keys()
    for rid, row in rows.items():
        settle = settles[rid]
        counts = (settle.prompt_tokens, min(settle.cached_tokens, settle.prompt_tokens), settle.completion_tokens)
        assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == counts
        assert row.cost_nanousd == cost(intents[rid].price, *counts)
    assert await store.open_requests() == len(intents.keys() - settles.keys())
    assert store.unknown_settles == 0
    await the_rollup_agrees_with_the_rows(store, list(rows.values()), since=since, until=until)


async def the_rollup_agrees_with_the_rows(
    store: UsageStore, rows: list[UsageRow], *, since: float, until: float
) -> None:
    for start, end in [(since, until), (0.0, math.inf), (NOON - 3_600, NOON + 3_600)]:
        for names in [("key", "hour"), ("status", "model"), ("day",), ("tenant",)]:
            expected: Counter[tuple[tuple[str, ...], str]] = Counter()
            for row in rows:
                if not start <= row.created_at < end:
                    continue
                when = datetime.fromtimestamp(row.created_at, UTC)
                values = {
                    "tenant": row.tenant_id,
                    "key": row.key_id,
                    "model": row.model,
                    "status": row.status.value,
                    "hour": when.strftime("%Y-%m-%dT%H:00:00Z"),
                    "day": when.strftime("%Y-%m-%d"),
                }
                group = tuple(values[name] for name in names)
                expected[group, "requests"] += 1
                expected[group, "prompt"] += row.prompt_tokens
                expected[group, "cached"] += row.cached_tokens
                expected[group, "completion"] += row.completion_tokens
                expected[group, "cost"] += row.cost_nanousd
            buckets = await store.usage(tenant_id=None, key_id=None, model=None, since=start, until=end, group_by=names)
            found: Counter[tuple[tuple[str, ...], str]] = Counter()
            for bucket in buckets:
                group = tuple(bucket.group[name] for name in names)
                found[group, "requests"] += bucket.requests
                found[group, "prompt"] += bucket.prompt_tokens
                found[group, "cached"] += bucket.cached_tokens
                found[group, "completion"] += bucket.completion_tokens
                found[group, "cost"] += bucket.cost_nanousd
            assert found == expected
            assert [tuple(bucket.group.values()) for bucket in buckets] == sorted({group for group, _ in expected})


# --- what quotas are checked against ---

DAY = int(NOON // 86_400)


async def test_what_was_spent_is_by_day_and_month_of_arrival_and_by_source(store: UsageStore) -> None:
    there = JournalPosition("gateway-1", "0000000003.journal", 9)
    await store.apply([an_intent("r1"), a_settle("r1")], HERE)
    await store.apply([an_intent("r2", at=NOON - 86_400), a_settle("r2")], HERE)
    await store.apply([an_intent("r3", at=NOON - 40 * 86_400), a_settle("r3")], HERE)
    await store.apply([an_intent("r4", key="k2"), a_settle("r4", tokens=(1, 0, 1))], there)
    await store.apply([an_intent("r5", tenant="t2", key="k3"), a_settle("r5")], HERE)
    await store.apply([an_intent("r1"), a_settle("r1")], there)  # told again, by whomever: nothing changes
    one = cost(PRICE, 10, 4, 20)
    assert await store.spent(["t1"], day=DAY) == (
        [
            SpentRow("t1", "k1", "gateway-0", 30, 60, one, 2 * one),
            SpentRow("t1", "k2", "gateway-1", 2, 2, cost(PRICE, 1, 0, 1), cost(PRICE, 1, 0, 1)),
        ],
        [HERE, there],
    )
    assert (await store.spent([], day=DAY))[0] == []
    assert [row.key_id for row in (await store.spent(["t2", "t1"], day=DAY))[0]] == ["k1", "k2", "k3"]
    assert (await store.spent(["t1"], day=DAY + 31))[0] == []


@given(
    st.lists(
        st.tuples(st.integers(-40 * 24, 40 * 24), st.sampled_from(["k1", "k2"]), st.sampled_from(["gateway-0", "w-1"])),
        max_size=25,
    ),
    st.integers(-35, 35),
)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_spent_is_what_the_ledger_says(work: list[tuple[int, str, str]], days: int) -> None:
    import asyncio

    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            database = open_fresh("sqlite", Path(folder))
            store = SqlUsageStore(database)
            for number, (hours, key, source) in enumerate(work):
                records = [an_intent(f"r{number}", at=NOON + hours * 3600, key=key), a_settle(f"r{number}")]
                await store.apply(records, JournalPosition(source, "1", number))
            day = DAY + days
            rows, _ = await store.spent(["t1"], day=day)
            ledger = await store.rows(tenant_id=None, since=-1e12, limit=1000)
            of_month = [row for row in ledger if month_name(day_of(row.created_at)) == month_name(day)]
            of_day = [row for row in of_month if day_of(row.created_at) == day]
            assert sum(row.day_nanousd for row in rows) == sum(row.cost_nanousd for row in of_day)
            assert sum(row.month_nanousd for row in rows) == sum(row.cost_nanousd for row in of_month)
            assert sum(row.month_tokens for row in rows) == 30 * len(of_month)
            assert sum(row.day_tokens for row in rows) == 30 * len(of_day)
            await database.close()

    asyncio.run(check())


async def test_arrivals_of_an_endpoint_are_counted_by_ten_minutes(store: UsageStore) -> None:
    moments = (0, 599.999, 600, 3599.5, 3600, 7200)
    records: list[JournalRecord] = []
    for at, moment in enumerate(moments):
        records += [an_intent(f"r{at}", at=NOON + moment), a_settle(f"r{at}", at=NOON + moment + 1)]
    records += [an_intent("other", model="else"), a_settle("other")]
    records += [msgspec.structs.replace(an_intent("line"), batch_line="batch_x/1"), a_settle("line")]
    await store.apply(records, HERE)
    found = await store.arrivals("ep-smol", since=0.0, until=NOON + 7200)
    assert found == {NOON: 2, NOON + 600: 1, NOON + 3000: 1, NOON + 3600: 1}
    assert await store.arrivals("ep-smol", since=NOON + 600, until=NOON + 601) == {NOON + 600: 1}
    assert await store.arrivals("ep-none", since=0.0, until=math.inf) == {}


async def test_what_was_spent_on_each_model_is_by_month_and_source(store: UsageStore) -> None:
    there = JournalPosition("gateway-1", "0000000003.journal", 9)
    other = msgspec.structs.replace(an_intent("r3"), model="other")
    await store.apply([an_intent("r1"), a_settle("r1"), other, a_settle("r3")], HERE)
    await store.apply([an_intent("r2", at=NOON - 20 * 86_400), a_settle("r2")], there)
    await store.apply([an_intent("r4", at=NOON - 40 * 86_400), a_settle("r4")], HERE)
    await store.apply([an_intent("r5", tenant="t2"), a_settle("r5")], HERE)
    one, model = cost(PRICE, 10, 4, 20), an_intent("r1").model
    rows, _ = await store.spent(["t1", "t2"], day=DAY, models_of=["t1"])
    assert [row for row in rows if row.model] == [
        SpentRow("t1", "k1", "gateway-0", 0, 0, 0, one, model="other"),
        SpentRow("t1", "k1", "gateway-0", 0, 0, 0, one, model=model),
        SpentRow("t1", "k1", "gateway-1", 0, 0, 0, one, model=model),
    ]
    assert [row for row in rows if not row.model] == (await store.spent(["t1", "t2"], day=DAY))[0]
