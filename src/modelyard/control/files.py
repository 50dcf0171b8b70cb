"""Files of tenants, from the first byte of their upload to their end.

A file streams to the disk as it comes. Its content is whole and synced before
its row is added, and its row is removed before its content: whatever is killed
when, nobody ever sees half a file, and what is left of one is swept away.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from modelyard import errors
from modelyard.clock import Clock
from modelyard.config import Config
from modelyard.control.artifacts.disk import is_full
from modelyard.control.file_forms import FileForm, FileOrder, SizeLimits
from modelyard.control.tasks import boundary
from modelyard.domain.files import FORM_BYTES_MAX, ID_PREFIX, File, FilePurpose, is_file_id
from modelyard.errors import ApiError
from modelyard.ids import new_id
from modelyard.policy.file_room import Bounds, FileRoom, Refusal
from modelyard.stores import AlreadyExistsError, ContentWriter, FileContents, FileStore, StoreUnavailableError
from modelyard.web.forms import FormReader

SILENCE_S_MAX = 60.0
"""Longest pause inside of an upload before it is given up."""
OPEN_MAX = 16
"""Uploads of one tenant at the same time; each holds up to two blocks in memory."""
OPEN_RETRY_S = 2.0
SWEEP_S = 60.0
ORPHANS_S = 3600.0
"""Pause between two looks for content that belongs to no file."""
SETTLED_S = 600.0
"""Age of content that must have a row by now, if it ever gets one."""

_log = logging.getLogger(__name__)


class Sender(NamedTuple):
    """Who sends a file, and the idempotency key that came with it."""

    tenant_id: str
    key_id: str
    idempotency_key: str | None = None


class FileDesk:
    """Takes files in, and lets them go. ``run`` sweeps what expired or was left behind."""

    def __init__(self, *, store: FileStore, contents: FileContents, config: Config, clock: Clock) -> None:
        self.store = store
        self.contents = contents
        self._settings = config.control
        self._limits = SizeLimits(config.gateway.file_bytes_max, config.control.batch_file_bytes_max)
        self._bounds = Bounds(config.control.files_held_max, config.control.file_bytes_held_max, OPEN_MAX)
        self._clock = clock
        self._room = FileRoom()
        self._judging = asyncio.Lock()
        self._keys_in_use: set[Sender] = set()
        self._orphans_due_s = 0.0

    def __repr__(self) -> str:
        return f"<FileDesk: {self._room!r}>"

    async def find(self, file_id: str, *, tenant_id: str | None) -> File | None:
        """Return the file of this id (of this tenant), unless it has expired."""
        file = await self.store.file(file_id, tenant_id=tenant_id) if is_file_id(file_id) else None
        return None if file is None or file.is_expired(self._clock.unix_s()) else file

    async def remove(self, file: File) -> bool:
        """Forget a file and its content; say whether it was still there."""
        was_there = await self.store.remove_file(file.id, tenant_id=file.tenant_id)
        await self._remove_content(file.id)
        return was_there

    # --- taking in -----------------------------------------------------------------

    async def receive(
        self, sender: Sender, body: AsyncIterator[bytes], *, content_type: str, length: int | None
    ) -> File:
        """Take a form with a file in; ``length`` is what its body was announced to have. All of it is kept, or nothing.

        Raises:
            ApiError: 400 for a bad form, 409 for an idempotency key in use, 413, 429 for a tenant that has enough, 507.
        """
        reader = FormReader(content_type)
        with self._only_one(sender):
            known = await self._known(sender)
            if known is not None:
                return await self._receive_again(known, reader, body)
            file_id = new_id(ID_PREFIX)
            try:
                await self._promise_room(file_id, sender.tenant_id, length)
                return await self._receive(file_id, sender, reader, body)
            finally:
                self._room.give_back(file_id)

    async def _receive(self, file_id: str, sender: Sender, reader: FormReader, body: AsyncIterator[bytes]) -> File:
        form = FileForm(partial(self.contents.create, file_id), self._limits)
        try:
            async for _ in _taken(form, reader, body):
                if form.writer is not None:
                    self._room.wrote(file_id, form.writer.size_bytes)
            order = form.order()
            assert form.writer is not None, "an order has a file"
            await form.writer.keep()
            return await self._add(self._file_of(file_id, sender, order, form.writer))
        except OSError as error:
            raise _refusal_of(error, file_id) from error
        finally:
            if form.writer is not None:
                await form.writer.abandon()

    async def _receive_again(self, known: File, reader: FormReader, body: AsyncIterator[bytes]) -> File:
        """Return the file that a first request with the same key made, if this one is that one."""
        form = FileForm(_begin_digest, self._limits)
        async for _ in _taken(form, reader, body):
            pass
        order = form.order()
        assert form.writer is not None, "an order has a file"
        if known.fingerprint != _fingerprint(order, form.writer.digest):
            raise errors.idempotency_key_reused()
        return known

    def _file_of(self, file_id: str, sender: Sender, order: FileOrder, writer: ContentWriter) -> File:
        now = self._clock.unix_s()
        kept_s: float | None = order.expires_after_s
        if kept_s is None and order.purpose is FilePurpose.BATCH:
            kept_s = self._settings.batch_file_ttl_s
        return File(
            id=file_id,
            tenant_id=sender.tenant_id,
            key_id=sender.key_id,
            filename=order.filename,
            purpose=order.purpose,
            bytes=writer.size_bytes,
            created_at=now,
            expires_at=None if kept_s is None else now + kept_s,
            digest=writer.digest,
            idempotency_key=sender.idempotency_key,
            fingerprint=_fingerprint(order, writer.digest) if sender.idempotency_key is not None else "",
        )

    async def _add(self, file: File) -> File:
        try:
            await self.store.add_file(file)
        except AlreadyExistsError:
            # Another controller of this database took the same key meanwhile.
            await self._remove_content(file.id)
            other = await self._known(Sender(file.tenant_id, file.key_id, file.idempotency_key))
            if other is None or other.fingerprint != file.fingerprint:
                raise errors.idempotency_key_reused() from None
            return other
        except StoreUnavailableError:
            await self._take_back(file)
            raise
        return file

    async def _take_back(self, file: File) -> None:
        """Leave nothing of a file whose row may or may not be there; where even that is not told, the sweep does it."""
        with suppress(StoreUnavailableError):
            await self.store.remove_file(file.id, tenant_id=file.tenant_id)
            await self._remove_content(file.id)

    async def _promise_room(self, file_id: str, tenant_id: str, length: int | None) -> None:
        wanted = self._limits.file_bytes if length is None else length
        if wanted > self._limits.file_bytes + FORM_BYTES_MAX:
            raise errors.file_too_large(self._limits.file_bytes, "gateway.file_bytes_max")
        async with self._judging:
            with self._room.judging():
                held = await self.store.held_files(tenant_id)
                refusal = self._room.take(
                    file_id,
                    tenant_id,
                    wanted,
                    held_files=held.files,
                    held_bytes=held.size_bytes,
                    bounds=self._bounds,
                )
        if refusal is not None:
            raise self._too_much(refusal, held.size_bytes, wanted)
        try:
            free = await self.contents.free_bytes()
        except OSError as error:
            raise _refusal_of(error, file_id) from error
        if self._room.to_come_bytes > free:
            raise errors.file_storage_full(needed=wanted, free=max(0, free - self._room.to_come_bytes + wanted))

    def _too_much(self, refusal: Refusal, held_bytes: int, wanted: int) -> ApiError:
        match refusal:
            case Refusal.OPEN:
                return errors.rate_limited("concurrency", limit=OPEN_MAX, retry_after_s=OPEN_RETRY_S, whose="uploads")
            case Refusal.FILES:
                return errors.files_full(f"it has {self._bounds.files}")
            case Refusal.BYTES:
                taken = f"{held_bytes} of {self._bounds.size_bytes} bytes are taken"
                return errors.files_full(f"{taken}, and this needs {wanted}")

    # --- the same request again -----------------------------------------------------

    @contextmanager
    def _only_one(self, sender: Sender) -> Iterator[None]:
        if sender.idempotency_key is None:
            yield
            return
        if sender in self._keys_in_use:
            raise errors.idempotency_key_in_use()
        self._keys_in_use.add(sender)
        try:
            yield
        finally:
            self._keys_in_use.discard(sender)

    async def _known(self, sender: Sender) -> File | None:
        """Return what was made with the same idempotency key, as long as keys are remembered."""
        if sender.idempotency_key is None:
            return None
        file = await self.store.file_of_key(sender.tenant_id, sender.key_id, sender.idempotency_key)
        now = self._clock.unix_s()
        if file is None or (not file.is_expired(now) and now - file.created_at < self._settings.kept_s):
            return file
        await self.store.release_key(file.id)
        return None

    # --- letting go -----------------------------------------------------------------

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            with boundary("the sweep of files"):
                await self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Remove files whose time is over, drafts of killed writers, and content without a file.

        Raises:
            StoreUnavailableError: it is tried again.
            OSError: the same.
        """
        while expired := await self.store.expired_files(before=self._clock.unix_s()):
            for file in expired:
                await self.remove(file)
            _log.info("%d files expired and were removed", len(expired))
        if drafts := await self.contents.clear_drafts():
            _log.info("%d uploads that a stop had cut off were removed", drafts)
        if self._clock.monotonic_s() >= self._orphans_due_s:
            await self._remove_orphans()
            self._orphans_due_s = self._clock.monotonic_s() + ORPHANS_S

    async def _remove_orphans(self) -> None:
        before = self._clock.unix_s() - SETTLED_S
        settled = await self.contents.settled_ids(before=before)
        for file_id in set(settled) - await self.store.known_files(settled):
            _log.info("%s: its content is removed, no file has it", file_id)
            await self.contents.remove_settled(file_id, before=before)

    async def _remove_content(self, file_id: str) -> None:
        try:
            await self.contents.remove(file_id)
        except OSError as error:
            _log.warning("%s: its content cannot be removed now, and is swept later: %s", file_id, error)


