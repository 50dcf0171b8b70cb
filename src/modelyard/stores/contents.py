"""``FileContents`` on the local disk: one file an id, whole or not there.

Paths come from ids of ours only. Content is written as a draft in the same
file system, synced, and only then renamed to its id, so that whatever is
killed when, a file with an id's name is whole. A writer holds a lock on its
draft for as long as it lives: any process may remove the drafts that nobody
holds, at any time, without taking another one's from under it.

Everything blocks, so all of it runs in threads.
"""

import asyncio
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from modelyard.domain.files import ID_PREFIX, is_file_id
from modelyard.stores.files import ContentMissingError

T = TypeVar("T")

BLOCK_BYTES = 1024 * 1024
"""What is read at once."""
SPARE_BYTES = 64 * 1024 * 1024
"""What files leave of the disk, so that the database and the journal can still be written."""

_DRAFTS = "drafts"


class DiskContents:
    """The folder of all contents: ``<two characters>/<id>``, and ``drafts``."""

    __slots__ = ("_root",)

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"<DiskContents {self._root}>"

    def path_of(self, file_id: str) -> Path:
        """Return where the content is. Fan-out keeps folders small where there are hundreds of thousands."""
        assert is_file_id(file_id), "an id that we made"
        return self._root / file_id[len(ID_PREFIX) :][:2] / file_id

    async def create(self, file_id: str) -> "DiskWriter":
        """Begin the content of a new file; raises ``OSError``."""
        return await _begun(lambda: self._create(file_id), DiskWriter.abandon_now)

    def _create(self, file_id: str) -> "DiskWriter":
        drafts = self._root / _DRAFTS
        drafts.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DiskWriter(drafts / f"{file_id}.{secrets.token_hex(4)}", self.path_of(file_id))

    async def adopt(self, file_id: str, draft: Path) -> None:
        """Make a whole file of the same file system the content; raises ``OSError``."""
        await asyncio.to_thread(self._adopt, draft, self.path_of(file_id))

    @staticmethod
    def _adopt(draft: Path, place: Path) -> None:
        descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _put(draft, place)

    async def read(self, file_id: str, *, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield ``length`` bytes (all) from ``start`` on, in blocks; a deletion in the middle changes nothing."""
        try:
            descriptor = await _begun(lambda: os.open(self.path_of(file_id), os.O_RDONLY | os.O_CLOEXEC), os.close)
        except FileNotFoundError:
            raise ContentMissingError(f"the content of {file_id} is gone") from None
        try:
            while length is None or length > 0:
                wanted = BLOCK_BYTES if length is None else min(BLOCK_BYTES, length)
                block = await asyncio.to_thread(os.pread, descriptor, wanted, start)
                if not block:
                    return
                start += len(block)
                length = None if length is None else length - len(block)
                yield block
        finally:
            os.close(descriptor)

    async def remove(self, file_id: str) -> None:
        """Remove the content, if there is any."""
        await asyncio.to_thread(self.path_of(file_id).unlink, missing_ok=True)

    async def free_bytes(self) -> int:
        """Return how much may still be written."""
        return await asyncio.to_thread(self._free_bytes)

    def _free_bytes(self) -> int:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return max(0, shutil.disk_usage(self._root).free - SPARE_BYTES)

    async def clear_drafts(self) -> int:
        """Remove the drafts that no living writer holds; return how many."""
        return await asyncio.to_thread(self._clear_drafts)

    def _clear_drafts(self) -> int:
        return sum(_remove_unheld(draft) for draft in (self._root / _DRAFTS).glob("file-*"))

    async def settled_ids(self, *, before: float) -> list[str]:
        """Return the ids of all content that was kept or adopted before then."""
        return await asyncio.to_thread(self._settled_ids, before)

    def _settled_ids(self, before: float) -> list[str]:
        found: list[str] = []
        for place in self._root.glob("??/file-*"):
            try:
                is_settled = place.stat().st_mtime < before
            except FileNotFoundError:
                continue
            if is_settled and is_file_id(place.name):
                found.append(place.name)
        return found

    async def remove_settled(self, file_id: str, *, before: float) -> None:
        """Remove content that was kept or adopted before then."""
        await asyncio.to_thread(self._remove_settled, self.path_of(file_id), before)

    @staticmethod
    def _remove_settled(place: Path, before: float) -> None:
        with suppress(FileNotFoundError):
            if place.stat().st_mtime < before:
                place.unlink()


class DiskWriter:
    """Content on its way in.

    The lock is for a caller that is cancelled: its thread goes on, and must neither write to a descriptor that was
    closed and given to somebody else, nor keep what was abandoned.
    """

    __slots__ = ("_descriptor", "_draft", "_hash", "_is_over", "_lock", "_place", "size_bytes")

    def __init__(self, draft: Path, place: Path) -> None:
        self._draft = draft
        self._place = place
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()
        self._is_over = False
        self.size_bytes = 0
        self._descriptor = _open_held(draft)

    @property
    def digest(self) -> str:
        """Return ``sha256:<hex>`` of what was written."""
        return f"sha256:{self._hash.hexdigest()}"

    async def write(self, block: bytes | bytearray | memoryview) -> None:
        """Append; raises ``OSError``."""
        await asyncio.to_thread(self._write, memoryview(block))

    def _write(self, view: memoryview) -> None:
        with self._lock:
            assert not self._is_over, "written before it is kept or abandoned"
            self._hash.update(view)
            self.size_bytes += len(view)
            while view:
                view = view[os.write(self._descriptor, view) :]

    async def keep(self) -> None:
        """Put it on the disk, then give it its name; raises ``OSError``."""
        await asyncio.to_thread(self._keep)

    def _keep(self) -> None:
        with self._lock:
            assert not self._is_over, "kept once"
            os.fsync(self._descriptor)
            _put(self._draft, self._place)
            self._end()

    async def abandon(self) -> None:
        """Leave nothing behind; after ``keep`` it does nothing."""
        await asyncio.to_thread(self.abandon_now)

    def abandon_now(self) -> None:
        """Do so in this thread."""
        with self._lock:
            if not self._is_over:
                self._draft.unlink(missing_ok=True)
                self._end()

    def _end(self) -> None:
        self._is_over = True
        os.close(self._descriptor)


async def _begun(begin: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Return what ``begin`` makes in a thread; of a caller that is cancelled meanwhile it is undone."""
    working = asyncio.get_running_loop().run_in_executor(None, begin)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
        raise


def _open_held(draft: Path) -> int:
    """Return a descriptor of a new draft that shows that its writer lives."""
    while True:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # somebody cleared it between the two lines


def _put(draft: Path, place: Path) -> None:
    """Give a synced draft its name, and wait until that is on the disk.

    Its time becomes that of now, whenever it was written: what has just been put there may still get its row.
    """
    os.utime(draft)
    is_first = not place.parent.exists()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft.rename(place)
    _sync_folder(place.parent)
    if is_first:
        _sync_folder(place.parent.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unheld(draft: Path) -> bool:
    try:
        descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        draft.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)
