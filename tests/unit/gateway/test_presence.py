"""What the gateway makes of the controller's feed."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelyard.clock import SystemClock
from modelyard.config import GatewayConfig
from modelyard.domain.demand import Report
from modelyard.domain.routing_table import Heartbeat, RoutingTable
from modelyard.domain.why import Told
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.presence import ControllerPresence


class Feed:
    """A follower whose updates are put in by hand."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[RoutingTable | Heartbeat | None] = asyncio.Queue()

    async def updates(self) -> AsyncIterator[RoutingTable | Heartbeat | None]:
        while True:
            yield await self.queue.get()

    def send(self, report: Report | Told) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_table_is_in_use_while_the_one_before_is_still_being_kept_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog: Catalog[Exchange] = Catalog(
        worker=0, settings=GatewayConfig(queue_max=1), deliver=lambda exchange, replica: False, chance=lambda: 0.0
    )
    feed, disk_is_free = Feed(), threading.Event()
    presence = ControllerPresence(follower=feed, catalog=catalog, last_table=tmp_path / "table", clock=SystemClock())
    really_keep = presence._keep

    def keep_slowly(table: RoutingTable) -> None:
        disk_is_free.wait(10)
        really_keep(table)

    monkeypatch.setattr(presence, "_keep", keep_slowly)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tasks = [group.create_task(presence.follow()), group.create_task(presence.keep())]
        for revision in (1, 2, 3):
            feed.queue.put_nowait(RoutingTable("e", revision, (), (), ()))
            while catalog.table is None or catalog.table.revision != revision:
                await asyncio.sleep(0)
        assert not (tmp_path / "table").exists()
        disk_is_free.set()
        again: Catalog[Exchange] = Catalog(
            worker=0, settings=GatewayConfig(queue_max=1), deliver=lambda exchange, replica: False, chance=lambda: 0.0
        )
        while again.table is None or again.table.revision != 3:
            await asyncio.sleep(0.01)
            ControllerPresence(
                follower=feed, catalog=again, last_table=tmp_path / "table", clock=SystemClock()
            ).recall()
        for task in tasks:
            task.cancel()
