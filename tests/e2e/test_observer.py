"""What the controller sees of real engines: at once when they get busy, and told to gateways once."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, chat
from tests.support.simulated import SECRET, Sim, end, launch, ready
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

from modelyard.clock import SystemClock
from modelyard.control.observer import Observer, Target
from modelyard.domain.demand import ReplicaReport
from modelyard.domain.routing_table import ReplicaSnapshot, Tidings
from modelyard.engines.simulated import SimulatedEngine
from modelyard.policy.reconcile import Vital
from modelyard.stores.feed import FeedClient

HANG_S = 30.0


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Sim]:
    running = ready(launch(tmp_path, slots=2))
    yield running
    end(running)


async def test_busy_replica_is_looked_at_at_once_and_each_look_is_told_once(sim: Sim) -> None:
    target = Target("rep-1", "127.0.0.1", sim.port, SECRET, SimulatedEngine(), 60.0)
    told: list[ReplicaSnapshot] = []
    late: list[ReplicaSnapshot] = []
    asked_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        observer = Observer(group, SystemClock(), hang_timeout_s=HANG_S, wake=lambda: None)
        observer.watch([(target, False)])

        def news() -> list[ReplicaSnapshot]:
            nonlocal asked_s
            before_s, asked_s = asked_s, time.monotonic()
            new = observer.snapshots()
            # What is told now was not there when it was asked for before, however long ago that is here.
            late.extend(one for one in new if not 0 <= one.age_s < 1 + time.monotonic() - before_s)
            told.extend(new)
            return told

        await eventually_async(lambda: observer.vital("rep-1")[0] is Vital.READY and news(), 20, "a first look")
        assert told[-1].running == 0
        assert not observer.snapshots(), "told once"
        with sim.chat("[[sim: tokens=4000 slow=10]] on", stream=True):
            await eventually_async(lambda: asyncio.to_thread(sim.running), 20, "it runs")
            count = len(told)
            # Idle replicas are looked at every five seconds; a gateway's report is what makes the next look come now.
            assert not observer.note("gateway-0", [ReplicaReport("rep-1", 1, 0, "", 0)])
            await eventually_async(lambda: any(one.running == 1 for one in news()[count:]), 3, "a look at once")
            looks = len(told)
            await eventually_async(lambda: len(news()) >= looks + 2, 4.5, "a look a second while it is busy")
            assert not late
            assert observer.note("gateway-0", [ReplicaReport("rep-1", 1, 2, "timeout", 0)]), "it got worse"
            assert not observer.note("gateway-0", [])
        observer.watch([])
        await observer.close()


async def test_every_gateway_is_told_what_engines_say(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 4, "ttft_ms": 1, "itl_ms": 1})
    (engine,) = yard.engines("sim")
    token = (yard.data / "secrets" / "internal-token").read_text().strip()
    follower = FeedClient(yard.data / "run" / "feed.sock", token, "gateway-of-the-test")
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(3):
            load.start(chat("sim", "[[sim: tokens=2000 slow=20]] on", stream=True), within_s=60)
        async with asyncio.timeout(30), aclosing(follower.updates()) as updates:
            async for update in updates:
                if isinstance(update, Tidings) and any(
                    one.replica_id == engine.replica_id and one.running == 3 for one in update.snapshots
                ):
                    break
        await follower.close()
        for exchange in load.exchanges:
            exchange.leave()
        await load.finish(20)
        check_ledger(yard, load.exchanges)
