"""A controller's loops in this process, over a real store, a real fleet and real (simulated) engines.

A gateway is a client of the real feed. A ``Site`` is the data directory; a
controller on it can be stopped, or cut off as ``kill -9`` would, and another
one started. Engines that are left are ended when the site closes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelyard.clock import SystemClock
from modelyard.config import Config, ControlConfig
from modelyard.config.billing import PriceConfig
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.bootstrap import ensure_platform
from modelyard.control.loops import Loops, Parts
from modelyard.control.rollouts import Rollouts, Windows
from modelyard.control.table import TablePublisher
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import EndpointDemand, ReplicaReport, Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.routing_table import Heartbeat, RoutingTable
from modelyard.domain.tenants import PLATFORM
from modelyard.engines import Engine
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet import Fleet, Observed, declared
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.fleet.machine import Machine
from modelyard.ids import new_id
from modelyard.policy.addresses import networks
from modelyard.policy.signals import Signals
from modelyard.stores import ControlStore
from modelyard.stores.feed import FeedClient, FeedServer
from modelyard.stores.sql import SqlControlStore, open_database
from modelyard.web.fetcher import Fetcher
from tests.support.waiting import eventually_async

TOKEN = "the token of the feed"
WITHIN_S = 60.0
PACE = ControlConfig(
    pass_interval_s=0.1,
    replica_grace_s=1,
    drain_timeout_s=20,
    crash_backoff_s=0.1,
    crash_backoff_max_s=0.5,
    hang_timeout_s=15,
)
"""Quick where it acts; slow to call an engine hung or drained long enough, which on a busy machine is only late."""


@dataclass(slots=True)
class Gateway:
    """A gateway without traffic: it follows the feed and reports what a test says."""

    client: FeedClient
    table: RoutingTable | None = None
    heartbeat: Heartbeat | None = None
    demand: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Queued, in flight, and when that was said, by endpoint id."""
    replicas: list[ReplicaReport] = field(default_factory=list)
    is_behind: bool = False
    """It goes on with the table it has."""

    async def follow(self) -> None:
        async for message in self.client.updates():
            if isinstance(message, RoutingTable) and not self.is_behind:
                self.table = message
                self.send()
            elif isinstance(message, Heartbeat):
                self.heartbeat = message
                self.send()

    def say(self, endpoint: Endpoint, *, queued: int = 0, in_flight: int = 0, on: str = "") -> None:
        """Report demand for ``endpoint``, and that ``in_flight`` of it is on the replica ``on``."""
        self.replicas = [ReplicaReport(on, in_flight, 0, "")] if on else []
        self.demand[endpoint.id] = (queued, in_flight, time.monotonic())
        self.send()

    def send(self) -> None:
        rows = []
        for endpoint_id, (queued, in_flight, said_s) in self.demand.items():
            idle_s = 0.0 if queued or in_flight else time.monotonic() - said_s
            rows.append(EndpointDemand(endpoint_id, queued, in_flight, idle_s, 1))
        revision = (self.table.epoch, self.table.revision) if self.table else ()
        self.client.send(Report(rows, self.replicas, *revision))

    def routed(self, endpoint: Endpoint) -> list[str]:
        """Return the ids of the replicas that may get new requests."""
        routes = [route for route in (self.table.endpoints if self.table else ()) if route.id == endpoint.id]
        return [
            replica.id
            for route in routes
            for release in route.releases
            for replica in release.replicas
            if not replica.is_draining
        ]


