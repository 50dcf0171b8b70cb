"""The control plane as one process: the management API, the loops, the way of usage into the ledger.

Engines outlive it: when it stops or is killed they go on serving, and the next
controller takes them over.
"""

import asyncio
import gc
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp

from modelyard.clock import Clock
from modelyard.config import Config, DataDirectory
from modelyard.control import server
from modelyard.control.api import build_api
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.artifacts.sweep import Sweep
from modelyard.control.books import Books
from modelyard.control.bootstrap import ensure_admin_key, keep_admin_key
from modelyard.control.context import Context
from modelyard.control.forecasts import Forecasts
from modelyard.control.leadership import Leadership
from modelyard.control.leases import LeaseOffice
from modelyard.control.loops import Loops, Parts
from modelyard.control.part_files import PartFiles
from modelyard.control.replica_book import ReplicaBook
from modelyard.control.requests import RequestDesk
from modelyard.control.rollouts import Rollouts
from modelyard.control.signals import Signals
from modelyard.control.table import TablePublisher
from modelyard.control.tidings import TidingsPublisher
from modelyard.control.uploads import UploadDesk
from modelyard.control.webhooks import WebhookSender
from modelyard.domain.usage import NANO_PER_USD
from modelyard.engines import Engines
from modelyard.fleet import Fleet
from modelyard.metering.delivery import Delivery
from modelyard.stores import ControlStore, RequestStore, StoreUnavailableError, TableFeed, UploadStore, UsageStore
from modelyard.web.fetcher import Fetcher

__all__ = ["ensure_admin_key", "run_control"]

COLLECT_AFTER = (20_000, 20, 50)
"""When cycles are looked for: as the gateway does it."""
DRAIN_TIMEOUT_S = 10.0
"""Longest that a stopping controller delivers; what is left stays in the journal for the next one."""
BOOT_PAUSE_S = 0.5
RECALL_TIMEOUT_S = 2.0
"""Longest wait for what gateways remember of a request."""

_log = logging.getLogger(__name__)


