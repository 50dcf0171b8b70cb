"""One database and the threads that may talk to it.

SQLAlchemy is used without asyncio: a function gets a connection, runs in a
thread of ours and is one transaction. There is one writer thread, because
SQLite has one writer and a queue is kinder than a lock, and a few readers,
which in WAL mode go on while a writer, even of another process, holds the
database. Writes that wait while another is under way are done together in one
transaction, each behind a savepoint: one that fails takes no other with it.
Every call has a deadline that counts from the moment it was asked
for, so that ten writes before a locked database fail together, not in turn.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import sqlite

from modelyard.clock import Clock, SystemClock
from modelyard.errors import StartupError
from modelyard.stores import AlreadyExistsError, StoreUnavailableError, SupersededError
from modelyard.stores.sql import schema
from modelyard.stores.sql.migrate import bring_up_to_date, check_readable

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

T = TypeVar("T")

READERS = 4
"""Reader threads. Reads are milliseconds; more would only wait for each other's GIL."""

WRITES_TOGETHER = 64
"""Most writes in one transaction: it holds the only writer's lock, some tens of milliseconds at most."""

CHUNK = 500
"""Values in one ``IN (…)``: well below both dialects' bounds on parameters."""

_EPOCH = sa.select(schema.controller_leases.c.epoch).where(schema.controller_leases.c.name == "controller")

_WAL_BYTES_KEPT = 64 * 1024 * 1024


class _Asked(NamedTuple):
    """A write that waits for its turn. ``epoch`` None: it is not fenced."""

    change: Callable[[sa.Connection], Any]
    epoch: int | None
    deadline_s: float
    done: "Future[Any]"


class Database:
    """An open database; made by ``open_database``."""

    def __init__(self, engine: sa.Engine, *, timeout_s: float, clock: Clock) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="database-reader")
        self._waiting: deque[_Asked] = deque()
        """Writes that were asked for, oldest first."""
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
        deadline_s = self._deadline_s()
        return await asyncio.wrap_future(self._readers.submit(self._run, query, deadline_s))

    async def write(self, change: Callable[[sa.Connection], T], *, is_fenced: bool = True) -> T:
        """Run ``change`` in the writer thread, wholly or not at all; writes run in the order they were asked for.

        It may share its transaction with others that waited, and may be run once more where that transaction came to
        nothing. A caller that is cancelled leaves a change that has begun to finish.

        Raises:
            StoreUnavailableError: the database is locked, full or gone; nothing was changed.
            SupersededError: another controller leads since; nothing was changed.
            AlreadyExistsError: a unique value is taken; nothing was changed.
        """
        asked = _Asked(change, self._epoch if is_fenced else None, self._deadline_s(), Future())
        self._waiting.append(asked)
        self._writer.submit(self._write_waiting)
        result: T = await asyncio.wrap_future(asked.done)
        return result

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

    def _deadline_s(self) -> float:
        if self._is_closed:
            raise StoreUnavailableError("the database was closed")
        return self._clock.monotonic_s() + self._timeout_s

    # --- in threads ------------------------------------------------------------------

    def _run(self, work: Callable[[sa.Connection], T], deadline_s: float, *, writes: bool = False) -> T:
        with translated(), self._connection(deadline_s, writes=writes) as connection, connection.begin():
            return work(connection)

    def _connection(self, deadline_s: float, *, writes: bool) -> sa.Connection:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise StoreUnavailableError("the database is busy")
        connection = self._engine.connect().execution_options(writes=writes, wait_s=left_s)
        if not writes and connection.dialect.name == "postgresql":
            # Each statement would else see what was committed meanwhile: no sum would agree with another.
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        return connection

    def _write_waiting(self) -> None:
        """Do what waits now; somebody before may have done it already."""
        group: list[_Asked] = []
        while self._waiting and len(group) < WRITES_TOGETHER:
            asked = self._waiting.popleft()
            if asked.done.set_running_or_notify_cancel():
                group.append(asked)
        if len(group) > 1 and self._write_together(group):
            return
        for asked in group:
            try:
                result = self._run(_Fence().guard(asked), asked.deadline_s, writes=True)
            except BaseException as error:  # noqa: BLE001 - boundary: of one write; whoever asked for it gets it
                asked.done.set_exception(error)
            else:
                asked.done.set_result(result)

    def _write_together(self, group: list[_Asked]) -> bool:
        """Do all in one transaction; say False, with nothing changed and nobody told, where that fails as a whole."""
        fence, is_committing = _Fence(), False
        try:
            deadline_s = min(asked.deadline_s for asked in group)
            with translated(), self._connection(deadline_s, writes=True) as connection, connection.begin():
                outcomes = [_behind_savepoint(connection, fence.guard(asked)) for asked in group]
                is_committing = True
        except StoreUnavailableError as error:
            if not is_committing:
                return False  # a lock, or a disk that is full for one of them: each tries with what time it has left
            outcomes = [(None, error)] * len(group)  # a connection that is lost now may have committed: never twice
        except Exception:  # noqa: BLE001 - boundary: of one of them, found at the commit; alone it is told whose it is
            return False
        for asked, (result, failure) in zip(group, outcomes, strict=True):
            if failure is not None:
                asked.done.set_exception(failure)
            else:
                asked.done.set_result(result)
        return True


