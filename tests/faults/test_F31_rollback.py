"""F31: a version is rolled back during load, by hand and by itself, and nobody notices more than its share."""

import asyncio
import time
from typing import Any

from tests.support.engines import plan
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.rollouts import (
    OPTIONS,
    QUICK,
    canary,
    engine_of,
    failed,
    rollout,
    traffic,
    until_state,
    until_weight,
    versions_of,
)
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SETTINGS = {"control.rollout_interval_s": 0.2, "control.drain_timeout_s": 20}
"""A drain far longer than any stream: on a slow machine, too, none is cut."""
STEP_S = 60
ROLLBACK_S = 5.0
"""Far above what it takes (it is printed), since other tests may run on this machine."""
SEEN: list[Exchange] = []


async def test_rollback_by_hand_is_at_once_and_loses_no_request(yard: Yard) -> None:
    yard.deploy("hand", options=OPTIONS, replicas=2)
    ids = canary(yard, "hand", 50, version="v2", mode="manual")["rollout"]
    until_weight(yard, "hand", 50)
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, "hand"):

            def has_both() -> bool:
                return len(set(versions_of(yard, load.exchanges).values())) == 2

            await eventually_async(has_both, 30, "both versions answer")
            asked_s = time.monotonic()
            reply = await asyncio.to_thread(yard.call, "POST", "/v1/endpoints/hand/rollback", {})
            answered_s = time.monotonic()
            assert reply.status == 200, reply.body
            sent = len(load.exchanges)
            await eventually_async(lambda: len(load.exchanges) > sent + 200, 30, "200 requests after it")
        SEEN.extend(load.exchanges)
    assert not failed(load.exchanges), failed(load.exchanges)[:5]
    check_ledger(yard, SEEN)
    answered_by = versions_of(yard, load.exchanges)
    late = [
        exchange.started_s - asked_s
        for exchange in load.exchanges
        if exchange.started_s > asked_s and answered_by[str(exchange.request_id)] == ids["candidate_id"]
    ]
    took_s = max(late, default=0.0)
    print(f"rollback: last request to the old weights after {took_s:.3f} s, answer after {answered_s - asked_s:.3f} s")
    assert took_s < ROLLBACK_S
    assert [one["weight"] for one in yard.get("/v1/endpoints/hand")["releases"]] == [100]
    eventually(lambda: len(yard.engines("hand")) == 2, 30, "the candidate's replica is drained and gone")


async def test_canary_that_fails_half_is_rolled_back_by_itself(yard: Yard) -> None:
    yard.deploy("auto", options=OPTIONS, replicas=2)
    users = [f"user-{number}" for number in range(12)]
    yard.call("PATCH", "/v1/endpoints/auto", {"serving": {"sticky": "user"}})
    view = canary(yard, "auto", 10, version="v2", auto={**QUICK, "step_seconds": STEP_S})
    candidate_id = view["rollout"]["candidate_id"]
    until_weight(yard, "auto", 10)
    async with Load(yard.port, yard.admin_key) as load:
        homes = await ask(yard, load, users)
        plan(yard, engine_of(yard, "auto", candidate_id), "http_error=500", contains="odd")
        bad_s = time.monotonic()
        await load_until_over(yard, load)
        took_s = time.monotonic() - bad_s
        again = await ask(yard, load, users)
        SEEN.extend(load.exchanges)
    check_ledger(yard, SEEN)
    shown = rollout(yard, "auto")
    print(f"rolled back by itself after {took_s:.2f} s, {len(failed(load.exchanges))} failed: {shown['reason']}")
    assert "the candidate failed" in shown["reason"]
    assert shown["judgements"][-1]["data"]["candidate_errors"] > 0
    assert took_s < STEP_S / 2, "it did not wait for the end of its step"
    on_candidate = shown["judgements"][-1]["data"]["candidate_requests"]
    # Counts are told a moment after they are made: what was sent meanwhile is on top of what was judged.
    assert len(failed(load.exchanges)) <= max(on_candidate, 0.1 * len(load.exchanges))
    moved = [user for user in users if homes[user] != candidate_id and again[user] != homes[user]]
    assert not moved, "who was on the stable version stays there"
    assert set(again.values()) == {shown["stable_id"]}
    event = [one for one in yard.get("/v1/endpoints/auto/events")["data"] if one["kind"] == "rollout_rolled_back"]
    assert event[0]["data"]["candidate"] == "v2"


async def ask(yard: Yard, load: Load, users: list[str]) -> dict[str, str]:
    """Send one request of each user, one after the other; return the version that answered each."""
    asked = {user: await load.send(chat("auto", f"I am {user}", user=user)) for user in users}
    assert {exchange.outcome for exchange in asked.values()} == {Outcome.COMPLETE}
    check_rows = [yard.row_of(exchange.request_id) for exchange in asked.values()]
    return {user: str(row["model_id"]) for user, row in zip(asked, check_rows, strict=True)}


async def load_until_over(yard: Yard, load: Load) -> dict[str, Any]:
    """Send requests of ever new users, half of which the candidate fails, until the rollout is over."""
    over = asyncio.create_task(until_state(yard, "auto", "rolled_back", 60))

    async def client(number: int) -> None:
        count = 0
        while not over.done():
            count += 1
            what = "odd" if count % 2 else "even"
            await load.send(chat("auto", f"{what} {number} {count}", user=f"{number}-{count}", stream=count % 4 < 2))
            await asyncio.sleep(0.01)

    await asyncio.gather(*(client(number) for number in range(8)))
    return await over


async def test_good_canary_goes_all_the_way_and_back_while_the_old_one_is_kept(yard: Yard) -> None:
    yard.deploy("good", options=OPTIONS)
    view = canary(yard, "good", 25, version="v2", auto={**QUICK, "steps": [50, 100]}, keep_previous_seconds=60)
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, "good"):
            shown = await until_state(yard, "good", "promoted", 60)
            assert len(yard.engines("good")) == 2, "the old one is kept"
            asked_s = time.monotonic()
            assert (await asyncio.to_thread(yard.call, "POST", "/v1/endpoints/good/rollback", {})).status == 200
            back_s = time.monotonic() - asked_s
            sent = len(load.exchanges)
            await eventually_async(lambda: len(load.exchanges) > sent + 100, 30, "100 requests after it")
        SEEN.extend(load.exchanges)
    print(f"rollback after the promotion in {back_s:.3f} s")
    assert not failed(load.exchanges), failed(load.exchanges)[:5]
    check_ledger(yard, SEEN)
    promotions = [one["weight"] for one in shown["judgements"] if one["verdict"] == "promote"]
    assert promotions == [25, 50]
    last = versions_of(yard, load.exchanges[-20:])
    assert set(last.values()) == {view["rollout"]["stable_id"]}


async def test_what_was_kept_is_let_go_of(yard: Yard) -> None:
    yard.deploy("kept", options=OPTIONS)
    canary(yard, "kept", 100, version="v2", keep_previous_seconds=1)
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, "kept", clients=2):
            await until_state(yard, "kept", "promoted", 60)
            await eventually_async(lambda: len(yard.engines("kept")) == 1, 30, "the old one is gone")
        SEEN.extend(load.exchanges)
    assert not failed(load.exchanges), failed(load.exchanges)[:5]
    (left,) = yard.get("/v1/endpoints/kept")["releases"]
    assert (left["version"], left["weight"]) == ("v2", 100)
    check_ledger(yard, SEEN)


async def test_new_release_with_everything_replaces_replica_by_replica_under_load(yard: Yard) -> None:
    yard.deploy("roll", options=OPTIONS, replicas=3)
    order = {
        "framework": "simulated",
        "version": "v2",
        "options": {**OPTIONS, "load_s": 0.3, "journal": str(yard.folder / "tokens" / "roll-v2.jsonl")},
        "weight": 100,
    }
    most = 0
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, "roll"):
            long = [
                load.start(chat("roll", f"[[sim: tokens=60 slow=20]] {number}", stream=True)) for number in range(6)
            ]
            await asyncio.gather(*(load.delivered(stream, 2) for stream in long))
            assert (await asyncio.to_thread(yard.call, "POST", "/v1/endpoints/roll/releases", order)).status == 202
            deadline = time.monotonic() + 90
            while rollout(yard, "roll")["state"] != "promoted":
                replicas = yard.get("/v1/endpoints/roll")["replicas"]
                living = [one for one in replicas if one["state"] in ("starting", "loading", "ready")]
                ready = [one for one in replicas if one["state"] == "ready"]
                most = max(most, len(living))
                assert len(ready) >= 3, replicas
                assert time.monotonic() < deadline, rollout(yard, "roll")
                await asyncio.sleep(0.05)
        await load.finish()
        SEEN.extend(load.exchanges)
    assert not failed(load.exchanges), failed(load.exchanges)[:5]
    assert most == 4, "one more than needed at a time"
    eventually(lambda: len(yard.engines("roll")) == 3, 30, "the old ones are gone")
    (left,) = yard.get("/v1/endpoints/roll")["releases"]
    assert (left["version"], left["weight"]) == ("v2", 100)
    check_ledger(yard, SEEN)