class ServedFeed(TableFeed, Protocol):
    """A feed that this process serves."""

    async def start(self) -> None:
        """Accept gateways."""
        ...

    async def close(self) -> None:
        """Let them go."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """Everything that the plane is made of; ``compose.py`` names the backends."""

    config: Config
    data: DataDirectory
    store: ControlStore
    usage: UsageStore
    books: Books
    requests: RequestStore
    uploads: UploadStore
    fetcher: Fetcher
    fleet: Fleet
    leadership: Leadership
    engines: Engines
    feed: ServedFeed
    delivery: Delivery
    console: Callable[[Context], ASGIApp]
    internal_token: str
    pepper: bytes
    clock: Clock


async def run_control(given: Given, stop: asyncio.Event) -> None:
    """Run the control plane until ``stop`` is set; closes its store and feed, leaves engines running.

    Nothing is listened on before this controller leads; once another one does, it sets ``stop``.

    Raises:
        StartupError: a socket cannot be made.
    """
    if not await given.leadership.acquire(stop):
        await given.store.close()
        return
    config, data, clock = given.config, given.data, given.clock
    store, fleet, engines, feed = given.store, given.fleet, given.engines, given.feed
    artifacts = ArtifactStore(data.artifacts, Sources(given.fetcher, config.fetch, now_s=clock.unix_s))
    publisher = TablePublisher(store=store, engines=engines, prices=config.prices, feed=feed)
    signals = Signals(clock)
    forecasts = Forecasts(store=store, reports=feed.reports, clock=clock)
    loops = Loops(Parts(config, store, fleet, engines, artifacts, feed, publisher, clock, signals, forecasts))
    leases = LeaseOffice(feed=feed, table=lambda: publisher.table, workers=config.gateway.workers, clock=clock)
    tidings = TidingsPublisher(store=store, usage=given.usage, feed=feed, clock=clock, snapshots=loops.snapshots)
    webhooks = WebhookSender(
        store=given.requests,
        fetcher=given.fetcher,
        pepper=given.pepper,
        clock=clock,
        chance=random.Random().random,
    )
    upload_desk, sweep = _keepers(given.uploads, store, artifacts, data, config, clock)
    context = Context(
        config=config,
        data=data,
        store=store,
        usage=given.usage,
        books=_books(given, loops),
        requests=RequestDesk(store=given.requests, webhooks=webhooks, settings=config.control, clock=clock),
        webhooks=webhooks,
        uploads=upload_desk,
        fleet=fleet,
        engines=engines,
        artifacts=artifacts,
        clock=clock,
        pepper=given.pepper,
        internal_token=given.internal_token,
        wake=loops.wake,
        refresh=lambda: _refresh(tidings, publisher),
        health=loops.health,
        gateways=feed.reports,
        signals=signals,
        recall=partial(feed.ask, timeout_s=RECALL_TIMEOUT_S),
        size=loops.size,
        nodes=loops.nodes,
        forecast=forecasts.profile,
        rounds=loops.rounds,
    )
    rollouts = _rollouts(context, loops, publisher)
    others = (given.delivery, tidings, leases, context.requests, webhooks, upload_desk, forecasts, rollouts, sweep)
    runs = [*(one.run for one in others), *context.books.runs()]
    api = build_api(context, given.console(context))
    # Of thousands of endpoints and replicas a look at all objects takes a tenth of a second in which nothing else
    # happens, and every report of a gateway brought one about.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    keeping = partial(given.leadership.keep, stop)
    try:
        await _live(context, api, feed, partial(loops.run, stop, keeping, *runs), stop)
        await _deliver_rest(given.delivery)
        await given.leadership.resign()
    finally:
        await store.close()


async def _live(
    context: Context, api: ASGIApp, feed: ServedFeed, work: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event
) -> None:
    """Listen, serve and work until ``stop`` is set."""
    listener = server.bind(context.data.control_socket)
    try:
        await feed.start()
        await _boot(context.store, context.pepper, context.clock, context.data, stop)
        await _serve(api, listener, stop, work())
    finally:
        listener.close()
        await feed.close()


async def _serve(api: ASGIApp, listener: socket.socket, stop: asyncio.Event, loops: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(api, listener, stop), name="the management API")
        group.create_task(loops, name="the loops")


def _books(given: Given, loops: Loops) -> Books:
    """Return the books with who keeps those of replicas."""
    replicas = ReplicaBook(
        store=given.store,
        books=given.books.store,
        nodes=loops.nodes,
        latest=loops.latest,
        reports=given.feed.reports,
        prices={kind: round(usd * NANO_PER_USD) for kind, usd in given.config.fleet.accelerator_prices.items()},
        clock=given.clock,
    )
    return replace(given.books, replicas=replicas)


def _rollouts(context: Context, loops: Loops, publisher: TablePublisher) -> Rollouts:
    return Rollouts(
        store=context.store,
        clock=context.clock,
        changing=context.changing,
        windows=context.signals,
        passed=loops.passed,
        refresh=publisher.refresh,
        wake=context.wake,
        interval_s=context.config.control.rollout_interval_s,
        price=loops.price,
    )


def _keepers(
    uploads: UploadStore,
    store: ControlStore,
    artifacts: ArtifactStore,
    data: DataDirectory,
    config: Config,
    clock: Clock,
) -> tuple[UploadDesk, Sweep]:
    """Return who takes artifacts in, and who removes those that nobody needs."""
    settings, files = config.control, PartFiles(data.uploads)
    desk = UploadDesk(store=uploads, versions=store, artifacts=artifacts, files=files, settings=settings, clock=clock)
    return desk, Sweep(artifacts.contents, store, settings, clock, spared=desk.kept_digests)


async def _refresh(tidings: TidingsPublisher, publisher: TablePublisher) -> None:
    """Push what is stored now; a gateway that gets a key with a quota must already know what is spent of it."""
    await tidings.refresh()
    await publisher.refresh()


async def _boot(store: ControlStore, pepper: bytes, clock: Clock, data: DataDirectory, stop: asyncio.Event) -> None:
    """Create what a fresh installation begins with; a database that is locked for a while is waited for."""
    while not stop.is_set():
        try:
            await keep_admin_key(store, pepper, clock, data.admin_key)
        except StoreUnavailableError as error:
            _log.warning("waiting for the store: %s", error)
            await asyncio.sleep(BOOT_PAUSE_S)
        else:
            return


async def _deliver_rest(delivery: Delivery) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            await delivery.drain()
    except (StoreUnavailableError, OSError) as error:  # a TimeoutError is an OSError
        _log.warning("usage is left in the journal for the next start: %s", str(error) or "no time was left")
