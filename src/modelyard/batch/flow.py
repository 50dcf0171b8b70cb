"""The life of a batch, in one sitting.

``validating``: whoever leases the batch reads its file once, all of it; it
fails with the numbers of its bad lines, or is cut into shards. ``in_progress``:
processes lease shards (``shard.py``) and send their lines through a gateway,
where each is admitted like a request of the key that made the batch, after
everybody else's. ``finalizing``: once all shards are done, or the window is
over, or the batch was cancelled, whoever leases it takes all shards from their
workers (``seal``), puts the spools together (``assembling.py``), and ends it
and adds the files in one transaction. Then it is ``completed``, ``expired`` or ``cancelled``.

Every step is a lease with a fencing token, and can be done again from its
beginning: a process may be killed between any two lines of this file.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from modelyard.batch import answers
from modelyard.batch.assembling import Assembled, Draft, assemble
from modelyard.batch.gateways import GatewayAwayError, Gateways, pause
from modelyard.batch.room import Room
from modelyard.batch.shard import INPUT, ShardRun, Tools
from modelyard.batch.sight import Sight
from modelyard.batch.tidying import tidy
from modelyard.batch.validation import ENVELOPE_BYTES, Checked, check
from modelyard.clock import Clock
from modelyard.config.batch import BatchConfig
from modelyard.domain.batches import Batch, BatchError, BatchStatus, Caller, Ending, Lease
from modelyard.domain.files import ID_PREFIX, File, FilePurpose
from modelyard.ids import new_id
from modelyard.stores import AlreadyExistsError, BatchStore, FileContents, FileStore, StoreUnavailableError

SHARDS_MAX = 8
"""Shards that one process works on at once, enough that a few slow lines do not leave it idle."""
SHARDS_OF_TENANT = 4
"""Of one tenant: the others' batches must not wait for its end."""
SHARDS_OF_MODEL = 3
"""Of one model of a tenant: where that gives no answers, the tenant's other batches go on."""
SHARDS_HELD_MAX = 64
"""Shards with those that get no answers at present: these wait for days, and others must not wait for them."""
STAGES_MAX = 2
"""Batches that one process checks or assembles at once."""
LOOK_S = 2.0
"""How often it looks for work that nobody told it of."""
WATCH_S = 0.1
"""How often it looks whether somebody made or cancelled a batch."""
AGAIN_S = 0.5
"""Pause before the end of a batch is written again."""
_LOST = ("server_error", "The answer of this request was lost. Submit it again.")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchPlane:
    """One process that works on batches, called ``holder`` in its leases."""

    holder: str
    store: BatchStore
    files: FileStore
    contents: FileContents
    gateways: Gateways
    sight: Sight
    settings: BatchConfig
    folder: Path
    wanted: Path
    file_bytes_max: int
    body_bytes_max: int
    clock: Clock
    _runs: dict[asyncio.Task[None], ShardRun] = field(default_factory=dict)
    _stages: set[asyncio.Task[None]] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __repr__(self) -> str:
        return f"<BatchPlane {self.holder}: {len(self._runs)} shards, {len(self._stages)} batches>"

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; what is under way then ends or is given back."""
        tools = Tools(
            store=self.store,
            gateways=self.gateways,
            room=Room(most=self.settings.concurrency, clock=self.clock),
            settings=self.settings,
            folder=self.folder,
            line_bytes_max=self.body_bytes_max + ENVELOPE_BYTES,
            clock=self.clock,
            free_bytes=self.contents.free_bytes,
            stop=stop,
            nudge=lambda: self._news,
        )
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            tidying = group.create_task(tidy(self.store, self.folder, self.clock, stop))
            while not stop.is_set():
                has_found = await self._look(group, tools)
                if not has_found:
                    await self._until_news(stop)
            while self._runs or self._stages:
                await asyncio.wait([*self._runs, *self._stages])
            watching.cancel()
            tidying.cancel()

    # --- finding work ---

    async def _look(self, group: asyncio.TaskGroup, tools: Tools) -> bool:
        """Lease what there is to do, if there are hands for it; say whether anything was found."""
        try:
            if await self._lease_batch(group, tools.stop):
                return True
            if await self.contents.free_bytes() > 0:
                return await self._lease_shard(group, tools)
            _log.warning("the disk is full: no line is run before there is room for its answer")
        except (StoreUnavailableError, OSError) as error:
            _log.warning("no work can be looked for: %s", error)
        return False

    async def _lease_batch(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> bool:
        if len(self._stages) >= STAGES_MAX:
            return False
        now = self.clock.unix_s()
        lease = await self.store.lease_batch(self.holder, now=now, until=now + self.settings.lease_s)
        if lease is None:
            return False
        task = group.create_task(self._guarded(self._stage(lease, stop), lease.batch))
        self._stages.add(task)
        task.add_done_callback(self._ended)
        return True

    async def _lease_shard(self, group: asyncio.TaskGroup, tools: Tools) -> bool:
        runs, now_s = list(self._runs.values()), self.clock.monotonic_s()
        if len(runs) >= SHARDS_HELD_MAX or sum(not run.is_stuck(now_s) for run in runs) >= SHARDS_MAX:
            return False
        tenants = Counter(run.batch.tenant_id for run in runs)
        models = Counter((run.batch.tenant_id, run.batch.model) for run in runs)
        full = [tenant_id for tenant_id, count in tenants.items() if count >= SHARDS_OF_TENANT]
        crowded = [model for model, count in models.items() if count >= SHARDS_OF_MODEL]
        now = self.clock.unix_s()
        until = now + self.settings.lease_s
        lease = await self.store.lease_shard(self.holder, now=now, until=until, not_of=full, not_for=crowded)
        if lease is None:
            return False
        run = ShardRun(tools, lease)
        task = group.create_task(self._guarded(run.run(), lease.batch))
        self._runs[task] = run
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._runs.pop(task, None)
        self._stages.discard(task)
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for news, once."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _until_news(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping, news = loop.create_task(stop.wait()), loop.create_task(self._news.wait())
        try:
            await asyncio.wait((stopping, news), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            news.cancel()

    async def _watch(self) -> None:
        """Notice that the controller touched its file."""
        seen = _touched(self.wanted)
        while True:
            await asyncio.sleep(WATCH_S)
            now = _touched(self.wanted)
            if now != seen:
                seen = now
                self._tell()

    async def _guarded(self, work: Coroutine[Any, Any, None], batch: Batch) -> None:
        """Do ``work``; what goes wrong with one batch must not end those of others."""
        try:
            await work
        except Exception:  # noqa: BLE001 - boundary: its lease ends, and it is tried again after that
            _log.exception("work on a batch failed", extra={"batch_id": batch.id})

    # --- a batch as a whole ---

    async def _stage(self, lease: Lease, stop: asyncio.Event) -> None:
        """Check a batch, or make its files, under a lease that is renewed meanwhile."""
        still = _Still()
        beating = asyncio.get_running_loop().create_task(self._beat(lease, still))
        try:
            if lease.batch.status is BatchStatus.VALIDATING:
                await self._validate(lease, still, stop)
            else:
                await self._finalize(lease, still)
        except (StoreUnavailableError, OSError) as error:
            _log.warning("%s: tried again later: %s", lease.batch.id, error)
            await pause(LOOK_S, stop)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with suppress(StoreUnavailableError):
                await self.store.leave_batch(lease.batch.id, lease.token)

    async def _beat(self, lease: Lease, still: "_Still") -> None:
        lease_s = self.settings.lease_s
        until_s = self.clock.monotonic_s() + lease_s
        while still.is_wanted:
            await asyncio.sleep(max(0.2, min(2.0, lease_s / 4)))
            begun_s, until = self.clock.monotonic_s(), self.clock.unix_s() + lease_s
            try:
                still.is_wanted = await self.store.keep_batch(lease.batch.id, lease.token, until=until)
            except StoreUnavailableError:
                still.is_wanted = self.clock.monotonic_s() < until_s
            else:
                until_s = begun_s + lease_s

    async def _validate(self, lease: Lease, still: "_Still", stop: asyncio.Event) -> None:
        batch, store = lease.batch, self.store
        try:
            errors = await self._take_input(batch)
            checked: Checked | None = None
            if not errors:
                checked = await asyncio.to_thread(self._check, batch, lambda: still.is_wanted and not stop.is_set())
                errors = checked.errors
            if not still.is_wanted or stop.is_set():
                return
            if checked is not None and not errors:
                errors = await self._check_model(batch, checked)
        except GatewayAwayError as error:
            _log.info("%s: checked again later: %s", batch.id, error)
            await pause(1.0, stop)
            return
        if errors or checked is None:
            if await store.fail(batch.id, lease.token, errors, now=self.clock.unix_s()):
                await asyncio.to_thread(shutil.rmtree, self.folder / batch.id, ignore_errors=True)
            return
        forecast = await self.sight.forecast(batch, checked.model, checked.work)
        await store.plan(batch.id, lease.token, checked.shards, checked.model, forecast, now=self.clock.unix_s())

    async def _take_input(self, batch: Batch) -> list[BatchError]:
        """Link the input into the batch's own folder; return what is wrong with it."""
        file = await self.files.file(batch.input_file_id, tenant_id=batch.tenant_id)
        missing = BatchError("invalid_request", f"No file found with id '{batch.input_file_id[:100]}'.", "file_id")
        if file is None or file.is_expired(self.clock.unix_s()):
            return [missing]
        if file.purpose is not FilePurpose.BATCH:
            message = f"The file's purpose is '{file.purpose.value}'; upload it with purpose 'batch'."
            return [BatchError("invalid_request", message, "file_id")]
        if file.bytes > self.file_bytes_max:
            message = f"The file has {file.bytes} bytes; at most {self.file_bytes_max} are taken. Split it."
            return [BatchError("file_too_large", message, "file_id")]
        try:
            await asyncio.to_thread(_link, self.contents.path_of(file.id), self.folder / batch.id)
        except FileNotFoundError:
            return [missing]
        return []

    def _check(self, batch: Batch, is_wanted: Callable[[], bool]) -> Checked:
        with (self.folder / batch.id / INPUT).open("rb") as file:
            return check(
                file,
                batch.id,
                batch.endpoint,
                shard_lines=self.settings.shard_lines,
                body_bytes_max=self.body_bytes_max,
                is_wanted=is_wanted,
            )

    async def _check_model(self, batch: Batch, checked: Checked) -> list[BatchError]:
        """Return what a gateway says of the model: whether the key may use it is judged in one place."""
        path = f"/v1/models/{quote(checked.model, safe='')}"
        reply = await self.gateways.ask("GET", path, Caller(batch.key_id))
        if reply.status >= 500:
            raise GatewayAwayError(f"status {reply.status}", was_sent=True)
        if reply.status == 404:
            message = f"The model '{checked.model[:100]}' does not exist or you do not have access to it."
            return [BatchError("model_not_found", message, "body.model", checked.model_line)]
        if reply.status != 200:
            told = answers.error_of(reply.body, reply.status)
            return [BatchError(told.code, told.message)]
        return []

    async def _finalize(self, lease: Lease, still: "_Still") -> None:
        batch = lease.batch
        shards = await self.store.seal(batch.id, lease.token, now=self.clock.unix_s())
        if shards is None:
            return
        is_expired = batch.status is BatchStatus.IN_PROGRESS and self.clock.unix_s() >= batch.expires_at
        rest = answers.EXPIRED if is_expired else _LOST
        if batch.status is BatchStatus.CANCELLING:
            rest = answers.CANCELLED
        folder = self.folder / batch.id
        name = f"{lease.token}.{self.holder}"
        longest = self.body_bytes_max + ENVELOPE_BYTES
        made = await asyncio.to_thread(
            lambda: assemble(
                batch, folder, shards, rest, name=name, line_bytes_max=longest, is_wanted=lambda: still.is_wanted
            )
        )
        if made is None or not await self.store.keep_batch(
            batch.id, lease.token, until=self.clock.unix_s() + self.settings.lease_s
        ):
            return
        status = BatchStatus.EXPIRED if is_expired and made.unanswered else BatchStatus.COMPLETED
        if batch.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        output, errors = await self._keep_both(batch, made)
        ending = Ending(status, made.counts, made.tokens, output, errors)
        if await self._end(lease, ending, still):
            _log.info("%s: %s, %s", batch.id, status.value, ending.counts)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return
        await self._drop(output, errors)  # somebody else has the lease, and files of their own

    async def _end(self, lease: Lease, ending: Ending, still: "_Still") -> bool:
        """End a batch; say whether it is ours to be ended.

        It is tried again here, and not from the beginning, which would leave one more copy of the files each time.
        """
        while True:
            try:
                return await self.store.finish(lease.batch.id, lease.token, ending, now=self.clock.unix_s())
            except AlreadyExistsError:
                return True  # an earlier try got through, and nobody could say so
            except StoreUnavailableError as error:
                if not still.is_wanted:
                    raise
                _log.warning("%s: not ended yet: %s", lease.batch.id, error)
                await asyncio.sleep(AGAIN_S)

    async def _keep_both(self, batch: Batch, made: Assembled) -> tuple[File | None, File | None]:
        output = await self._keep(batch, made.output, "output")
        try:
            return output, await self._keep(batch, made.errors, "error")
        except OSError:
            await self._drop(output)
            raise

    async def _drop(self, *files: File | None) -> None:
        for file in files:
            if file is not None:
                await self.contents.remove(file.id)

    async def _keep(self, batch: Batch, draft: Draft, kind: str) -> File | None:
        """Make the content of a file of a draft that has anything.

        Each try has an id of its own, and it is a file only once the batch ends with it: one who comes back from the
        dead can neither write over what others published, nor bring back what was deleted since.
        """
        if not draft.size_bytes:
            return None
        file_id = new_id(ID_PREFIX)
        await self.contents.adopt(file_id, draft.path)
        now = self.clock.unix_s()
        kept_s = self.settings.output_ttl_s if batch.output_expires_s is None else batch.output_expires_s
        return File(
            id=file_id,
            tenant_id=batch.tenant_id,
            key_id=batch.key_id,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=FilePurpose.BATCH_OUTPUT,
            bytes=draft.size_bytes,
            created_at=now,
            expires_at=now + kept_s,
            digest=draft.digest,
        )


@dataclass(slots=True)
class _Still:
    """Whether work is still wanted; read by threads."""

    is_wanted: bool = True


def _link(source: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = folder / INPUT
    with suppress(FileExistsError):
        place.hardlink_to(source)


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
