"""Content by its digest on a disk: ``sha256/<hex>`` files, ``trees/<hex>`` folders of hard links to them.

A name appears only when what it stands for is whole, checked and on the disk,
and then by a rename. A file is used only if it was hashed since this process
began, and since then has the same inode, size and time of change. All of it
blocks: call it in a thread, but for ``path``.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from modelyard.control.artifacts.disk import Disk
from modelyard.control.artifacts.errors import ArtifactError, CorruptError
from modelyard.control.artifacts.names import is_plain
from modelyard.domain.catalog import Artifact, ArtifactFile

CHUNK_BYTES = 4 * 1024 * 1024
USED_STEP_S = 60.0
"""Times of use are kept this roughly: each costs a write."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_log = logging.getLogger(__name__)

Mark = tuple[int, int, int]
"""Inode, size and time of change of a file."""
Hashed = Callable[[int], None]
"""Called with the bytes that have been hashed."""


def hex_of(digest: str) -> str:
    """Return the hexadecimal part of a digest, which is safe in a path.

    Raises:
        ArtifactError: it is none.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ArtifactError(f"'{digest[:80]}' is no SHA-256 digest")
    return match[1]


def manifest_digest(files: tuple[ArtifactFile, ...]) -> str:
    """Return the digest of an artifact of several files: that of the JSON of them, in order of their paths."""
    return f"sha256:{hashlib.sha256(msgspec.json.encode(sorted(files, key=lambda file: file.path))).hexdigest()}"


class Contents:
    """What is kept under ``root``."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self._disk = disk
        self._marks: dict[str, Mark] = {}
        """Of files that were hashed since this process began, by digest."""
        self.busy: set[str] = set()
        """Names of drafts that a fetch is at."""

    def folder(self, name: str) -> Path:
        """Return a folder of the store; makes it."""
        folder = self.root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def file(self, digest: str) -> Path:
        """Return where the content of ``digest`` is or would be."""
        return self.root / "sha256" / hex_of(digest)

    def tree(self, digest: str) -> Path:
        """Return where the folder of the artifact with ``digest`` is or would be."""
        return self.root / "trees" / hex_of(digest)

    def path(self, artifact: Artifact) -> Path | None:
        """Return the file or folder of ``artifact`` when it is whole, was hashed, and has not been touched since."""
        try:
            for digest, size in _parts(artifact):
                mark = _mark_of(self.file(digest))
                if mark[1] != size or self._marks.get(digest) != mark:
                    return None
            if not artifact.files:
                return self.file(artifact.digest)
            tree = self.tree(artifact.digest)
            for part in artifact.files:
                if (tree / part.path).stat().st_ino != self._marks[part.digest][0]:
                    return None
        except (OSError, ArtifactError):
            return None
        return tree

    def has(self, artifact: Artifact) -> bool:
        """Say whether all of ``artifact`` is here by name and size, hashed or not."""
        try:
            return bool(artifact.digest) and all(
                self.file(digest).stat().st_size == size for digest, size in _parts(artifact)
            )
        except (OSError, ArtifactError):
            return False

    def verify(self, artifact: Artifact, hashed: Hashed, is_stopped: Callable[[], bool]) -> bool:
        """Hash what was not hashed yet, or was touched; a file that is not what its name says is moved aside.

        Raises:
            OSError: the disk fails.
        """
        if artifact.files and manifest_digest(artifact.files) != artifact.digest:
            raise CorruptError("the list of the artifact's files is not the one it was stored with")
        is_good, done = True, 0
        for digest, size in _parts(artifact):
            is_good &= self._verify_file(digest, size, lambda got, base=done: hashed(base + got), is_stopped)  # type: ignore[misc]
            done += size
        if is_good and artifact.files:
            self.plant(artifact)
        return is_good

    def _verify_file(self, digest: str, size: int, hashed: Hashed, is_stopped: Callable[[], bool]) -> bool:
        file = self.file(digest)
        mark = _mark_of(file)
        if self._marks.get(digest) == mark:
            return True
        found = hash_file(file, hashed, is_stopped)
        if _mark_or_none(file) != mark:
            return False  # another fetch put a new file there meanwhile, which is not to blame
        if found != digest or mark[1] != size:
            self.quarantine(digest)
            return False
        self._marks[digest] = mark
        return True

    def quarantine(self, digest: str) -> None:
        """Move what is not what its name says out of the way; it goes with the other leftovers."""
        self._marks.pop(digest, None)
        file = self.file(digest)
        _log.error("the artifact %s is corrupt on the disk; it is moved to quarantine", digest)
        with suppress(FileNotFoundError):
            self._disk.rename(file, _free_name(self.folder("quarantine") / file.name))

    def publish(self, draft: Path, digest: str) -> None:
        """Give a draft, whose content was hashed and is on the disk, its name.

        Raises:
            OSError: the disk fails; nothing has the name then, or all of it.
        """
        os.utime(draft)  # fetched now, whatever its source says
        draft.chmod(0o400)
        final = self.file(digest)
        self.folder("sha256")
        if digest in self._marks and self._marks[digest] == _mark_or_none(final):
            draft.unlink()  # it is here already, and links to it may be in use
            return
        self._disk.rename(draft, final)
        self._disk.sync_folder(final.parent)
        self._marks[digest] = _mark_of(final)

    def plant(self, artifact: Artifact, check: Callable[[Path], None] = lambda _: None) -> None:
        """Make the folder of ``artifact`` out of links to its files, look at it, and give it its name last.

        Raises:
            OSError: the disk fails.
        """
        tree = self.tree(artifact.digest)
        if _is_tree_of(tree, artifact, self._marks):
            check(tree)
            return
        for left in self.folder("incoming").glob(f"tree-{tree.name}.*"):
            if not left.name.startswith(f"tree-{tree.name}.{os.getpid()}."):  # of a controller that was killed here
                shutil.rmtree(left, ignore_errors=True)
        draft = _free_name(self.folder("incoming") / f"tree-{tree.name}.{os.getpid()}")
        try:
            for part in artifact.files:
                if not is_plain(part.path):
                    raise ArtifactError(f"'{part.path[:128]}' is no plain path")
                place = draft / part.path
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._disk.link(self.file(part.digest), place)
            check(draft)
            for folder in sorted({draft, *(draft.joinpath(part.path).parent for part in artifact.files)}):
                self._disk.sync_folder(folder)
            self.folder("trees")
            if tree.exists():  # of files that were replaced since
                self._disk.rename(tree, _free_name(self.folder("quarantine") / tree.name))
            self._disk.rename(draft, tree)
            self._disk.sync_folder(tree.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def note_use(self, artifact: Artifact, now_s: float) -> None:
        """Remember that an artifact is used now, for what decides which goes first."""
        for digest, _ in _parts(artifact):
            with suppress(OSError, ArtifactError):
                file = self.file(digest)
                found = file.stat()
                if now_s - found.st_atime > USED_STEP_S:
                    os.utime(file, ns=(int(now_s * 1e9), found.st_mtime_ns))


def hash_file(file: Path, hashed: Hashed, is_stopped: Callable[[], bool]) -> str:
    """Return the digest of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    hasher, done = hashlib.sha256(), 0
    with file.open("rb", buffering=0) as reader:
        while block := reader.read(CHUNK_BYTES):
            if is_stopped():
                raise ArtifactError("the check was stopped", is_transient=True)
            hasher.update(block)
            done += len(block)
            hashed(done)
    return f"sha256:{hasher.hexdigest()}"


def _parts(artifact: Artifact) -> list[tuple[str, int]]:
    """Return digest and size of the files of ``artifact``."""
    if artifact.files:
        return [(file.digest, file.size_bytes) for file in artifact.files]
    return [(artifact.digest, artifact.size_bytes)]


def _mark_of(file: Path) -> Mark:
    found = file.stat(follow_symlinks=False)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _mark_or_none(file: Path) -> Mark | None:
    try:
        return _mark_of(file)
    except OSError:
        return None


def _is_tree_of(tree: Path, artifact: Artifact, marks: Mapping[str, Mark]) -> bool:
    try:
        return all((tree / part.path).stat().st_ino == marks[part.digest][0] for part in artifact.files)
    except (OSError, KeyError):
        return False


def _free_name(wanted: Path) -> Path:
    number = 0
    while (name := wanted.with_name(f"{wanted.name}.{number}")).exists():
        number += 1
    return name
