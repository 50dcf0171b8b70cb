"""Every ``ControlStore`` remembers what it was told, keeps unique things unique, and fails in the two named ways."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.catalog import Artifact, ModelVersion, VersionStatus
from modelyard.domain.endpoints import (
    Endpoint,
    EndpointStatus,
    Progress,
    Release,
    Scaling,
    Serving,
    Stage,
    Sticky,
    Timeouts,
)
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState, SeatState
from modelyard.domain.rollouts import Judgement, Rollout, RolloutKind, RolloutMode, RolloutState, Thresholds
from modelyard.domain.tenants import ApiKey, Limits, Scope, Tenant
from modelyard.stores import AlreadyExistsError, ControlStore, Event, StoreUnavailableError
from modelyard.stores.sql import SqlControlStore

ACME = Tenant("ten-acme", "acme", 1_000, Limits(requests_per_minute=60, concurrency=4))
OTHER = Tenant("ten-other", "other", 2_000)


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ControlStore]:
    opened = SqlControlStore(open_fresh(request.param, tmp_path))
    await opened.add_tenant(ACME)
    await opened.add_tenant(OTHER)
    yield opened
    await opened.close()


def a_key(name: str = "k1", **changes: object) -> ApiKey:
    key = ApiKey(
        id=name,
        tenant_id=ACME.id,
        name="laptop",
        secret_hash=bytes(range(32)),
        scopes=(Scope.INFERENCE, Scope.MANAGE),
        created_at=1_000,
        last4="abcd",
        limits=Limits(tokens_per_minute=9),
        models=("smol", "org/big"),
        expires_at=5_000,
    )
    return msgspec.structs.replace(key, **changes)


def a_version(version_id: str = "ver-1", **changes: object) -> ModelVersion:
    version = ModelVersion(
        id=version_id,
        tenant_id=ACME.id,
        name="smol",
        version=version_id,
        framework="llamacpp",
        artifact=Artifact("file:///models/smol.gguf", "sha256:00", 5_000_000_000),
        options={"context": 4096, "flash": True, "ratio": 0.5, "template": "chatml"},
        created_at=1_000,
        gpu_type="h100",
        gpu_count=4,
        memory_bytes=80 * 2**30,
    )
    return msgspec.structs.replace(version, **changes)


def an_endpoint(endpoint_id: str = "ep-1", version_id: str = "ver-1", **changes: object) -> Endpoint:
    endpoint = Endpoint(
        id=endpoint_id,
        tenant_id=ACME.id,
        name=endpoint_id.removeprefix("ep-"),
        releases=(Release(version_id),),
        scaling=Scaling(0, 3, scale_to_zero=True, idle_s=12.5, metric="queue_depth", target_value=7.5),
        created_at=1_000,
        is_shared=True,
        progress=Progress(Stage.DOWNLOADING, 42, 8.5, "needs 3 GiB"),
        failure="",
    )
    return msgspec.structs.replace(endpoint, **changes)


def a_replica(name: str, **changes: object) -> Replica:
    replica = Replica(
        id=name,
        endpoint_id="ep-1",
        version_id="ver-1",
        ordinal=0,
        generation=1,
        state=ReplicaState.READY,
        state_since=1_000.25,
        host="127.0.0.1",
        port=4242,
        secret="s3cret",
        slots=8,
        started_at=990.5,
        ready_at=1_000.25,
        reason="ready",
    )
    return msgspec.structs.replace(replica, **changes)


async def test_tenants_come_back_as_they_were_oldest_first(store: ControlStore) -> None:
    assert await store.tenants() == [ACME, OTHER]
    suspended = msgspec.structs.replace(OTHER, is_suspended=True, limits=Limits(concurrency=1), name="renamed")
    await store.put_tenant(suspended)
    assert await store.tenants() == [ACME, suspended]


async def test_a_taken_tenant_id_or_name_is_refused(store: ControlStore) -> None:
    with pytest.raises(AlreadyExistsError):
        await store.add_tenant(Tenant("ten-new", "acme", 3_000))
    with pytest.raises(AlreadyExistsError):
        await store.add_tenant(Tenant("ten-acme", "new", 3_000))
    with pytest.raises(AlreadyExistsError):
        await store.put_tenant(msgspec.structs.replace(OTHER, name="acme"))
    assert await store.tenants() == [ACME, OTHER]


async def test_keys_come_back_as_they_were(store: ControlStore) -> None:
    full, bare = a_key(), ApiKey("k2", OTHER.id, "ci", b"\x00\xff", (Scope.ADMIN,), 2_000)
    await store.add_key(bare)
    await store.add_key(full)
    assert await store.keys() == [full, bare]
    assert await store.keys(tenant_id=OTHER.id) == [bare]
    rotated = a_key(secret_hash=b"new", previous_hash=b"old", previous_expires_at=3_000, revoked_at=4_000, models=None)
    await store.put_key(rotated)
    assert await store.keys(tenant_id=ACME.id) == [rotated]
    with pytest.raises(AlreadyExistsError):
        await store.add_key(full)


async def test_a_key_that_may_use_no_model_is_not_one_that_may_use_all(store: ControlStore) -> None:
    await store.add_key(a_key("none", models=()))
    await store.add_key(a_key("all", models=None))
    assert {key.id: key.models for key in await store.keys()} == {"none": (), "all": None}


async def test_versions_come_back_as_they_were(store: ControlStore) -> None:
    version = a_version()
    await store.add_version(version)
    assert await store.versions() == [version]
    assert await store.versions(tenant_id=OTHER.id) == []
    with pytest.raises(AlreadyExistsError):
        await store.add_version(a_version("ver-2", version="ver-1"))
    await store.add_version(a_version("ver-3", version="ver-1", tenant_id=OTHER.id, created_at=2_000))
    assert [found.id for found in await store.versions()] == ["ver-1", "ver-3"]


async def test_only_what_is_learned_of_a_version_changes(store: ControlStore) -> None:
    await store.add_version(a_version())
    learned = a_version(
        status=VersionStatus.ACTIVE, artifact=Artifact("file:///m", "sha256:ff", 7), memory_bytes=9, gpu_count=2
    )
    await store.put_version(msgspec.structs.replace(learned, options={}, name="other", framework="vllm"))
    assert await store.versions() == [learned]


async def test_a_deployment_is_added_wholly_or_not_at_all(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    assert await store.endpoints() == [an_endpoint()]
    assert await store.versions() == [a_version()]
    with pytest.raises(AlreadyExistsError, match="endpoint named '1'"):
        await store.add_deployment(a_version("ver-2"), an_endpoint("ep-2", "ver-2", name="1"))
    with pytest.raises(AlreadyExistsError, match="Version 'ver-1'"):
        await store.add_deployment(a_version("ver-2", version="ver-1"), an_endpoint("ep-2", "ver-2"))
    assert [found.id for found in await store.versions()] == ["ver-1"]
    assert [found.id for found in await store.endpoints()] == ["ep-1"]


async def test_rollout_of_an_endpoint_is_kept_with_everything_in_it(store: ControlStore) -> None:
    rollout = Rollout(
        "ver-1",
        "ver-2",
        1.5,
        kind=RolloutKind.ROLLING,
        mode=RolloutMode.MANUAL,
        state=RolloutState.PROMOTED,
        reason="good",
        steps=(5, 100),
        step=1,
        asked_at=2.5,
        step_began_at=3.5,
        thresholds=Thresholds(min_requests=7, ttft_ratio=2.0),
        keep_s=1.0,
        ended_at=4.5,
        kept_until=5.5,
        judgements=(Judgement(1.0, 5, "wait", "why", {"requests": 3, "share": 0.5, "of": "v1", "unknown": None}),),
    )
    await store.add_deployment(a_version(), an_endpoint())
    await store.put_endpoint(an_endpoint(rollout=rollout))
    (found,) = await store.endpoints()
    assert found.rollout == rollout
    await store.put_outlook("ep-1", status=EndpointStatus.RUNNING, progress=Progress(Stage.READY), failure="")
    (found,) = await store.endpoints()
    assert found.rollout == rollout, "what is told of it changes nothing that was asked"


async def test_endpoint_names_are_unique_per_tenant_among_the_living(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    theirs = an_endpoint("ep-2", "ver-2", name="1", tenant_id=OTHER.id)
    await store.add_deployment(a_version("ver-2", tenant_id=OTHER.id), theirs)
    await store.put_endpoint(an_endpoint(is_deleted=True))
    again = an_endpoint("ep-3", "ver-3", name="1", created_at=3_000)
    await store.add_deployment(a_version("ver-3"), again)
    assert [found.id for found in await store.endpoints(tenant_id=ACME.id)] == ["ep-1", "ep-3"]
    with pytest.raises(AlreadyExistsError):
        await store.put_endpoint(an_endpoint(is_deleted=False))


async def test_an_endpoint_changes_with_its_releases(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_version(a_version("ver-2"))
    canary = an_endpoint(
        releases=(Release("ver-2", 10), Release("ver-1", 90)),
        status=EndpointStatus.FAILED,
        failure="no room",
        progress=Progress(Stage.READY),
        scaling=Scaling(),
    )
    await store.put_endpoint(canary)
    assert await store.endpoints() == [canary]
    await store.put_endpoint(msgspec.structs.replace(canary, releases=(Release("ver-2", 100),)))
    assert (await store.endpoints())[0].releases == (Release("ver-2", 100),)


async def test_how_an_endpoint_is_served_comes_back_as_it_was(store: ControlStore) -> None:
    serving = Serving(Timeouts(first_token_s=60.0, total_s=2.5), 20, Sticky.USER, fallback_after_s=1.5)
    await store.add_deployment(a_version(), an_endpoint())
    assert (await store.endpoints())[0].serving == Serving()
    await store.put_endpoint(an_endpoint(serving=serving))
    assert await store.endpoints() == [an_endpoint(serving=serving)]


async def test_a_release_is_added_with_its_version_or_not_at_all(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    two = an_endpoint(releases=(Release("ver-1", 100), Release("ver-2", 0, shadow=25)))
    await store.add_release(a_version("ver-2"), two)
    assert await store.endpoints() == [two]
    assert await store.versions() == [a_version(), a_version("ver-2")]
    three = an_endpoint(releases=(*two.releases, Release("ver-3", 0)))
    with pytest.raises(AlreadyExistsError, match="Version 'ver-2'"):
        await store.add_release(a_version("ver-3", version="ver-2"), three)
    assert await store.endpoints() == [two]
    assert len(await store.versions()) == 2
    behind = an_endpoint(releases=(Release("ver-1", 100), Release("ver-2", 0, fallback=2)))
    await store.put_endpoint(behind)
    assert await store.endpoints() == [behind]


async def test_an_outlook_changes_what_is_told_and_never_what_was_asked(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_deployment(a_version("ver-2"), an_endpoint("ep-2", "ver-2"))
    asked = an_endpoint(is_deleted=True, is_shared=False, scaling=Scaling(1, 9))
    await store.put_endpoint(asked)
    told = {
        "status": EndpointStatus.FAILED,
        "progress": Progress(Stage.LOADING, 60, None, "slow"),
        "failure": "no room",
    }
    await store.put_outlook("ep-1", **told)
    assert await store.endpoints() == [msgspec.structs.replace(asked, **told), an_endpoint("ep-2", "ver-2")]
    await store.remove_endpoint("ep-1")
    await store.put_outlook("ep-1", **told)
    assert await store.endpoints() == [an_endpoint("ep-2", "ver-2")], "an outlook makes no endpoint"


async def test_a_removed_endpoint_takes_its_replicas_and_events_and_stays_removed(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.put_replica(a_replica("rep-1"))
    await store.add_event(Event(1.0, "ep-1", "started", "asked to"))
    await store.remove_endpoint("ep-1")
    await store.put_endpoint(an_endpoint())
    await store.add_event(Event(2.0, "ep-1", "late", "a pass that began before"))
    assert await store.endpoints() == []
    assert await store.replicas() == []
    assert await store.events("ep-1", limit=10) == []
    assert await store.versions() == [a_version()]


async def test_replicas_are_replaced_by_id(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_deployment(a_version("ver-2"), an_endpoint("ep-2", "ver-2"))
    first, second = a_replica("rep-1"), a_replica("rep-2", endpoint_id="ep-2", version_id="ver-2", ready_at=None)
    await store.put_replica(second)
    await store.put_replica(first)
    assert await store.replicas() == [first, second]
    drained = a_replica(
        "rep-1", state=ReplicaState.DRAINING, state_since=1_001.0, reason="scale down", takes_over="rep-0"
    )
    await store.put_replica(drained)
    assert await store.replicas(endpoint_id="ep-1") == [drained]
    await store.remove_replica("rep-1")
    assert await store.replicas() == [second]


async def test_only_the_newest_events_of_an_endpoint_stay(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_deployment(a_version("ver-2"), an_endpoint("ep-2", "ver-2"))
    other = Event(0.5, "ep-2", "queued", "", "rep-9")
    await store.add_event(other)
    events = [Event(float(at), "ep-1", "scaled", f"for the {at}th time", "rep-1") for at in range(205)]
    for event in events:
        await store.add_event(event)
    assert await store.events("ep-1", limit=1_000) == events[-200:]
    assert await store.events("ep-1", limit=3) == events[-3:]
    assert await store.events("ep-2", limit=3) == [other]


async def test_only_the_newest_load_times_of_a_version_stay(store: ControlStore) -> None:
    for seconds in range(13):
        await store.add_observed_load("ver-1", seconds + 0.5)
    await store.add_observed_load("ver-2", 99.0)
    assert await store.observed_load_s("ver-1") == [seconds + 0.5 for seconds in range(3, 13)]
    assert await store.observed_load_s("ver-3") == []


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    first = SqlControlStore(open_fresh("sqlite", tmp_path))
    await first.add_tenant(ACME)
    await first.add_deployment(a_version(), an_endpoint())
    await first.close()
    second = SqlControlStore(open_fresh("sqlite", tmp_path))
    assert await second.endpoints() == [an_endpoint()]
    await second.close()


def modes_in(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


async def test_the_database_is_readable_for_its_owner_only(tmp_path: Path) -> None:
    store = SqlControlStore(open_fresh("sqlite", tmp_path))
    await store.add_tenant(ACME)
    assert modes_in(tmp_path) == {"control.sqlite": 0o600, "control.sqlite-wal": 0o600, "control.sqlite-shm": 0o600}
    await store.close()


async def test_while_another_process_locks_it_writes_are_refused_and_reads_go_on(tmp_path: Path) -> None:
    store = SqlControlStore(open_fresh("sqlite", tmp_path, timeout_s=2.0))
    await store.add_tenant(ACME)
    holder = sqlite3.connect(tmp_path / "control.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        # Together, not one after the other: in turn they would take twenty seconds.
        async with asyncio.timeout(20):
            refused = await asyncio.gather(*(store.add_tenant(OTHER) for _ in range(50)), return_exceptions=True)
        assert {type(error) for error in refused} == {StoreUnavailableError}
        with pytest.raises(StoreUnavailableError):
            await store.ping()
        assert await asyncio.gather(*(store.tenants() for _ in range(8))) == [[ACME]] * 8
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    await store.ping()
    await store.add_tenant(OTHER)
    assert await store.tenants() == [ACME, OTHER]
    await store.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqlControlStore(open_fresh("sqlite", tmp_path))
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailableError):
        await store.tenants()


async def test_forecasts_are_kept_for_endpoints_that_exist_and_go_with_them(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    assert await store.forecasts() == {}
    await store.put_forecasts({"ep-1": b"\x00one", "ep-gone": b"x"}, at=5.0)
    await store.put_forecasts({"ep-1": b"\x00two"}, at=6.0)
    assert await store.forecasts() == {"ep-1": b"\x00two"}
    await store.remove_endpoint("ep-1")
    assert await store.forecasts() == {}


async def test_speeds_of_engines_are_kept_for_versions_that_exist_and_go_with_them(store: ControlStore) -> None:
    await store.add_version(a_version())
    assert await store.engine_fits() == {}
    await store.put_engine_fits({"ver-1": b"\x00one", "ver-gone": b"x"}, at=5.0)
    await store.put_engine_fits({"ver-1": b"\x00two"}, at=6.0)
    assert await store.engine_fits() == {"ver-1": b"\x00two"}
    assert await store.remove_version("ver-1")
    assert await store.engine_fits() == {}


async def test_a_version_is_removed_only_when_nothing_uses_it(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_version(a_version("ver-2", parent_id="ver-1"))
    await store.add_version(a_version("ver-3", parent_id="ver-2", base_id="ver-2"))
    assert not await store.remove_version("ver-1")
    assert not await store.remove_version("ver-2")
    assert await store.remove_version("ver-3")
    await store.add_version(a_version("ver-4", parent_id="ver-2"))
    await store.add_observed_load("ver-2", 3.0)
    assert await store.remove_version("ver-2")
    assert await store.remove_version("ver-2")
    assert await store.versions() == [a_version(), a_version("ver-4", parent_id="ver-1")]
    assert await store.observed_load_s("ver-2") == []


async def test_a_version_of_a_replica_that_still_drains_is_not_removed(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.put_replica(a_replica("ep-1-0"))
    await store.add_version(a_version("ver-2"))
    await store.put_endpoint(an_endpoint(releases=(Release("ver-2"),)))
    assert not await store.remove_version("ver-1")
    await store.remove_replica("ep-1-0")
    assert await store.remove_version("ver-1")


@pytest.mark.parametrize("state", [ReplicaState.STOPPED, ReplicaState.FAILED])
async def test_what_is_kept_of_ended_replicas_goes_with_their_version(store: ControlStore, state: ReplicaState) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.put_replica(a_replica("ep-1-0", state=state))
    assert not await store.remove_version("ver-1"), "a release names it"
    await store.add_version(a_version("ver-2"))
    await store.put_endpoint(an_endpoint(releases=(Release("ver-2"),)))
    await store.put_replica(a_replica("ep-1-1", version_id="ver-2", state=state))
    assert await store.remove_version("ver-1")
    assert [one.id for one in await store.replicas()] == ["ep-1-1"]
    assert [one.id for one in await store.versions()] == ["ver-2"]


async def test_an_endpoint_of_a_known_version_is_added_alone(store: ControlStore) -> None:
    with pytest.raises(KeyError):
        await store.add_endpoint(an_endpoint())
    assert await store.endpoints() == []
    await store.add_version(a_version())
    await store.add_endpoint(an_endpoint())
    assert await store.endpoints() == [an_endpoint()]
    with pytest.raises(AlreadyExistsError, match="endpoint named '1'"):
        await store.add_endpoint(an_endpoint("ep-2", name="1"))
    assert await store.versions() == [a_version()]


async def test_seats_and_the_rest_of_a_replica_are_written_apart(store: ControlStore) -> None:
    await store.add_deployment(a_version(), an_endpoint())
    await store.add_deployment(a_version("ver-2"), an_endpoint("ep-2", "ver-2", host_id="ep-1"))
    assert [one.host_id for one in await store.endpoints()] == ["", "ep-1"]
    seats = (GuestSeat("ep-2", "ver-2", "bot@1", SeatState.READY, 5.0, 6.0),)
    await store.put_guests("rep-1", seats)
    assert await store.replicas() == [], "seats make no replica"
    before = a_replica("rep-1")
    await store.put_replica(before)
    await store.put_guests("rep-1", seats)
    drained = a_replica("rep-1", state=ReplicaState.DRAINING, reason="from a pass that knew no guest")
    await store.put_replica(drained)
    assert await store.replicas() == [msgspec.structs.replace(drained, guests=seats)]
    await store.put_guests("rep-1", ())
    assert await store.replicas() == [drained]
