"""The mirror says what the store says, after any writes, and finds back to it after any failure."""

import asyncio
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.clock import ManualClock
from modelyard.domain.catalog import Artifact, ModelVersion, VersionStatus
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.stores import AlreadyExistsError, ControlStore
from modelyard.stores.mirror import REREAD_S, MirroredStore
from modelyard.stores.sql import SqlControlStore, open_database

OPS = (
    "add_tenant", "put_tenant", "add_key", "put_key", "add_deployment", "add_release", "put_version", "put_endpoint",
    "put_outlook", "remove_endpoint", "put_replica", "remove_replica",
)  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=25
)


def a_version(number: int, flavour: int) -> ModelVersion:
    artifact = Artifact(f"file:///{flavour}", f"sha256:{flavour}", flavour)
    status = list(VersionStatus)[flavour % 3]
    return ModelVersion(f"ver-{number}", "ten-0", "m", f"v{number}", "simulated", artifact, {"slots": 2}, 1, status)


def an_endpoint(number: int, flavour: int) -> Endpoint:
    release = Release(f"ver-{number}", 100)
    return Endpoint(f"ep-{number}", "ten-0", f"name-{flavour}", (release,), Scaling(flavour, 4), 5 - number)


def a_replica(number: int, flavour: int) -> Replica:
    state = list(ReplicaState)[flavour]
    return Replica(f"rep-{number}-{flavour}", f"ep-{number}", f"ver-{number}", flavour, 0, state, 1.0, port=flavour)


async def write(store: ControlStore, op: str, number: int, flavour: int) -> None:
    key = ApiKey(f"key-{number}", "ten-0", f"{flavour}", b"h", (Scope.INFERENCE,), flavour)
    match op:
        case "add_tenant" | "put_tenant":
            await getattr(store, op)(Tenant(f"ten-{number}", f"name-{flavour}", 1))
        case "add_key" | "put_key":
            await getattr(store, op)(key)
        case "add_deployment" | "add_release":
            await getattr(store, op)(a_version(number, flavour), an_endpoint(number, flavour))
        case "put_version":
            await store.put_version(a_version(number, flavour))
        case "put_endpoint":
            await store.put_endpoint(an_endpoint(number, flavour))
        case "put_outlook":
            status, progress = list(EndpointStatus)[flavour], Progress(Stage.LOADING, flavour)
            await store.put_outlook(f"ep-{number}", status=status, progress=progress, failure=f"{flavour}")
        case "remove_endpoint":
            await store.remove_endpoint(f"ep-{number}")
        case "put_replica":
            if f"ep-{number}" in {one.id for one in await store.endpoints()}:
                await store.put_replica(a_replica(number, flavour))
        case "remove_replica":
            await store.remove_replica(f"rep-{number}-{flavour}")
        case _:
            raise AssertionError(op)


async def everything(store: ControlStore) -> list[object]:
    return [
        await store.tenants(),
        await store.keys(),
        await store.versions(),
        await store.endpoints(),
        await store.endpoints(tenant_id="ten-0"),
        await store.replicas(),
        await store.replicas(endpoint_id="ep-1"),
    ]


async def open_store(folder: str | Path) -> SqlControlStore:
    store = SqlControlStore(open_database(f"sqlite:///{folder}/control.sqlite", timeout_s=5))
    await store.add_tenant(Tenant("ten-0", "first", 1))
    return store


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_the_mirror_reads_what_the_store_has_after_any_writes(steps: list[tuple[str, int, int, bool]]) -> None:
    async def run(folder: str) -> None:
        store = await open_store(folder)
        mirror = MirroredStore(store, ManualClock())
        try:
            await everything(mirror)
            for op, number, flavour, is_compared in steps:
                with suppress(AlreadyExistsError):  # what the store refuses changes neither
                    await write(mirror, op, number, flavour)
                if is_compared:
                    assert await everything(mirror) == await everything(store)
            assert await everything(mirror) == await everything(store)
        finally:
            await store.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


async def test_what_did_not_change_is_the_same_object_in_every_read(tmp_path: Path) -> None:
    store, clock = await open_store(tmp_path), ManualClock()
    mirror = MirroredStore(store, clock)
    await mirror.add_deployment(a_version(1, 1), an_endpoint(1, 1))
    (first,) = await mirror.endpoints()
    clock.advance(REREAD_S + 1)
    (again,) = await mirror.endpoints()
    assert again is first
    await store.close()


async def test_what_another_process_wrote_is_seen_at_the_next_reading(tmp_path: Path) -> None:
    store, clock = await open_store(tmp_path), ManualClock()
    mirror = MirroredStore(store, clock)
    assert len(await mirror.tenants()) == 1
    await store.add_tenant(Tenant("ten-9", "by another", 2))
    clock.advance(REREAD_S + 1)
    assert [tenant.id for tenant in await mirror.tenants()] == ["ten-0", "ten-9"]
    await store.close()


async def test_a_write_that_was_cancelled_half_way_is_found_out(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    mirror = MirroredStore(store, ManualClock())
    await mirror.tenants()
    writing = asyncio.ensure_future(mirror.add_tenant(Tenant("ten-9", "late", 2)))
    await asyncio.sleep(0)  # it has been handed to the writer
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await store.ping()  # writes are done in turn: that one is through
    assert await mirror.tenants() == await store.tenants()
    await store.close()


async def test_a_write_during_a_reading_is_not_lost(tmp_path: Path) -> None:
    store = await open_store(tmp_path)

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        async def tenants(self) -> list[Tenant]:
            found = await store.tenants()
            await mirror.put_tenant(msgspec.structs.replace(found[0], name="renamed"))
            return found

    mirror = MirroredStore(Slow(), ManualClock())  # type: ignore[arg-type]
    assert [tenant.name for tenant in await mirror.tenants()] == ["renamed"]
    await store.close()
