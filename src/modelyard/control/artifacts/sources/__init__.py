"""Where artifacts come from, one file a scheme.

This is the contract. A source lists the files of an artifact and opens ranges
of them; what is made of the bytes is the business of ``transfer.py`` and
``store.py``. Everything outbound goes through the fetcher.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec


class SourceFile(msgspec.Struct, frozen=True):
    """One file of an artifact at its source."""

    path: str
    """Where it goes in the artifact: relative and plain."""
    location: str
    """Where the source has it."""
    size_bytes: int | None = None
    """None: the source does not say."""
    digest: str = ""
    """``sha256:<hex>`` when the source promises one."""
    mark: str = ""
    """What changes when the content does: an ETag, an inode with its times; "" when there is no such thing."""
    has_ranges: bool = True
    """Whether a range of it can be had; else all of it, from the beginning."""


class Listing(msgspec.Struct, frozen=True):
    """What an artifact consists of. ``uri`` names the very same content later: a commit instead of a branch."""

    uri: str
    files: tuple[SourceFile, ...]
    is_folder: bool = False
    """Several files, for an engine that takes a folder; else it is the one file."""
    member: str | None = None
    """The one file is a wheel, and the artifact is its only member that matches this."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files, as far as they are known."""
        return sum(file.size_bytes or 0 for file in self.files)


class Source(Protocol):
    """One place that holds one artifact. Both methods raise ``ArtifactError``."""

    parallel: int
    """Ranges that may be read at once."""

    async def list(self) -> Listing:
        """Return the files, now."""
        ...

    def read(self, file: SourceFile, start: int, end: int | None) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open the bytes ``start`` to ``end`` (None: all) of a file; raises ``ChangedError`` when its mark changed."""
        ...
