"""``ControlStore`` in SQL: what the controller remembers.

Every method is one function that runs on the database's threads. Replacing
what does not exist changes nothing: the reconciler may finish a pass over an
endpoint that was removed meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import exc

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState
from modelyard.domain.tenants import ApiKey, Tenant
from modelyard.stores import AlreadyExistsError, Event
from modelyard.stores.sql import mapping, schema
from modelyard.stores.sql.announcing import add_events, trimmed
from modelyard.stores.sql.database import CHUNK, Database, insert, is_unique_violation

T = TypeVar("T")

LOADS_KEPT = 10
"""Newest measured load times of a version that stay; older ones say little about today's machine."""

_ENDED = (ReplicaState.STOPPED, ReplicaState.FAILED)


class SqlControlStore:
    """Tenants, keys, registry, endpoints, replicas and events in ``database``, which it closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ping(self) -> None:
        """Prove that the store can be written, now: only a commit finds a full disk."""
        version = schema.alembic_version
        await self._database.write(lambda c: c.execute(sa.update(version).values(version_num=version.c.version_num)))

    async def add_tenant(self, tenant: Tenant) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or name."""
        await self._insert(schema.tenants, mapping.tenant_values(tenant), f"A tenant named '{tenant.name}' exists")

    async def put_tenant(self, tenant: Tenant) -> None:
        """Replace the tenant of this id; raises ``AlreadyExistsError`` for a name that another has."""
        values = mapping.tenant_values(tenant)
        await self._update(schema.tenants.c.tenant_id, values, f"A tenant named '{tenant.name}' exists")

    async def tenants(self) -> list[Tenant]:
        """Return all, oldest first."""
        table = schema.tenants
        return await self._all(sa.select(table).order_by(table.c.created_at, table.c.tenant_id), mapping.tenant_of)

    async def add_key(self, key: ApiKey) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id."""
        await self._insert(schema.api_keys, mapping.key_values(key), f"An API key '{key.id}' exists")

    async def put_key(self, key: ApiKey) -> None:
        """Replace the key of this id."""
        await self._update(schema.api_keys.c.api_key_id, mapping.key_values(key), "")

    async def keys(self, *, tenant_id: str | None = None) -> list[ApiKey]:
        """Return all of a tenant (or of all), oldest first, revoked ones too."""
        table = schema.api_keys
        query = sa.select(table).order_by(table.c.created_at, table.c.api_key_id)
        return await self._all(_where(query, table.c.tenant_id, tenant_id), mapping.key_of)

    async def add_version(self, version: ModelVersion) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or (tenant, name, version)."""
        await self._insert(schema.model_registry, mapping.version_values(version), _version_taken(version))

    async def remove_version(self, version_id: str) -> bool:
        """Forget a version; say False, and keep it, while an endpoint, a replica that lives or an adapter uses it."""
        table, loads, replicas = schema.model_registry, schema.observed_loads, schema.replicas
        lives = (replicas.c.model_id == version_id) & replicas.c.state.not_in(_ENDED)
        users = (schema.releases.c.model_id == version_id, lives, table.c.base_id == version_id)

        def remove(connection: sa.Connection) -> bool:
            if any(connection.execute(sa.select(sa.literal(1)).where(uses)).first() for uses in users):
                return False
            # Ids of replicas are made of the version's, which is never given again: its tombstones guard nothing more.
            connection.execute(sa.delete(replicas).where(replicas.c.model_id == version_id))
            mine = table.c.model_id == version_id
            parent = connection.execute(sa.select(table.c.parent_id).where(mine)).scalar() or ""
            connection.execute(sa.update(table).where(table.c.parent_id == version_id).values(parent_id=parent))
            connection.execute(sa.delete(loads).where(loads.c.model_id == version_id))
            connection.execute(sa.delete(table).where(mine))
            return True

        return await self._database.write(remove)

    async def put_version(self, version: ModelVersion) -> None:
        """Replace the status, digest and sizes of the version of this id; the rest of a version never changes."""
        values = {"model_id": version.id, **mapping.version_changes(version)}
        await self._update(schema.model_registry.c.model_id, values, "")

    async def versions(self, *, tenant_id: str | None = None) -> list[ModelVersion]:
        """Return all of a tenant (or of all), oldest first."""
        table = schema.model_registry
        query = sa.select(table).order_by(table.c.created_at, table.c.model_id)
        return await self._all(_where(query, table.c.owner_id, tenant_id), mapping.version_of)

    async def add_deployment(self, version: ModelVersion, endpoint: Endpoint) -> None:
        """Add both in one transaction; raises ``AlreadyExistsError`` for a taken endpoint name or version."""

        def add(connection: sa.Connection) -> None:
            with _taken(f"An endpoint named '{endpoint.name}' exists"):
                connection.execute(sa.insert(schema.endpoints).values(mapping.endpoint_values(endpoint)))
            with _taken(_version_taken(version)):
                connection.execute(sa.insert(schema.model_registry).values(mapping.version_values(version)))
            _add_releases(connection, endpoint)

        await self._database.write(add)

    async def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add one of known versions; raises ``AlreadyExistsError`` for a taken name, ``KeyError`` for no version."""
        table = schema.model_registry

        def add(connection: sa.Connection) -> None:
            for release in endpoint.releases:
                if not connection.execute(
                    sa.select(table.c.model_id).where(table.c.model_id == release.version_id)
                ).first():
                    raise KeyError(release.version_id)
            with _taken(f"An endpoint named '{endpoint.name}' exists"):
                connection.execute(sa.insert(schema.endpoints).values(mapping.endpoint_values(endpoint)))
            _add_releases(connection, endpoint)

        await self._database.write(add)

    async def add_release(self, version: ModelVersion, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Add the version and replace the endpoint of this id; raises ``AlreadyExistsError`` for a taken version."""

        def add(connection: sa.Connection) -> None:
            with _taken(_version_taken(version)):
                connection.execute(sa.insert(schema.model_registry).values(mapping.version_values(version)))
            _put_endpoint(connection, endpoint)
            add_events(connection, events)

        await self._database.write(add)

    async def put_endpoint(self, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Replace the endpoint of this id and its releases; raises ``AlreadyExistsError`` for a taken name."""

        def put(connection: sa.Connection) -> None:
            _put_endpoint(connection, endpoint)
            add_events(connection, events)

        await self._database.write(put)

    async def put_outlook(
        self,
        endpoint_id: str,
        *,
        status: EndpointStatus,
        progress: Progress,
        failure: str,
        events: Sequence[Event] = (),
    ) -> None:
        """Replace what is told of the endpoint of this id, and nothing that was asked of it."""
        values = {**mapping.outlook_values(status, progress, failure), "of_row": endpoint_id}

        def put(connection: sa.Connection) -> None:
            connection.execute(_update_of(schema.endpoints.c.endpoint_id), values)
            add_events(connection, events)

        await self._database.write(put)

    async def remove_endpoint(self, endpoint_id: str) -> None:
        """Forget an endpoint, its releases, replicas and events; the registry and the ledger keep their rows."""
        table = schema.endpoints  # the rows of the others go with it: ON DELETE CASCADE
        await self._database.write(lambda c: c.execute(sa.delete(table).where(table.c.endpoint_id == endpoint_id)))

    async def endpoints(self, *, tenant_id: str | None = None) -> list[Endpoint]:
        """Return all of a tenant (or of all), oldest first."""
        table, releases = schema.endpoints, schema.releases
        query = _where(sa.select(table), table.c.owner_id, tenant_id).order_by(table.c.created_at, table.c.endpoint_id)
        parts = _where(
            sa.select(releases).join(table, table.c.endpoint_id == releases.c.endpoint_id), table.c.owner_id, tenant_id
        ).order_by(releases.c.endpoint_id, releases.c.position)

        def read(connection: sa.Connection) -> list[Endpoint]:
            by_endpoint: dict[str, list[Release]] = {}
            for row in connection.execute(parts).mappings():
                by_endpoint.setdefault(row["endpoint_id"], []).append(mapping.release_of(row))
            rows = connection.execute(query).mappings()
            return [mapping.endpoint_of(row, tuple(by_endpoint.get(row["endpoint_id"], ()))) for row in rows]

        return await self._database.read(read)

    async def put_replica(self, replica: Replica) -> None:
        """Add or replace the replica of this id."""
        values = mapping.replica_values(replica)
        await self._database.write(lambda connection: connection.execute(_replica_upsert(connection), values))

    async def put_guests(self, replica_id: str, guests: tuple[GuestSeat, ...]) -> None:
        """Replace the seats on the replica of this id."""
        values = {"replica_id": replica_id, "guests": mapping.seats_text(guests)}
        await self._update(schema.replicas.c.replica_id, values, "")

    async def remove_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        table = schema.replicas
        await self._database.write(lambda c: c.execute(sa.delete(table).where(table.c.replica_id == replica_id)))

    async def replicas(self, *, endpoint_id: str | None = None) -> list[Replica]:
        """Return all (of an endpoint), by id."""
        table = schema.replicas
        query = sa.select(table).order_by(table.c.replica_id)
        return await self._all(_where(query, table.c.endpoint_id, endpoint_id), mapping.replica_of)

    async def add_event(self, event: Event) -> None:
        """Append; only the last 200 of an endpoint are kept, and none of one that was removed meanwhile."""
        await self._database.write(lambda connection: add_events(connection, (event,)))

    async def events(self, endpoint_id: str, *, limit: int) -> list[Event]:
        """Return the newest ``limit``, oldest first."""
        table = schema.endpoint_events
        newest_first = sa.select(table).where(table.c.endpoint_id == endpoint_id).order_by(table.c.sequence.desc())
        return (await self._all(newest_first.limit(limit), mapping.event_of))[::-1]

    async def observed_load_s(self, version_id: str) -> list[float]:
        """Return the last (at most 10) measured seconds from start to ready of this version, oldest first."""
        table = schema.observed_loads
        query = sa.select(table.c.seconds).where(table.c.model_id == version_id).order_by(table.c.sequence)
        return await self._all(query, lambda row: float(row["seconds"]))

    async def observed_loads(self) -> dict[str, list[float]]:
        """Return the same of every version that was measured, by its id."""
        table = schema.observed_loads
        query = sa.select(table.c.model_id, table.c.seconds).order_by(table.c.sequence)

        def read(connection: sa.Connection) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for model_id, seconds in connection.execute(query):
                found.setdefault(model_id, []).append(float(seconds))
            return found

        return await self._database.read(read)

    async def add_observed_load(self, version_id: str, seconds: float) -> None:
        """Remember one measured load time."""
        table = schema.observed_loads

        def add(connection: sa.Connection) -> None:
            connection.execute(sa.insert(table), {"model_id": version_id, "seconds": seconds})
            connection.execute(_LOAD_TRIM, {"of_model": version_id})

        await self._database.write(add)

    async def forecasts(self) -> dict[str, bytes]:
        """Return the stored forecast profile of each endpoint that has one, by its id."""
        table = schema.forecasts
        rows = await self._all(sa.select(table), lambda row: (str(row["endpoint_id"]), bytes(row["profile"])))
        return dict(rows)

    async def put_forecasts(self, profiles: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace profiles by endpoint id; those of endpoints that do not exist are dropped."""
        table, endpoints = schema.forecasts, schema.endpoints

        def put(connection: sa.Connection) -> None:
            known = set(connection.scalars(sa.select(endpoints.c.endpoint_id)))
            for endpoint_id in sorted(profiles.keys() & known):
                changes = {"profile": profiles[endpoint_id], "updated_at": at}
                row = insert(connection, table).values(endpoint_id=endpoint_id, **changes)
                connection.execute(row.on_conflict_do_update(index_elements=["endpoint_id"], set_=changes))

        await self._database.write(put)

    async def engine_fits(self) -> dict[str, bytes]:
        """Return what is stored of engines' speeds, by version."""
        table = schema.engine_fits
        return dict(await self._all(sa.select(table), lambda row: (str(row["model_id"]), bytes(row["fit"]))))

    async def put_engine_fits(self, fits: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace by version; those of versions that do not exist are dropped."""
        table, versions = schema.engine_fits, schema.model_registry
        wanted = sorted(fits)

        def put(connection: sa.Connection) -> None:
            row = insert(connection, table)
            changes = {name: row.excluded[name] for name in ("fit", "updated_at")}
            upsert = row.on_conflict_do_update(index_elements=["model_id"], set_=changes)
            for start in range(0, len(wanted), CHUNK):
                there = versions.c.model_id.in_(wanted[start : start + CHUNK])
                known = connection.scalars(sa.select(versions.c.model_id).where(there)).all()
                if known:
                    connection.execute(upsert, [{"model_id": one, "fit": fits[one], "updated_at": at} for one in known])

        await self._database.write(put)

    async def close(self) -> None:
        """Give back connections and threads."""
        await self._database.close()

    async def _all(self, query: sa.Select[tuple[object, ...]], noun_of: Callable[[sa.RowMapping], T]) -> list[T]:
        return await self._database.read(lambda c: [noun_of(row) for row in c.execute(query).mappings()])

    async def _insert(self, table: sa.Table, values: mapping.Values, taken: str) -> None:
        def add(connection: sa.Connection) -> None:
            with _taken(taken):
                connection.execute(sa.insert(table).values(values))

        await self._database.write(add)

    async def _update(self, key: sa.Column[str], values: mapping.Values, taken: str) -> None:
        def put(connection: sa.Connection) -> None:
            with _taken(taken):
                connection.execute(_update_of(key), {**values, "of_row": values[key.name]})

        await self._database.write(put)


# Statements that run often are made once: making one costs SQLAlchemy more than SQLite needs to do it.


@cache
def _update_of(key: sa.Column[str]) -> sa.Update:
    return sa.update(key.table).where(key == sa.bindparam("of_row"))


_replica_upserts: dict[str, sa.Executable] = {}
"""By dialect."""


def _replica_upsert(connection: sa.Connection) -> sa.Executable:
    found = _replica_upserts.get(connection.dialect.name)
    if found is None:
        row = insert(connection, schema.replicas)
        changes = {
            column.name: row.excluded[column.name]
            for column in schema.replicas.columns
            if not column.primary_key and column.name != "guests"
        }
        found = row.on_conflict_do_update(index_elements=["replica_id"], set_=changes)
        _replica_upserts[connection.dialect.name] = found
    return found


_LOAD_TRIM = trimmed(schema.observed_loads, schema.observed_loads.c.model_id == sa.bindparam("of_model"), LOADS_KEPT)


@contextmanager
def _taken(message: str) -> Iterator[None]:
    """Say which of the unique values it was; the driver only names columns."""
    try:
        yield
    except exc.IntegrityError as error:
        if is_unique_violation(error):
            raise AlreadyExistsError(message) from error
        raise


def _version_taken(version: ModelVersion) -> str:
    return f"Version '{version.version}' of model '{version.name}' exists"


def _where(query: sa.Select[T], column: sa.Column[str], value: str | None) -> sa.Select[T]:
    return query if value is None else query.where(column == value)


def _put_endpoint(connection: sa.Connection, endpoint: Endpoint) -> None:
    table, releases = schema.endpoints, schema.releases
    with _taken(f"An endpoint named '{endpoint.name}' exists"):
        changed = connection.execute(
            sa.update(table).where(table.c.endpoint_id == endpoint.id).values(mapping.endpoint_values(endpoint))
        )
    if changed.rowcount:
        connection.execute(sa.delete(releases).where(releases.c.endpoint_id == endpoint.id))
        _add_releases(connection, endpoint)


def _add_releases(connection: sa.Connection, endpoint: Endpoint) -> None:
    if rows := mapping.release_values(endpoint):
        connection.execute(sa.insert(schema.releases), rows)
