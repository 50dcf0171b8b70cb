"""Which endpoints rest: a host does not while one of its guests is on its way."""

import asyncio
from dataclasses import replace

from modelyard.clock import ManualClock
from modelyard.control.attention import SWEEP_S, Attention
from modelyard.control.guests import NOTHING, Standing
from modelyard.control.observer import Observer
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Release, Scaling, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy.progress import Fetch
from modelyard.policy.reconcile import Vital

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


async def test_one_that_sleeps_rests_and_one_that_may_be_due_to_is_looked_at_in_time() -> None:
    seen = {ReplicaState.READY: True, ReplicaState.ASLEEP: True, ReplicaState.WAKING: False}
    async with asyncio.TaskGroup() as group:
        observer = Observer(group, ManualClock(), hang_timeout_s=5, wake=lambda: None)
        observer.vital = lambda _: (Vital.READY, "")  # type: ignore[method-assign]
        for state, rests in seen.items():
            attention = Attention(observer, pass_interval_s=1)
            look = replace(world(0), replicas={HOST: [Replica("r", HOST, "v", 0, 0, state, 0.0)]}, guests={})
            attention.passed(HOST, look, has_changed=False)
            assert (HOST not in attention.wanted(replace(look, monotonic_s=0.1))) is rests, state
            attention.passed(HOST, look, has_changed=False, look_in_s=2.0)
            assert HOST in attention.wanted(replace(look, monotonic_s=2.0))
