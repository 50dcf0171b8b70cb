"""The contract of what is remembered of uploads: models that come by parts."""

from typing import Protocol

from modelyard.domain.uploads import Upload


class UploadStore(Protocol):
    """Uploads under way, and what was uploaded by whom. All methods raise ``StoreUnavailableError``."""

    async def add_upload(self, upload: Upload) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id."""
        ...

    async def upload(self, upload_id: str, *, tenant_id: str | None) -> Upload | None:
        """Return the upload of this id (of this tenant)."""
        ...

    async def uploads(self, *, tenant_id: str | None = None) -> list[Upload]:
        """Return all of a tenant (or of all), oldest first."""
        ...

    async def uploaded(self, digest: str, *, tenant_id: str | None) -> Upload | None:
        """Return the oldest complete upload of this content (by this tenant)."""
        ...

    async def put_part(self, upload_id: str, number: int, *, expires_at: float) -> bool:
        """Note that a part is here, and move the end of its upload's time; say whether the upload is open."""
        ...

    async def drop_part(self, upload_id: str, number: int) -> bool:
        """Note that a part is gone; say whether its upload is open."""
        ...

    async def complete_upload(self, upload_id: str, *, digest: str, expires_at: float) -> bool:
        """Note that an open upload is whole and has this digest; say whether it was open."""
        ...

    async def keep_upload(self, upload_id: str, *, expires_at: float) -> None:
        """Move the end of an upload's time."""
        ...

    async def remove_upload(self, upload_id: str) -> None:
        """Forget an upload."""
        ...

    async def expired_uploads(self, *, before: float) -> list[Upload]:
        """Return those whose time ended before then, the longest ago first."""
        ...
