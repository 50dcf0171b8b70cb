"""Which endpoints rest: a host does not while one of its guests is on its way."""

import asyncio

from modelyard.clock import ManualClock
from modelyard.control.attention import SWEEP_S, Attention
from modelyard.control.guests import NOTHING, Standing
from modelyard.control.observer import Observer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Release, Scaling, Stage
from modelyard.policy.progress import Fetch

HOST, GUEST = "ep-host", "ep-guest"


def endpoint(id: str, host_id: str = "") -> Endpoint:
    return Endpoint(
        id=id,
        tenant_id="t",
        name=id,
        releases=(Release("v"),),
        scaling=Scaling(),
        created_at=0,
        status=EndpointStatus.RUNNING,
        host_id=host_id,
    )


def world(now_s: float) -> World:
    host, guest = endpoint(HOST), endpoint(GUEST, HOST)
    return World(
        now_s, now_s, {HOST: host, GUEST: guest}, {}, {}, {}, frozenset(), {}, frozenset(), True, {},
        guests={HOST: [guest]},
    )  # fmt: skip


async def test_a_host_gets_every_pass_until_the_files_of_its_guest_are_there_and_it_sits() -> None:
    standings = {GUEST: Standing(fetch=Fetch(Stage.DOWNLOADING, 40))}
    async with asyncio.TaskGroup() as group:
        observer = Observer(group, ManualClock(), hang_timeout_s=5, wake=lambda: None)
        attention = Attention(observer, lambda one: standings.get(one, NOTHING), pass_interval_s=1)
        attention.passed(HOST, world(0), has_changed=False)
        assert HOST in attention.wanted(world(0.1)), "its files are on their way"
        standings[GUEST] = Standing(troubles={"v": "the file has gone"})
        attention.passed(HOST, world(1), has_changed=False)
        assert HOST in attention.wanted(world(1.1)), "it is tried again"
        del standings[GUEST]
        attention.passed(HOST, world(2), has_changed=False)
        assert HOST not in attention.wanted(world(2.1)), "nothing is under way"
        assert HOST in attention.wanted(world(2 + SWEEP_S))
