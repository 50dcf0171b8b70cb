"""Every ``UsageStore`` charges a line of a batch once, however often it was run and told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.batches import Batch
from modelyard.domain.tenants import Tenant
from modelyard.domain.usage import Intent, JournalRecord, Price, Settle, UsageStatus
from modelyard.stores import JournalPosition, UsageStore
from modelyard.stores.sql import SqlBatchStore, SqlControlStore, SqlUsageStore

PRICE = Price(1_000_000, 1_000_000, 2_000_000)


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UsageStore]:
    database = open_fresh(request.param, tmp_path)
    yield SqlUsageStore(database)
    await database.close()


def run_of(request_id: str, line: str, status: UsageStatus = UsageStatus.SUCCESS) -> list[JournalRecord]:
    intent = Intent(request_id, 1_000.0, "ten", "key", "ep", "smol", "ver", "/x", False, 5, 9, PRICE, line, 500_000)
    tokens = (10, 0, 5) if status is UsageStatus.SUCCESS else (0, 0, 0)
    http_status = 200 if status is UsageStatus.SUCCESS else 499
    return [intent, Settle(request_id, 1_001.0, *tokens, status, http_status, "", None, 1.0, "rep", 1, False)]


async def applied(store: UsageStore, at: int, *records: JournalRecord) -> dict[str, tuple[int, int, str]]:
    await store.apply(records, JournalPosition("gateway-0", "0001", at))
    rows = await store.rows(tenant_id=None, since=0, limit=100)
    return {row.request_id: (row.cost_nanousd, row.completion_tokens, row.error_code) for row in rows}


async def test_a_second_run_of_a_line_costs_nothing(store: UsageStore) -> None:
    first = await applied(store, 1, *run_of("r1", "batch_1/0"))
    assert first == {"r1": (20, 5, "")}
    both = await applied(store, 2, *run_of("r2", "batch_1/0"))
    assert both == {"r1": (20, 5, ""), "r2": (0, 0, "batch_line_repeated")}
    (bucket,) = await store.usage(tenant_id=None, key_id=None, model=None, since=0, until=9_999, group_by=[])
    assert (bucket.cost_nanousd, bucket.completion_tokens) == (20, 5)


async def test_two_runs_told_at_once_are_charged_once(store: UsageStore) -> None:
    rows = await applied(store, 1, *run_of("r1", "batch_1/0"), *run_of("r2", "batch_1/0"))
    assert sorted(cost for cost, *_ in rows.values()) == [0, 20]


async def test_what_is_told_again_changes_nothing(store: UsageStore) -> None:
    once = await applied(store, 1, *run_of("r1", "batch_1/0"), *run_of("r2", "batch_1/0"))
    assert await applied(store, 2, *run_of("r1", "batch_1/0")) == once
    assert await applied(store, 3, *run_of("r2", "batch_1/0")) == once


async def test_a_run_that_failed_does_not_keep_the_next_from_being_charged(store: UsageStore) -> None:
    rows = await applied(store, 1, *run_of("r1", "batch_1/0", UsageStatus.CLIENT_CLOSED), *run_of("r2", "batch_1/0"))
    assert rows == {"r1": (0, 0, ""), "r2": (20, 5, "")}


async def test_other_lines_and_requests_in_real_time_are_charged_each(store: UsageStore) -> None:
    rows = await applied(
        store,
        1,
        *run_of("r1", "batch_1/0"),
        *run_of("r2", "batch_1/1"),
        *run_of("r3", "batch_2/0"),
        *run_of("r4", ""),
        *run_of("r5", ""),
    )
    assert [cost for cost, *_ in rows.values()] == [20] * 5


async def test_charges_are_forgotten_long_after_the_end_of_their_batch(store: SqlUsageStore) -> None:
    database = store._database
    await SqlControlStore(database).add_tenant(Tenant("ten", "acme", 1))
    batches = SqlBatchStore(database)
    for name, ended in (("batch_1", 2_000.0), ("batch_2", 9_000.0)):
        await batches.add_batch(Batch(name, "ten", "key", "/x", "file-in", "24h", 1_000.0, 87_400.0))
        lease = await batches.lease_batch("one", now=1_100.0, until=1_130.0)
        assert lease is not None
        await batches.fail(name, lease.token, [], now=ended)
    await batches.add_batch(Batch("batch_3", "ten", "key", "/x", "file-in", "24h", 1_000.0, 87_400.0))
    lines = [f"batch_{at}/{line}" for at in (1, 2, 3) for line in (0, 1)]
    await applied(store, 1, *(record for line in lines for record in run_of(f"r-{line}", line)))
    assert await batches.forget_charges(before=5_000.0) == 2
    assert await batches.forget_charges(before=5_000.0) == 0
    again = await applied(store, 2, *(record for line in lines for record in run_of(f"again-{line}", line)))
    assert sorted(rid for rid, (cost, *_) in again.items() if cost and rid.startswith("again")) == [
        "again-batch_1/0",
        "again-batch_1/1",
    ]
