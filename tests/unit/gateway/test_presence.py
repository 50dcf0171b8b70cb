"""What the gateway makes of the controller's feed."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelyard.clock import ManualClock, SystemClock
from modelyard.config import GatewayConfig
from modelyard.domain.demand import Report
from modelyard.domain.routing_table import Heartbeat, RoutingTable
from modelyard.domain.why import Ask, Told
from modelyard.gateway.catalog import Catalog
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.presence import ControllerPresence


class Feed:
    """A follower whose updates are put in by hand."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[RoutingTable | Heartbeat | Ask | None] = asyncio.Queue()

    async def updates(self) -> AsyncIterator[RoutingTable | Heartbeat | Ask | None]:
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
        disk_is_free.wait(30)
        really_keep(table)

    monkeypatch.setattr(presence, "_keep", keep_slowly)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
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


class Heard(Feed):
    """A feed that keeps what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Report | Told] = []

    def send(self, report: Report | Told) -> None:
        self.sent.append(report)


async def following(tmp_path: Path) -> tuple[Heard, ManualClock, ControllerPresence]:
    catalog: Catalog[Exchange] = Catalog(
        worker=0, settings=GatewayConfig(queue_max=1), deliver=lambda exchange, replica: False, chance=lambda: 0.0
    )
    feed, clock = Heard(), ManualClock()
    return feed, clock, ControllerPresence(follower=feed, catalog=catalog, last_table=tmp_path / "t", clock=clock)


async def test_what_was_counted_of_releases_is_told_every_two_seconds_and_to_each_new_controller_at_once(
    tmp_path: Path,
) -> None:
    feed, clock, presence = await following(tmp_path)

    def says() -> list[bool]:
        said = [report.releases is not None for report in feed.sent if isinstance(report, Report)]
        feed.sent.clear()
        return said

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        following_it = group.create_task(presence.follow())
        for _ in range(5):
            presence._send()
            clock.advance(1.0)
        assert says() == [True, False, True, False, True]
        for epoch, revision, expected in (("e", 1, True), ("e", 2, False), ("f", 1, True)):
            feed.queue.put_nowait(RoutingTable(epoch, revision, (), (), ()))
            while not feed.sent:
                await asyncio.sleep(0)
            assert says() == [expected], (epoch, revision)
        following_it.cancel()


async def test_a_question_is_answered_at_once_with_its_number(tmp_path: Path) -> None:
    feed, _, presence = await following(tmp_path)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        following_it = group.create_task(presence.follow())
        feed.queue.put_nowait(Ask(7, "req_1"))
        while not feed.sent:
            await asyncio.sleep(0)
        assert feed.sent == [Told(7)], "nobody has said yet who remembers"
        feed.sent.clear()
        presence.on_ask(lambda ask: Told(ask.number + 1))
        feed.queue.put_nowait(Ask(8, "req_1"))
        while not feed.sent:
            await asyncio.sleep(0)
        assert feed.sent == [Told(9)]
        following_it.cancel()
