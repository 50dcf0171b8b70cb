"""A gateway worker as a process: its parts put together, its clockwork, its end."""

import asyncio
import gc
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from modelyard.clock import Clock
from modelyard.config import GatewayConfig
from modelyard.domain.usage import MICRO_PER_UNIT
from modelyard.errors import StartupError, shutting_down
from modelyard.gateway import callers
from modelyard.gateway.catalog import Catalog, EndpointState
from modelyard.gateway.clockwork import connections_limit, raise_file_limit, sweep
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.links import LinkFetcher
from modelyard.gateway.presence import ControllerPresence
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.siblings import Siblings
from modelyard.gateway.upstream import UpstreamPool
from modelyard.metering.abandoned import settle_abandoned
from modelyard.metering.journal import Journal
from modelyard.observe.metrics import Gauge, Labels
from modelyard.stores import TableFollower
from modelyard.web.fetcher import Fetcher

BACKLOG = 4096
HANDSHAKE_TIMEOUT_S = 10.0
CLOSE_NOTIFY_TIMEOUT_S = 5.0
INFORMED_TIMEOUT_S = 15.0
"""Longest wait of a relief for its first routing table; the worker before it serves meanwhile."""
RETIRE_S_MAX = 600.0
"""Longest that a relieved worker goes on for requests under way; nobody waits for it."""
LAST_BYTES_S = 1.0
"""Time that clients get, after the drain, to read the ends of their answers."""

_log = logging.getLogger(__name__)


class Shift(NamedTuple):
    """Where a worker serves, and from when to when.

    ``stop`` ends it with the platform; ``relieved`` says that another worker serves in its place. With ``on_ready`` it
    is that other worker: it serves once it knows what the one before knows, and then calls it.
    """

    listener: socket.socket
    tls: ssl.SSLContext | None
    stop: asyncio.Event
    relieved: asyncio.Event
    on_ready: Callable[[], None] | None


class Rates(NamedTuple):
    """What amounts are in, and the share of a price (in millionths) that lines of batches pay where it says none."""

    currency: str = "USD"
    batch_factor_micro: int = MICRO_PER_UNIT


async def run_gateway(  # noqa: PLR0913 - called once, by compose
    *,
    settings: GatewayConfig,
    name: str,
    worker: int,
    shift: Shift,
    follower: TableFollower,
    control_socket: Path,
    internal_token: str,
    pepper: bytes,
    journal_root: Path,
    last_table: Path,
    caller_socket: Path,
    clock: Clock,
    rates: Rates,
    fetcher: Fetcher | None = None,
) -> None:
    """Serve for one ``shift``, then drain. ``name`` is this process's own, also beside one of the same number.

    Raises:
        JournalLockedError: another worker of this name runs.
        StartupError: a relief could not learn what to serve.
    """
    loop = asyncio.get_running_loop()
    journal = Journal(journal_root / name, sync_s=settings.journal_sync_s, clock=clock, soon=loop.call_soon)
    if journal.recovered:
        _log.warning(
            "%d requests were interrupted by the end of the last run; billed by their last mark", journal.recovered
        )

    catalog: Catalog[Exchange] = Catalog(
        worker=worker,
        settings=settings,
        deliver=lambda exchange, replica: gateway.deliver(exchange, replica),
        chance=random.Random().random,
        source=name,
        currency=rates.currency,
    )
    presence = ControllerPresence(follower=follower, catalog=catalog, last_table=last_table, clock=clock)
    gateway = Gateway(
        settings=settings,
        catalog=catalog,
        pool=UpstreamPool(clock=clock),
        journal=journal,
        presence=presence,
        control_socket=control_socket,
        internal_token=internal_token,
        pepper=pepper,
    )
    gateway.batch_factor_micro = rates.batch_factor_micro
    gateway.links = LinkFetcher(fetcher, bytes_max=settings.image_bytes_max, timeout_s=settings.image_timeout_s)
    _declare_gauges(gateway)
    catalog.accounts.attach(journal)
    presence.on_table(gateway.forget_heads)
    presence.on_tidings(gateway.take_tidings)
    presence.on_report(gateway.suspects.export)
    presence.on_ask(gateway.tell_story)
    presence.recall()
    _calm_collector()
    gateway.siblings = Siblings(last_table.parent, name, gateway.metrics.render, is_alone=settings.workers == 1)
    await gateway.siblings.start()
    served = partial(_serve_callers, gateway, caller_socket, internal_token.encode())
    try:
        await _work(gateway, shift, journal_root, served)
    finally:
        await _close(gateway, follower)


