"""A database is read while a platform runs on it, and when none does, without leaving a trace."""

import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from modelyard.domain.tenants import Tenant
from modelyard.errors import StartupError
from modelyard.stores import StoreUnavailableError
from modelyard.stores.sql import SqlControlStore, open_database, open_to_read


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'control #1.sqlite'}"  # a name that a URI would cut short


async def test_what_a_live_writer_has_written_is_seen_and_nothing_can_be_changed(tmp_path: Path) -> None:
    written = SqlControlStore(open_database(url_of(tmp_path), timeout_s=5))
    reader = open_to_read(url_of(tmp_path), timeout_s=5)
    await written.add_tenant(Tenant("ten-1", "acme", 1))
    assert [one.name for one in await SqlControlStore(reader).tenants()] == ["acme"]
    with pytest.raises(StoreUnavailableError, match="readonly"):
        await SqlControlStore(reader).add_tenant(Tenant("ten-2", "other", 1))
    await reader.close()
    await written.add_tenant(Tenant("ten-3", "later", 1))
    await written.close()


async def test_it_is_read_when_nobody_has_it_open(tmp_path: Path) -> None:
    written = SqlControlStore(open_database(url_of(tmp_path), timeout_s=5))
    await written.add_tenant(Tenant("ten-1", "acme", 1))
    await written.close()
    reader = open_to_read(url_of(tmp_path), timeout_s=5)
    assert [one.name for one in await SqlControlStore(reader).tenants()] == ["acme"]
    await reader.close()


async def test_a_backup_that_is_mounted_to_read_is_read_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SqlControlStore(open_database(url_of(tmp_path), timeout_s=5))
    await written.add_tenant(Tenant("ten-1", "acme", 1))
    await written.close()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    reader = open_to_read(url_of(tmp_path), timeout_s=5)
    assert [one.name for one in await SqlControlStore(reader).tenants()] == ["acme"]
    assert not (tmp_path / "control #1.sqlite-wal").exists()
    await reader.close()


async def test_a_reader_does_not_wait_for_a_writer_in_the_middle_of_a_change(tmp_path: Path) -> None:
    written = open_database(url_of(tmp_path), timeout_s=5)
    other = sqlite3.connect(tmp_path / "control #1.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    reader = open_to_read(url_of(tmp_path), timeout_s=0.2)
    assert await SqlControlStore(reader).tenants() == []
    other.execute("ROLLBACK")
    other.close()
    await reader.close()
    await written.close()


def test_what_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="There is no database"):
        open_to_read(url_of(tmp_path), timeout_s=1)
    assert list(tmp_path.iterdir()) == []
    sqlite3.connect(tmp_path / "control #1.sqlite").close()
    with pytest.raises(StartupError, match="no tables of ours"):
        open_to_read(url_of(tmp_path), timeout_s=1)


async def test_tables_of_another_release_are_left_as_they_are(tmp_path: Path) -> None:
    await open_database(url_of(tmp_path), timeout_s=5).close()
    engine = sa.create_engine(url_of(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))
    with pytest.raises(StartupError, match=r"'0001'.*start the platform with this one first"):
        open_to_read(url_of(tmp_path), timeout_s=1)
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() == "0001"
    engine.dispose()
