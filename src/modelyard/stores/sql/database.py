"""One database and the threads that may talk to it.

SQLAlchemy is used without asyncio: a function gets a connection, runs in a
thread of ours and is one transaction. There is one writer thread, because
SQLite has one writer and a queue is kinder than a lock, and a few readers,
which in WAL mode go on while a writer, even of another process, holds the
database. Every call has a deadline that counts from the moment it was asked
for, so that ten writes before a locked database fail together, not in turn.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import sqlite

from modelyard.clock import Clock, SystemClock
from modelyard.errors import StartupError
from modelyard.stores import AlreadyExistsError, StoreUnavailableError, SupersededError
from modelyard.stores.sql import schema
from modelyard.stores.sql.migrate import bring_up_to_date

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

T = TypeVar("T")

READERS = 4
"""Reader threads. Reads are milliseconds; more would only wait for each other's GIL."""

CHUNK = 500
"""Values in one ``IN (…)``: well below both dialects' bounds on parameters."""

_EPOCH = sa.select(schema.controller_leases.c.epoch).where(schema.controller_leases.c.name == "controller")

_WAL_BYTES_KEPT = 64 * 1024 * 1024


class Database:
    """An open database; made by ``open_database``."""

    def __init__(self, engine: sa.Engine, *, timeout_s: float, clock: Clock) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="database-reader")
        self._is_closed = False
        self._epoch: int | None = None

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<Database {self._engine.url.render_as_string(hide_password=True)} {state}>"

    async def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Run ``query`` in a reader thread on one consistent view; it must not write.

        Raises:
            StoreUnavailableError: no answer could be had within the timeout.
        """
        return await self._submit(self._readers, query, writes=False)

    async def write(self, change: Callable[[sa.Connection], T], *, is_fenced: bool = True) -> T:
        """Run ``change`` in the writer thread as one transaction; writes run in the order they were asked for.

        A caller that is cancelled leaves a change that has begun to finish.

        Raises:
            StoreUnavailableError: the database is locked, full or gone; nothing was changed.
            SupersededError: another controller leads since; nothing was changed.
            AlreadyExistsError: a unique value is taken; nothing was changed.
        """
        epoch = self._epoch

        def fenced(connection: sa.Connection) -> T:
            if connection.execute(_EPOCH).scalar() != epoch:
                raise SupersededError("another controller leads now")
            return change(connection)

        return await self._submit(self._writer, change if epoch is None or not is_fenced else fenced, writes=True)

    def fence(self, epoch: int) -> None:
        """From now on refuse every write once the leader's epoch is another one than ``epoch``."""
        self._epoch = epoch

    async def close(self) -> None:
        """Finish what was asked for, then give back threads and connections. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._engine.dispose()

    async def _submit(self, threads: ThreadPoolExecutor, work: Callable[[sa.Connection], T], *, writes: bool) -> T:
        if self._is_closed:
            raise StoreUnavailableError("the database was closed")
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        return await asyncio.wrap_future(threads.submit(self._run, work, deadline_s, writes))

    def _run(self, work: Callable[[sa.Connection], T], deadline_s: float, writes: bool) -> T:  # noqa: FBT001 - submit passes by position
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise StoreUnavailableError("the database is busy")
        with (
            translated(),
            self._engine.connect().execution_options(writes=writes, wait_s=left_s) as connection,
            connection.begin(),
        ):
            return work(connection)


def open_database(url: str, *, timeout_s: float, clock: Clock | None = None) -> Database:
    """Open ``url`` (``sqlite:///<path>`` or ``postgresql+psycopg://…``), creating or migrating its tables.

    Blocks; call it before the loop runs, or in a thread. ``timeout_s`` is the longest that a caller waits for a lock.

    Raises:
        StartupError: the database cannot be opened, is damaged, or was written by a newer release.
    """
    try:
        where = sa.make_url(url)
    except exc.ArgumentError as error:
        raise StartupError(
            "'control.database_url' is no database URL. Example: sqlite:////var/lib/modelyard/control.sqlite"
        ) from error
    try:
        engine = _engine(where, timeout_s)
        with ExitStack() as if_it_fails:
            if_it_fails.callback(engine.dispose)
            with engine.connect().execution_options(writes=True, wait_s=timeout_s) as connection, connection.begin():
                bring_up_to_date(connection)
            if_it_fails.pop_all()
    except (exc.DBAPIError, OSError, ImportError) as error:
        reason = str(error.orig) if isinstance(error, exc.DBAPIError) else str(error)
        raise StartupError(
            f"Cannot open the database {where.render_as_string(hide_password=True)}: {reason}. "
            "Check 'control.database_url' and that no other program holds it."
        ) from error
    return Database(engine, timeout_s=timeout_s, clock=clock or SystemClock())


def _engine(where: sa.URL, timeout_s: float) -> sa.Engine:
    match where.get_backend_name():
        case "sqlite":
            return _sqlite_engine(where, timeout_s)
        case "postgresql":
            return _postgres_engine(where, timeout_s)
        case other:
            raise StartupError(f"'control.database_url' names '{other}'; there are 'sqlite' and 'postgresql'.")


def _sqlite_engine(where: sa.URL, timeout_s: float) -> sa.Engine:
    if not where.database or where.database == ":memory:":
        raise StartupError("SQLite needs a file: every connection to ':memory:' would see a database of its own.")
    file = Path(where.database)
    # SQLite would create it readable for all; its -wal and -shm files take the mode of the database.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    file.chmod(0o600)
    engine = sa.create_engine(
        where,
        connect_args={"timeout": timeout_s},
        pool_size=READERS + 1,
        max_overflow=0,
        pool_timeout=timeout_s,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        # The driver would begin transactions by itself, deferred and too late; we say BEGIN.
        connection.isolation_level = None
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            f"journal_size_limit = {_WAL_BYTES_KEPT}",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {max(1, int(options['wait_s'] * 1000))}")
        # IMMEDIATE: a deferred writer that finds the lock taken after its first read fails at once, without waiting.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options["writes"] else "BEGIN")

    return engine


def _postgres_engine(where: sa.URL, timeout_s: float) -> sa.Engine:
    wait_ms = max(1, int(timeout_s * 1000))
    return sa.create_engine(
        where,
        connect_args={"connect_timeout": max(1, round(timeout_s)), "options": f"-c lock_timeout={wait_ms}"},
        pool_size=READERS + 1,
        max_overflow=0,
        pool_timeout=timeout_s,
        pool_pre_ping=True,  # a restarted server must not cost one failed call per pooled connection
    )


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's errors into the two that the contract names; others are bugs and pass."""
    try:
        yield
    except exc.IntegrityError as error:
        if is_unique_violation(error):
            raise AlreadyExistsError("a row with this id or name exists") from error
        raise
    except (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError) as error:
        raise StoreUnavailableError(_reason(error)) from error
    except exc.DBAPIError as error:
        # sqlite3 raises the bare base class for a damaged file.
        if type(error) is exc.DatabaseError:
            raise StoreUnavailableError(_reason(error)) from error
        raise


def _reason(error: exc.SQLAlchemyError) -> str:
    return str(error.orig) if isinstance(error, exc.DBAPIError) else "no free connection"


def is_unique_violation(error: exc.IntegrityError) -> bool:
    """Say whether ``error`` is a taken unique value (and not, say, a missing parent row)."""
    name = getattr(error.orig, "sqlite_errorname", None)
    if name is not None:
        return name in {"SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"}
    return getattr(error.orig, "sqlstate", None) == "23505"


def insert(connection: sa.Connection, table: sa.Table) -> "sqlite.Insert | postgresql.Insert":
    """Return an INSERT that knows ``ON CONFLICT``: both dialects have it, with one spelling, in two modules."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)