def _calm_collector() -> None:
    # What was imported stays for good; the collector need not look at it again.
    gc.freeze()
    # Requests leave no cycles behind; the default threshold would look for some every few requests.
    gc.set_threshold(20_000, 20, 50)


async def _close(gateway: Gateway, follower: TableFollower) -> None:
    """Give back connections; what is being stored is stored first."""
    if gateway.siblings is not None:
        await gateway.siblings.close()
    await follower.close()
    for request in list(gateway.side_requests):
        request.cancel()
    await gateway.links.close()
    await gateway.kept.close()
    await gateway.control.close()
    await gateway.pool.close()
    gateway.journal.close()


@asynccontextmanager
async def _serve_callers(gateway: Gateway, place: Path, token: bytes) -> AsyncIterator[None]:
    """Serve the planes of this machine, at ``place``, while the public port is served."""
    listener = callers.listen(place)
    try:
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: callers.CallerConnection(gateway, token), sock=listener
        )
        try:
            yield
        finally:
            server.close()
    finally:
        callers.close(place, listener)


async def _work(
    gateway: Gateway, shift: Shift, journal_root: Path, serve_callers: Callable[[], AbstractAsyncContextManager[None]]
) -> None:
    """Serve while all that a worker does on its own goes on."""
    connections_max = connections_limit(gateway.settings, raise_file_limit())
    works = (
        gateway.journal.run(),
        gateway.presence.run(),
        sweep(gateway, connections_max=connections_max),
        settle_abandoned(journal_root, clock=gateway.clock),
    )
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        await _serve(gateway, shift, tasks, connections_max, serve_callers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    gateway: Gateway,
    shift: Shift,
    tasks: list["asyncio.Task[None]"],
    connections_max: int,
    serve_callers: Callable[[], AbstractAsyncContextManager[None]],
) -> None:
    if shift.on_ready is not None:
        await _first_to_end([_until_informed(gateway)], tasks)
    has_tls = shift.tls is not None
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(gateway, connections_max=connections_max),
        sock=shift.listener,
        backlog=BACKLOG,
        ssl=shift.tls,
        ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if has_tls else None,
        ssl_shutdown_timeout=CLOSE_NOTIFY_TIMEOUT_S if has_tls else None,
    )
    try:
        async with serve_callers():
            if shift.on_ready is not None:
                shift.on_ready()
            await _first_to_end([shift.stop.wait(), shift.relieved.wait()], tasks)
    finally:
        server.close()
    if not shift.stop.is_set():
        await _retire(gateway, shift.stop)
    await _drain(gateway)


async def _until_informed(gateway: Gateway) -> None:
    """Wait for the present routing table; the last one kept must do where no controller is to be heard."""
    presence = gateway.presence
    deadline_s = gateway.clock.monotonic_s() + INFORMED_TIMEOUT_S
    while not presence.is_authoritative:
        if gateway.clock.monotonic_s() > deadline_s:
            if gateway.catalog.table is None:
                raise StartupError("No routing table came from the controller. See its log.")
            return
        await asyncio.sleep(0.02)


