"""Files of tenants: what was sent to ``/v1/files``, and what batches made."""

import re
from enum import StrEnum

import msgspec

FILES_PATH = "/v1/files"
ID_PREFIX = "file-"
BATCH_FILE_ENDING = ".jsonl"
FORM_BYTES_MAX = 64 * 1024
"""What a form may take around its file, at the gateway and behind it."""
EXPIRES_AFTER_S_MIN = 3_600
EXPIRES_AFTER_S_MAX = 2_592_000

_ID = re.compile(r"file-[a-km-np-z2-9]{26}")


class FilePurpose(StrEnum):
    """What a file is for. The last one is what batches make, and cannot be uploaded."""

    ASSISTANTS = "assistants"
    BATCH = "batch"
    FINE_TUNE = "fine-tune"
    VISION = "vision"
    USER_DATA = "user_data"
    EVALS = "evals"
    BATCH_OUTPUT = "batch_output"


UPLOADABLE = tuple(purpose for purpose in FilePurpose if purpose is not FilePurpose.BATCH_OUTPUT)
"""What a client may say that its file is for."""


class FileStatus(StrEnum):
    """Whether a file can be used; OpenAI's words."""

    UPLOADED = "uploaded"
    PROCESSED = "processed"
    ERROR = "error"


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose content is here whole. Times are unix seconds; ``digest`` is ``sha256:<hex>`` of the content."""

    id: str
    tenant_id: str
    key_id: str
    """The API key that sent it, or that made the batch whose output it is."""
    filename: str
    purpose: FilePurpose
    bytes: int
    created_at: float
    expires_at: float | None = None
    """When it stops to exist; None: when somebody deletes it."""
    status: FileStatus = FileStatus.PROCESSED
    digest: str = ""
    idempotency_key: str | None = None
    fingerprint: str = ""
    """Of the request that made it, where that named an idempotency key."""

    def is_expired(self, now: float) -> bool:
        """Say whether its time is over: it does not exist any more then, even before it is swept away."""
        return self.expires_at is not None and self.expires_at <= now


def is_file_id(text: str) -> bool:
    """Say whether ``text`` can be the id of a file; what cannot need not be looked for."""
    return _ID.fullmatch(text) is not None
