"""A fetch in a process of its own that is killed, as by ``kill -9``, at the n-th thing it does to its disk."""

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

from modelyard.config import FetchConfig
from modelyard.control.artifacts.disk import Disk
from modelyard.domain.catalog import Artifact
from tests.support.artifacts import accept, ignore, open_store

DONE = 0
WITHIN_S = 60.0


class DeadlyDisk(Disk):
    """Kills its own process at operation ``kill_at``; a write is half done by then."""

    def __init__(self, kill_at: int) -> None:
        self._left = kill_at

    def _step(self) -> bool:
        self._left -= 1
        return self._left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, offset: int, content: bytes) -> None:
        """Write, or half of it and die."""
        if self._step():
            super().write(descriptor, offset, content[: len(content) // 2])
            self._die()
        super().write(descriptor, offset, content)

    def sync(self, descriptor: int) -> None:
        """Die before or after it, in turns."""
        if self._step():
            self._die()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Die right after it: before is after the sync."""
        super().rename(old, new)
        if self._step():
            self._die()

    def link(self, present: Path, new: Path) -> None:
        """Die right after it."""
        super().link(present, new)
        if self._step():
            self._die()


def fetch_and_die(root: str, uri: str, part_bytes: int, kill_at: int) -> None:
    """Fetch; the process ends with 0 if it was never killed."""
    store = open_store(Path(root), FetchConfig(part_bytes=part_bytes), disk=DeadlyDisk(kill_at))
    asyncio.run(store.fetch(Artifact(uri), accept, ignore))


def killed_at(root: Path, uri: str, *, part_bytes: int, kill_at: int) -> int:
    """Run ``fetch_and_die`` and return the exit code of its process: ``-9`` if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.killing"])
    process = context.Process(target=fetch_and_die, args=(str(root), uri, part_bytes, kill_at))
    process.start()
    process.join(WITHIN_S)
    assert process.exitcode is not None, "the fetch hangs"
    return process.exitcode