async def _first_to_end(events: Iterable[Coroutine[Any, Any, object]], tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Wait for one of ``events``; a task that ends earlier has failed, and so has the worker."""
    loop = asyncio.get_running_loop()
    waiting = {loop.create_task(event) for event in events}
    try:
        done, _ = await asyncio.wait({*waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _retire(gateway: Gateway, stop: asyncio.Event) -> None:
    """Serve what comes on open connections until there are none: the next worker takes the new ones.

    Nothing is cut and nothing refused. Each connection closes behind its next answer, or when its client has been
    silent for a moment.
    """
    _log.info("relieved: %d connections, %d requests in flight", len(gateway.connections), len(gateway.exchanges))
    deadline_s = gateway.clock.monotonic_s() + RETIRE_S_MAX
    while (
        (gateway.connections or gateway.kept.active) and not stop.is_set() and gateway.clock.monotonic_s() < deadline_s
    ):
        # Again and again: some are accepted and not yet made when the listener closes.
        for connection in list(gateway.connections):
            connection.retire()
        await asyncio.sleep(0.05)


async def _drain(gateway: Gateway) -> None:
    """Take no new work, let what runs finish, then end the rest with an error it can see."""
    _log.info("draining: %d requests in flight", len(gateway.exchanges))
    gateway.is_draining = True
    for connection in list(gateway.connections):
        connection.close_when_idle()
    deadline_s = gateway.clock.monotonic_s() + gateway.settings.drain_timeout_s
    while (gateway.exchanges or gateway.control.unanswered) and gateway.clock.monotonic_s() < deadline_s:  # noqa: ASYNC110 - once a life
        await asyncio.sleep(0.02)
    for exchange in list(gateway.exchanges):
        exchange.fail(shutting_down())
    gateway.kept.refuse_waiting()
    gateway.journal.flush()
    # Give the transports a moment to write what they hold, also when the drain took all its time.
    deadline_s = gateway.clock.monotonic_s() + LAST_BYTES_S
    while any(c.has_unsent for c in gateway.connections) and gateway.clock.monotonic_s() < deadline_s:  # noqa: ASYNC110 - once a life
        await asyncio.sleep(0.02)


def _declare_gauges(gateway: Gateway) -> None:
    catalog = gateway.catalog
    gauges = gateway.metrics.gauges

    def by_model(read: Callable[[EndpointState[Exchange]], float]) -> Gauge:
        return lambda: _sums(((endpoint.route.name,), read(endpoint)) for endpoint in catalog.endpoints)

    gauges["modelyard_in_flight"] = (("model",), by_model(lambda e: e.in_flight))
    gauges["modelyard_batch_lines"] = (("model",), by_model(lambda e: len(e.batch_lines)))
    gauges["modelyard_queued"] = (("model",), by_model(lambda e: len(e.dispatcher.line)))
    gauges["modelyard_replicas"] = (
        ("model",),
        by_model(lambda e: sum(not replica.is_draining for replica in e.dispatcher.replicas)),
    )
    gauges["modelyard_predicted_wait_seconds"] = (
        ("model",),
        lambda: _largest(((e.route.name,), e.wait_s(gateway.clock.monotonic_s())) for e in catalog.endpoints),
    )
    gauges["modelyard_remembered_requests"] = (("kind",), gateway.memory.sizes)
    gateway.metrics.releases = lambda: (
        ((endpoint.route.name, version_id), tally.requests, tally.errors, tally.service_s)
        for endpoint in catalog.endpoints
        for version_id, tally in endpoint.tallies.items()
    )
    gauges["modelyard_connections"] = ((), lambda: [((), len(gateway.connections))])
    gauges["modelyard_table_revision"] = ((), lambda: [((), catalog.table.revision if catalog.table else 0)])
    gauges["modelyard_table_age_seconds"] = ((), lambda: [((), gateway.presence.silence_s)])
    gauges["modelyard_journal_writable"] = ((), lambda: [((), int(gateway.journal.is_writable))])
    gauges["modelyard_refused_fingerprints"] = (
        (),
        lambda: [((), len(gateway.suspects.export(gateway.clock.monotonic_s())))],
    )
    gauges["modelyard_overload_level"] = ((), lambda: [((), gateway.overload.level)])
    gauges["modelyard_loop_lag_seconds"] = ((), lambda: [((), gateway.overload.lag_s)])


def _largest(numbers: Iterable[tuple[Labels, float]]) -> list[tuple[Labels, float]]:
    """Return the largest number of equal labels."""
    found: dict[Labels, float] = {}
    for labels, number in numbers:
        found[labels] = max(number, found.get(labels, 0.0))
    return list(found.items())


def _sums(numbers: Iterable[tuple[Labels, float]]) -> list[tuple[Labels, float]]:
    """Add up equal labels: two tenants may have a model of the same name, and no series may stand on a page twice."""
    found: dict[Labels, float] = {}
    for labels, number in numbers:
        found[labels] = found.get(labels, 0) + number
    return list(found.items())
