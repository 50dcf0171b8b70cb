"""Every ``ControlStore`` makes of what happens to an endpoint what its tenant's webhooks are told, in one step."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage
from modelyard.domain.rollouts import Rollout
from modelyard.domain.tenants import Tenant
from modelyard.policy.announcements import STAGE
from modelyard.stores import AlreadyExistsError, Event
from modelyard.stores.sql import Database, SqlControlStore, schema_events


@pytest.fixture(params=BACKENDS)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    database = open_fresh(request.param, tmp_path)
    yield database
    await database.close()


@pytest.fixture
async def store(database: Database) -> SqlControlStore:
    store = SqlControlStore(database)
    await store.add_tenant(Tenant("ten-a", "a", 1))
    await store.add_deployment(a_version("ver-1", "v1"), ENDPOINT)
    return store


def a_version(version_id: str, version: str) -> ModelVersion:
    return ModelVersion(
        id=version_id,
        tenant_id="ten-a",
        name="smol",
        version=version,
        framework="simulated",
        artifact=Artifact(""),
        options={},
        created_at=1,
    )


ENDPOINT = Endpoint("ep-1", "ten-a", "smol", (Release("ver-1"),), Scaling(), 1)


async def told(database: Database) -> list[tuple[str, str]]:
    """Return type and version of what the tenant was told, oldest first."""
    table = schema_events.tenant_events
    query = sa.select(table.c.type, table.c.data).order_by(table.c.created_at, table.c.event_id)
    rows = await database.read(lambda c: c.execute(query).all())
    return [(kind, msgspec.json.decode(data)["version"]) for kind, data in rows]


def status(at: float, kind: EndpointStatus, stage: Stage = Stage.READY) -> Event:
    return Event(at, "ep-1", kind.value, "because", data={STAGE: stage.value})


async def put_status(store: SqlControlStore, event: Event) -> None:
    progress = Progress(Stage.READY)
    events = (event,)
    await store.put_outlook("ep-1", status=EndpointStatus(event.kind), progress=progress, failure="", events=events)


async def test_what_is_told_names_the_endpoint_and_the_reason(store: SqlControlStore, database: Database) -> None:
    await put_status(store, status(5.0, EndpointStatus.RUNNING))
    table = schema_events.tenant_events
    row = await database.read(lambda c: c.execute(sa.select(table)).mappings().one())
    assert (row["owner_id"], row["type"], row["created_at"]) == ("ten-a", "deployment.ready", 5.0)
    assert msgspec.json.decode(row["data"]) == {
        "id": "ep-1",
        "object": "endpoint",
        "name": "smol",
        "version": "v1",
        "reason": "because",
    }
    (event,) = await store.events("ep-1", limit=9)
    assert event.kind == "running", "and it stays an event of the endpoint"


async def test_sleep_and_size_are_no_news_but_a_failure_and_its_end_are(
    store: SqlControlStore, database: Database
) -> None:
    running, failed, asleep = EndpointStatus.RUNNING, EndpointStatus.FAILED, EndpointStatus.STOPPED
    stories = [
        (EndpointStatus.PROVISIONING, Stage.LOADING),
        (running, Stage.READY),
        (EndpointStatus.SCALING, Stage.READY),
        (running, Stage.READY),
        (asleep, Stage.QUEUED),
        (EndpointStatus.SCALING, Stage.LOADING),
        (running, Stage.READY),
        (failed, Stage.QUEUED),
        (failed, Stage.QUEUED),  # of a controller that was killed before it knew that it had told it
        (EndpointStatus.SCALING, Stage.LOADING),
        (running, Stage.READY),
        (asleep, Stage.QUEUED),
        (running, Stage.READY),
        (failed, Stage.QUEUED),
    ]
    for at, (kind, stage) in enumerate(stories):
        await put_status(store, status(float(at), kind, stage))
    ready, broken = ("deployment.ready", "v1"), ("deployment.failed", "v1")
    assert await told(database) == [ready, broken, ready, broken]


async def test_another_version_is_news_again(store: SqlControlStore, database: Database) -> None:
    await put_status(store, status(1.0, EndpointStatus.RUNNING))
    second = a_version("ver-2", "v2")
    rollout = Rollout("ver-1", "ver-2", 2.0)
    two = msgspec.structs.replace(ENDPOINT, releases=(Release("ver-1", 90), Release("ver-2", 10)), rollout=rollout)
    await store.add_release(second, two, events=(Event(2.0, "ep-1", "rollout_began", "v2 beside v1"),))
    await put_status(store, status(3.0, EndpointStatus.RUNNING))
    one = msgspec.structs.replace(two, releases=(Release("ver-2"),))
    await store.put_endpoint(one, events=(Event(4.0, "ep-1", "rollout_promoted", "v2 has all traffic"),))
    await put_status(store, status(5.0, EndpointStatus.RUNNING))
    assert await told(database) == [
        ("deployment.ready", "v1"),
        ("rollout.started", "v2"),
        ("rollout.promoted", "v2"),
        ("deployment.ready", "v2"),
    ]


async def test_a_change_that_fails_tells_nothing(store: SqlControlStore, database: Database) -> None:
    events = (Event(2.0, "ep-1", "rollout_began", "never"),)
    with pytest.raises(AlreadyExistsError):
        await store.add_release(a_version("ver-2", "v1"), ENDPOINT, events=events)
    assert await told(database) == []
    assert await store.events("ep-1", limit=9) == []


async def test_of_warm_pools_and_what_is_being_deleted_nothing_is_told(
    store: SqlControlStore, database: Database
) -> None:
    for change in ({"pool": "fast"}, {"is_deleted": True}):
        await store.put_endpoint(msgspec.structs.replace(ENDPOINT, **change))
        await put_status(store, status(1.0, EndpointStatus.RUNNING))
    await store.add_event(Event(1.0, "ep-gone", "failed", "x"))
    assert await told(database) == []