class _Fence:
    """Who leads, read once in a transaction; and again after a write that may have changed it."""

    def __init__(self) -> None:
        self._is_read = False
        self._stored: int | None = None

    def guard(self, asked: _Asked) -> Callable[[sa.Connection], Any]:
        """Return the change, which fails if another controller leads."""

        def guarded(connection: sa.Connection) -> Any:
            if asked.epoch is None:
                self._is_read = False
                return asked.change(connection)
            if not self._is_read:
                self._stored, self._is_read = connection.execute(_EPOCH).scalar(), True
            if self._stored != asked.epoch:
                raise SupersededError("another controller leads now")
            return asked.change(connection)

        return guarded


def _behind_savepoint(
    connection: sa.Connection, change: Callable[[sa.Connection], Any]
) -> tuple[Any, Exception | None]:
    """Return what ``change`` came to, and nothing else of one that failed.

    Raises:
        StoreUnavailableError: the whole transaction is lost.
    """
    result, failure = None, None
    connection.exec_driver_sql("SAVEPOINT change")
    try:
        with translated():
            result = change(connection)
    except StoreUnavailableError:
        raise
    except Exception as error:  # noqa: BLE001 - boundary: of one write; whoever asked for it gets it
        failure = error
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT change")
    connection.exec_driver_sql("RELEASE SAVEPOINT change")
    return result, failure


def open_database(url: str, *, timeout_s: float, clock: Clock | None = None) -> Database:
    """Open ``url`` (``sqlite:///<path>`` or ``postgresql+psycopg://…``), creating or migrating its tables.

    Blocks; call it before the loop runs, or in a thread. ``timeout_s`` is the longest that a caller waits for a lock.

    Raises:
        StartupError: the database cannot be opened, is damaged, or was written by a newer release.
    """
    where = _place_of(url)
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


def open_to_read(url: str, *, timeout_s: float, clock: Clock | None = None) -> Database:
    """Open a database that is there, to read from it alone: it is neither created nor migrated, and nothing is written.

    A platform that runs on it is not disturbed. Blocks, as ``open_database``.

    Raises:
        StartupError: there is none, it cannot be opened, or it has the tables of another release.
    """
    where = _place_of(url)
    if where.get_backend_name() == "sqlite" and not Path(where.database or "").is_file():
        raise StartupError(f"There is no database {where.database}. Name its data directory with --data-dir.")
    try:
        engine = _engine(where, timeout_s, reads_only=True)
        with ExitStack() as if_it_fails:
            if_it_fails.callback(engine.dispose)
            with engine.connect().execution_options(writes=False, wait_s=timeout_s) as connection, connection.begin():
                check_readable(connection)
            if_it_fails.pop_all()
    except (exc.DBAPIError, OSError, ImportError) as error:
        reason = str(error.orig) if isinstance(error, exc.DBAPIError) else str(error)
        raise StartupError(
            f"Cannot read the database {where.render_as_string(hide_password=True)}: {reason}."
        ) from error
    return Database(engine, timeout_s=timeout_s, clock=clock or SystemClock())


def _place_of(url: str) -> sa.URL:
    try:
        return sa.make_url(url)
    except exc.ArgumentError as error:
        raise StartupError(
            "'control.database_url' is no database URL. Example: sqlite:////var/lib/modelyard/control.sqlite"
        ) from error


def _engine(where: sa.URL, timeout_s: float, *, reads_only: bool = False) -> sa.Engine:
    match where.get_backend_name():
        case "sqlite":
            return _sqlite_reader(where, timeout_s) if reads_only else _sqlite_engine(where, timeout_s)
        case "postgresql":
            return _postgres_engine(where, timeout_s, reads_only=reads_only)
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

    _begin_by_hand(engine)
    return engine


def _sqlite_reader(where: sa.URL, timeout_s: float) -> sa.Engine:
    # What a live writer has in its log is seen; a file that nobody has open gets a log of its own beside it.
    query = {"mode": "ro", "uri": "true"}
    if _is_still(Path(where.database or "")):
        query["immutable"] = "1"  # a backup that is mounted to read has no room for a log, and needs none
    there = where.set(database=f"file:{quote(where.database or '')}", query=query)
    engine = sa.create_engine(there, connect_args={"timeout": timeout_s}, pool_size=1, max_overflow=READERS)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        connection.isolation_level = None

    _begin_by_hand(engine)
    return engine


def _is_still(file: Path) -> bool:
    """Say whether nobody can write to a database: it is on a file system to read, and all of it is in its file."""
    log = file.with_name(f"{file.name}-wal")
    is_whole = not log.exists() or log.stat().st_size == 0
    return is_whole and bool(os.statvfs(file).f_flag & os.ST_RDONLY)


def _begin_by_hand(engine: sa.Engine) -> None:
    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {max(1, int(options['wait_s'] * 1000))}")
        # IMMEDIATE: a deferred writer that finds the lock taken after its first read fails at once, without waiting.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options["writes"] else "BEGIN")


def _postgres_engine(where: sa.URL, timeout_s: float, *, reads_only: bool = False) -> sa.Engine:
    wait_ms = max(1, int(timeout_s * 1000))
    options = f"-c lock_timeout={wait_ms}" + (" -c default_transaction_read_only=on" if reads_only else "")
    return sa.create_engine(
        where,
        connect_args={"connect_timeout": max(1, round(timeout_s)), "options": options},
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
