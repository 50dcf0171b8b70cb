"""A batch that is cut off after any step of its life is brought to its end by whoever comes next, exactly once.

Stores, contents and spools are the real ones; the gateway is a server on a unix socket that answers at once. A cut is a
process that stops between two calls: nothing of it runs on, and its leases have to end by themselves.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import eventually_async

from modelyard.batch import flow, shard
from modelyard.batch.flow import BatchPlane
from modelyard.batch.gateways import Gateways, Reply
from modelyard.batch.room import Room
from modelyard.batch.sight import Sight
from modelyard.clock import SystemClock
from modelyard.config import BatchConfig
from modelyard.domain.batches import Batch, BatchStatus
from modelyard.domain.files import File, FilePurpose
from modelyard.domain.tenants import Tenant
from modelyard.ids import new_id
from modelyard.stores import StoreUnavailableError
from modelyard.stores.contents import DiskContents
from modelyard.stores.sql import (
    Database,
    SqlBatchStore,
    SqlBillingStore,
    SqlControlStore,
    SqlFileStore,
    SqlUsageStore,
    open_database,
)

CHAT = "/v1/chat/completions"
LINES = 5
STEPS = 26
"""Calls of stores and contents in the life of such a batch."""
ENTRY = "file-" + "a" * 26
SETTINGS = BatchConfig(lease_s=0.4, shard_lines=2, concurrency=4)
PATIENT = BatchConfig(lease_s=10, shard_lines=2, concurrency=4)
"""With a lease that no busy machine loses, for those that count how often a line is asked."""


class Knife:
    """Wraps stores and contents; after the n-th call of any of them the process is gone, and so is every later one."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.gone = asyncio.Event()

    def wrap(self, whole: Any) -> Any:
        knife = self

        class Cut:
            def __getattr__(self, name: str) -> Any:
                found = getattr(whole, name)
                if not asyncio.iscoroutinefunction(found) or name == "free_bytes":
                    return found

                async def call(*args: Any, **fields: Any) -> Any:
                    if knife.gone.is_set():
                        raise asyncio.CancelledError
                    result = await found(*args, **fields)
                    knife.left -= 1
                    if not knife.left:
                        knife.gone.set()
                    if knife.gone.is_set():
                        raise asyncio.CancelledError
                    return result

                return call

        return Cut()


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[list[str]]:
    """Serve what a gateway does for callers; yields the lines that it was asked, in order."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        caller = json.loads(request.headers["x-modelyard-caller"])
        assert request.headers["x-modelyard-internal-token"] == "token"
        asked.append(caller["line"])
        body = await request.json()
        if body["model"] == "stuck":
            return web.json_response({"error": {"message": "it loads"}}, status=503, headers={"retry-after": "1"})
        if body["messages"] == "bad":
            return web.json_response({"error": {"message": "no", "code": "bad_messages"}}, status=400)
        return web.json_response({"usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    async def model(request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["name"]})

    app = web.Application()
    app.router.add_post(CHAT, answer)
    app.router.add_get("/v1/models/{name}", model)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "c-gateway-0.sock")).start()
    try:
        yield asked
    finally:
        await runner.cleanup()


@asynccontextmanager
async def database_in(folder: Path) -> AsyncIterator[Database]:
    """Open a database in which a batch of ``LINES`` waits to be checked; one of its lines is bad at execution."""
    database = await asyncio.to_thread(open_database, f"sqlite:///{folder / 'control.sqlite'}", timeout_s=5.0)
    await add_batch(
        folder, database, [{"model": "smol", "messages": "bad" if at == 3 else "good"} for at in range(LINES)]
    )
    try:
        yield database
    finally:
        await database.close()


async def add_batch(
    folder: Path, database: Database, bodies: Sequence[object], name: str = "batch_1", tenant: str = "ten"
) -> None:
    """Add a batch, with a file of its own, of a tenant that may be new."""
    if tenant not in [one.id for one in await SqlControlStore(database).tenants()]:
        await SqlControlStore(database).add_tenant(Tenant(tenant, tenant, 1))
    lines = [
        json.dumps({"custom_id": f"id-{at}", "method": "POST", "url": CHAT, "body": body})
        for at, body in enumerate(bodies)
    ]
    entry = ENTRY if name == "batch_1" else new_id("file-")
    writer = await DiskContents(folder / "files").create(entry)
    await writer.write("\n".join(lines).encode())
    await writer.keep()
    now = SystemClock.unix_s()
    file = File(
        id=entry,
        tenant_id=tenant,
        key_id="key",
        filename="in.jsonl",
        purpose=FilePurpose.BATCH,
        bytes=9,
        created_at=now,
    )
    await SqlFileStore(database).add_file(file)
    await SqlBatchStore(database).add_batch(Batch(name, tenant, "key", CHAT, entry, "24h", now, now + 86_400))


def a_plane(folder: Path, database: Database, gateways: Gateways, wrap: Callable[[Any], Any], name: str) -> BatchPlane:
    batches = SqlBatchStore(database)
    return BatchPlane(
        holder=name,
        store=wrap(batches),
        files=wrap(SqlFileStore(database)),
        contents=wrap(DiskContents(folder / "files")),
        gateways=gateways,
        sight=Sight(
            store=batches,
            control=SqlControlStore(database),
            usage=SqlUsageStore(database),
            billing=SqlBillingStore(database),
            configured=(),
            factor_micro=500_000,
            concurrency=4,
            clock=SystemClock(),
        ),
        settings=SETTINGS,
        folder=folder / "files" / "batches",
        wanted=folder / "wanted",
        file_bytes_max=1_000_000,
        body_bytes_max=10_000,
        clock=SystemClock(),
    )


async def run_until_cut(plane: BatchPlane, knife: Knife) -> None:
    """Run a plane until it is cut; then nothing of it is left."""
    running = asyncio.get_running_loop().create_task(plane.run(asyncio.Event()))
    gone = asyncio.get_running_loop().create_task(knife.gone.wait())
    await asyncio.wait((running, gone), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    gone.cancel()
    await asyncio.gather(running, gone, return_exceptions=True)
    assert knife.gone.is_set(), "it was never cut"


async def run_to_its_end(plane: BatchPlane, store: SqlBatchStore) -> Batch:
    stop = asyncio.Event()
    running = asyncio.get_running_loop().create_task(plane.run(stop))

    async def over() -> Batch | None:
        batch = await store.batch("batch_1", tenant_id=None)
        # What a plane leaves that was killed after the end is removed by the next one, beside its work.
        is_tidy = not list(plane.folder.glob("batch_*/*"))
        return batch if batch is not None and batch.status.is_over and is_tidy else None

    try:
        return await eventually_async(over, 60, "the batch is over, and nothing is left of it")
    finally:
        stop.set()
        await running


def ids(folder: Path, file_id: str) -> list[str]:
    text = DiskContents(folder / "files").path_of(file_id).read_text()
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "LOOK_S", 0.1)


@pytest.mark.parametrize("cut_at", range(1, STEPS + 1))
async def test_a_batch_cut_off_after_any_step_ends_with_each_line_once(tmp_path: Path, cut_at: int) -> None:
    async with (
        gateway(tmp_path),
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        knife = Knife(cut_at)
        await run_until_cut(a_plane(tmp_path, database, gateways, knife.wrap, "first"), knife)
        store = SqlBatchStore(database)
        batch = await run_to_its_end(a_plane(tmp_path, database, gateways, lambda whole: whole, "second"), store)
        assert batch.status is BatchStatus.COMPLETED
        assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (LINES, LINES - 1, 1)
        output, errors = batch.output_file_id, batch.error_file_id
        assert (ids(tmp_path, output), ids(tmp_path, errors)) == (["id-0", "id-1", "id-2", "id-4"], ["id-3"])
        files = await SqlFileStore(database).files(tenant_id="ten", now=SystemClock.unix_s(), limit=10)
        assert sorted(file.id for file in files) == sorted([ENTRY, output, errors])
        place = DiskContents(tmp_path / "files").path_of(output)
        assert next(file for file in files if file.id == output).bytes == place.stat().st_size


async def test_on_a_full_disk_nothing_is_run_until_there_is_room(tmp_path: Path) -> None:
    free = 0

    class Contents(DiskContents):
        async def free_bytes(self) -> int:
            return free

    async with (
        gateway(tmp_path) as asked,
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        store = SqlBatchStore(database)
        plane = a_plane(tmp_path, database, gateways, lambda whole: whole, "only")
        plane.contents, plane.settings = Contents(tmp_path / "files"), PATIENT
        ending = asyncio.get_running_loop().create_task(run_to_its_end(plane, store))

        async def begun() -> bool:
            batch = await store.batch("batch_1", tenant_id=None)
            return batch is not None and batch.status is BatchStatus.IN_PROGRESS

        await eventually_async(begun, 60, "the batch is checked")
        assert asked == []
        free = 1_000_000
        assert (await ending).status is BatchStatus.COMPLETED
        assert len(asked) == LINES


async def test_without_cuts_every_line_is_asked_once(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path) as asked,
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        store = SqlBatchStore(database)
        knife = Knife(10_000)
        plane = a_plane(tmp_path, database, gateways, knife.wrap, "only")
        plane.settings = PATIENT
        batch = await run_to_its_end(plane, store)
        assert 10_000 - knife.left >= STEPS, "as many steps as are cut above"
        assert batch.status is BatchStatus.COMPLETED
        assert sorted(asked) == [f"batch_1/{at}" for at in range(LINES)]
        assert (batch.tokens.input, batch.tokens.output) == (2 * (LINES - 1), LINES - 1)


async def test_what_comes_back_too_late_with_its_files_changes_nothing(tmp_path: Path) -> None:
    late, may_go_on = asyncio.Event(), asyncio.Event()

    class Slow(DiskContents):
        async def adopt(self, file_id: str, draft: Path) -> None:
            await super().adopt(file_id, draft)
            if not late.is_set():
                late.set()
                await may_go_on.wait()

    class Asleep(SqlBatchStore):
        async def keep_batch(self, *args: Any, **fields: Any) -> bool:
            if late.is_set():
                return True  # nothing of it renews its lease, and it does not know
            return await super().keep_batch(*args, **fields)

    async with (
        gateway(tmp_path),
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        store, files = SqlBatchStore(database), SqlFileStore(database)
        zombie = a_plane(tmp_path, database, gateways, lambda whole: whole, "zombie")
        zombie.store = Asleep(database)
        zombie.contents = Slow(tmp_path / "files")
        stop = asyncio.Event()
        running = asyncio.get_running_loop().create_task(zombie.run(stop))
        await asyncio.wait_for(late.wait(), 60)
        batch = await run_to_its_end(a_plane(tmp_path, database, gateways, lambda whole: whole, "next"), store)
        assert ids(tmp_path, batch.output_file_id) == ["id-0", "id-1", "id-2", "id-4"]
        errors = await files.file(batch.error_file_id, tenant_id="ten")
        await files.remove_file(batch.output_file_id, tenant_id="ten")  # its owner has read it
        may_go_on.set()
        stop.set()
        await running
        left = await files.files(tenant_id="ten", now=SystemClock.unix_s(), limit=10)
        assert sorted(file.id for file in left) == sorted([ENTRY, batch.error_file_id])
        assert errors in left
        assert await store.batch("batch_1", tenant_id=None) == batch
        contents = [place.name for place in (tmp_path / "files").glob("??/file-*")]
        assert sorted(contents) == sorted([ENTRY, batch.output_file_id, batch.error_file_id])


async def test_an_end_that_was_written_but_not_told_is_not_written_twice(tmp_path: Path) -> None:
    class Forgetful(SqlBatchStore):
        tries = 0

        async def finish(self, *args: Any, **fields: Any) -> bool:
            done = await super().finish(*args, **fields)
            Forgetful.tries += 1
            if Forgetful.tries == 1:
                raise StoreUnavailableError("the connection was lost")
            return done

    async with (
        gateway(tmp_path),
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        plane = a_plane(tmp_path, database, gateways, lambda whole: whole, "only")
        plane.store = Forgetful(database)
        batch = await run_to_its_end(plane, SqlBatchStore(database))
        assert ids(tmp_path, batch.output_file_id) == ["id-0", "id-1", "id-2", "id-4"]
        contents = [place.name for place in (tmp_path / "files").glob("??/file-*")]
        assert sorted(contents) == sorted([ENTRY, batch.output_file_id, batch.error_file_id])
        assert Forgetful.tries == 1, "what was begun again is refused before it counts"


async def test_batches_go_on_beside_those_whose_model_answers_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "STUCK_S", 0.3)
    monkeypatch.setattr(shard, "STOPPING_S", 0.1)
    stuck = [{"model": "stuck", "messages": "good"}] * 10
    async with (
        gateway(tmp_path),
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        store = SqlBatchStore(database)
        await store.cancel("batch_1", now=SystemClock.unix_s())
        for name in ("a", "b", "c"):
            await add_batch(tmp_path, database, stuck, f"batch_stuck{name}", f"ten-{name}")
        await add_batch(tmp_path, database, [{"model": "smol", "messages": "good"}] * 4, "batch_own", "ten-a")
        await add_batch(tmp_path, database, [{"model": "smol", "messages": "good"}] * 4, "batch_other", "ten-d")
        plane = a_plane(tmp_path, database, gateways, lambda whole: whole, "only")
        stop = asyncio.Event()
        running = asyncio.get_running_loop().create_task(plane.run(stop))

        async def done() -> bool:
            over = [await store.batch(name, tenant_id=None) for name in ("batch_own", "batch_other")]
            return all(batch is not None and batch.status is BatchStatus.COMPLETED for batch in over)

        try:
            await eventually_async(done, 60, "what can be answered is answered")
        finally:
            stop.set()
            await running


async def test_lines_under_way_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "LINES_BYTES_MAX", 200)
    most = 0

    class Counted(Gateways):
        under_way = 0

        async def ask(self, *args: Any, **fields: Any) -> Reply:
            nonlocal most
            self.under_way += 1
            most = max(most, self.under_way)
            try:
                await asyncio.sleep(0.02)
                return await super().ask(*args, **fields)
            finally:
                self.under_way -= 1

    async with (
        gateway(tmp_path),
        database_in(tmp_path) as database,
        Counted(tmp_path, "token", timeout_s=30) as gateways,
    ):
        store = SqlBatchStore(database)
        plane = a_plane(tmp_path, database, gateways, lambda whole: whole, "only")
        plane.settings = BatchConfig(lease_s=10, shard_lines=100, concurrency=4)
        assert (await run_to_its_end(plane, store)).status is BatchStatus.COMPLETED
    assert most == 1, "two of these lines are more than may be held"


async def test_of_many_lines_that_wait_for_a_model_one_looks_whether_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = most = 0
    take = Room.take

    async def counted(self: Room, *args: Any) -> bool:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        try:
            return await take(self, *args)
        finally:
            looking -= 1

    monkeypatch.setattr(Room, "take", counted)
    monkeypatch.setattr(shard, "STOPPING_S", 0.1)
    async with (
        gateway(tmp_path) as asked,
        database_in(tmp_path) as database,
        Gateways(tmp_path, "token", timeout_s=30) as gateways,
    ):
        await SqlBatchStore(database).cancel("batch_1", now=SystemClock.unix_s())
        await add_batch(tmp_path, database, [{"model": "stuck", "messages": "good"}] * 20, "batch_stuck")
        plane = a_plane(tmp_path, database, gateways, lambda whole: whole, "only")
        plane.settings = BatchConfig(lease_s=10, shard_lines=100, concurrency=8)
        stop = asyncio.Event()
        running = asyncio.get_running_loop().create_task(plane.run(stop))
        try:
            await eventually_async(lambda: _true(len(asked) >= 4), 60, "some lines were turned away")
            await asyncio.sleep(1.0)
        finally:
            stop.set()
            await running
    assert most == 1


async def _true(found: bool) -> bool:
    return found
