"""The table says what is stored, and is pushed only when that changed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.clock import ManualClock
from modelyard.config.billing import BillingConfig, PriceConfig
from modelyard.control.table import TablePublisher
from modelyard.control.terms import TermsDesk
from modelyard.domain.billing import AuditEntry
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, Release, Scaling, Serving, Sticky, Timeouts
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.prices import PriceEntry
from modelyard.domain.routing_table import EndpointRoute, Heartbeat, RoutingTable
from modelyard.domain.tenants import ApiKey, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.engines.providers.engines import OpenAIProviderEngine
from modelyard.engines.providers.keys import ProviderKeys
from modelyard.engines.simulated import SimulatedEngine
from modelyard.stores import AlreadyExistsError, StoreUnavailableError
from modelyard.stores.mirror import MirroredStore
from modelyard.stores.sql import SqlBillingStore, SqlControlStore, open_database


class Recorder:
    """A feed without gateways."""

    def __init__(self) -> None:
        self.tables: list[RoutingTable] = []

    async def publish(self, table: RoutingTable) -> None:
        self.tables.append(table)

    def beat(self, heartbeat: Heartbeat) -> None: ...

    def reports(self) -> dict[str, Report]:
        return {}

    def on_report(self, listener: Callable[[str, Report], None]) -> None: ...


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlControlStore]:
    opened = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    await opened.add_tenant(Tenant("t", "t", 1))
    yield opened
    await opened.close()


@pytest.fixture
def feed() -> Recorder:
    return Recorder()


@pytest.fixture
def publisher(store: SqlControlStore, feed: Recorder) -> TablePublisher:
    engines = {"simulated": SimulatedEngine()}
    return TablePublisher(store=store, engines=engines, prices={"*": PriceConfig(input=1.0, output=2.0)}, feed=feed)


def version(id: str, **options: str | int | float | bool) -> ModelVersion:
    return ModelVersion(id, "t", "m", id, "simulated", Artifact(""), options, 1)


ENDPOINT = Endpoint("ep-1", "t", "m", (Release("ver-a"),), Scaling(), 1)


def replica(state: ReplicaState, ordinal: int, of: str = "ver-a") -> Replica:
    return Replica(f"rep-{of}-{ordinal}", "ep-1", of, ordinal, 0, state, 1.0, host="127.0.0.1", port=1, secret="s")


async def published(publisher: TablePublisher, feed: Recorder) -> EndpointRoute:
    await publisher.refresh()
    return feed.tables[-1].endpoints[0]


async def test_first_table_is_pushed_even_when_it_is_empty_and_no_same_one_after(
    publisher: TablePublisher, feed: Recorder
) -> None:
    for _ in range(3):
        await publisher.refresh()
    assert [table.revision for table in feed.tables] == [1]


async def test_revisions_grow_within_one_epoch(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await publisher.refresh()
    await store.add_tenant(Tenant("u", "u", 1))
    await publisher.refresh()
    assert [table.revision for table in feed.tables] == [1, 2]
    assert len({table.epoch for table in feed.tables}) == 1


async def test_revoked_key_is_left_out(store: SqlControlStore, publisher: TablePublisher, feed: Recorder) -> None:
    keys = [ApiKey(id, "t", id, b"h", (Scope.INFERENCE,), 1) for id in ("good", "revoked")]
    for key in keys:
        await store.add_key(key)
    await store.put_key(msgspec.structs.replace(keys[1], revoked_at=1))
    await publisher.refresh()
    assert [key.id for key in feed.tables[-1].keys] == ["good"]


async def test_only_ready_and_draining_replicas_are_routes(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await store.add_deployment(version("ver-a", context_length=2048), ENDPOINT)
    for ordinal, state in enumerate(ReplicaState):
        await store.put_replica(replica(state, ordinal))
    route = await published(publisher, feed)
    (release,) = route.releases
    assert {one.id.rsplit("-", 1)[1]: one.is_draining for one in release.replicas} == {
        "2": False,
        "3": True,
        "5": True,
        "6": True,
    }, "ready, falling asleep, waking, draining"
    assert route.context_length == 2048
    assert (route.price.input, route.price.output) == (1_000_000_000, 2_000_000_000)
    assert "/v1/embeddings" in route.routes
    assert "top_k" in route.engine_extras


async def test_replaced_version_keeps_the_traffic_until_the_new_one_is_ready(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await store.add_deployment(version("ver-a"), ENDPOINT)
    await store.add_version(version("ver-b"))
    await store.put_replica(replica(ReplicaState.READY, 0))
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, releases=(Release("ver-b"),)))

    def weights(route: EndpointRoute) -> dict[str, tuple[int, int]]:
        return {release.version_id: (release.weight, len(release.replicas)) for release in route.releases}

    assert weights(await published(publisher, feed)) == {"ver-b": (100, 0), "ver-a": (100, 1)}
    await store.put_replica(replica(ReplicaState.READY, 0, of="ver-b"))
    assert weights(await published(publisher, feed)) == {"ver-b": (100, 1), "ver-a": (0, 1)}


async def test_gateways_are_told_how_to_serve_what_shadows_and_how_much_fits(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    serving = Serving(Timeouts(first_token_s=60.0), coalesce_ms=20, sticky=Sticky.USER)
    both = (Release("ver-a"), Release("ver-b", 0, shadow=25))
    await store.add_version(version("ver-b", kv_blocks=10, context_length=64))
    await store.add_deployment(version("ver-a", slots=2, context_length=2048), ENDPOINT)
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, serving=serving, releases=both))
    await store.put_replica(replica(ReplicaState.READY, 0))
    await store.put_replica(replica(ReplicaState.READY, 0, of="ver-b"))
    route = await published(publisher, feed)
    assert route.serving == serving
    assert [(release.version_id, release.weight, release.shadow) for release in route.releases] == [
        ("ver-a", 100, 0),
        ("ver-b", 0, 25),
    ]
    assert [release.replicas[0].kv_tokens for release in route.releases] == [4096, 160]
    assert route.context_length == 2048, "the shadow's own bounds nobody"


async def test_gateways_are_told_what_a_fallback_can_do_and_costs_and_it_never_gets_a_share(
    store: SqlControlStore, feed: Recorder
) -> None:
    keys = ProviderKeys({"MODELYARD_PROVIDER_X": "k"})
    engines = {"simulated": SimulatedEngine(), "openai": OpenAIProviderEngine(keys)}
    prices = {"*": PriceConfig(input=1.0), "m@ver-b": PriceConfig(input=2.5, output=10)}
    publisher = TablePublisher(store=store, engines=engines, prices=prices, feed=feed)
    options: dict[str, str | int | float | bool] = {"model": "x", "key_env": "MODELYARD_PROVIDER_X"}
    remote = msgspec.structs.replace(version("ver-b"), framework="openai", options=options)
    await store.add_deployment(version("ver-a", context_length=64), ENDPOINT)
    await store.add_version(remote)
    both = (Release("ver-a"), Release("ver-b", 0, fallback=1))
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, releases=both))
    await store.put_replica(replica(ReplicaState.READY, 0, of="ver-b"))
    route = await published(publisher, feed)
    assert [(one.weight, one.fallback, len(one.replicas)) for one in route.releases] == [(100, 0, 0), (0, 1, 1)]
    assert [one.price and one.price.output for one in route.releases] == [None, 10_000_000_000]
    assert [one.is_remote for one in route.releases] == [False, True], "who asks it again pays again"
    assert route.routes == SimulatedEngine.routes, "what a fallback cannot do waits for the others"
    assert route.fallback_routes == {"/v1/chat/completions"}
    assert route.fallback_extras == {"n", "dimensions", "tools.required"}
    assert route.context_length == 64


async def test_release_that_lost_its_traffic_keeps_it_until_another_is_ready_and_a_shadow_never_gets_any(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await store.add_deployment(version("ver-a"), ENDPOINT)
    for other in ("ver-b", "ver-c"):
        await store.add_version(version(other))
    moved = (Release("ver-a", 0), Release("ver-b", 100), Release("ver-c", 0, shadow=10))
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, releases=moved))
    await store.put_replica(replica(ReplicaState.READY, 0))
    await store.put_replica(replica(ReplicaState.READY, 0, of="ver-c"))

    def weights(route: EndpointRoute) -> list[int]:
        return [release.weight for release in route.releases]

    assert weights(await published(publisher, feed)) == [100, 100, 0]
    await store.put_replica(replica(ReplicaState.READY, 0, of="ver-b"))
    assert weights(await published(publisher, feed)) == [0, 100, 0]


async def test_drain_is_known_when_every_gateway_serves_from_a_table_that_has_it(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    def known(*revisions: tuple[str, int]) -> frozenset[str]:
        return publisher.known_to_drain([Report([], [], *revision) for revision in revisions])

    await store.add_deployment(version("ver-a"), ENDPOINT)
    await store.put_replica(replica(ReplicaState.READY, 0))
    await publisher.refresh()
    epoch = feed.tables[-1].epoch
    drains = replica(ReplicaState.DRAINING, 0)
    await store.put_replica(drains)
    assert not known((epoch, 1)), "nothing of it was published"
    await publisher.refresh()
    assert not known((epoch, 2), (epoch, 1)), "one has the table before it"
    assert not known((epoch, 2), ("another epoch", 9)), "one has a table of an earlier controller"
    assert not known((epoch, 2), ("", 0)), "one has not said"
    assert known((epoch, 2), (epoch, 3)) == known() == {drains.id}
    await store.put_replica(replica(ReplicaState.READY, 0))
    await publisher.refresh()
    await store.put_replica(drains)
    await publisher.refresh()
    assert not known((epoch, 2)), "it was needed again in between"
    assert known((epoch, 4)) == {drains.id}


async def test_replica_of_a_deleted_endpoint_is_known_to_drain_since_the_endpoint_was_left_out(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await store.add_deployment(version("ver-a"), ENDPOINT)
    await store.put_replica(replica(ReplicaState.READY, 0))
    await publisher.refresh()
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, is_deleted=True))
    await publisher.refresh()
    drains = replica(ReplicaState.DRAINING, 0)
    await store.put_replica(drains)
    await publisher.refresh()
    assert [table.revision for table in feed.tables] == [1, 2]
    epoch = feed.tables[-1].epoch
    assert publisher.known_to_drain([Report([], [], epoch, 1)]) == frozenset()
    assert publisher.known_to_drain([Report([], [], epoch, 2)]) == {drains.id}


async def test_deleted_endpoint_is_left_out(store: SqlControlStore, publisher: TablePublisher, feed: Recorder) -> None:
    await store.add_deployment(version("ver-a"), ENDPOINT)
    await store.put_endpoint(msgspec.structs.replace(ENDPOINT, is_deleted=True))
    await publisher.refresh()
    assert feed.tables[-1].endpoints == ()


async def test_store_that_is_gone_leaves_the_last_table(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    await publisher.refresh()
    await store.close()
    with pytest.raises(StoreUnavailableError):
        await publisher.refresh()
    assert len(feed.tables) == 1


async def test_every_refresh_at_once_sees_what_was_stored_before_it(
    store: SqlControlStore, publisher: TablePublisher, feed: Recorder
) -> None:
    async def add_and_refresh(number: int) -> None:
        await store.add_tenant(Tenant(f"n{number}", f"n{number}", 1))
        await publisher.refresh()
        assert f"n{number}" in {tenant.id for tenant in feed.tables[-1].tenants}

    await asyncio.gather(*(add_and_refresh(number) for number in range(20)))
    assert [table.revision for table in feed.tables] == sorted(table.revision for table in feed.tables)


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(ReplicaState)), max_size=15)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_a_table_made_step_by_step_is_the_one_that_is_made_at_once(steps: list[tuple[int, int, ReplicaState]]) -> None:
    async def run(folder: str) -> None:
        plain = SqlControlStore(open_database(f"sqlite:///{folder}/control.sqlite", timeout_s=5))
        store = MirroredStore(plain, ManualClock())
        engines = {"simulated": SimulatedEngine()}
        try:
            await store.add_tenant(Tenant("t", "t", 1))
            for number in range(3):
                of = msgspec.structs.replace(
                    ENDPOINT, id=f"ep-{number}", name=f"m{number}", releases=(Release(f"ver-{number}"),)
                )
                made = msgspec.structs.replace(version(f"ver-{number}"), name=f"m{number}")
                await store.add_deployment(made, of)
            growing = TablePublisher(store=store, engines=engines, prices={}, feed=Recorder())
            await growing.refresh()
            for step, number, state in steps:
                await change(store, step, number, state)
                await growing.refresh()
                fresh = TablePublisher(store=plain, engines=engines, prices={}, feed=Recorder())
                await fresh.refresh()
                assert growing.table.endpoints == fresh.table.endpoints
                assert growing.table.keys == fresh.table.keys
        finally:
            await plain.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


async def change(store: MirroredStore, step: int, number: int, state: ReplicaState) -> None:
    """Do one of the things that happen to an endpoint; what it is done to may be gone."""
    of = {one.id: one for one in await store.endpoints()}.get(f"ep-{number}")
    if of is None:
        return
    record = replica(state, 0, of=f"ver-{number}")
    match step:
        case 0:
            await store.put_replica(msgspec.structs.replace(record, endpoint_id=of.id))
        case 1:
            await store.remove_replica(record.id)
        case 2:
            await store.put_endpoint(msgspec.structs.replace(of, is_shared=not of.is_shared))
        case 3:
            await store.put_version(msgspec.structs.replace(version(f"ver-{number}"), base_id=str(state)))
        case 4:
            with suppress(AlreadyExistsError):
                await store.add_release(version(f"ver-{number}-{state}"), of)
        case 5:
            await store.remove_endpoint(of.id)


async def test_stored_prices_reach_the_gateways_before_they_begin_and_touch_no_other_endpoint(
    store: SqlControlStore, feed: Recorder, tmp_path: Path
) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'prices.sqlite'}", timeout_s=5.0)
    billing, clock = SqlBillingStore(database), ManualClock()
    terms = TermsDesk(billing, BillingConfig(), clock)
    prices = {"*": PriceConfig(input=1.0), "m@ver-a": PriceConfig(input=2.0)}
    engines = {"simulated": SimulatedEngine()}
    publisher = TablePublisher(store=store, engines=engines, prices=prices, feed=feed, terms=terms)
    await store.add_deployment(version("ver-a"), ENDPOINT)
    other = msgspec.structs.replace(ENDPOINT, id="ep-2", name="other", releases=(Release("ver-b"),))
    await store.add_deployment(version("ver-b"), other)
    assert (await published(publisher, feed)).tariffs == ()

    now = int(clock.unix_s())
    coming = PriceEntry("price-1", "m", Price(input=7), now + 100, version="ver-a")
    who = AuditEntry(0.0, "k", "platform", "test", "")
    await billing.put_price(coming, who, now=now)
    await billing.put_price(PriceEntry("price-2", "m", Price(input=9), now, tenant_id="somebody"), who, now=now)
    terms.void()
    route = await published(publisher, feed)
    assert [(one.version_id, one.since, one.price.input) for one in route.tariffs] == [
        ("ver-a", now + 100, 7),
        ("ver-a", 0, 2_000_000_000),
        ("", 0, 1_000_000_000),
    ], "a private endpoint has no prices of tenants that cannot call it"
    assert feed.tables[-1].endpoints[1] is feed.tables[0].endpoints[1]
    revision = feed.tables[-1].revision
    clock.advance(1000)  # read anew, and the same
    await publisher.refresh()
    assert feed.tables[-1].revision == revision
    await database.close()
