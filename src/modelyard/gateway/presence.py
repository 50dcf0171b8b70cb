"""The controller as the gateway sees it: tables and heartbeats in, reports out.

The gateway serves from the last table however long the controller is away
(static stability). What it must not do meanwhile is judge keys it does not
know: ``is_authoritative`` says whether an unknown key is a wrong key.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from modelyard import errors
from modelyard.clock import Clock
from modelyard.domain.leases import Leases
from modelyard.domain.routing_table import Heartbeat, RoutingTable, Tidings
from modelyard.domain.why import Ask, Told
from modelyard.gateway import waiting
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.stores import TableFollower

SILENCE_S_MAX = 3.0
"""Heartbeats come every second; after this long without one the controller counts as away."""
REPORT_INTERVAL_S = 1.0
REPORT_PAUSE = 20.0
"""Least pause between two reports, in times of what the last one took: of thousands of endpoints one takes a while, at
the controller too, and tables change many times a second."""
RELEASES_INTERVAL_S = 2.0
"""Shortest pause between two reports that say what was counted of releases."""
KEEP_PAUSE = 10
"""Pause between two copies of the table on disk, in times of what one takes."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RoutingTable).decode


class ControllerPresence:
    """Follows the feed. ``last_table`` is where the table is kept for the next start."""

    def __init__(self, *, follower: TableFollower, catalog: Catalog[Exchange], last_table: Path, clock: Clock) -> None:
        self.clock = clock
        self._follower = follower
        self._catalog = catalog
        self._last_table = last_table
        self._heartbeat: Heartbeat | None = None
        self._heard_s = clock.monotonic_s()
        self._is_report_due = False
        self._report_from_s = 0.0
        """No prompt report goes before this moment."""
        self._unkept: RoutingTable | None = None
        self._has_unkept = asyncio.Event()
        self._on_table: Callable[[], None] = lambda: None
        self._on_tidings: Callable[[Tidings], None] = lambda tidings: None
        self._tell: Callable[[Ask], Told] = lambda ask: Told(ask.number)
        self._releases_due_s = 0.0
        self._refused: Callable[[float], list[tuple[int, float]]] = lambda now_s: []

    def on_table(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each new table."""
        self._on_table = listener

    def on_report(self, refused: Callable[[float], list[tuple[int, float]]]) -> None:
        """Ask ``refused``, at each report, for what is refused because it takes engines down."""
        self._refused = refused

    def on_ask(self, tell: Callable[[Ask], Told]) -> None:
        """Have ``tell`` answer what the controller asks of single requests."""
        self._tell = tell

    def on_tidings(self, listener: Callable[[Tidings], None]) -> None:
        """Call ``listener`` with what changes too often for the table."""
        self._on_tidings = listener

    @property
    def silence_s(self) -> float:
        """Return seconds since the controller was last heard."""
        return self.clock.monotonic_s() - self._heard_s

    @property
    def is_authoritative(self) -> bool:
        """Say whether the table is known to be complete now."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.is_authoritative and self.silence_s < SILENCE_S_MAX

    def recall(self) -> None:
        """Serve from the table of the last run until the controller is heard."""
        try:
            table = _decode(self._last_table.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("the last routing table cannot be read: %s", error)
            return
        self._catalog.take(table, now_s=self.clock.monotonic_s())

    async def run(self) -> None:
        """Follow, keep and report, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for work in (self.follow, self.keep, self.report):
                group.create_task(work())

    async def follow(self) -> None:
        """Take what the controller sends, until cancelled."""
        async for update in self._follower.updates():
            if update is None:
                self._heartbeat = None
                _log.warning("the controller is away; serving from the last table")
                continue
            self._heard_s = self.clock.monotonic_s()
            if isinstance(update, Heartbeat):
                self._heartbeat = update
                continue
            if isinstance(update, Leases):
                self._catalog.accounts.shares.take(update, now_s=self._heard_s)
                self.report_now()
                continue
            if isinstance(update, Ask):
                self._follower.send(self._tell(update))
                continue
            if isinstance(update, Tidings):
                self._on_tidings(update)
                continue
            if self._catalog.table is None or self._catalog.table.epoch != update.epoch:
                # A controller that begins anew takes the first counts it hears as its starting point.
                self._releases_due_s = 0.0
            self._catalog.take(update, now_s=self._heard_s)
            self._on_table()
            self._turn_away_hopeless(update)
            self.report_now()
            self._unkept = update
            self._has_unkept.set()

    async def keep(self) -> None:
        """Keep the newest table for the next start, until cancelled; apart from ``follow``, which must not wait for a
        disk: a key that was just made is in the very next table."""
        while True:
            await self._has_unkept.wait()
            self._has_unkept.clear()
            if self._unkept is not None:
                began_s = self.clock.monotonic_s()
                await asyncio.to_thread(self._keep, self._unkept)
                # A table of thousands of endpoints may change many times a second: its copies take a small share of it.
                await asyncio.sleep((self.clock.monotonic_s() - began_s) * KEEP_PAUSE)

    async def report(self) -> None:
        """Report every second, until cancelled."""
        while True:
            self._send()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def report_now(self) -> None:
        """Report at the end of this tick, or soon; a herd of requests makes one report."""
        if not self._is_report_due:
            self._is_report_due = True
            loop, pause_s = asyncio.get_running_loop(), self._report_from_s - self.clock.monotonic_s()
            if pause_s > 0:
                loop.call_later(pause_s, self._send)
            else:
                loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_report_due = False
        now_s = self.clock.monotonic_s()
        report = self._catalog.report(now_s=now_s)
        if day := self._catalog.accounts.quotas.number_of_day:
            report = msgspec.structs.replace(report, day=day)
        if refused := self._refused(now_s):
            report = msgspec.structs.replace(report, refused=refused)
        if (leases := self._catalog.accounts.shares.report(now_s)) is not None:
            report = msgspec.structs.replace(report, leases=leases)
        if now_s >= self._releases_due_s:
            # Many reports are about something that just happened; what is counted can wait for one in a while.
            self._releases_due_s = now_s + RELEASES_INTERVAL_S
            report = msgspec.structs.replace(report, releases=self._catalog.releases(now_s=now_s))
        self._follower.send(report)
        ended_s = self.clock.monotonic_s()
        self._report_from_s = ended_s + REPORT_PAUSE * (ended_s - now_s)

    def _turn_away_hopeless(self, table: RoutingTable) -> None:
        """Refuse those who wait for an endpoint that is gone or cannot start."""
        live = {route.id for route in table.endpoints}
        for endpoint in list(self._catalog.endpoints):
            route = endpoint.route
            if route.id not in live:
                for waiter in endpoint.dispatcher.line:
                    waiting.refuse(waiter, errors.model_not_found(route.name))
            elif route.failure and endpoint.dispatcher.is_cold:
                for waiter in endpoint.dispatcher.line:
                    waiting.refuse(waiter, errors.model_failed(route.name, route.failure))

    def _keep(self, table: RoutingTable) -> None:
        new = self._last_table.with_suffix(f".{os.getpid()}")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(table))
            new.replace(self._last_table)
        except OSError as error:
            _log.warning("the routing table cannot be kept for the next start: %s", error.strerror)
