"""``UploadStore`` in SQL: uploads under way, and what was uploaded by whom."""

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from modelyard.domain.catalog import ArtifactFile
from modelyard.domain.uploads import Upload, UploadStatus
from modelyard.stores import AlreadyExistsError
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import Database
from modelyard.stores.sql.mapping import Values

_TABLE = schema.uploads

_to_json = msgspec.json.Encoder().encode
_files = msgspec.json.Decoder(tuple[ArtifactFile, ...]).decode
_parts = msgspec.json.Decoder(tuple[int, ...]).decode


class SqlUploadStore:
    """Uploads in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_upload(self, upload: Upload) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id."""
        try:
            await self._database.write(lambda c: c.execute(sa.insert(_TABLE).values(_values(upload))))
        except AlreadyExistsError as error:
            raise AlreadyExistsError(f"An upload '{upload.id}' exists") from error

    async def upload(self, upload_id: str, *, tenant_id: str | None) -> Upload | None:
        """Return the upload of this id (of this tenant)."""
        query = _of_tenant(sa.select(_TABLE).where(_TABLE.c.upload_id == upload_id), tenant_id)
        found = await self._all(query)
        return found[0] if found else None

    async def uploads(self, *, tenant_id: str | None = None) -> list[Upload]:
        """Return all of a tenant (or of all), oldest first."""
        query = sa.select(_TABLE).order_by(_TABLE.c.created_at, _TABLE.c.upload_id)
        return await self._all(_of_tenant(query, tenant_id))

    async def uploaded(self, digest: str, *, tenant_id: str | None) -> Upload | None:
        """Return the oldest complete upload of this content (by this tenant)."""
        query = sa.select(_TABLE).where(_TABLE.c.digest == digest, _TABLE.c.status == UploadStatus.COMPLETE.value)
        found = await self._all(_of_tenant(query, tenant_id).order_by(_TABLE.c.created_at, _TABLE.c.upload_id))
        return found[0] if found else None

    async def put_part(self, upload_id: str, number: int, *, expires_at: float) -> bool:
        """Note that a part is here; say whether its upload is open."""
        return await self._change_parts(upload_id, lambda parts: parts | {number}, {"expires_at": expires_at})

    async def drop_part(self, upload_id: str, number: int) -> bool:
        """Note that a part is gone; say whether its upload is open."""
        return await self._change_parts(upload_id, lambda parts: parts - {number}, {})

    async def complete_upload(self, upload_id: str, *, digest: str, expires_at: float) -> bool:
        """Note that an open upload is whole; say whether it was open."""
        values = {"status": UploadStatus.COMPLETE.value, "digest": digest, "parts": "[]", "expires_at": expires_at}
        change = sa.update(_TABLE).where(_is_open(upload_id)).values(values)
        return await self._database.write(lambda c: c.execute(change).rowcount > 0)

    async def keep_upload(self, upload_id: str, *, expires_at: float) -> None:
        """Move the end of an upload's time."""
        change = sa.update(_TABLE).where(_TABLE.c.upload_id == upload_id).values(expires_at=expires_at)
        await self._database.write(lambda c: c.execute(change))

    async def remove_upload(self, upload_id: str) -> None:
        """Forget an upload."""
        await self._database.write(lambda c: c.execute(sa.delete(_TABLE).where(_TABLE.c.upload_id == upload_id)))

    async def expired_uploads(self, *, before: float) -> list[Upload]:
        """Return those whose time ended before then, the longest ago first."""
        query = sa.select(_TABLE).where(_TABLE.c.expires_at < before)
        return await self._all(query.order_by(_TABLE.c.expires_at, _TABLE.c.upload_id))

    async def _change_parts(self, upload_id: str, change: Callable[[set[int]], set[int]], more: Values) -> bool:
        def put(connection: sa.Connection) -> bool:
            mine = sa.select(_TABLE.c.parts).where(_is_open(upload_id)).with_for_update()
            row = connection.execute(mine).first()
            if row is None:
                return False
            parts = sorted(change(set(_parts(row.parts))))
            values = {"parts": _to_json(parts).decode(), **more}
            connection.execute(sa.update(_TABLE).where(_TABLE.c.upload_id == upload_id).values(values))
            return True

        return await self._database.write(put)

    async def _all(self, query: sa.Select[tuple[object, ...]]) -> list[Upload]:
        return await self._database.read(lambda c: [_upload_of(row) for row in c.execute(query).mappings()])


def _is_open(upload_id: str) -> sa.ColumnElement[bool]:
    return (_TABLE.c.upload_id == upload_id) & (_TABLE.c.status == UploadStatus.OPEN.value)


def _of_tenant(query: sa.Select[tuple[object, ...]], tenant_id: str | None) -> sa.Select[tuple[object, ...]]:
    return query if tenant_id is None else query.where(_TABLE.c.owner_id == tenant_id)


def _values(upload: Upload) -> Values:
    return {
        "upload_id": upload.id,
        "owner_id": upload.tenant_id,
        "name": upload.name,
        "digest": upload.digest,
        "size_bytes": upload.size_bytes,
        "part_bytes": upload.part_bytes,
        "parts": _to_json(upload.parts).decode(),
        "status": upload.status.value,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "files": _to_json(upload.files).decode(),
    }


def _upload_of(row: sa.RowMapping) -> Upload:
    return Upload(
        id=row["upload_id"],
        tenant_id=row["owner_id"],
        name=row["name"],
        size_bytes=row["size_bytes"],
        part_bytes=row["part_bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        digest=row["digest"],
        parts=_parts(row["parts"]),
        status=UploadStatus(row["status"]),
        files=_files(row["files"]),
    )
