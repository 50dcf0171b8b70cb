"""Transactions are whole, writes keep their order, and the driver's errors have our names."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from modelyard.domain.tenants import Tenant
from modelyard.stores import AlreadyExistsError, StoreUnavailableError
from modelyard.stores.sql import Database, open_database, schema
from modelyard.stores.sql.database import translated
from modelyard.stores.sql.mapping import tenant_values

WITHIN_S = 15.0


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5)
    yield opened
    await opened.close()


def add(connection: sa.Connection, name: str) -> None:
    connection.execute(sa.insert(schema.tenants).values(tenant_values(Tenant(f"ten-{name}", name, 1))))


def names(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(schema.tenants.c.name).order_by(schema.tenants.c.name)))


async def test_a_change_that_fails_half_way_changes_nothing(database: Database) -> None:
    def half(connection: sa.Connection) -> None:
        add(connection, "a")
        raise LookupError("after the first half")

    with pytest.raises(LookupError):
        await database.write(half)
    assert await database.read(names) == []


async def test_writes_run_in_the_order_they_were_asked_for(database: Database) -> None:
    order: list[int] = []
    await asyncio.gather(*(database.write(lambda _, at=at: order.append(at)) for at in range(50)))
    assert order == list(range(50))


async def test_reads_do_not_wait_for_a_write(database: Database) -> None:
    may_go_on, has_begun = threading.Event(), threading.Event()

    def slow(connection: sa.Connection) -> None:
        add(connection, "slow")
        has_begun.set()
        assert may_go_on.wait(WITHIN_S)

    writing = asyncio.create_task(database.write(slow))
    await asyncio.to_thread(has_begun.wait, WITHIN_S)
    async with asyncio.timeout(WITHIN_S):
        assert await database.read(names) == []
    may_go_on.set()
    await writing
    assert await database.read(names) == ["slow"]


async def test_a_caller_that_is_cancelled_leaves_the_database_usable(database: Database) -> None:
    may_go_on, has_begun = threading.Event(), threading.Event()

    def slow(connection: sa.Connection) -> None:
        add(connection, "begun")
        has_begun.set()
        assert may_go_on.wait(WITHIN_S)

    writing = asyncio.create_task(database.write(slow))
    await asyncio.to_thread(has_begun.wait, WITHIN_S)
    writing.cancel()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await database.write(lambda connection: add(connection, "next"))
    assert await database.read(names) == ["begun", "next"]


async def test_a_full_disk_refuses_writes_and_nothing_else(database: Database) -> None:
    await database.write(lambda connection: add(connection, "before"))

    def too_much(connection: sa.Connection) -> None:
        # SQLite's own bound on its size fails as a full disk does.
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        try:
            for number in range(1_000):
                add(connection, f"{number}" * 50)
        finally:
            connection.exec_driver_sql("PRAGMA max_page_count = 1073741823")

    with pytest.raises(StoreUnavailableError, match="full"):
        await database.write(too_much)
    assert await database.read(names) == ["before"]
    await database.write(lambda connection: add(connection, "after"))
    assert await database.read(names) == ["after", "before"]


async def test_a_taken_value_and_a_missing_parent_are_different_things(database: Database) -> None:
    await database.write(lambda connection: add(connection, "a"))
    with pytest.raises(AlreadyExistsError):
        await database.write(lambda connection: add(connection, "a"))
    orphan = {"endpoint_id": "ep-none", "at": 1.0, "kind": "", "reason": "", "replica_id": ""}
    with pytest.raises(exc.IntegrityError):
        await database.write(lambda c: c.execute(sa.insert(schema.endpoint_events).values(orphan)))


def test_a_damaged_file_is_a_store_that_is_away() -> None:
    malformed = sqlite3.DatabaseError("database disk image is malformed")
    with pytest.raises(StoreUnavailableError, match="malformed"), translated():
        raise exc.DatabaseError("SELECT 1", {}, malformed)


async def test_its_repr_tells_its_state_and_no_password(database: Database) -> None:
    assert repr(database).endswith("control.sqlite open>")
    await database.close()
    assert repr(database).endswith("control.sqlite closed>")
