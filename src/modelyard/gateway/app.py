"""A gateway worker as a process: its parts put together, its clockwork, its end."""

import asyncio
import gc
import logging
import random
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from modelyard.clock import Clock
from modelyard.config import GatewayConfig
from modelyard.errors import StartupError, shutting_down
from modelyard.gateway.catalog import Catalog, EndpointState
from modelyard.gateway.clockwork import connections_limit, raise_file_limit, sweep
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.presence import ControllerPresence
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import UpstreamPool
from modelyard.metering.abandoned import settle_abandoned
from modelyard.metering.journal import Journal
from modelyard.observe.metrics import Gauge, Labels
from modelyard.stores import TableFollower

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


async def run_gateway(  # noqa: PLR0913, PLR0915 - called once, by compose; one step after the other
    *,
    settings: GatewayConfig,
    name: str,
    worker: int,
    listener: socket.socket,
    follower: TableFollower,
    control_socket: Path,
    internal_token: str,
    pepper: bytes,
    journal_root: Path,
    last_table: Path,
    clock: Clock,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
    relieved: asyncio.Event,
    on_ready: Callable[[], None] | None,
) -> None:
    """Serve on ``listener`` until ``stop`` or ``relieved`` is set, then drain.

    ``name`` is this process's own, also beside an older worker of the same number. With ``on_ready`` it relieves that
    one: it serves once it knows what the older one knows, and then calls it.

    Raises:
        JournalLockedError: another worker of this name runs.
        StartupError: a relief could not learn what to serve.
    """
    loop = asyncio.get_running_loop()
    connections_max = connections_limit(settings, raise_file_limit())
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
    )
    presence = ControllerPresence(follower=follower, catalog=catalog, last_table=last_table, clock=clock)
    pool = UpstreamPool(clock=clock)
    gateway = Gateway(
        settings=settings,
        catalog=catalog,
        pool=pool,
        journal=journal,
        presence=presence,
        control_socket=control_socket,
        internal_token=internal_token,
        pepper=pepper,
    )
    _declare_gauges(gateway)
    catalog.accounts.attach(journal)
    presence.on_table(gateway.forget_heads)
    presence.on_tidings(gateway.take_tidings)
    presence.recall()
    # What was imported stays for good; the collector need not look at it again.
    gc.freeze()
    # Requests leave no cycles behind; the default threshold would look for some every few requests.
    gc.set_threshold(20_000, 20, 50)
    works = (
        journal.run(),
        presence.run(),
        sweep(gateway, connections_max=connections_max),
        settle_abandoned(journal_root, clock=clock),
    )
    tasks = [loop.create_task(work) for work in works]
    server: asyncio.Server | None = None
    try:
        if on_ready is not None:
            await _first_to_end([_until_informed(gateway)], tasks)
        server = await _listen(gateway, listener, tls, connections_max)
        if on_ready is not None:
            on_ready()
        await _first_to_end([stop.wait(), relieved.wait()], tasks)
        server.close()
        if not stop.is_set():
            await _retire(gateway, stop)
        await _drain(gateway)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            server.close()
        await follower.close()
        for request in list(gateway.side_requests):
            request.cancel()
        await gateway.control.close()
        await pool.close()
        journal.close()


async def _listen(
    gateway: Gateway, listener: socket.socket, tls: ssl.SSLContext | None, connections_max: int
) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(gateway, connections_max=connections_max),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
        ssl_shutdown_timeout=None if tls is None else CLOSE_NOTIFY_TIMEOUT_S,
    )


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
    while gateway.connections and not stop.is_set() and gateway.clock.monotonic_s() < deadline_s:
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
    gateway.journal.flush()
    # Give the transports a moment to write what they hold, also when the drain took all its time.
    deadline_s = gateway.clock.monotonic_s() + LAST_BYTES_S
    while any(c.has_unsent for c in gateway.connections) and gateway.clock.monotonic_s() < deadline_s:  # noqa: ASYNC110 - once a life
        await asyncio.sleep(0.02)


def _declare_gauges(gateway: Gateway) -> None:
    catalog = gateway.catalog
    gauges = gateway.metrics.gauges

    def by_model(read: Callable[[EndpointState[Exchange]], int]) -> Gauge:
        return lambda: _sums(((endpoint.route.name,), read(endpoint)) for endpoint in catalog.endpoints)

    gauges["modelyard_in_flight"] = (("model",), by_model(lambda e: e.in_flight))
    gauges["modelyard_queued"] = (("model",), by_model(lambda e: len(e.dispatcher.line)))
    gauges["modelyard_replicas"] = (
        ("model",),
        by_model(lambda e: sum(not replica.is_draining for replica in e.dispatcher.replicas)),
    )
    gauges["modelyard_connections"] = ((), lambda: [((), len(gateway.connections))])
    gauges["modelyard_table_revision"] = ((), lambda: [((), catalog.table.revision if catalog.table else 0)])
    gauges["modelyard_table_age_seconds"] = ((), lambda: [((), gateway.presence.silence_s)])
    gauges["modelyard_journal_writable"] = ((), lambda: [((), int(gateway.journal.is_writable))])


def _sums(numbers: Iterable[tuple[Labels, int]]) -> list[tuple[Labels, float]]:
    """Add up equal labels: two tenants may have a model of the same name, and no series may stand on a page twice."""
    found: dict[Labels, float] = {}
    for labels, number in numbers:
        found[labels] = found.get(labels, 0) + number
    return list(found.items())
