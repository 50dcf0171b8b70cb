"""Uploads: artifacts that come in by parts, so that a lost connection costs one part and not forty gigabytes."""

from enum import StrEnum

import msgspec

from modelyard.domain.catalog import ArtifactFile

PART_BYTES_MAX = 64 * 1024 * 1024
"""Largest part; also what the gateway passes on of one request to a path of parts."""
PART_BYTES_MIN = 64 * 1024
"""Smallest part of an upload of several."""
PART_BYTES_DEFAULT = 16 * 1024 * 1024
PARTS_MAX = 10_000
UPLOADS_PATH = "/v1/uploads/artifacts"
FOLDERS_PATH = "/v1/uploads/folders"
SCHEME = "upload:"
"""An uploaded artifact is ``upload:sha256:<hex>``."""


class UploadStatus(StrEnum):
    """Where an upload is."""

    OPEN = "open"
    COMPLETE = "complete"


class Upload(msgspec.Struct, frozen=True):
    """One upload of a tenant. ``digest`` is what was announced (or empty), and once it is complete what it has.

    ``parts`` are the numbers, from 1, of those that are here whole. A complete one says that its tenant had the bytes,
    which is why it may deploy them.
    """

    id: str
    tenant_id: str
    name: str
    size_bytes: int
    part_bytes: int
    created_at: float
    expires_at: float
    digest: str = ""
    parts: tuple[int, ...] = ()
    status: UploadStatus = UploadStatus.OPEN
    files: tuple[ArtifactFile, ...] = ()
    """Of a folder: the uploads that it is made of; its digest is that of their list."""

    @property
    def part_count(self) -> int:
        """Return how many parts make it whole."""
        return -(-self.size_bytes // self.part_bytes)

    @property
    def missing(self) -> list[int]:
        """Return the numbers of the parts that it still needs."""
        if self.status is UploadStatus.COMPLETE:
            return []
        return sorted(set(range(1, self.part_count + 1)) - set(self.parts))

    def size_of(self, number: int) -> int:
        """Return the bytes of a part; the last one has the rest."""
        return min(self.part_bytes, self.size_bytes - (number - 1) * self.part_bytes)


def part_bytes_for(size_bytes: int) -> int:
    """Return the size of parts for an upload whose client does not choose one."""
    mebibyte = 1024 * 1024
    least = -(-size_bytes // PARTS_MAX)
    return max(PART_BYTES_DEFAULT, -(-least // mebibyte) * mebibyte)


def upload_digest(reference: str) -> str:
    """Return the digest that ``upload:<digest>`` names, or "" for another kind of reference."""
    return reference.removeprefix(SCHEME) if reference.startswith(SCHEME) else ""
