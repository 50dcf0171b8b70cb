"""What may go again: artifacts that nobody names, halves of fetches, files that were found corrupt.

Nothing goes before it was left alone for ``artifact_ttl_s``: a fetch that
just ended is named a moment later, an upload is deployed the next morning.
With ``artifact_cache_bytes`` what nothing runs and what can be fetched again
goes, too, unused longest first.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.artifacts.contents import Contents
from modelyard.control.artifacts.sources.schemes import can_be_fetched_again
from modelyard.control.artifacts.threads import in_thread
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.stores import ControlStore, StoreUnavailableError

INTERVAL_MAX_S = 3600.0
SHARE_OF_TTL = 0.25
RESIDENCE_S = 600.0
"""Time that what was fetched or used stays, however full it is: else it would be fetched, and go, in turns."""

_ENDED = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})
_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """What a sweep must know of the artifacts that are named: digests of files, and of folders."""

    named: frozenset[str]
    needed: frozenset[str]
    """Of them, what runs, or cannot be fetched again."""


class Sweep:
    """The loop that removes."""

    def __init__(
        self,
        contents: Contents,
        store: ControlStore,
        settings: ControlConfig,
        clock: Clock,
        *,
        spared: Callable[[], Awaitable[frozenset[str]]] | None = None,
    ) -> None:
        self._contents = contents
        self._store = store
        self._ttl_s = settings.artifact_ttl_s
        self._bytes_max = settings.artifact_cache_bytes
        self._clock = clock
        self._spared = spared
        """What else must stay: uploads that may still be deployed."""

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            try:
                await self.sweep()
            except StoreUnavailableError as error:
                _log.warning("artifacts are not swept, the store cannot be used: %s", error)
            except OSError as error:
                _log.warning("artifacts are not swept: %s", error)
            await asyncio.sleep(min(max(self._ttl_s * SHARE_OF_TTL, 0.05), INTERVAL_MAX_S))

    async def sweep(self) -> list[Path]:
        """Remove what may go now, and return it."""
        kept = kept_of(await self._store.versions(), await self._store.replicas())
        if self._spared is not None:
            spared = await self._spared()
            kept = Kept(kept.named | spared, kept.needed | spared)
        return await in_thread(self._sweep, kept)

    def _sweep(self, kept: Kept) -> list[Path]:
        old_s = self._clock.unix_s() - self._ttl_s
        gone = list(self._remove(self._left_alone(("incoming", "quarantine"), frozenset(), old_s)))
        gone += self._remove(self._left_alone(("trees", "sha256"), kept.named, old_s))
        if self._bytes_max:
            gone += self._remove(self._too_much(kept))
        if gone:
            _log.info("removed %d artifacts and leftovers that were not needed any more", len(gone))
        return gone

    def _left_alone(self, folders: Sequence[str], named: Collection[str], old_s: float) -> Iterable[Path]:
        for folder in folders:
            for entry in _entries(self._contents.root / folder):
                if entry.name.partition(".")[0] in self._contents.busy:
                    continue
                if f"sha256:{entry.name}" not in named and _touched_s(Path(entry)) < old_s:
                    yield Path(entry)

    def _too_much(self, kept: Kept) -> Iterable[Path]:
        """Yield what to remove to get below the limit, folders before the files that they link to."""
        files = [(entry.stat(), Path(entry)) for entry in _entries(self._contents.root / "sha256")]
        fresh_s = self._clock.unix_s() - min(RESIDENCE_S, self._ttl_s)
        total = sum(found.st_size for found, _ in files)
        victims = set()
        for found, file in sorted(files, key=lambda pair: pair[0].st_atime):
            if total <= self._bytes_max:
                break
            if f"sha256:{file.name}" not in kept.needed and found.st_atime < fresh_s:
                victims.add(found.st_ino)
                total -= found.st_size
        if not victims:
            return
        for tree in _entries(self._contents.root / "trees"):
            inodes = {(Path(at) / name).stat().st_ino for at, _, names in os.walk(tree) for name in names}
            if inodes & victims and f"sha256:{tree.name}" not in kept.needed:
                yield Path(tree)
        yield from (file for found, file in files if found.st_ino in victims)

    def _remove(self, paths: Iterable[Path]) -> Iterable[Path]:
        for path in sorted(paths, key=lambda path: path.suffix != ".json"):  # a note never outlives its draft
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            yield path


def kept_of(versions: Iterable[ModelVersion], replicas: Iterable[Replica]) -> Kept:
    """Return what versions name, and what of it must stay."""
    living = [replica for replica in replicas if replica.state not in _ENDED]
    running = {replica.version_id for replica in living}
    running |= {seat.version_id for replica in living for seat in replica.guests}
    named: set[str] = set()
    needed: set[str] = set()
    for version in versions:
        digests = _digests(version.artifact)
        named |= digests
        if version.id in running or not can_be_fetched_again(version.artifact.uri):
            needed |= digests
    return Kept(frozenset(named), frozenset(needed))


def _digests(artifact: Artifact) -> set[str]:
    return {artifact.digest, *(file.digest for file in artifact.files)} - {""}


def _touched_s(path: Path) -> float:
    """Return when a file was last made, named or used."""
    try:
        found = path.stat()
    except OSError:
        return float("inf")  # another took it
    return max(found.st_mtime, found.st_ctime, found.st_atime)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []
