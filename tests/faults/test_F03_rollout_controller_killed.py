"""F3 and F31: the controller is killed again and again during rollouts; they end as if it had not been."""

import asyncio

import pytest
from tests.support.engines import plan
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load
from tests.support.rollouts import (
    OPTIONS,
    QUICK,
    canary,
    engine_of,
    failed,
    rollout,
    traffic,
    until_state,
    versions_of,
)
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

SETTINGS = {"control.rollout_interval_s": 0.2}
KILLS = 4
SEEN: list[Exchange] = []


def has_begun(yard: Yard, name: str) -> bool:
    return int(rollout(yard, name)["weight"]) >= 10


async def kill_controller(yard: Yard) -> None:
    """``kill -9`` it, and wait until another one answers."""
    (pid,) = yard.plane_pids("control")
    yard.kill(pid)

    def answers() -> bool:
        pids = yard.plane_pids("control")
        return bool(pids) and pids != [pid] and yard.call("GET", "/v1/endpoints").status == 200

    await eventually_async(lambda: asyncio.to_thread(answers), 30, "another controller answers")


@pytest.mark.parametrize("is_good", [True, False])
async def test_rollout_goes_on_where_the_killed_controller_left_it(yard: Yard, is_good: bool) -> None:
    name = "good" if is_good else "bad"
    yard.deploy(name, options=OPTIONS, replicas=2)
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, name, clients=4, prompt="hello" if is_good else "odd"):
            auto = {**QUICK, "steps": [25, 50, 100]} if is_good else {**QUICK, "step_seconds": 60}
            view = await asyncio.to_thread(canary, yard, name, 10, version="v2", auto=auto)
            ids = view["rollout"]
            await kill_controller(yard)
            # A good one may have gone on by now: what counts is that it has begun.
            await eventually_async(lambda: asyncio.to_thread(has_begun, yard, name), 60, "the candidate is asked")
            if not is_good:
                plan(yard, engine_of(yard, name, ids["candidate_id"]), "http_error=500", contains="odd")
            for _ in range(KILLS - 1):
                await kill_controller(yard)
                await asyncio.to_thread(rollout, yard, name)
            shown = await until_state(yard, name, "promoted" if is_good else "rolled_back", 90)
            sent = len(load.exchanges)
            await eventually_async(lambda: len(load.exchanges) > sent + 40, 30, "40 requests after it")
        SEEN.extend(load.exchanges)
    winner = shown["candidate_id"] if is_good else shown["stable_id"]
    check_ledger(yard, SEEN)
    assert set(versions_of(yard, load.exchanges[-8:]).values()) == {winner}
    if is_good:
        assert not failed(load.exchanges), failed(load.exchanges)[:5]
        weights = [one["weight"] for one in shown["judgements"] if one["verdict"] == "promote"]
        assert weights == [10, 25, 50], "each step once"
    else:
        assert len(failed(load.exchanges)) < 0.2 * len(load.exchanges)

    def is_settled() -> bool:
        engines = yard.engines(name)
        return len({one.replica_id for one in engines}) == len(engines) == (4 if is_good else 2)

    await eventually_async(is_settled, 30, "no replica too many, none doubled")
    starts = [
        one["reason"] for one in yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"] if "rollout" in one["kind"]
    ]
    assert starts[0].startswith("v2 beside v1")
