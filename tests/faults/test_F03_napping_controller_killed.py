"""F3: ``kill -9`` of the control plane while an engine sleeps, and while it falls asleep or wakes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.test_naps import WITHIN_S, config_in, deploy, states, until_asleep
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with Yard(tmp_path, {"gateway.load_wait_s": WITHIN_S}, options=config_in(tmp_path)) as running:
        yield running


def kill_control(yard: Yard) -> None:
    """Kill it, and wait until the next one answers."""
    (pid,) = yard.plane_pids("control")
    yard.kill(pid)
    eventually(lambda: yard.plane_pids("control") not in ([], [pid]), WITHIN_S, "another controller")
    eventually(lambda: yard.call("GET", "/v1/endpoints").status == 200, WITHIN_S, "it answers")


def is_recorded(yard: Yard, state: str) -> bool:
    return bool(yard.query(f"SELECT 1 FROM replicas WHERE state = '{state}'"))


async def test_it_sleeps_on_and_wakes_for_the_next_controller(yard: Yard) -> None:
    await asyncio.to_thread(deploy, yard, "one")
    await asyncio.to_thread(until_asleep, yard, "one")
    (engine,) = yard.engines("one")
    await asyncio.to_thread(kill_control, yard)
    assert states(yard, "one") == ["asleep"]
    async with Load(yard.port, yard.admin_key) as load:
        load.start(chat("one", "[[sim: tokens=30]] hello", max_tokens=60, stream=True))
        await load.finish(WITHIN_S)
        assert [one.outcome for one in load.exchanges] == [Outcome.COMPLETE]
    assert [one.pid for one in yard.engines("one")] == [engine.pid]


@pytest.mark.parametrize("state", ["falling_asleep", "waking"])
async def test_what_was_begun_is_ended_by_the_next_one_and_the_request_is_answered(yard: Yard, state: str) -> None:
    await asyncio.to_thread(deploy, yard, "one", sleep_s=2, wake_s=2)
    if state == "waking":
        await asyncio.to_thread(until_asleep, yard, "one")
    (engine,) = yard.engines("one")
    async with Load(yard.port, yard.admin_key) as load:
        if state == "waking":
            load.start(chat("one", "[[sim: tokens=30]] hello", max_tokens=60, stream=True))

        async def is_there() -> bool:
            return await asyncio.to_thread(is_recorded, yard, state)

        await eventually_async(is_there, WITHIN_S, f"it is {state}")
        await asyncio.to_thread(kill_control, yard)
        load.start(chat("one", "[[sim: tokens=30]] hello again", max_tokens=60, stream=True))
        await load.finish(WITHIN_S)
        assert {one.outcome for one in load.exchanges} == {Outcome.COMPLETE}, load.exchanges
    assert [one.pid for one in yard.engines("one")] == [engine.pid], "the same engine answered"
    await asyncio.to_thread(until_asleep, yard, "one")
