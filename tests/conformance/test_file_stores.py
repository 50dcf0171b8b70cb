"""Every ``FileStore`` keeps tenants apart, pages in a stable order, and forgets nothing before it is told to."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.files import File, FilePurpose, FileStatus
from modelyard.domain.tenants import Tenant
from modelyard.stores import AlreadyExistsError, FileStore, Held
from modelyard.stores.sql import SqlControlStore, SqlFileStore
from modelyard.stores.sql.files import EXPIRED_AT_ONCE

NOW = 2_000.0


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FileStore]:
    database = open_fresh(request.param, tmp_path)
    for name in ("acme", "other"):
        await SqlControlStore(database).add_tenant(Tenant(f"ten-{name}", name, 1_000))
    yield SqlFileStore(database)
    await database.close()


def a_file(name: str = "file-1", **changes: object) -> File:
    file = File(
        id=name,
        tenant_id="ten-acme",
        key_id="key-1",
        filename="lines.jsonl",
        purpose=FilePurpose.BATCH,
        bytes=5_000_000_000,
        created_at=1_000.25,
        expires_at=3_000.5,
        digest="sha256:" + "ab" * 32,
    )
    return msgspec.structs.replace(file, **changes)


async def ids(store: FileStore, **filters: object) -> list[str]:
    wanted = {"tenant_id": "ten-acme", "now": NOW, "limit": 100, **filters}
    return [file.id for file in await store.files(**wanted)]


async def test_files_come_back_as_they_were(store: FileStore) -> None:
    whole = a_file("file-2", expires_at=None, status=FileStatus.ERROR, idempotency_key="once", fingerprint="f")
    await store.add_file(a_file())
    await store.add_file(whole)
    assert await store.file("file-1", tenant_id="ten-acme") == a_file()
    assert await store.file("file-2", tenant_id=None) == whole
    with pytest.raises(AlreadyExistsError):
        await store.add_file(a_file())


async def test_another_tenants_file_does_not_exist(store: FileStore) -> None:
    await store.add_file(a_file(idempotency_key="once"))
    assert await store.file("file-1", tenant_id="ten-other") is None
    assert await ids(store, tenant_id="ten-other") == []
    assert await store.file_of_key("ten-other", "key-1", "once") is None
    assert not await store.remove_file("file-1", tenant_id="ten-other")
    assert await store.held_files("ten-other") == Held(0, 0)
    assert await ids(store) == ["file-1"]


async def test_lists_are_of_a_purpose_in_an_order_and_go_on_behind_a_file(store: FileStore) -> None:
    # Three of the same instant: a page that ends between them must lose none.
    for name in ("file-b", "file-a", "file-c"):
        await store.add_file(a_file(name, created_at=1_000.0))
    await store.add_file(a_file("file-0", created_at=1_001.0, purpose=FilePurpose.VISION))
    newest = ["file-0", "file-c", "file-b", "file-a"]
    assert await ids(store) == newest
    assert await ids(store, order="asc") == newest[::-1]
    assert await ids(store, purpose=FilePurpose.BATCH) == newest[1:]
    for order in ("desc", "asc"):
        seen: list[File] = []
        while page := await store.files(
            tenant_id="ten-acme", now=NOW, limit=1, after=seen[-1] if seen else None, order=order
        ):
            seen += page
        assert [file.id for file in seen] == (newest if order == "desc" else newest[::-1])


async def test_expired_files_are_in_no_list_and_are_found_until_removed(store: FileStore) -> None:
    await store.add_file(a_file("file-1", expires_at=NOW))
    await store.add_file(a_file("file-2", expires_at=NOW - 1))
    await store.add_file(a_file("file-3", expires_at=NOW + 1))
    await store.add_file(a_file("file-4", expires_at=None))
    assert await ids(store) == ["file-4", "file-3"]
    assert [file.id for file in await store.expired_files(before=NOW)] == ["file-2", "file-1"]
    assert await store.held_files("ten-acme") == Held(4, 4 * 5_000_000_000)
    assert await store.remove_file("file-1", tenant_id=None)
    assert not await store.remove_file("file-1", tenant_id=None)
    assert [file.id for file in await store.expired_files(before=NOW)] == ["file-2"]
    assert await store.held_files("ten-acme") == Held(3, 3 * 5_000_000_000)


async def test_an_idempotency_key_makes_one_file_of_an_api_key_until_it_is_released(store: FileStore) -> None:
    first = a_file("file-1", idempotency_key="once")
    await store.add_file(first)
    with pytest.raises(AlreadyExistsError):
        await store.add_file(a_file("file-2", idempotency_key="once"))
    await store.add_file(a_file("file-3", idempotency_key="once", key_id="key-2"))
    assert await store.file_of_key("ten-acme", "key-1", "once") == first
    await store.release_key("file-1")
    assert await store.file_of_key("ten-acme", "key-1", "once") is None
    await store.add_file(a_file("file-2", idempotency_key="once"))
    assert await store.file("file-1", tenant_id=None) == msgspec.structs.replace(first, idempotency_key=None)


async def test_known_files_are_told_from_others_however_many_are_asked_for(store: FileStore) -> None:
    await store.add_file(a_file("file-1"))
    await store.add_file(a_file("file-2"))
    asked = [f"file-{number}" for number in range(2_000)]
    assert await store.known_files(asked) == {"file-1", "file-2"}
    assert await store.known_files([]) == set()


async def test_expired_files_come_in_bounded_numbers(store: FileStore) -> None:
    for number in range(EXPIRED_AT_ONCE + 1):
        await store.add_file(a_file(f"file-{number}", expires_at=float(number)))
    found = await store.expired_files(before=NOW)
    assert [file.expires_at for file in found] == [float(number) for number in range(EXPIRED_AT_ONCE)]
