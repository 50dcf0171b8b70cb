"""What the store does to its disk, each operation by itself.

Tests put a disk of theirs in its place that fails at the n-th operation; the
store must never show half a file for it. All of it blocks: call it in a thread.
"""

import errno
import os
import shutil
from pathlib import Path

from modelyard.control.artifacts.errors import ArtifactError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The file system."""

    def write(self, descriptor: int, offset: int, content: bytes) -> None:
        """Write all of ``content`` at ``offset``."""
        view = memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, descriptor: int) -> None:
        """Wait until a file is on the disk."""
        os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder its name, at once and whole."""
        old.rename(new)

    def link(self, present: Path, new: Path) -> None:
        """Give a file one more name."""
        os.link(present, new)

    def free_bytes(self, folder: Path) -> int:
        """Return how much fits the disk of ``folder``."""
        return shutil.disk_usage(folder).free


def as_error(error: OSError, what: str) -> ArtifactError:
    """Return what to tell people of a disk that fails."""
    if is_full(error):
        return ArtifactError(
            f"{what} does not fit: the disk of the data directory is full. Free some, or bound what is kept with "
            "control.artifact_cache_bytes"
        )
    return ArtifactError(f"{what} cannot be copied: {error.strerror or error}", is_transient=True)


def is_full(error: OSError) -> bool:
    """Say whether the disk has no room left."""
    return error.errno in _FULL
