"""A fresh installation has one admin key, and its text is never lost."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from modelyard.clock import ManualClock
from modelyard.control.bootstrap import ensure_admin_key, keep_admin_key
from modelyard.domain.tenants import PLATFORM, Scope
from modelyard.ids import hash_secret, parse_api_key
from modelyard.stores.sql import SqlControlStore, open_database

PEPPER = b"pepper"
CLOCK = ManualClock()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlControlStore]:
    opened = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    yield opened
    await opened.close()


async def test_first_admin_key_is_made_once(store: SqlControlStore) -> None:
    text = await ensure_admin_key(store, PEPPER, CLOCK)
    assert text is not None
    parsed = parse_api_key(text)
    assert parsed is not None
    (key,) = await store.keys()
    assert (key.id, key.tenant_id, key.scopes) == (parsed.key_id, PLATFORM, (Scope.ADMIN,))
    assert key.secret_hash == hash_secret(PEPPER, parsed.secret)
    assert await ensure_admin_key(store, PEPPER, CLOCK) is None


async def test_key_file_is_private_and_matches_the_store(store: SqlControlStore, tmp_path: Path) -> None:
    file = tmp_path / "admin-key"
    for _ in range(2):
        await keep_admin_key(store, PEPPER, CLOCK, file)
    assert file.stat().st_mode & 0o777 == 0o600
    parsed = parse_api_key(file.read_text().strip())
    assert parsed is not None
    assert [key.id for key in await store.keys()] == [parsed.key_id]


async def test_key_that_was_written_but_not_stored_is_stored(store: SqlControlStore, tmp_path: Path) -> None:
    other = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'lost.sqlite'}", timeout_s=5))
    file = tmp_path / "admin-key"
    await keep_admin_key(other, PEPPER, CLOCK, file)
    await other.close()
    before = file.read_text()
    await keep_admin_key(store, PEPPER, CLOCK, file)
    assert file.read_text() == before
    assert len(await store.keys()) == 1


async def test_revoked_admin_key_is_replaced(store: SqlControlStore, tmp_path: Path) -> None:
    file = tmp_path / "admin-key"
    await keep_admin_key(store, PEPPER, CLOCK, file)
    before = file.read_text()
    (key,) = await store.keys()
    await store.put_key(msgspec.structs.replace(key, revoked_at=1))
    await keep_admin_key(store, PEPPER, CLOCK, file)
    assert file.read_text() != before
    assert len([one for one in await store.keys() if one.revoked_at is None]) == 1