@dataclass(slots=True)
class Site:
    """One data directory, with what lives longer than a controller."""

    root: Path
    store: ControlStore
    fleet: LocalFleet
    engines: Mapping[str, Engine]
    config: Config

    async def deploy(
        self,
        options: Mapping[str, str | int | float | bool] | None = None,
        *,
        framework: str = "simulated",
        artifact: str = "",
        scaling: Scaling | None = None,
        name: str = "sim",
        kind: str = "cpu",
    ) -> Endpoint:
        """Store a deployment as the management API does."""
        await ensure_platform(self.store, SystemClock())
        version = ModelVersion(
            id=new_id("ver-"),
            tenant_id=PLATFORM,
            name=name,
            version="v1",
            framework=framework,
            artifact=Artifact(artifact),
            options=dict(options or {}),
            created_at=1,
            gpu_type=kind,
        )
        endpoint = Endpoint(new_id("ep-"), PLATFORM, name, (Release(version.id),), scaling or Scaling(), created_at=1)
        await self.store.add_deployment(version, endpoint)
        return endpoint

    async def endpoint(self, endpoint: Endpoint) -> Endpoint | None:
        return next((one for one in await self.store.endpoints() if one.id == endpoint.id), None)

    async def replicas(self, endpoint: Endpoint, *states: ReplicaState) -> list[Replica]:
        found = await self.store.replicas(endpoint_id=endpoint.id)
        return [replica for replica in found if not states or replica.state in states]

    async def running(self) -> list[Observed]:
        return [process for process in await self.fleet.observe() if process.is_running]

    async def until_ready(self, endpoint: Endpoint, count: int = 1) -> list[Replica]:
        """Wait until exactly ``count`` replicas are ready, and nothing else of the site runs."""

        async def look() -> list[Replica]:
            ready = await self.replicas(endpoint, ReplicaState.READY)
            running = {process.replica_id for process in await self.running()}
            return ready if len(ready) == count and {replica.id for replica in ready} == running else []

        return await eventually_async(look, WITHIN_S, f"{count} replicas ready")

    async def until_slept(self, endpoint: Endpoint) -> None:
        """Wait until an endpoint was ready, for however short a time, and has gone to sleep."""

        async def look() -> bool:
            now = await self.endpoint(endpoint)
            was_ready = bool(await self.reasons(endpoint, "replica_ready"))
            is_asleep = now is not None and now.status is EndpointStatus.STOPPED
            return was_ready and is_asleep and not await self.running()

        has_slept: bool = await eventually_async(look, WITHIN_S, "it was ready and sleeps")
        assert has_slept

    async def until_none_runs(self) -> None:
        async def look() -> bool:
            return not await self.running()

        is_quiet: bool = await eventually_async(look, WITHIN_S, "no engine runs")
        assert is_quiet

    async def reasons(self, endpoint: Endpoint, kind: str) -> Sequence[str]:
        return [event.reason for event in await self.store.events(endpoint.id, limit=200) if event.kind == kind]


@dataclass(slots=True)
class Controller:
    """A running controller and a gateway that follows it."""

    loops: Loops
    publisher: TablePublisher
    gateway: Gateway


@asynccontextmanager
async def open_site(
    root: Path,
    *,
    pace: ControlConfig = PACE,
    engines: Sequence[Engine] = (),
    nodes: Sequence[Mapping[str, Any]] = (),
) -> AsyncIterator[Site]:
    """Open a data directory; whatever runs in it at the end is ended. ``nodes`` are declared beside this machine."""
    config = Config(control=pace, prices={"*": PriceConfig(input=1.0)})
    store = SqlControlStore(open_database(f"sqlite:///{root / 'control.sqlite'}", timeout_s=5))
    fleet = LocalFleet(root / "replicas", SystemClock(), Machine(declared.load(nodes, None)))
    known: Sequence[Engine] = [SimulatedEngine(), *engines]
    try:
        yield Site(root, store, fleet, {engine.name: engine for engine in known}, config)
    finally:
        await store.close()
        await asyncio.to_thread(stop_all, root / "replicas", 1.0)


@asynccontextmanager
async def controller(
    site: Site,
    *,
    through: Callable[[ControlStore, Fleet], tuple[ControlStore, Fleet]] | None = None,
    has_gateway: bool = True,
    windows: Windows | None = None,
) -> AsyncIterator[Controller]:
    """Run a controller on ``site``; ``through`` may put something between it and its store and fleet.

    ``windows`` say what gateways counted, where a rollout is to be judged.
    """
    store, fleet = through(site.store, site.fleet) if through else (site.store, site.fleet)
    feed = FeedServer(site.root / "feed.sock", TOKEN)
    await feed.start()
    publisher = TablePublisher(store=store, engines=site.engines, prices=site.config.prices, feed=feed)
    fetcher = Fetcher(networks(site.config.fetch.private_networks))
    artifacts = ArtifactStore(site.root / "artifacts", Sources(fetcher, site.config.fetch, now_s=SystemClock().unix_s))
    parts = Parts(
        site.config, store, fleet, site.engines, artifacts, feed, publisher, SystemClock(), Signals(SystemClock())
    )
    loops = Loops(replace(parts, gateways_settle_s=0.5))
    gateway = Gateway(FeedClient(site.root / "feed.sock", TOKEN, "gateway-0"))
    stop = asyncio.Event()
    rollouts = Rollouts(
        store=store,
        clock=SystemClock(),
        changing=asyncio.Lock(),
        windows=windows or parts.signals,
        passed=loops.passed,
        refresh=publisher.refresh,
        wake=loops.wake,
        interval_s=0.1,
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(loops.run(stop, rollouts.run))
            if has_gateway:
                group.create_task(gateway.follow())
            try:
                yield Controller(loops, publisher, gateway)
            finally:
                await gateway.client.close()
                stop.set()
    finally:
        await feed.close()
