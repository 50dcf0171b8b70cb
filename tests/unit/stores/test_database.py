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
from modelyard.stores import AlreadyExistsError, StoreUnavailableError, SupersededError
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


class Held:
    """Holds up the writer thread, so that what is asked for meanwhile waits together."""

    def __init__(self, database: Database) -> None:
        self._begun, self._may_go_on = threading.Event(), threading.Event()
        self._writing = asyncio.create_task(database.write(self._wait))

    def _wait(self, connection: sa.Connection) -> None:
        self._begun.set()
        assert self._may_go_on.wait(WITHIN_S)

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait, WITHIN_S)

    async def let_go(self) -> None:
        self._may_go_on.set()
        await self._writing


async def test_writes_that_wait_share_a_transaction_and_one_that_fails_takes_no_other_with_it(
    database: Database,
) -> None:
    seen: list[int] = []

    def noted(connection: sa.Connection, name: str) -> str:
        seen.append(connection.exec_driver_sql("SELECT count(*) FROM tenants").scalar_one())
        add(connection, name)
        return name

    def half(connection: sa.Connection) -> None:
        add(connection, "half")
        raise LookupError("after the first half")

    held = Held(database)
    await held.begun()
    begins: list[str] = []
    sa.event.listen(database._engine, "begin", lambda _: begins.append("begin"))
    waiting = [
        asyncio.create_task(database.write(change))
        for change in (lambda c: noted(c, "a"), half, lambda c: add(c, "a"), lambda c: noted(c, "b"))
    ]
    await asyncio.sleep(0)
    await held.let_go()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert (outcomes[0], outcomes[3]) == ("a", "b")
    assert isinstance(outcomes[1], LookupError)
    assert isinstance(outcomes[2], AlreadyExistsError)
    assert seen == [0, 1]
    assert begins == ["begin"]
    assert await database.read(names) == ["a", "b"]


async def test_a_write_that_finds_the_disk_full_takes_none_that_waited_with_it(database: Database) -> None:
    def too_much(connection: sa.Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        try:
            for number in range(1_000):
                add(connection, f"{number}" * 50)
        finally:
            connection.exec_driver_sql("PRAGMA max_page_count = 1073741823")

    held = Held(database)
    await held.begun()
    changes = (lambda c: add(c, "a"), too_much, lambda c: add(c, "b"))
    waiting = [asyncio.create_task(database.write(change)) for change in changes]
    await asyncio.sleep(0)
    await held.let_go()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[0] is outcomes[2] is None
    assert isinstance(outcomes[1], StoreUnavailableError)
    assert await database.read(names) == ["a", "b"]


async def test_of_writes_that_wait_only_those_of_the_leader_are_done(database: Database) -> None:
    leases = schema.controller_leases
    row = {"name": "controller", "epoch": 1, "holder": "x", "beat": 0}
    await database.write(lambda c: c.execute(sa.insert(leases).values(row)))
    database.fence(1)
    held = Held(database)
    await held.begun()
    waiting = [
        asyncio.create_task(database.write(lambda c: add(c, "before"))),
        asyncio.create_task(database.write(lambda c: c.execute(sa.update(leases).values(epoch=2)), is_fenced=False)),
        asyncio.create_task(database.write(lambda c: add(c, "after"))),
    ]
    await asyncio.sleep(0)
    await held.let_go()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[2], SupersededError)
    assert await database.read(names) == ["before"]


async def test_a_write_whose_caller_left_while_it_waited_is_not_done(database: Database) -> None:
    held = Held(database)
    await held.begun()
    left = asyncio.create_task(database.write(lambda c: add(c, "left")))
    stays = asyncio.create_task(database.write(lambda c: add(c, "stays")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    await held.let_go()
    await stays
    assert left.cancelled()
    assert await database.read(names) == ["stays"]
