"""Every ``UploadStore`` remembers parts and ends, keeps tenants apart, and changes nothing of what is over."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.tenants import Tenant
from modelyard.domain.uploads import Upload, UploadStatus
from modelyard.stores import AlreadyExistsError, UploadStore
from modelyard.stores.sql import SqlControlStore, SqlUploadStore

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UploadStore]:
    database = open_fresh(request.param, tmp_path)
    for name in ("acme", "other"):
        await SqlControlStore(database).add_tenant(Tenant(f"ten-{name}", name, 1_000))
    yield SqlUploadStore(database)
    await database.close()


def an_upload(name: str = "upl-1", **changes: object) -> Upload:
    upload = Upload(
        id=name,
        tenant_id="ten-acme",
        name="org/smol",
        size_bytes=50_000_000_000,
        part_bytes=16_777_216,
        created_at=1_000.25,
        expires_at=2_000.5,
        digest=DIGEST,
    )
    return msgspec.structs.replace(upload, **changes)


async def test_uploads_come_back_as_they_were_oldest_first(store: UploadStore) -> None:
    later = an_upload("upl-0", created_at=1_001.0, digest="")
    await store.add_upload(later)
    await store.add_upload(an_upload())
    assert await store.uploads() == [an_upload(), later]
    assert await store.upload("upl-0", tenant_id=None) == later
    with pytest.raises(AlreadyExistsError):
        await store.add_upload(an_upload())


async def test_another_tenants_upload_does_not_exist(store: UploadStore) -> None:
    await store.add_upload(an_upload())
    await store.complete_upload("upl-1", digest=DIGEST, expires_at=5_000.0)
    assert await store.upload("upl-1", tenant_id="ten-other") is None
    assert await store.uploads(tenant_id="ten-other") == []
    assert await store.uploaded(DIGEST, tenant_id="ten-other") is None
    assert (await store.uploaded(DIGEST, tenant_id="ten-acme") or an_upload("none")).id == "upl-1"
    assert (await store.uploaded(DIGEST, tenant_id=None) or an_upload("none")).id == "upl-1"


async def test_parts_are_noted_once_in_order_and_taken_back(store: UploadStore) -> None:
    await store.add_upload(an_upload())
    for number in (3, 1, 3):
        assert await store.put_part("upl-1", number, expires_at=3_000.0)
    found = await store.upload("upl-1", tenant_id="ten-acme")
    assert found == an_upload(parts=(1, 3), expires_at=3_000.0)
    assert await store.drop_part("upl-1", 3)
    assert (await store.uploads())[0].parts == (1,)


async def test_a_complete_upload_takes_no_part_and_is_completed_once(store: UploadStore) -> None:
    await store.add_upload(an_upload(digest=""))
    await store.put_part("upl-1", 1, expires_at=3_000.0)
    assert await store.complete_upload("upl-1", digest=DIGEST, expires_at=4_000.0)
    whole = an_upload(digest=DIGEST, status=UploadStatus.COMPLETE, expires_at=4_000.0)
    assert not await store.put_part("upl-1", 2, expires_at=9_000.0)
    assert not await store.drop_part("upl-1", 1)
    assert not await store.complete_upload("upl-1", digest="sha256:" + "00" * 32, expires_at=9_000.0)
    assert await store.uploads() == [whole]


async def test_what_is_announced_and_not_complete_was_not_uploaded(store: UploadStore) -> None:
    await store.add_upload(an_upload())
    assert await store.uploaded(DIGEST, tenant_id="ten-acme") is None


async def test_expired_uploads_are_found_until_kept_or_removed(store: UploadStore) -> None:
    await store.add_upload(an_upload("upl-1", expires_at=10.0))
    await store.add_upload(an_upload("upl-2", expires_at=20.0))
    await store.add_upload(an_upload("upl-3", expires_at=30.0))
    assert [one.id for one in await store.expired_uploads(before=30.0)] == ["upl-1", "upl-2"]
    await store.keep_upload("upl-1", expires_at=99.0)
    await store.remove_upload("upl-2")
    assert await store.expired_uploads(before=30.0) == []
    assert [one.id for one in await store.uploads()] == ["upl-1", "upl-3"]


async def test_parts_of_an_upload_that_is_gone_are_not_noted(store: UploadStore) -> None:
    assert not await store.put_part("upl-none", 1, expires_at=1.0)
    assert not await store.drop_part("upl-none", 1)
