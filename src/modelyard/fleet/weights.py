"""A node's own copies of artifacts: next to the engines that load them, by digest, bounded in bytes.

The artifact store may be far away or slow; what a node loaded once it loads
again from its own disk. A copy is hashed on its way and gets its name last,
so that whatever has a digest for a name is whole. Those in use are pinned;
of the others the one unused longest goes when room is needed.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from modelyard.clock import Clock
from modelyard.domain.catalog import Artifact

CHUNK_BYTES = 4 * 1024 * 1024

Progressed = Callable[[int, int], None]
"""Called from a thread with the bytes copied and the bytes of the whole."""

_POOL = ThreadPoolExecutor(4, thread_name_prefix="weights")
"""Not the loop's own: copies take minutes, and what waits for a thread there takes milliseconds."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class WeightsError(Exception):
    """Why a node cannot have an artifact, in our words."""


class WeightCache:
    """The artifacts under ``root``: a file or a folder each, named by its digest."""

    def __init__(self, root: Path, limit_bytes: int, clock: Clock) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes by digest, unused longest first."""
        self._pins: Counter[str] = Counter()
        self._coming: dict[str, int] = {}
        """Bytes that copies under way have been given, by digest."""
        self._waiting: dict[str, list[Progressed]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._open()

    def __repr__(self) -> str:
        return (
            f"<WeightCache {len(self._sizes)} artifacts, {self.used_bytes()} of {self._limit_bytes} bytes, "
            f"{len(self._pins)} pinned>"
        )

    def _open(self) -> None:
        """Take stock of what an earlier controller copied; halves go."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for entry in self._root.iterdir():
            if _DIGEST.fullmatch(f"sha256:{entry.name}"):
                found.append((entry.stat().st_atime, entry))
            else:
                _remove(entry)
        for _, entry in sorted(found):
            self._sizes[f"sha256:{entry.name}"] = _size_of(entry)

    def digests(self) -> frozenset[str]:
        """Return the artifacts that are here, whole."""
        return frozenset(self._sizes)

    def used_bytes(self) -> int:
        """Return the bytes of what is here or under way."""
        return sum(self._sizes.values()) + sum(self._coming.values())

    def path(self, digest: str) -> Path | None:
        """Return where an artifact is, None when it is not here; counts as a use."""
        if digest not in self._sizes:
            return None
        place = self._place(digest)
        now_ns = int(self._clock.unix_s() * 1e9)
        try:
            os.utime(place, ns=(now_ns, place.stat().st_mtime_ns))  # so that the next controller knows, too
        except OSError:  # somebody took it away
            del self._sizes[digest]
            return None
        self._sizes.move_to_end(digest)
        return place

    async def get(self, artifact: Artifact, source: Path, progressed: Progressed = lambda done, whole: None) -> Path:
        """Return the node's copy of ``artifact``; copies it from ``source`` if need be. All who ask share one copy.

        The digest must be pinned, or a neighbour's copy may take its room again before it is used.

        Raises:
            WeightsError: it does not fit beside what is pinned, cannot be read, or is not what its digest says.
        """
        self._waiting.setdefault(artifact.digest, []).append(progressed)
        try:
            async with self._alone(artifact.digest):
                if (place := self.path(artifact.digest)) is not None:
                    return place
                return await self._copied(artifact, source)
        finally:
            self._waiting[artifact.digest].remove(progressed)
            if not self._waiting[artifact.digest]:
                del self._waiting[artifact.digest]

    @contextmanager
    def pinned(self, digest: str) -> Iterator[None]:
        """Keep an artifact here while something uses it."""
        self.pin(digest)
        try:
            yield
        finally:
            self.unpin(digest)

    def pin(self, digest: str) -> None:
        """Keep an artifact here until it is unpinned as often."""
        self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        """Undo one ``pin``."""
        assert self._pins[digest] > 0, "unpinned more often than pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def evict(self, digest: str) -> bool:
        """Remove an artifact unless it is pinned; say whether it went."""
        if digest not in self._sizes or self._pins[digest]:
            return False
        del self._sizes[digest]
        _remove(self._place(digest))
        return True

    # --- copying ------------------------------------------------------------------------------

    async def _copied(self, artifact: Artifact, source: Path) -> Path:
        digest = artifact.digest
        self._make_room(artifact)
        self._coming[digest] = artifact.size_bytes
        stop = threading.Event()
        draft = self._root / f"draft-{self._place(digest).name}"
        copying = asyncio.get_running_loop().run_in_executor(
            _POOL, self._copy, artifact, source, draft, self._place(digest), stop
        )
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            stop.set()
            while not copying.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            copying.exception()
            raise
        except OSError as error:
            raise WeightsError(f"the weights cannot be copied to the node: {error.strerror or error}") from error
        finally:
            del self._coming[digest]
        self._sizes[digest] = artifact.size_bytes
        return self._place(digest)

    def _make_room(self, artifact: Artifact) -> None:
        need = artifact.size_bytes
        evictable = [digest for digest in self._sizes if digest not in self._pins]
        free = self._limit_bytes - self.used_bytes()
        if need > free + sum(self._sizes[digest] for digest in evictable):
            raise WeightsError(
                f"the weights need {need:,} bytes of the node's cache of {self._limit_bytes:,}, of which "
                f"{self._limit_bytes - free - sum(self._sizes[digest] for digest in evictable):,} are in use"
            )
        for digest in evictable:
            if self._limit_bytes - self.used_bytes() >= need:
                return
            self.evict(digest)

    def _copy(self, artifact: Artifact, source: Path, draft: Path, place: Path, stop: threading.Event) -> None:
        """Copy into a draft, hash on the way, rename last. Blocks."""
        _remove(draft)
        done = 0

        def got(count: int) -> None:
            nonlocal done
            if stop.is_set():
                raise WeightsError("the copy was stopped")
            done += count
            for progressed in tuple(self._waiting.get(artifact.digest, ())):
                progressed(done, artifact.size_bytes)

        try:
            if artifact.files:
                for file in artifact.files:
                    target = draft / file.path
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _copy_file(source / file.path, target, file.digest, got)
            else:
                _copy_file(source, draft, artifact.digest, got)
            if done != artifact.size_bytes:
                raise WeightsError(f"artifact_corrupt: {source} has {done} bytes, expected were {artifact.size_bytes}")
            _sync_folders(draft)
            draft.rename(place)
            _sync(place.parent)
        finally:
            _remove(draft)

    def _place(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise WeightsError(f"'{digest[:80]}' is no SHA-256 digest")
        return self._root / match[1]

    @asynccontextmanager
    async def _alone(self, digest: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if len(self._waiting.get(digest, ())) <= 1:
                self._locks.pop(digest, None)


def _copy_file(source: Path, target: Path, digest: str, got: Callable[[int], None]) -> None:
    hasher = hashlib.sha256()
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        while block := reader.read(CHUNK_BYTES):
            hasher.update(block)
            writer.write(block)
            got(len(block))
        os.fsync(writer.fileno())
    if f"sha256:{hasher.hexdigest()}" != digest:
        raise WeightsError(f"artifact_corrupt: {source} is not what its digest {digest} says")
    target.chmod(0o400)


def _sync_folders(draft: Path) -> None:
    for folder, _, _ in os.walk(draft):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of(entry: Path) -> int:
    if entry.is_file():
        return entry.stat().st_size
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
