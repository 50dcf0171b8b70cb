"""A ``ControlStore`` whose reads are answered from memory.

The controller reads everything it remembers in every reconcile round and at
every change; with thousands of endpoints the reading alone would take longer
than the round may. So what was read once is kept, and each write is done to
the store first and to the copy then, in the order in which the store did them.

Two things bring the copy back to the truth whatever happened: a write whose
outcome is not known (cancelled, or failed in no way that has a name) voids it,
and every ``REREAD_S`` it is read anew, since another process may have written.
What did not change is the same object in every read, so that readers can tell
by identity what is news.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from modelyard.clock import Clock
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress
from modelyard.domain.fleet import GuestSeat, Replica
from modelyard.domain.tenants import ApiKey, Tenant
from modelyard.stores import AlreadyExistsError, ControlStore, Event, StoreUnavailableError

REREAD_S = 30.0

_VERSION_CHANGES = ("artifact", "gpu_type", "gpu_count", "memory_bytes", "status", "facts", "base_id", "parent_id")
"""What ``put_version`` replaces; the rest of a version never changes."""


class _Row(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Row)


class Rows(Generic[T]):
    """The copy of one table, in the store's order: ``key`` of a row tells its place."""

    def __init__(self, read: Callable[[], Awaitable[list[T]]], key: Callable[[T], Any], clock: Clock) -> None:
        self._read = read
        self._key = key
        self._clock = clock
        self._rows: dict[str, T] = {}
        self._due_s: float | None = None
        """When to read anew; None: nothing is known."""
        self._turn = asyncio.Lock()
        self._since: list[Callable[[], None]] | None = None
        """Writes since the reading that is under way began: it may or may not have seen them."""

    def __repr__(self) -> str:
        return f"<Rows {len(self._rows)}>"

    async def all(self) -> list[T]:
        """Return all rows."""
        if self._due_s is None or self._clock.monotonic_s() >= self._due_s:
            async with self._turn:
                if self._due_s is None or self._clock.monotonic_s() >= self._due_s:
                    await self._reread()
        return list(self._rows.values())

    def void(self) -> None:
        """Believe nothing of it any more."""
        self._due_s = None
        if self._since is not None:
            self._since.append(self.void)

    def change(self, work: Callable[[], None]) -> None:
        """Do to the copy what the store did."""
        work()
        if self._since is not None:
            self._since.append(work)

    def get(self, row_id: str) -> T | None:
        """Return the row of this id."""
        return self._rows.get(row_id)

    def set(self, row: T) -> None:
        """Add or replace a row."""
        is_new = row.id not in self._rows
        is_moved = not is_new and self._key(self._rows[row.id]) != self._key(row)
        is_last = is_new and (not self._rows or self._key(next(reversed(self._rows.values()))) <= self._key(row))
        self._rows[row.id] = row
        if is_moved or (is_new and not is_last):
            self._rows = dict(sorted(self._rows.items(), key=lambda item: self._key(item[1])))

    def replace(self, row: T) -> None:
        """Replace a row that is there."""
        if row.id in self._rows:
            self.set(row)

    def drop(self, is_gone: Callable[[T], bool]) -> None:
        """Remove rows."""
        for row in [row for row in self._rows.values() if is_gone(row)]:
            del self._rows[row.id]

    async def _reread(self) -> None:
        self._since = []
        began_s = self._clock.monotonic_s()
        try:
            rows = await self._read()
        finally:
            since, self._since = self._since, None
        old = self._rows
        self._rows = {row.id: kept if (kept := old.get(row.id)) == row else row for row in rows}
        self._due_s = began_s + REREAD_S
        # The reading has seen those writes or not; done again in their order they leave each row as the store has it.
        for work in since:
            work()


