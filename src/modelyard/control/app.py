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
from modelyard.control.billing import BillingDesk
from modelyard.control.books import Books
from modelyard.control.bootstrap import ensure_admin_key, keep_admin_key
from modelyard.control.context import Context
from modelyard.control.files import FileDesk
from modelyard.control.fits import Fits
from modelyard.control.forecasts import Forecasts
from modelyard.control.leadership import Leadership
from modelyard.control.leases import LeaseOffice
from modelyard.control.loops import Loops, Parts
from modelyard.control.notices import NoticeSender
from modelyard.control.part_files import PartFiles
from modelyard.control.replica_book import ReplicaBook
from modelyard.control.requests import RequestDesk
from modelyard.control.rollouts import Rollouts
from modelyard.control.table import TablePublisher
from modelyard.control.terms import TermsDesk
from modelyard.control.tidings import TidingsPublisher
from modelyard.control.uploads import UploadDesk
from modelyard.control.webhooks import WebhookSender
from modelyard.domain.usage import NANO_PER_USD
from modelyard.engines import Engines
from modelyard.fleet import Fleet
from modelyard.metering.delivery import Delivery
from modelyard.metering.retention import Retention
from modelyard.policy.signals import Signals
from modelyard.stores import (
    BatchStore,
    BillingStore,
    ControlStore,
    EventStore,
    FileContents,
    FileStore,
    RequestStore,
    StoreUnavailableError,
    TableFeed,
    UploadStore,
    UsageStore,
    WebhookStore,
)
from modelyard.web.fetcher import Fetcher
from modelyard.web.page_socket import PageSocket

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
    events: EventStore
    webhooks: WebhookStore
    uploads: UploadStore
    batches: BatchStore
    files: FileStore
    contents: FileContents
    billing: BillingStore
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
    made = _made(given)
    context = _context(given, made)
    loops, store = made.loops, given.store
    context.webhooks.metrics.moves = loops.moves
    rollouts = _rollouts(context, loops, made.publisher)
    works = (
        given.delivery,
        made.tidings,
        made.leases,
        context.requests,
        made.webhooks,
        made.forecasts,
        made.fits,
        rollouts,
    )
    keepers = (made.uploads, context.files, made.sweep, made.retention, made.billing, made.notices)
    runs = [*(one.run for one in (*works, *keepers)), *context.books.runs()]
    api = build_api(context, given.console(context))
    # Of thousands of endpoints and replicas a look at all objects takes a tenth of a second in which nothing else
    # happens, and every report of a gateway brought one about.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    keeping = partial(given.leadership.keep, stop)
    try:
        await _live(context, api, given.feed, partial(loops.run, stop, keeping, *runs), stop)
        await _deliver_rest(given.delivery)
        await given.leadership.resign()
    finally:
        await store.close()


@dataclass(frozen=True, slots=True)
class _Made:
    """What the plane makes of what it is given, and runs."""

    artifacts: ArtifactStore
    terms: TermsDesk
    publisher: TablePublisher
    signals: Signals
    forecasts: Forecasts
    fits: Fits
    loops: Loops
    leases: LeaseOffice
    tidings: TidingsPublisher
    webhooks: WebhookSender
    notices: NoticeSender
    billing: BillingDesk
    uploads: UploadDesk
    sweep: Sweep
    retention: Retention


def _made(given: Given) -> _Made:
    config, clock = given.config, given.clock
    store, engines, feed = given.store, given.engines, given.feed
    artifacts = ArtifactStore(given.data.artifacts, Sources(given.fetcher, config.fetch, now_s=clock.unix_s))
    terms = TermsDesk(given.billing, config.billing, clock)
    publisher = TablePublisher(store=store, engines=engines, prices=config.prices, feed=feed, terms=terms)
    signals = Signals(clock)
    forecasts = Forecasts(store=store, reports=feed.reports, clock=clock)
    fits = Fits(store=store, clock=clock)
    kept = (signals, forecasts, fits)
    loops = Loops(Parts(config, store, given.fleet, engines, artifacts, feed, publisher, clock, *kept))
    leases = LeaseOffice(feed=feed, table=lambda: publisher.table, workers=config.gateway.workers, clock=clock)
    tidings = TidingsPublisher(
        store=store,
        usage=given.usage,
        feed=feed,
        clock=clock,
        snapshots=loops.snapshots,
        speeds=loops.speeds,
        terms=terms,
    )
    notices, billing = _billing(given, terms, lambda: _refresh(tidings, publisher))
    uploads, sweep, retention = _keepers(given, artifacts)
    return _Made(
        artifacts=artifacts,
        terms=terms,
        publisher=publisher,
        signals=signals,
        forecasts=forecasts,
        fits=fits,
        loops=loops,
        leases=leases,
        tidings=tidings,
        webhooks=_webhooks(given, billing),
        notices=notices,
        billing=billing,
        uploads=uploads,
        sweep=sweep,
        retention=retention,
    )


