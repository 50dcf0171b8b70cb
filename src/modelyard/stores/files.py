"""The contracts of files: ``FileStore`` knows what there is, ``FileContents`` has the bytes.

The order of both is what makes a crash harmless: content is whole and on the
disk before its row is added, and a row is removed before its content. What a
killed process leaves is a draft or content without a row; both are swept.
"""

from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from modelyard.domain.files import File, FilePurpose

Order = Literal["asc", "desc"]


class ContentMissingError(Exception):
    """There is no content of this file: it was deleted meanwhile."""


class Held(NamedTuple):
    """What a tenant has."""

    files: int
    size_bytes: int


class FileStore(Protocol):
    """Which files there are, and whose. All methods raise ``StoreUnavailableError``.

    Expired files are there until they are removed: ``File.is_expired`` says that one must not be shown.
    """

    async def add_file(self, file: File) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id, or an idempotency key that its API key has used."""
        ...

    async def file(self, file_id: str, *, tenant_id: str | None) -> File | None:
        """Return the file of this id (of this tenant)."""
        ...

    async def file_of_key(self, tenant_id: str, key_id: str, idempotency_key: str) -> File | None:
        """Return the file that this API key made with this idempotency key."""
        ...

    async def release_key(self, file_id: str) -> None:
        """Let the idempotency key of a file be used again."""
        ...

    async def files(
        self,
        *,
        tenant_id: str | None,
        now: float,
        limit: int,
        purpose: FilePurpose | None = None,
        after: File | None = None,
        order: Order = "desc",
    ) -> list[File]:
        """Return those that have not expired (of this tenant) by their creation, from behind ``after`` on."""
        ...

    async def remove_file(self, file_id: str, *, tenant_id: str | None) -> bool:
        """Forget a file (of this tenant); say whether there was one."""
        ...

    async def expired_files(self, *, before: float) -> list[File]:
        """Return those whose time ended by then, the longest ago first; at most some hundred at once."""
        ...

    async def held_files(self, tenant_id: str) -> Held:
        """Return how many files a tenant has, and their bytes; expired ones too, until they are removed."""
        ...

    async def known_files(self, file_ids: Collection[str]) -> set[str]:
        """Return those of the ids that there are rows of."""
        ...


class ContentWriter(Protocol):
    """Content on its way in: ``write`` it, then ``keep`` it; ``abandon`` in a ``finally``."""

    @property
    def digest(self) -> str:
        """Return ``sha256:<hex>`` of what was written."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return how much was written."""
        ...

    async def write(self, block: bytes | bytearray | memoryview) -> None:
        """Append; raises ``OSError``, a full disk among others. One thread call each: give it large blocks."""
        ...

    async def keep(self) -> None:
        """Put it on the disk, then give it its name; raises ``OSError``."""
        ...

    async def abandon(self) -> None:
        """Leave nothing behind; after ``keep`` it does nothing."""
        ...


class FileContents(Protocol):
    """The bytes of files by their ids. Any process of this data directory may use it at the same time."""

    def path_of(self, file_id: str) -> Path:
        """Return where the content is, for whoever reads it by other means; it may be gone at any moment.

        Open it once and keep the descriptor, or link it, to read what is deleted meanwhile.
        """
        ...

    async def create(self, file_id: str) -> ContentWriter:
        """Begin the content of a new file; raises ``OSError``."""
        ...

    async def adopt(self, file_id: str, draft: Path) -> None:
        """Make a whole file of the same file system the content: synced, then renamed; raises ``OSError``."""
        ...

    def read(self, file_id: str, *, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield ``length`` bytes (all) from ``start`` on, in blocks.

        Raises:
            ContentMissingError: before the first block.
            OSError: the disk is broken.
        """
        ...

    async def remove(self, file_id: str) -> None:
        """Remove the content, if there is any."""
        ...

    async def free_bytes(self) -> int:
        """Return how much may still be written; what the database and the journal need is left out."""
        ...

    async def clear_drafts(self) -> int:
        """Remove the drafts of writers that died; return how many."""
        ...

    async def settled_ids(self, *, before: float) -> list[str]:
        """Return the ids of all content that was kept or adopted before then: what has no row by now has no owner."""
        ...

    async def remove_settled(self, file_id: str, *, before: float) -> None:
        """Remove content that was kept or adopted before then; what took its place since stays."""
        ...
