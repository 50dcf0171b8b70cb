"""The control plane as one process: the management API, the loops, the way of usage into the ledger.

Engines outlive it: when it stops or is killed they go on serving, and the next
controller takes them over.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp

from modelyard.clock import Clock
from modelyard.config import Config, DataDirectory
from modelyard.control import server
from modelyard.control.api import build_api
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.artifacts.sweep import Sweep
from modelyard.control.bootstrap import ensure_admin_key, keep_admin_key
from modelyard.control.context import Context
from modelyard.control.forecasts import Forecasts
from modelyard.control.leadership import Leadership
from modelyard.control.leases import LeaseOffice
from modelyard.control.loops import Loops, Parts
from modelyard.control.part_files import PartFiles
from modelyard.control.requests import RequestDesk
from modelyard.control.rollouts import Rollouts
from modelyard.control.signals import Signals
from modelyard.control.table import TablePublisher
from modelyard.control.tidings import TidingsPublisher
from modelyard.control.uploads import UploadDesk
from modelyard.control.webhooks import WebhookSender
from modelyard.engines import Engines
from modelyard.fleet import Fleet
from modelyard.metering.delivery import Delivery
from modelyard.stores import ControlStore, RequestStore, StoreUnavailableError, TableFeed, UploadStore, UsageStore
from modelyard.web.fetcher import Fetcher

__all__ = ["ensure_admin_key", "run_control"]

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


async def run_control(  # noqa: PLR0913 - everything that the plane is made of, by name, from compose.py
    *,
    config: Config,
    data: DataDirectory,
    store: ControlStore,
    usage: UsageStore,
    requests: RequestStore,
    uploads: UploadStore,
    fetcher: Fetcher,
    fleet: Fleet,
    leadership: Leadership,
    engines: Engines,
    feed: ServedFeed,
    delivery: Delivery,
    console: Callable[[Context], ASGIApp],
    internal_token: str,
    pepper: bytes,
    clock: Clock,
    stop: asyncio.Event,
) -> None:
    """Run the control plane until ``stop`` is set; closes ``store`` and ``feed``, leaves engines running.

    Nothing is listened on before this controller leads; once another one does, it sets ``stop``.

    Raises:
        StartupError: a socket cannot be made.
    """
    if not await leadership.acquire(stop):
        await store.close()
        return
    artifacts = ArtifactStore(data.artifacts, Sources(fetcher, config.fetch, now_s=clock.unix_s))
    sweep = Sweep(artifacts.contents, store, config.control, clock)
    publisher = TablePublisher(store=store, engines=engines, prices=config.prices, feed=feed)
    signals = Signals(clock)
    forecasts = Forecasts(store=store, reports=feed.reports, clock=clock)
    loops = Loops(Parts(config, store, fleet, engines, artifacts, feed, publisher, clock, signals, forecasts))
    leases = LeaseOffice(feed=feed, table=lambda: publisher.table, workers=config.gateway.workers, clock=clock)
    tidings = TidingsPublisher(store=store, usage=usage, feed=feed, clock=clock, snapshots=loops.snapshots)
    webhooks = WebhookSender(store=requests, fetcher=fetcher, pepper=pepper, clock=clock, chance=random.Random().random)
    upload_desk = _upload_desk(uploads, store, artifacts, data, config, clock)
    context = Context(
        config=config,
        data=data,
        store=store,
        usage=usage,
        requests=RequestDesk(store=requests, webhooks=webhooks, settings=config.control, clock=clock),
        webhooks=webhooks,
        uploads=upload_desk,
        fleet=fleet,
        engines=engines,
        artifacts=artifacts,
        clock=clock,
        pepper=pepper,
        internal_token=internal_token,
        wake=loops.wake,
        refresh=lambda: _refresh(tidings, publisher),
        health=loops.health,
        gateways=feed.reports,
        signals=signals,
        recall=partial(feed.ask, timeout_s=RECALL_TIMEOUT_S),
        size=loops.size,
        forecast=forecasts.profile,
        rounds=loops.times.status,
    )
    rollouts = _rollouts(context, loops, publisher)
    others = (delivery, tidings, leases, context.requests, webhooks, upload_desk, forecasts, rollouts, sweep)
    api = build_api(context, console(context))
    listener = server.bind(data.control_socket)
    try:
        await feed.start()
        await _boot(store, pepper, clock, data, stop)
        keeping = partial(leadership.keep, stop)
        await _serve(api, listener, stop, loops.run(stop, keeping, *(one.run for one in others)))
        await _deliver_rest(delivery)
        await leadership.resign()
    finally:
        listener.close()
        await feed.close()
        await store.close()


async def _serve(api: ASGIApp, listener: socket.socket, stop: asyncio.Event, loops: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(api, listener, stop), name="the management API")
        group.create_task(loops, name="the loops")


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


def _upload_desk(
    uploads: UploadStore,
    store: ControlStore,
    artifacts: ArtifactStore,
    data: DataDirectory,
    config: Config,
    clock: Clock,
) -> UploadDesk:
    files = PartFiles(data.uploads)
    return UploadDesk(
        store=uploads, versions=store, artifacts=artifacts, files=files, settings=config.control, clock=clock
    )


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
