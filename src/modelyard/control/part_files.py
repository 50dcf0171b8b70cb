"""The bytes of uploads on disk: parts that are whole or not there, and the file they make.

Paths come from ids and numbers of ours only. A part is written under a draft's
name, synced, and only then renamed to its number, so that whatever is killed
when, a numbered file is a whole part; of one that is sent twice the last whole
one stays. All of this blocks: it is called in threads.
"""

import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from io import BufferedWriter, RawIOBase
from pathlib import Path

from modelyard.control.artifacts.disk import Disk

BLOCK_BYTES = 1024 * 1024
SPARE_BYTES = 64 * 1024 * 1024
"""What an upload leaves of the disk, so that the database and the journal can still be written."""

_ID = re.compile(r"upl-[a-z0-9]{26}")


class PartMissingError(Exception):
    """A part that was here is gone; ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number} is gone")
        self.number = number


class StoppedError(Exception):
    """Assembling was stopped half-way."""


class PartDraft:
    """A part on its way in: ``write`` it, then ``keep`` or ``abandon`` it."""

    __slots__ = ("_file", "_hash", "_path", "_writer", "size_bytes")

    def __init__(self, path: Path, file: Path) -> None:
        self._path = path
        self._file = file
        self._hash = hashlib.sha256()
        self._writer = path.open("xb", buffering=0)
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        """The SHA-256 of what was written, in hex."""
        return self._hash.hexdigest()

    def write(self, block: bytes) -> None:
        """Append; raises ``OSError``, a full disk among others."""
        view = memoryview(block)
        while view:
            view = view[self._writer.write(view) :]
        self._hash.update(block)
        self.size_bytes += len(block)

    def keep(self) -> None:
        """Make it the part; raises ``OSError``."""
        os.fsync(self._writer.fileno())
        self._writer.close()
        self._path.rename(self._file)
        Disk().sync_folder(self._file.parent)

    def abandon(self) -> None:
        """Leave nothing behind; after ``keep`` it does nothing."""
        self._writer.close()
        self._path.unlink(missing_ok=True)


class PartFiles:
    """The folder of all uploads, inside that of the artifacts: one folder an upload, one file a part."""

    __slots__ = ("_root",)

    def __init__(self, root: Path) -> None:
        self._root = root

    def free_bytes(self) -> int:
        """Return how much an upload may still take of the disk."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return max(0, shutil.disk_usage(self._root).free - SPARE_BYTES)

    def draft(self, upload_id: str, number: int) -> PartDraft:
        """Return a new draft of a part; raises ``OSError``."""
        folder = self._folder(upload_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return PartDraft(folder / f"{number}.{secrets.token_hex(8)}.draft", folder / str(number))

    def assemble(self, upload_id: str, count: int, stop: threading.Event) -> tuple[Path, str]:
        """Put parts 1 to ``count`` together; return the file, which is still a draft, and its digest.

        The parts stay until the upload is complete, so that a cut costs no more than this.

        Raises:
            PartMissingError: a part is not there.
            StoppedError: ``stop`` was set.
            OSError: the disk is full or broken; nothing is left behind.
        """
        folder = self._folder(upload_id)
        whole = folder / "whole.draft"
        hasher = hashlib.sha256()
        try:
            with whole.open("wb") as writer:
                for number in range(1, count + 1):
                    try:
                        reader = (folder / str(number)).open("rb", buffering=0)
                    except FileNotFoundError:
                        raise PartMissingError(number) from None
                    with reader:
                        _append(reader, writer, hasher.update, stop)
                writer.flush()
                os.fsync(writer.fileno())
        except BaseException:
            whole.unlink(missing_ok=True)
            raise
        return whole, f"sha256:{hasher.hexdigest()}"

    def remove(self, upload_id: str) -> None:
        """Remove all parts of an upload."""
        shutil.rmtree(self._folder(upload_id), ignore_errors=True)

    def whole(self, digest: str, size_bytes: int) -> Path | None:
        """Return the file of this content when it is here: the artifacts' folder is the one around this."""
        file = self._root.parent / "sha256" / digest.removeprefix("sha256:")
        try:
            is_here = file.stat().st_size == size_bytes
        except OSError:
            return None
        return file if is_here else None

    def folders(self) -> list[str]:
        """Return the ids of which there is a folder."""
        if not self._root.is_dir():
            return []
        return [folder.name for folder in self._root.iterdir() if _ID.fullmatch(folder.name)]

    def clear_drafts(self) -> None:
        """Remove the drafts that a killed controller left; call before the first upload."""
        for draft in self._root.glob("upl-*/*.draft"):
            draft.unlink(missing_ok=True)

    def _folder(self, upload_id: str) -> Path:
        assert _ID.fullmatch(upload_id), "an id that we made"
        return self._root / upload_id


def _append(reader: RawIOBase, writer: BufferedWriter, hashed: Callable[[bytes], None], stop: threading.Event) -> None:
    while block := reader.read(BLOCK_BYTES):
        if stop.is_set():
            raise StoppedError
        hashed(block)
        writer.write(block)
