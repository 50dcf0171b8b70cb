"""A gateway worker as a process: its parts put together, its clockwork, its end."""

import asyncio
import gc
import logging
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from modelyard.clock import Clock
from modelyard.config import GatewayConfig
from modelyard.errors import shutting_down
from modelyard.gateway.catalog import Catalog, EndpointState
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.flow import Gateway
from modelyard.gateway.presence import ControllerPresence
from modelyard.gateway.server import ClientConnection
from modelyard.gateway.upstream import UpstreamPool
from modelyard.metering.journal import Journal
from modelyard.observe.metrics import Gauge, Labels
from modelyard.stores import TableFollower

BACKLOG = 4096
LAST_BYTES_S = 1.0
"""Time that clients get, after the drain, to read the ends of their answers."""

_log = logging.getLogger(__name__)


async def run_gateway(  # noqa: PLR0913 - called once, by compose
    *,
    settings: GatewayConfig,
    worker: int,
    listener: socket.socket,
    follower: TableFollower,
    control_socket: Path,
    internal_token: str,
    pepper: bytes,
    journal_root: Path,
    last_table: Path,
    clock: Clock,
    stop: asyncio.Event,
) -> None:
    """Serve on ``listener`` until ``stop`` is set, then drain.

    Raises:
        JournalLockedError: another worker of this number runs.
    """
    loop = asyncio.get_running_loop()
    journal = Journal(
        journal_root / f"gateway-{worker}", sync_s=settings.journal_sync_s, clock=clock, soon=loop.call_soon
    )
    if journal.recovered:
        _log.warning(
            "%d requests were interrupted by the end of the last run; billed by their last mark", journal.recovered
        )

    catalog: Catalog[Exchange] = Catalog(
        worker=worker,
        settings=settings,
        deliver=lambda exchange, replica: gateway.deliver(exchange, replica),
        chance=random.Random().random,
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
    presence.on_table(gateway.forget_heads)
    presence.recall()
    server = await loop.create_server(lambda: ClientConnection(gateway), sock=listener, backlog=BACKLOG)
    # What was imported stays for good; the collector need not look at it again.
    gc.freeze()
    # Requests leave no cycles behind; the default threshold would look for some every few requests.
    gc.set_threshold(20_000, 20, 50)
    tasks = [loop.create_task(work) for work in (journal.run(), presence.run(), _sweep(gateway))]
    try:
        await _first_to_end(stop, tasks)
        await _drain(gateway, server)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        await follower.close()
        for request in list(gateway.side_requests):
            request.cancel()
        await gateway.control.close()
        await pool.close()
        journal.close()


async def _first_to_end(stop: asyncio.Event, tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Wait for ``stop``; a task that ends earlier has failed, and so has the worker."""
    waiting = asyncio.get_running_loop().create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()
    finally:
        waiting.cancel()


async def _sweep(gateway: Gateway) -> None:
    """Look at every deadline a few times a second: far cheaper than a timer a request."""
    settings = gateway.settings
    shortest_s = min(
        settings.first_token_timeout_s, settings.token_timeout_s, settings.total_timeout_s, settings.loading_comment_s,
        settings.queue_wait_s, settings.load_wait_s, settings.write_stall_timeout_s,
    )  # fmt: skip
    pause_s = min(0.25, shortest_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        now_s = gateway.clock.monotonic_s()
        gateway.check_time(now_s)
        gateway.control.check_time(now_s)
        gateway.pool.close_old(now_s)
        for connection in list(gateway.connections):
            connection.check_time(now_s)


async def _drain(gateway: Gateway, server: asyncio.Server) -> None:
    """Take no new work, let what runs finish, then end the rest with an error it can see."""
    _log.info("draining: %d requests in flight", len(gateway.exchanges))
    gateway.is_draining = True
    server.close()
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