async def _taken(form: FileForm, reader: FormReader, body: AsyncIterator[bytes]) -> AsyncIterator[None]:
    """Pass the body on to the form, a piece at a time.

    Raises:
        ApiError: 400 and 413 as the form says, 408 for a body that stops to come.
    """
    while True:
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                piece = await anext(body, None)
        except TimeoutError:
            raise errors.request_timeout() from None
        if piece is None:
            reader.close()
            return
        for happening in reader.feed(piece):
            await form.take(happening)
        yield


class _Digest:
    """Content that is only looked at."""

    __slots__ = ("_hash", "size_bytes")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    async def write(self, block: bytes | bytearray | memoryview) -> None:
        self.size_bytes += len(block)
        await asyncio.to_thread(self._hash.update, block)

    async def keep(self) -> None:
        """Keep nothing."""

    async def abandon(self) -> None:
        """Leave nothing, as there is nothing."""


async def _begin_digest() -> ContentWriter:
    return _Digest()


def _fingerprint(order: FileOrder, digest: str) -> str:
    return hashlib.sha256(msgspec.json.encode([*order, digest])).hexdigest()


def _refusal_of(error: OSError, file_id: str) -> ApiError:
    if is_full(error):
        return errors.file_storage_full(needed=1, free=0)
    _log.error("%s: its content cannot be stored: %s", file_id, error)
    return errors.storage_unavailable()
