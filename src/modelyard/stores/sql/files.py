"""``FileStore`` in SQL: files of tenants, without their contents."""

from collections.abc import Collection

import sqlalchemy as sa

from modelyard.domain.files import File, FilePurpose, FileStatus
from modelyard.stores import AlreadyExistsError, Held
from modelyard.stores.files import Order
from modelyard.stores.sql import schema
from modelyard.stores.sql.database import CHUNK, Database
from modelyard.stores.sql.mapping import Values

EXPIRED_AT_ONCE = 500
"""Most expired files that are returned together; who removes them asks again."""

_TABLE = schema.files


class SqlFileStore:
    """Files in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_file(self, file: File) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id, or an idempotency key that its API key has used."""
        try:
            await self._database.write(lambda c: c.execute(sa.insert(_TABLE).values(values_of(file))))
        except AlreadyExistsError as error:
            raise AlreadyExistsError(f"A file '{file.id}', or one of its idempotency key, exists") from error

    async def file(self, file_id: str, *, tenant_id: str | None) -> File | None:
        """Return the file of this id (of this tenant)."""
        return await self._first(_of_tenant(sa.select(_TABLE).where(_TABLE.c.file_id == file_id), tenant_id))

    async def file_of_key(self, tenant_id: str, key_id: str, idempotency_key: str) -> File | None:
        """Return the file that this API key made with this idempotency key."""
        return await self._first(
            sa.select(_TABLE).where(
                _TABLE.c.owner_id == tenant_id,
                _TABLE.c.api_key_id == key_id,
                _TABLE.c.idempotency_key == idempotency_key,
            )
        )

    async def release_key(self, file_id: str) -> None:
        """Let the idempotency key of a file be used again."""
        change = sa.update(_TABLE).where(_TABLE.c.file_id == file_id).values(idempotency_key=None)
        await self._database.write(lambda c: c.execute(change))

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
        is_there = _TABLE.c.expires_at.is_(None) | (_TABLE.c.expires_at > now)
        query = _of_tenant(sa.select(_TABLE).where(is_there), tenant_id)
        if purpose is not None:
            query = query.where(_TABLE.c.purpose == purpose.value)
        place = sa.tuple_(_TABLE.c.created_at, _TABLE.c.file_id)
        if after is not None:
            there = sa.tuple_(sa.literal(after.created_at), sa.literal(after.id))
            query = query.where(place < there if order == "desc" else place > there)
        if order == "desc":
            query = query.order_by(_TABLE.c.created_at.desc(), _TABLE.c.file_id.desc())
        else:
            query = query.order_by(_TABLE.c.created_at, _TABLE.c.file_id)
        return await self._all(query.limit(limit))

    async def remove_file(self, file_id: str, *, tenant_id: str | None) -> bool:
        """Forget a file (of this tenant); say whether there was one."""
        gone = sa.delete(_TABLE).where(_TABLE.c.file_id == file_id)
        if tenant_id is not None:
            gone = gone.where(_TABLE.c.owner_id == tenant_id)
        return await self._database.write(lambda c: c.execute(gone).rowcount > 0)

    async def expired_files(self, *, before: float) -> list[File]:
        """Return those whose time ended by then, the longest ago first."""
        query = sa.select(_TABLE).where(_TABLE.c.expires_at <= before)
        return await self._all(query.order_by(_TABLE.c.expires_at, _TABLE.c.file_id).limit(EXPIRED_AT_ONCE))

    async def held_files(self, tenant_id: str) -> Held:
        """Return how many files a tenant has, and their bytes."""
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_TABLE.c.size_bytes), 0)).where(
            _TABLE.c.owner_id == tenant_id
        )

        def read(connection: sa.Connection) -> Held:
            count, size = connection.execute(query).one()
            return Held(int(count), int(size))

        return await self._database.read(read)

    async def known_files(self, file_ids: Collection[str]) -> set[str]:
        """Return those of the ids that there are rows of."""
        wanted = sorted(file_ids)

        def read(connection: sa.Connection) -> set[str]:
            found: set[str] = set()
            for start in range(0, len(wanted), CHUNK):
                chunk = _TABLE.c.file_id.in_(wanted[start : start + CHUNK])
                found.update(connection.execute(sa.select(_TABLE.c.file_id).where(chunk)).scalars())
            return found

        return await self._database.read(read)

    async def _first(self, query: sa.Select[tuple[object, ...]]) -> File | None:
        found = await self._all(query)
        return found[0] if found else None

    async def _all(self, query: sa.Select[tuple[object, ...]]) -> list[File]:
        return await self._database.read(lambda c: [_file_of(row) for row in c.execute(query).mappings()])


def _of_tenant(query: sa.Select[tuple[object, ...]], tenant_id: str | None) -> sa.Select[tuple[object, ...]]:
    return query if tenant_id is None else query.where(_TABLE.c.owner_id == tenant_id)


def values_of(file: File) -> Values:
    """Return the row of a file."""
    return {
        "file_id": file.id,
        "owner_id": file.tenant_id,
        "api_key_id": file.key_id,
        "filename": file.filename,
        "purpose": file.purpose.value,
        "size_bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "status": file.status.value,
        "digest": file.digest,
        "idempotency_key": file.idempotency_key,
        "fingerprint": file.fingerprint,
    }


def _file_of(row: sa.RowMapping) -> File:
    return File(
        id=row["file_id"],
        tenant_id=row["owner_id"],
        key_id=row["api_key_id"],
        filename=row["filename"],
        purpose=FilePurpose(row["purpose"]),
        bytes=row["size_bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        status=FileStatus(row["status"]),
        digest=row["digest"],
        idempotency_key=row["idempotency_key"],
        fingerprint=row["fingerprint"],
    )