def _context(given: Given, made: _Made) -> Context:
    config, clock, loops = given.config, given.clock, made.loops
    return Context(
        config=config,
        data=given.data,
        store=given.store,
        usage=given.usage,
        books=_books(given, loops),
        requests=RequestDesk(store=given.requests, webhooks=made.webhooks, settings=config.control, clock=clock),
        events=given.events,
        webhooks=made.webhooks,
        uploads=made.uploads,
        batches=given.batches,
        files=FileDesk(store=given.files, contents=given.contents, config=config, clock=clock),
        fleet=given.fleet,
        engines=given.engines,
        artifacts=made.artifacts,
        clock=clock,
        pepper=given.pepper,
        internal_token=given.internal_token,
        wake=loops.wake,
        refresh=lambda: _refresh(made.tidings, made.publisher),
        health=loops.health,
        billing=given.billing,
        terms=made.terms,
        billing_desk=made.billing,
        gateways=given.feed.reports,
        signals=made.signals,
        recall=partial(given.feed.ask, timeout_s=RECALL_TIMEOUT_S),
        size=loops.size,
        nodes=loops.nodes,
        forecast=made.forecasts.profile,
        rounds=loops.rounds,
    )


async def _live(
    context: Context, api: ASGIApp, feed: ServedFeed, work: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event
) -> None:
    """Listen, serve and work until ``stop`` is set."""
    listener = server.bind(context.data.control_socket)
    metrics = context.webhooks.metrics
    metrics.sinks = lambda: [
        (one.sink, one.pending + one.gap_requests, one.waiting_bytes, bool(one.alarm))
        for one in context.books.statuses()
    ]
    page = PageSocket(context.data.control_socket.parent, "control", metrics.render)
    try:
        await feed.start()
        await page.start()
        await _boot(context.store, context.pepper, context.clock, context.data, stop)
        await _serve(api, listener, stop, work())
    finally:
        listener.close()
        await page.close()
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


def _webhooks(given: Given, billing: BillingDesk) -> WebhookSender:
    """Return who tells callers and tenants what happened."""
    sender = WebhookSender(
        store=given.webhooks,
        events=given.events,
        fetcher=given.fetcher,
        settings=given.config.control,
        pepper=given.pepper,
        clock=given.clock,
        chance=random.Random().random,
    )
    sender.on_disabled = billing.tell_of_webhook
    return sender


def _billing(
    given: Given, terms: TermsDesk, refresh: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[NoticeSender, BillingDesk]:
    """Return who tells of money, and who does what is due about it."""
    settings = given.config.billing
    notices = NoticeSender(
        store=given.billing,
        smtp=settings.smtp,
        fetcher=given.fetcher,
        clock=given.clock,
        chance=random.Random().random,
    )
    desk = BillingDesk(
        store=given.billing,
        usage=given.usage,
        control=given.store,
        terms=terms,
        settings=settings,
        refresh=refresh,
        wake=notices.wake,
        clock=given.clock,
    )
    return notices, desk


def _keepers(given: Given, artifacts: ArtifactStore) -> tuple[UploadDesk, Sweep, Retention]:
    """Return who takes artifacts in, who removes those that nobody needs, and who removes old rows of the ledger."""
    settings, clock, store = given.config.control, given.clock, given.store
    files = PartFiles(given.data.uploads)
    desk = UploadDesk(
        store=given.uploads, versions=store, artifacts=artifacts, files=files, settings=settings, clock=clock
    )
    sweep = Sweep(artifacts.contents, store, settings, clock, spared=desk.kept_digests)
    return desk, sweep, Retention(given.usage, clock, given.delivery.backlog, keep_days=settings.usage_rows_days)


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