class MirroredStore:
    """``ControlStore`` over ``store``, which nobody else writes to in this process."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store = store
        self._tenants: Rows[Tenant] = Rows(store.tenants, _by_age, clock)
        self._keys: Rows[ApiKey] = Rows(store.keys, _by_age, clock)
        self._versions: Rows[ModelVersion] = Rows(store.versions, _by_age, clock)
        self._endpoints: Rows[Endpoint] = Rows(store.endpoints, _by_age, clock)
        self._replicas: Rows[Replica] = Rows(store.replicas, lambda row: row.id, clock)

    def __repr__(self) -> str:
        return f"<MirroredStore of {self._store!r}>"

    # --- reads from memory -------------------------------------------------------------

    async def tenants(self) -> list[Tenant]:
        """Return all, oldest first."""
        return await self._tenants.all()

    async def keys(self, *, tenant_id: str | None = None) -> list[ApiKey]:
        """Return all of a tenant (or of all), oldest first, revoked ones too."""
        return _of_tenant(await self._keys.all(), tenant_id)

    async def versions(self, *, tenant_id: str | None = None) -> list[ModelVersion]:
        """Return all of a tenant (or of all), oldest first."""
        return _of_tenant(await self._versions.all(), tenant_id)

    async def endpoints(self, *, tenant_id: str | None = None) -> list[Endpoint]:
        """Return all of a tenant (or of all), oldest first."""
        return _of_tenant(await self._endpoints.all(), tenant_id)

    async def replicas(self, *, endpoint_id: str | None = None) -> list[Replica]:
        """Return all (of an endpoint), by id."""
        rows = await self._replicas.all()
        return rows if endpoint_id is None else [row for row in rows if row.endpoint_id == endpoint_id]

    # --- writes, to the store first ---------------------------------------------------------

    async def add_tenant(self, tenant: Tenant) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or name."""
        await self._write(self._store.add_tenant(tenant), (self._tenants, lambda: self._tenants.set(tenant)))

    async def put_tenant(self, tenant: Tenant) -> None:
        """Replace the tenant of this id."""
        await self._write(self._store.put_tenant(tenant), (self._tenants, lambda: self._tenants.replace(tenant)))

    async def add_key(self, key: ApiKey) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id."""
        await self._write(self._store.add_key(key), (self._keys, lambda: self._keys.set(key)))

    async def put_key(self, key: ApiKey) -> None:
        """Replace the key of this id."""
        await self._write(self._store.put_key(key), (self._keys, lambda: self._keys.replace(key)))

    async def add_version(self, version: ModelVersion) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or (tenant, name, version)."""
        await self._write(self._store.add_version(version), (self._versions, lambda: self._versions.set(version)))

    async def put_version(self, version: ModelVersion) -> None:
        """Replace what may change of the version of this id."""

        def put() -> None:
            if (old := self._versions.get(version.id)) is not None:
                changes = {name: getattr(version, name) for name in _VERSION_CHANGES}
                self._versions.set(msgspec.structs.replace(old, **changes))

        await self._write(self._store.put_version(version), (self._versions, put))

    async def remove_version(self, version_id: str) -> bool:
        """Forget a version; say False, and keep it, while an endpoint, a replica that lives or an adapter uses it."""
        try:
            return await self._store.remove_version(version_id)
        finally:
            self._versions.void()  # others may have got another lineage with it
            self._replicas.void()  # what is kept of those that ended goes with it

    async def add_deployment(self, version: ModelVersion, endpoint: Endpoint) -> None:
        """Add both in one transaction; raises ``AlreadyExistsError`` for a taken endpoint name of the tenant."""
        await self._write(
            self._store.add_deployment(version, endpoint),
            (self._versions, lambda: self._versions.set(version)),
            (self._endpoints, lambda: self._endpoints.set(endpoint)),
        )

    async def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add one of versions that exist; raises ``AlreadyExistsError`` for a taken name of the tenant."""
        await self._write(self._store.add_endpoint(endpoint), (self._endpoints, lambda: self._endpoints.set(endpoint)))

    async def add_release(self, version: ModelVersion, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Add the version and replace the endpoint of this id; raises ``AlreadyExistsError`` for a taken version."""
        await self._write(
            self._store.add_release(version, endpoint, events=events),
            (self._versions, lambda: self._versions.set(version)),
            (self._endpoints, lambda: self._endpoints.replace(endpoint)),
        )

    async def put_endpoint(self, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Replace the endpoint of this id, and append the events of that change."""
        work = self._store.put_endpoint(endpoint, events=events)
        await self._write(work, (self._endpoints, lambda: self._endpoints.replace(endpoint)))

    async def put_outlook(
        self,
        endpoint_id: str,
        *,
        status: EndpointStatus,
        progress: Progress,
        failure: str,
        events: Sequence[Event] = (),
    ) -> None:
        """Replace what is told of the endpoint of this id, and nothing that was asked of it; append ``events``."""

        def put() -> None:
            if (old := self._endpoints.get(endpoint_id)) is not None:
                self._endpoints.set(msgspec.structs.replace(old, status=status, progress=progress, failure=failure))

        work = self._store.put_outlook(endpoint_id, status=status, progress=progress, failure=failure, events=events)
        await self._write(work, (self._endpoints, put))

    async def remove_endpoint(self, endpoint_id: str) -> None:
        """Forget an endpoint, its replicas and events; the ledger keeps its rows."""
        await self._write(
            self._store.remove_endpoint(endpoint_id),
            (self._endpoints, lambda: self._endpoints.drop(lambda row: row.id == endpoint_id)),
            (self._replicas, lambda: self._replicas.drop(lambda row: row.endpoint_id == endpoint_id)),
        )

    async def put_replica(self, replica: Replica) -> None:
        """Add or replace the replica of this id; the seats on one that is there stay as they are."""

        def put() -> None:
            old = self._replicas.get(replica.id)
            self._replicas.set(replica if old is None else msgspec.structs.replace(replica, guests=old.guests))

        await self._write(self._store.put_replica(replica), (self._replicas, put))

    async def put_guests(self, replica_id: str, guests: tuple[GuestSeat, ...]) -> None:
        """Replace the seats on the replica of this id, and nothing else of it."""

        def put() -> None:
            if (old := self._replicas.get(replica_id)) is not None:
                self._replicas.set(msgspec.structs.replace(old, guests=guests))

        await self._write(self._store.put_guests(replica_id, guests), (self._replicas, put))

    async def remove_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        work = self._store.remove_replica(replica_id)
        await self._write(work, (self._replicas, lambda: self._replicas.drop(lambda row: row.id == replica_id)))

    async def _write(self, work: Awaitable[None], *changes: tuple[Rows[Any], Callable[[], None]]) -> None:
        try:
            await work
        except (AlreadyExistsError, StoreUnavailableError):
            raise  # nothing was changed
        except BaseException:
            for rows, _ in changes:
                rows.void()
            raise
        for rows, change in changes:
            rows.change(change)

    # --- not mirrored ---------------------------------------------------------------------------

    async def ping(self) -> None:
        """Prove that the store can be written, now."""
        await self._store.ping()

    async def add_event(self, event: Event) -> None:
        """Append; only the last 200 of an endpoint are kept."""
        await self._store.add_event(event)

    async def events(self, endpoint_id: str, *, limit: int) -> list[Event]:
        """Return the newest ``limit``, oldest first."""
        return await self._store.events(endpoint_id, limit=limit)

    async def observed_load_s(self, version_id: str) -> list[float]:
        """Return the last (at most 10) measured seconds from start to ready of this version."""
        return await self._store.observed_load_s(version_id)

    async def observed_loads(self) -> Mapping[str, list[float]]:
        """Return the same of every version that was measured, by its id."""
        return await self._store.observed_loads()

    async def add_observed_load(self, version_id: str, seconds: float) -> None:
        """Remember one measured load time."""
        await self._store.add_observed_load(version_id, seconds)

    async def forecasts(self) -> dict[str, bytes]:
        """Return the stored forecast profile of each endpoint that has one, by its id."""
        return await self._store.forecasts()

    async def put_forecasts(self, profiles: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace profiles by endpoint id; those of endpoints that do not exist are dropped."""
        await self._store.put_forecasts(profiles, at=at)

    async def engine_fits(self) -> dict[str, bytes]:
        """Return what is stored of engines' speeds, by version."""
        return await self._store.engine_fits()

    async def put_engine_fits(self, fits: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace by version; those of versions that do not exist are dropped."""
        await self._store.put_engine_fits(fits, at=at)

    async def close(self) -> None:
        """Give back connections and threads."""
        await self._store.close()


def _by_age(row: Any) -> tuple[int, str]:
    return row.created_at, row.id


U = TypeVar("U", ApiKey, ModelVersion, Endpoint)


def _of_tenant(rows: list[U], tenant_id: str | None) -> list[U]:
    return rows if tenant_id is None else [row for row in rows if row.tenant_id == tenant_id]
