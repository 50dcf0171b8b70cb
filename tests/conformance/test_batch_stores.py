"""Every ``BatchStore`` gives each lease once, refuses what comes with an older token, and counts upwards only."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.batches import (
    Batch,
    BatchError,
    BatchStatus,
    Counts,
    Ending,
    Forecast,
    Hold,
    Lease,
    Progress,
    Shard,
    Tokens,
)
from modelyard.domain.files import File, FilePurpose
from modelyard.domain.tenants import Tenant
from modelyard.stores import BatchesFullError, BatchStore, FileStore
from modelyard.stores.sql import SqlBatchStore, SqlControlStore, SqlFileStore

FORECAST = Forecast(10, 20, 30, 1.5, "a test")
USED = Tokens(5, 1, 7, 2)


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BatchStore]:
    database = open_fresh(request.param, tmp_path)
    for name in ("acme", "other"):
        await SqlControlStore(database).add_tenant(Tenant(f"ten-{name}", name, 1_000))
    yield SqlBatchStore(database)
    await database.close()


@pytest.fixture
def files(store: SqlBatchStore) -> FileStore:
    """Return the files of the same database."""
    return SqlFileStore(store._database)


def a_batch(name: str = "batch_1", **changes: object) -> Batch:
    batch = Batch(
        id=name,
        tenant_id="ten-acme",
        key_id="key",
        endpoint="/v1/chat/completions",
        input_file_id="file-in",
        completion_window="24h",
        created_at=1_000.0,
        expires_at=87_400.0,
        output_file_id="file-out",
        error_file_id="file-err",
        metadata={"a": "b"},
        output_expires_s=3_600,
    )
    return msgspec.structs.replace(batch, **changes)


def a_file(file_id: str) -> File:
    return File(
        id=file_id,
        tenant_id="ten-acme",
        key_id="key",
        filename="out.jsonl",
        purpose=FilePurpose.BATCH_OUTPUT,
        bytes=7,
        created_at=1_040.0,
    )


def shards_of(batch_id: str, count: int = 2, lines: int = 10) -> list[Shard]:
    return [Shard(batch_id, at, at * lines, lines, at * 100, 100) for at in range(count)]


async def begun(store: BatchStore, batch: Batch, count: int = 2) -> list[Shard]:
    """Add a batch and bring it to ``in_progress``."""
    await store.add_batch(batch)
    lease = await leased(store)
    assert lease.batch.id == batch.id
    shards = shards_of(batch.id, count)
    assert await store.plan(batch.id, lease.token, shards, "smol", FORECAST, now=1_010.0)
    return shards


async def leased(store: BatchStore, *, now: float = 1_005.0, holder: str = "one") -> Lease:
    lease = await store.lease_batch(holder, now=now, until=now + 30)
    assert lease is not None
    return lease


async def shard_leased(store: BatchStore, *, now: float = 1_020.0, holder: str = "one") -> tuple[Shard, int]:
    lease = await store.lease_shard(holder, now=now, until=now + 30)
    assert lease is not None
    assert lease.shard is not None
    return lease.shard, lease.token


async def found(store: BatchStore, batch_id: str = "batch_1") -> Batch:
    batch = await store.batch(batch_id, tenant_id=None)
    assert batch is not None
    return batch


async def test_a_batch_comes_back_as_it_was_and_another_tenants_does_not_exist(store: BatchStore) -> None:
    assert await store.add_batch(a_batch()) is None
    assert await store.batch("batch_1", tenant_id="ten-acme") == a_batch()
    assert await store.batch("batch_1", tenant_id="ten-other") is None
    assert await store.batches(tenant_id="ten-other", limit=10, after=None) == []


async def test_batches_are_listed_newest_first_from_behind_one(store: BatchStore) -> None:
    batches = [a_batch(f"batch_{at}", created_at=1_000.0 + at) for at in range(4)]
    for batch in batches:
        await store.add_batch(batch)
    newest = await store.batches(tenant_id="ten-acme", limit=2, after=None)
    assert [one.id for one in newest] == ["batch_3", "batch_2"]
    rest = await store.batches(tenant_id=None, limit=10, after=newest[-1])
    assert [one.id for one in rest] == ["batch_1", "batch_0"]


async def test_an_idempotency_key_of_an_api_key_makes_one_batch(store: BatchStore) -> None:
    first = a_batch(idempotency_key="k", fingerprint="f")
    assert await store.add_batch(first) is None
    assert await store.add_batch(a_batch("batch_2", idempotency_key="k")) == first
    assert await store.batch("batch_2", tenant_id=None) is None
    assert await store.add_batch(a_batch("batch_3", idempotency_key="k", key_id="another")) is None
    assert await store.add_batch(a_batch("batch_4")) is None
    assert await store.add_batch(a_batch("batch_5")) is None, "without a key nothing is the same"


async def test_a_tenants_batches_that_are_not_over_are_counted(store: BatchStore) -> None:
    for at in range(3):
        await store.add_batch(a_batch(f"batch_{at}"))
    lease = await leased(store)
    await store.fail(lease.batch.id, lease.token, [], now=1_010.0)
    assert await store.open_batches("ten-acme") == 2
    assert await store.open_batches("ten-other") == 0


async def test_a_batch_is_checked_by_one_at_a_time_and_again_when_its_lease_has_ended(store: BatchStore) -> None:
    await store.add_batch(a_batch())
    first = await leased(store)
    assert await store.lease_batch("two", now=1_010.0, until=1_040.0) is None
    assert await store.keep_batch("batch_1", first.token, until=1_050.0)
    assert await store.lease_batch("two", now=1_049.0, until=1_080.0) is None
    second = await leased(store, now=1_051.0, holder="two")
    assert second.token > first.token
    assert not await store.keep_batch("batch_1", first.token, until=9_999.0)
    assert not await store.plan("batch_1", first.token, shards_of("batch_1"), "smol", FORECAST, now=1_052.0)
    assert not await store.fail("batch_1", first.token, [BatchError("x", "y")], now=1_052.0)
    assert await store.plan("batch_1", second.token, shards_of("batch_1"), "smol", FORECAST, now=1_052.0)
    batch = await found(store)
    assert (batch.status, batch.in_progress_at, batch.model) == (BatchStatus.IN_PROGRESS, 1_052.0, "smol")
    assert (batch.counts, batch.forecast) == (Counts(20, 0, 0), FORECAST)


async def test_a_batch_that_fails_keeps_its_errors(store: BatchStore) -> None:
    await store.add_batch(a_batch())
    lease = await leased(store)
    errors = (BatchError("invalid_json_line", "no JSON", None, 3), BatchError("invalid_url", "another", "url", 4))
    assert await store.fail("batch_1", lease.token, errors, now=1_020.0)
    batch = await found(store)
    assert (batch.status, batch.failed_at, batch.errors) == (BatchStatus.FAILED, 1_020.0, errors)
    assert await store.lease_batch("two", now=9_999.0, until=10_000.0) is None
    assert not await store.cancel("batch_1", now=1_030.0)


async def test_each_shard_is_given_out_once_until_its_lease_ends(store: BatchStore) -> None:
    shards = await begun(store, a_batch())
    first, token = await shard_leased(store)
    second, _ = await shard_leased(store)
    assert [first, second] == shards
    assert await store.lease_shard("two", now=1_049.0, until=1_080.0) is None
    assert await store.keep_shard(first, token, Progress(3, 1, USED), until=1_100.0) is Hold.HELD
    assert await store.lease_shard("two", now=1_051.0, until=1_081.0, not_of=["ten-acme"]) is None
    taken, newer = await shard_leased(store, now=1_051.0, holder="two")
    assert (taken, (await found(store)).counts) == (second, Counts(20, 3, 1))
    assert newer > 1


async def test_a_zombie_changes_nothing(store: BatchStore) -> None:
    await begun(store, a_batch(), 1)
    shard, old = await shard_leased(store)
    _, new = await shard_leased(store, now=1_100.0, holder="two")
    assert await store.keep_shard(shard, new, Progress(4, 0, USED), until=1_130.0) is Hold.HELD
    late = Progress(9, 1, Tokens(99))
    assert await store.keep_shard(shard, old, late, until=9_999.0) is Hold.LOST
    assert await store.leave_shard(shard, old, late) is Hold.LOST
    assert await store.finish_shard(shard, old, late) is Hold.LOST
    batch = await found(store)
    assert (batch.counts, batch.tokens) == (Counts(10, 4, 0), USED)
    assert await store.lease_batch("three", now=1_110.0, until=1_140.0) is None, "its shard is not done"


async def test_counts_never_go_down(store: BatchStore) -> None:
    await begun(store, a_batch(), 1)
    shard, token = await shard_leased(store)
    await store.keep_shard(shard, token, Progress(5, 1), until=1_050.0)
    _, newer = await shard_leased(store, now=1_060.0)
    assert await store.keep_shard(shard, newer, Progress(2, 0), until=1_090.0) is Hold.HELD
    assert (await found(store)).counts == Counts(10, 5, 1)
    await store.keep_shard(shard, newer, Progress(7, 1), until=1_090.0)
    assert (await found(store)).counts == Counts(10, 7, 1)


async def test_what_one_leaves_another_takes_at_once(store: BatchStore) -> None:
    await begun(store, a_batch(), 1)
    shard, token = await shard_leased(store)
    assert await store.leave_shard(shard, token, Progress(1, 0)) is Hold.HELD
    again, newer = await shard_leased(store)
    assert (again, newer > token) == (shard, True)


async def test_a_batch_whose_shards_are_done_is_finished_by_one(store: BatchStore) -> None:
    await begun(store, a_batch())
    for _ in range(2):
        shard, token = await shard_leased(store)
        assert await store.lease_batch("one", now=1_030.0, until=1_060.0) is None
        assert await store.finish_shard(shard, token, Progress(9, 1, USED)) is Hold.HELD
    lease = await leased(store, now=1_030.0)
    shards = await store.seal("batch_1", lease.token, now=1_031.0)
    assert shards == shards_of("batch_1")
    batch = await found(store)
    assert (batch.status, batch.finalizing_at) == (BatchStatus.FINALIZING, 1_031.0)
    ending = Ending(BatchStatus.COMPLETED, Counts(20, 18, 2), USED + USED, a_file("file-made"))
    assert not await store.finish("batch_1", lease.token - 1, ending, now=1_040.0)
    assert await store.finish("batch_1", lease.token, ending, now=1_040.0)
    batch = await found(store)
    assert (batch.status, batch.completed_at, batch.counts) == (BatchStatus.COMPLETED, 1_040.0, ending.counts)
    assert (batch.output_file_id, batch.error_file_id, batch.tokens) == ("file-made", "", ending.tokens)
    assert await store.lease_batch("one", now=9_999.0, until=10_000.0) is None


async def test_files_of_a_batch_are_there_with_its_end_and_not_otherwise(store: BatchStore, files: FileStore) -> None:
    await begun(store, a_batch(), 1)
    shard, token = await shard_leased(store)
    await store.finish_shard(shard, token, Progress(10, 0))
    late, lease = await leased(store, now=1_030.0), await leased(store, now=1_070.0, holder="two")
    ending = Ending(BatchStatus.COMPLETED, Counts(10, 9, 1), USED, a_file("file-late-o"), a_file("file-late-e"))
    assert not await store.finish("batch_1", late.token, ending, now=1_075.0)
    assert await files.known_files(["file-late-o", "file-late-e"]) == set()
    good = Ending(BatchStatus.COMPLETED, Counts(10, 9, 1), USED, a_file("file-o"), a_file("file-e"))
    assert await store.finish("batch_1", lease.token, good, now=1_080.0)
    assert await files.file("file-o", tenant_id="ten-acme") == a_file("file-o")
    assert await files.known_files(["file-o", "file-e"]) == {"file-o", "file-e"}
    assert not await store.finish("batch_1", late.token, ending, now=1_090.0)
    assert await files.known_files(["file-late-o", "file-late-e"]) == set()


async def test_shards_are_not_given_out_for_a_model_of_a_tenant_that_has_enough(store: BatchStore) -> None:
    await begun(store, a_batch(), 1)
    assert await store.lease_shard("x", now=1_020.0, until=1_050.0, not_for=[("ten-acme", "smol")]) is None
    others = [("ten-acme", "another"), ("ten-other", "smol")]
    assert await store.lease_shard("x", now=1_020.0, until=1_050.0, not_for=others) is not None


async def test_a_tenant_that_has_enough_batches_still_gets_the_one_it_made(store: BatchStore) -> None:
    first = a_batch(idempotency_key="k", fingerprint="f")
    assert await store.add_batch(first, open_max=1) is None
    assert await store.add_batch(a_batch("batch_2", idempotency_key="k"), open_max=1) == first
    with pytest.raises(BatchesFullError):
        await store.add_batch(a_batch("batch_3"), open_max=1)
    assert await store.add_batch(a_batch("batch_4", tenant_id="ten-other"), open_max=1) is None


async def test_an_expired_batch_is_taken_from_its_workers_once_they_are_done_with_it(store: BatchStore) -> None:
    await begun(store, a_batch(expires_at=2_000.0), 1)
    shard, token = await shard_leased(store, now=1_990.0)
    assert await store.lease_batch("two", now=2_001.0, until=2_031.0) is None, "a shard of it is worked on"
    assert await store.leave_shard(shard, token, Progress(2, 0)) is Hold.HELD
    assert await store.lease_shard("two", now=2_001.0, until=2_031.0) is None
    lease = await leased(store, now=2_002.0)
    assert await store.seal("batch_1", lease.token, now=2_003.0) == [shard]
    assert (await found(store)).status is BatchStatus.IN_PROGRESS
    assert await store.keep_shard(shard, token, Progress(9, 0), until=9_999.0) is Hold.LOST, "it is sealed"


async def test_a_cancelled_batch_gives_no_more_out_and_tells_who_works_on_it(store: BatchStore) -> None:
    await begun(store, a_batch())
    shard, token = await shard_leased(store)
    assert await store.cancel("batch_1", now=1_025.0)
    assert not await store.cancel("batch_1", now=1_026.0)
    batch = await found(store)
    assert (batch.status, batch.cancelling_at) == (BatchStatus.CANCELLING, 1_025.0)
    assert await store.lease_shard("two", now=1_030.0, until=1_060.0) is None
    assert await store.lease_batch("two", now=1_030.0, until=1_060.0) is None
    assert await store.keep_shard(shard, token, Progress(2, 0), until=1_060.0) is Hold.ENDING
    assert await store.leave_shard(shard, token, Progress(3, 0)) is Hold.ENDING
    assert (await leased(store, now=1_031.0)).batch.counts.completed == 3


async def test_a_batch_that_is_being_checked_can_be_cancelled(store: BatchStore) -> None:
    await store.add_batch(a_batch())
    lease = await leased(store)
    assert await store.cancel("batch_1", now=1_006.0)
    assert not await store.plan("batch_1", lease.token, shards_of("batch_1"), "smol", FORECAST, now=1_007.0)
    ending = await leased(store, now=1_008.0, holder="two")
    assert await store.seal("batch_1", ending.token, now=1_009.0) == []


async def test_a_small_tenants_shard_comes_before_more_of_a_large_ones(store: BatchStore) -> None:
    await begun(store, a_batch("batch_large"), 3)
    await begun(store, a_batch("batch_small", tenant_id="ten-other", created_at=1_001.0), 1)
    order = [(await shard_leased(store))[0].batch_id for _ in range(4)]
    assert order == ["batch_large", "batch_small", "batch_large", "batch_large"]


async def test_lines_ahead_are_of_older_batches_of_the_same_model(store: BatchStore) -> None:
    await begun(store, a_batch("batch_old"), 2)
    await begun(store, a_batch("batch_new", created_at=1_001.0), 1)
    shard, token = await shard_leased(store)
    await store.finish_shard(shard, token, Progress(10, 0))
    new = await found(store, "batch_new")
    assert await store.ahead(new) == 10
    assert await store.ahead(await found(store, "batch_old")) == 0
    assert await store.ahead(msgspec.structs.replace(new, model="another")) == 0
