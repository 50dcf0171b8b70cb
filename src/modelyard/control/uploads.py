"""Uploads from their announcement to the content-addressed store.

Parts stream to disk as they come and are never held in memory. An upload is
visible to a deployment only once all of it is there, hashed and renamed to its
digest. What nobody finishes expires; a complete upload that no version uses
does too, since nothing else would ever let go of it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from modelyard import errors
from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.artifacts import ArtifactError
from modelyard.control.artifacts.contents import manifest_digest
from modelyard.control.artifacts.disk import is_full
from modelyard.control.part_files import BLOCK_BYTES, PartDraft, PartFiles, PartMissingError, StoppedError
from modelyard.control.tasks import boundary
from modelyard.domain.catalog import Artifact, ArtifactFile
from modelyard.domain.uploads import SCHEME, Upload, UploadStatus
from modelyard.errors import ApiError
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of
from modelyard.ids import new_id
from modelyard.stores import ControlStore, StoreUnavailableError, UploadStore

SILENCE_S_MAX = 60.0
"""Longest pause inside of a part before it is given up."""
COMPLETE_WAIT_S = 30.0
"""How long the answer to a completion waits for it; a bigger file goes on, and its client asks again."""
LOOK_TIMEOUT_S = 30.0
"""Longest that reading the headers of a folder may take."""
SWEEP_S_MAX = 60.0

_log = logging.getLogger(__name__)


class Adopts(Protocol):
    """The content-addressed store, as far as uploads need it."""

    async def adopt(self, draft: Path, name: str, *, digest: str = "") -> Artifact:
        """Take a whole file over, as ``upload:<name>``; raises ``ArtifactError``."""
        ...


class UploadDesk:
    """Takes uploads in. ``run`` sweeps; ``close`` ends what is being put together."""

    def __init__(
        self,
        *,
        store: UploadStore,
        versions: ControlStore,
        artifacts: Adopts,
        files: PartFiles,
        settings: ControlConfig,
        clock: Clock,
    ) -> None:
        self.store = store
        self._versions = versions
        self._artifacts = artifacts
        self._files = files
        self._settings = settings
        self._clock = clock
        self._announcing = asyncio.Lock()
        self._joining: dict[str, asyncio.Task[Upload]] = {}
        self._writing: dict[str, int] = {}
        self._stop = threading.Event()

    def __repr__(self) -> str:
        return f"<UploadDesk: {sum(self._writing.values())} parts coming in, {len(self._joining)} put together>"

    def is_joining(self, upload_id: str) -> bool:
        """Say whether an upload is being put together now."""
        return upload_id in self._joining

    async def uploads(self, *, tenant_id: str | None) -> list[Upload]:
        """Return the uploads of a tenant, or all; a complete one whose bytes are gone is none any more."""
        uploads = await self.store.uploads(tenant_id=tenant_id)
        gone = await asyncio.to_thread(self._gone, uploads)
        return [one for one in uploads if one.id not in gone]

    async def upload(self, upload_id: str, *, tenant_id: str | None) -> Upload | None:
        """Return one upload, with the same reservation."""
        upload = await self.store.upload(upload_id, tenant_id=tenant_id)
        if upload is None or upload.id in await asyncio.to_thread(self._gone, [upload]):
            return None
        return upload

    async def announce(self, *, tenant_id: str, name: str, size_bytes: int, part_bytes: int, digest: str) -> Upload:
        """Begin an upload.

        Raises:
            ApiError: 429 for a tenant that has enough, 507 when the disk cannot take it.
        """
        now = self._clock.unix_s()
        upload = Upload(
            id=new_id("upl-"),
            tenant_id=tenant_id,
            name=name,
            size_bytes=size_bytes,
            part_bytes=part_bytes,
            created_at=now,
            expires_at=now + self._settings.upload_ttl_s,
            digest=digest,
        )
        async with self._announcing:  # two at once must not both take the last place
            await self._forget_gone()  # what is sent anew takes the place of what was lost
            await self._check_room(upload)
            await self.store.add_upload(upload)
        return upload

    async def _check_room(self, upload: Upload) -> None:
        settings = self._settings
        everyone = await self.store.uploads()
        mine = [one for one in everyone if one.tenant_id == upload.tenant_id]
        under_way = [one for one in everyone if one.status is UploadStatus.OPEN]
        if sum(one.tenant_id == upload.tenant_id for one in under_way) >= settings.uploads_open_max:
            raise errors.uploads_full(f"{settings.uploads_open_max} uploads are open", "Complete or delete one")
        held = _held_bytes(mine)
        if held + upload.size_bytes > settings.upload_bytes_held_max:
            reason = f"{held} of {settings.upload_bytes_held_max} bytes are taken, and this needs {upload.size_bytes}"
            raise errors.uploads_full(reason, "Delete an upload that you do not need")
        # While it is put together the parts and the whole are both there. What the others still have to send is theirs.
        needed = 2 * upload.size_bytes
        promised = sum(_still_to_come(one) for one in under_way)
        free = await asyncio.to_thread(self._files.free_bytes)
        if needed + promised > free:
            raise errors.upload_storage_full(needed=needed, free=max(0, free - promised))

    async def make_folder(self, *, tenant_id: str, name: str, files: Mapping[str, str]) -> Upload:
        """Make a folder of complete uploads of a tenant; ``files`` are digests by path.

        Raises:
            ApiError: 400 for content that this tenant has not sent, or that together is no model.
        """
        parts: list[ArtifactFile] = []
        for path, digest in sorted(files.items()):
            upload = await self.store.uploaded(digest, tenant_id=tenant_id)
            if upload is None or upload.files:
                raise errors.invalid_value("files", f"you have no complete upload of the digest of '{path}'")
            parts.append(ArtifactFile(path, digest, upload.size_bytes))
        now = self._clock.unix_s()
        folder = Upload(
            id=new_id("upl-"),
            tenant_id=tenant_id,
            name=name,
            size_bytes=sum(part.size_bytes for part in parts),
            part_bytes=max(1, sum(part.size_bytes for part in parts)),
            created_at=now,
            expires_at=now + self._settings.upload_ttl_s,
            digest=manifest_digest(tuple(parts)),
            status=UploadStatus.COMPLETE,
            files=tuple(parts),
        )
        known = await self.store.uploaded(folder.digest, tenant_id=tenant_id)
        if known is not None and known.files == folder.files:
            await self.store.keep_upload(known.id, expires_at=folder.expires_at)
            return known
        await self._check_folder(folder)
        async with self._announcing:
            await self.store.add_upload(folder)
        return folder

    async def _check_folder(self, folder: Upload) -> None:
        """Refuse what no engine may see: files that run code, or that are no model together."""
        files = await asyncio.to_thread(self.files_of, folder)
        if files is None:
            raise errors.invalid_value("files", "the uploaded bytes of one are gone; upload it again")
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await asyncio.to_thread(facts_of, files)
        except TimeoutError:
            raise errors.request_timeout() from None
        except OSError as error:
            raise _refusal_of(error, folder) from error
        except ArtifactInvalidError as error:
            raise errors.bad_request("artifact_invalid", f"This upload is no model: {error}", param="files") from error

    async def receive(self, upload: Upload, number: int, body: AsyncIterator[bytes], *, digest: str) -> None:
        """Take a part in; ``digest`` (hex), if any, is what it must have. Nothing is left of one that fails.

        Raises:
            ApiError: 400 for the wrong length or digest, 409 for an upload that is over, 507 for a full disk.
        """
        self._check_open(upload)
        self._writing[upload.id] = self._writing.get(upload.id, 0) + 1
        draft: PartDraft | None = None
        try:
            draft = await asyncio.to_thread(self._files.draft, upload.id, number)
            await self._write(draft, body, upload.size_of(number))
            if digest and draft.digest != digest:
                raise errors.bad_request(
                    "digest_mismatch",
                    f"Part {number} has the SHA-256 {draft.digest}, announced was {digest}. Send it again.",
                    param="x-content-sha256",
                )
            await asyncio.to_thread(draft.keep)
            expires_at = self._clock.unix_s() + self._settings.upload_ttl_s
            if not await self.store.put_part(upload.id, number, expires_at=expires_at):
                raise errors.conflict(f"Upload '{upload.id}' is complete or was deleted meanwhile.")
        except OSError as error:
            raise _refusal_of(error, upload) from error
        finally:
            if draft is not None:
                await asyncio.to_thread(draft.abandon)
            self._writing[upload.id] -= 1
            if not self._writing[upload.id]:
                del self._writing[upload.id]

    @staticmethod
    async def _write(draft: PartDraft, body: AsyncIterator[bytes], wanted: int) -> None:
        """Write the body block by block; one thread call a mebibyte, and no more than that in memory."""
        block = bytearray()
        received = 0
        while True:
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    piece = await anext(body, None)
            except TimeoutError:
                raise errors.request_timeout() from None
            if piece is not None:
                received += len(piece)
                block += piece
            if received > wanted or (piece is None and received < wanted):
                some = "more" if received > wanted else f"{received}"
                raise errors.invalid_value("body", f"this part has {wanted} bytes, and {some} came")
            if len(block) >= BLOCK_BYTES or (piece is None and block):
                await asyncio.to_thread(draft.write, bytes(block))
                block.clear()
            if piece is None:
                return

    async def complete(self, upload: Upload) -> Upload:
        """Put the parts together; return the upload, complete if that came in time.

        Raises:
            ApiError: 400 naming the parts that are missing, or for another digest than announced; 507.
        """
        if upload.status is UploadStatus.COMPLETE:
            return upload
        task = self._joining.get(upload.id)
        if task is None:
            self._check_whole(upload)
            task = asyncio.get_running_loop().create_task(self._join(upload), name=f"complete {upload.id}")
            self._joining[upload.id] = task
            task.add_done_callback(lambda done: self._joined(upload, done))
        await asyncio.wait([task], timeout=COMPLETE_WAIT_S)
        return task.result() if task.done() else upload

    def _joined(self, upload: Upload, task: asyncio.Task[Upload]) -> None:
        self._joining.pop(upload.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever still waits is told; whoever asks again tries again.
            _log.warning("%s: it could not be completed: %s", upload.id, error)

    def _check_whole(self, upload: Upload) -> None:
        if missing := upload.missing:
            raise errors.bad_request(
                "upload_incomplete",
                f"The parts {_ranges(missing)} of {upload.part_count} are missing. "
                f"Send each to PUT …/{upload.id}/parts/{{number}}, then complete again.",
                param="parts",
            )

    async def _join(self, upload: Upload) -> Upload:
        try:
            draft, digest = await self._in_thread(upload)
        except PartMissingError as error:
            await self.store.drop_part(upload.id, error.number)
            now = await self.store.upload(upload.id, tenant_id=None)
            if now is not None and now.status is UploadStatus.COMPLETE:
                return now  # another call did it while this one was on its way
            if now is not None:
                self._check_whole(now)
            raise errors.conflict(f"Upload '{upload.id}' was deleted meanwhile.") from None
        except OSError as error:
            raise _refusal_of(error, upload) from error
        if upload.digest and upload.digest != digest:
            await asyncio.to_thread(draft.unlink, missing_ok=True)
            raise errors.bad_request(
                "digest_mismatch",
                f"The parts make {digest}, announced was {upload.digest}. Send the parts of the right file again, "
                "or delete this upload.",
                param="digest",
            )
        try:
            await self._artifacts.adopt(draft, digest, digest=digest)
        except ArtifactError as error:
            if isinstance(error.__cause__, OSError):
                raise _refusal_of(error.__cause__, upload) from error
            raise errors.bad_request("artifact_invalid", f"This upload is no model: {error}.") from error
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)
        expires_at = self._clock.unix_s() + self._settings.upload_ttl_s
        if not await self.store.complete_upload(upload.id, digest=digest, expires_at=expires_at):
            raise errors.conflict(f"Upload '{upload.id}' was deleted meanwhile.")
        await asyncio.to_thread(self._files.remove, upload.id)
        complete = await self.store.upload(upload.id, tenant_id=None)
        if complete is None:
            raise errors.conflict(f"Upload '{upload.id}' was deleted meanwhile.")
        return complete

    async def _in_thread(self, upload: Upload) -> tuple[Path, str]:
        working = asyncio.get_running_loop().run_in_executor(
            None, self._files.assemble, upload.id, upload.part_count, self._stop
        )
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # ``close`` has set the stop; the thread ends within a block.
            await asyncio.wait([working])
            working.exception()
            raise

    async def drop(self, upload: Upload) -> None:
        """Forget an upload and its parts; what it became stays as long as a version uses it.

        Raises:
            ApiError: 409 while it is being put together.
        """
        if upload.id in self._joining:
            raise errors.conflict(f"Upload '{upload.id}' is being completed; delete it when that is done.")
        await self.store.remove_upload(upload.id)
        await asyncio.to_thread(self._files.remove, upload.id)

    async def run(self) -> None:
        """Sweep what expired, until cancelled; ends what is being put together when it ends."""
        pause_s = min(SWEEP_S_MAX, self._settings.upload_ttl_s / 2)
        await asyncio.to_thread(self._files.clear_drafts)
        try:
            while True:
                with boundary("the sweep of uploads"):
                    await self.sweep()
                await asyncio.sleep(pause_s)
        finally:
            await self.close()

    async def close(self) -> None:
        """End what is being put together; its parts stay, and its client may complete it again."""
        self._stop.set()
        for task in (tasks := list(self._joining.values())):
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, ApiError, StoppedError, StoreUnavailableError):
                await task

    async def sweep(self) -> None:
        """Forget uploads whose time is over, and folders that belong to none.

        Raises:
            StoreUnavailableError: it is tried again.
        """
        now = self._clock.unix_s()
        expired = await self.store.expired_uploads(before=now)
        used = {one.artifact.digest for one in await self._versions.versions()} if expired else set()
        for upload in expired:
            if upload.id in self._joining or upload.id in self._writing:
                continue
            if upload.status is UploadStatus.COMPLETE and upload.digest in used:
                await self.store.keep_upload(upload.id, expires_at=now + self._settings.upload_ttl_s)
                continue
            _log.info("%s: forgotten, nothing came of it for %.0f s", upload.id, self._settings.upload_ttl_s)
            await self.drop(upload)
        await self._forget_gone()
        # Looked at before the store: a folder that is made meanwhile belongs to an upload that is known by then.
        folders = await asyncio.to_thread(self._files.folders)
        known = {one.id for one in await self.store.uploads() if one.status is UploadStatus.OPEN}
        for upload_id in set(folders) - known - self._joining.keys() - self._writing.keys():
            await asyncio.to_thread(self._files.remove, upload_id)

    async def _forget_gone(self) -> None:
        """Forget complete uploads whose bytes are not here any more, so that they are sent again."""
        for upload_id in await asyncio.to_thread(self._gone, await self.store.uploads()):
            _log.info("%s: forgotten, its bytes are gone", upload_id)
            await self.store.remove_upload(upload_id)

    def _gone(self, uploads: Iterable[Upload]) -> set[str]:
        """Return the ids of those that are complete and whose bytes are not here: moved to quarantine, say. Blocks."""
        return {one.id for one in uploads if one.status is UploadStatus.COMPLETE and self.files_of(one) is None}

    def files_of(self, upload: Upload) -> dict[str, Path] | None:
        """Return the files that a complete upload became by their paths in it, if they are here. Blocks."""
        parts = upload.files or (ArtifactFile("model", upload.digest, upload.size_bytes),)
        found = {part.path: self._files.whole(part.digest, part.size_bytes) for part in parts}
        files = {path: file for path, file in found.items() if file is not None}
        return files if len(files) == len(parts) else None

    async def kept_digests(self) -> frozenset[str]:
        """Return what was uploaded and may still be deployed: the garbage collection of artifacts spares it."""
        uploads = await self.store.uploads()
        complete = [one for one in uploads if one.status is UploadStatus.COMPLETE]
        return frozenset(digest for one in complete for digest in (one.digest, *(part.digest for part in one.files)))

    def _check_open(self, upload: Upload) -> None:
        if upload.status is UploadStatus.COMPLETE or upload.id in self._joining:
            raise errors.conflict(f"Upload '{upload.id}' is complete; its parts cannot change. Begin another.")


def uri_of(digest: str) -> str:
    """Return what a deployment calls uploaded content."""
    return SCHEME + digest


def _held_bytes(uploads: Sequence[Upload]) -> int:
    """Return the bytes that uploads of a tenant keep here; those of a folder stay when the uploads of its files go."""
    whole = {one.digest for one in uploads if one.status is UploadStatus.COMPLETE and not one.files}
    of_folders = {file.digest: file.size_bytes for one in uploads for file in one.files if file.digest not in whole}
    return sum(one.size_bytes for one in uploads if not one.files) + sum(of_folders.values())


def _still_to_come(upload: Upload) -> int:
    return upload.size_bytes + sum(upload.size_of(number) for number in upload.missing)


def _ranges(numbers: list[int], most: int = 10) -> str:
    """Return ``1–3, 7, 9–12`` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join(shown) + (", …" if len(runs) > most else "")


def _refusal_of(error: OSError, upload: Upload) -> ApiError:
    if is_full(error):
        return errors.upload_storage_full(needed=upload.size_bytes, free=0)
    _log.error("%s: its bytes cannot be stored: %s", upload.id, error)
    return errors.storage_unavailable()
