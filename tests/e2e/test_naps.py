"""Engines that sleep between requests and take turns on an accelerator: real processes, real requests."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import CONTEXT, Yard

WITHIN_S = 60.0
NODE = '[[fleet.nodes]]\nid = "gpu"\naccelerators = [{ kind = "h100", count = 1 }]\n'


def config_in(folder: Path, nodes: str = NODE) -> tuple[str, str]:
    config = folder / "modelyard.toml"
    config.write_text(nodes)
    return "--config", str(config)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("naps")
    with Yard(folder, {"control.sleepers_bytes": 200 * 1024**3}, options=config_in(folder)) as running:
        yield running


@pytest.fixture
def name(yard: Yard, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an endpoint that is gone after the test, as all others."""
    yield f"m{abs(hash(request.node.name)) % 10_000}"
    for endpoint in yard.get("/v1/endpoints?limit=100")["data"]:
        yard.call("DELETE", f"/v1/endpoints/{endpoint['id']}")
    eventually(lambda: not yard.query("SELECT * FROM replicas"), WITHIN_S, "nothing of it is left")


def order(name: str, *, memory_gib: float = 30, nap_s: float = 1, least: int = 0, **options: object) -> dict[str, Any]:
    plain = {"memory_gib": memory_gib, "sleep": True, "sleep_s": 0.1, "wake_s": 0.3, "context_length": CONTEXT}
    return {
        "model_name": name,
        "framework": "simulated",
        "options": {**plain, **options},
        "hardware": {"gpu_type": "h100", "min_replicas": least, "max_replicas": 1},
        "scaling": {"scale_to_zero": not least},
        "autoscale": {"nap_s": nap_s, "prewarm": False},
    }


def deploy(yard: Yard, name: str, **more: Any) -> None:
    reply = yard.call("POST", "/v1/models/deploy", order(name, **more))
    assert reply.status == 202, reply.body
    yard.wait_ready(name, within_s=WITHIN_S)


def states(yard: Yard, name: str) -> list[str]:
    return [replica["state"] for replica in yard.get(f"/v1/endpoints/{name}")["replicas"]]


def until_asleep(yard: Yard, name: str) -> None:
    eventually(lambda: states(yard, name) == ["asleep"], WITHIN_S, f"{name} sleeps")


def ask(yard: Yard, name: str, text: str = "good morning") -> None:
    reply = yard.call("POST", "/v1/chat/completions", chat(name, text), within_s=WITHIN_S)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"][0]["message"]["content"] == text


async def test_it_naps_and_a_request_wakes_it_and_is_answered_whole(yard: Yard, name: str) -> None:
    await asyncio.to_thread(deploy, yard, name)
    for _ in range(2):
        await asyncio.to_thread(until_asleep, yard, name)
        shown = yard.get(f"/v1/endpoints/{name}")
        assert (shown["status"], shown["progress"]["stage"]) == ("running", "warming")
        assert "its engine sleeps" in shown["progress"]["reason"]
        assert (shown["tier"]["tier"], "asleep" in shown["tier"]["reason"]) == ("warm", True)
        (engine,) = yard.engines(name)
        async with Load(yard.port, yard.admin_key) as load:
            load.start(chat(name, "[[sim: tokens=40]] on and on", max_tokens=60, stream=True))
            await load.finish(WITHIN_S)
            assert [exchange.outcome for exchange in load.exchanges] == [Outcome.COMPLETE]
        assert [one.pid for one in yard.engines(name)] == [engine.pid], "it woke, nothing was started"
    kinds = [event["kind"] for event in yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]]
    assert sorted(kinds) == ["deployed", "replica_ready", "replica_started", "running"], "naps are no events"


def test_whoever_keeps_one_ready_has_it_awake(yard: Yard, name: str) -> None:
    deploy(yard, name, least=1, nap_s=0.1)

    def has_been_idle() -> bool:
        shown = yard.get(f"/v1/endpoints/{name}")
        assert [replica["state"] for replica in shown["replicas"]] == ["ready"]
        return shown["idle_s"] is None or shown["idle_s"] > 2

    ask(yard, name)
    eventually(has_been_idle, WITHIN_S, "it is idle for longer than naps take to begin")


async def test_two_take_turns_on_an_accelerator_that_holds_one(yard: Yard, name: str) -> None:
    first, second = f"{name}-a", f"{name}-b"
    await asyncio.to_thread(deploy, yard, first, memory_gib=60)
    await asyncio.to_thread(until_asleep, yard, first)
    await asyncio.to_thread(deploy, yard, second, memory_gib=60, nap_s=3600)
    pids = sorted(one.pid for one in yard.engines())
    async with Load(yard.port, yard.admin_key) as load:
        for turn in range(4):
            asked = first if turn % 2 == 0 else second
            load.start(chat(asked, f"[[sim: tokens=30]] turn {turn}", max_tokens=60, stream=True))
            await load.finish(WITHIN_S)
            if asked == first:
                (slept,) = yard.get(f"/v1/endpoints/{second}")["replicas"]
                assert slept["state"] == "asleep"
                assert f"`{first}` is asked for" in slept["reason"], "it made room though it was to stay for long"
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}, load.exchanges
    assert sorted(one.pid for one in yard.engines()) == pids, "nothing was started or stopped"
    awake = yard.query("SELECT endpoint_id FROM replicas WHERE state IN ('ready', 'waking', 'falling_asleep')")
    assert len(awake) <= 1, "120 of 80 GiB"


def test_one_that_does_not_wake_is_replaced_and_its_caller_is_answered(yard: Yard, name: str) -> None:
    deploy(yard, name, fail_wake=True)
    until_asleep(yard, name)
    (before,) = yard.engines(name)
    ask(yard, name)
    assert before.pid not in {one.pid for one in yard.engines(name)}
    killed = [one for one in yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"] if "not wake" in one["reason"]]
    assert [one["kind"] for one in killed][:1] == ["replica_killed"]


def test_one_that_dies_asleep_is_noticed_and_replaced(yard: Yard, name: str) -> None:
    deploy(yard, name)
    until_asleep(yard, name)
    (before,) = yard.engines(name)
    yard.kill(before.pid)

    def says_so() -> bool:
        events = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
        return any(event["kind"] == "replica_failed" and event["replica_id"] == before.replica_id for event in events)

    eventually(says_so, WITHIN_S, "its end is noticed")
    ask(yard, name)


def test_a_sleeper_is_stopped_when_its_endpoint_goes_or_gets_another_version(yard: Yard, name: str) -> None:
    deploy(yard, name)
    until_asleep(yard, name)
    (before,) = yard.engines(name)
    release = {"version": "v2", "framework": "simulated", "options": order(name)["options"]}
    reply = yard.call("POST", f"/v1/endpoints/{name}/releases", release)
    assert reply.status == 202, reply.body
    reply = yard.call("PATCH", f"/v1/endpoints/{name}", {"releases": [{"version": "v2", "weight": 100}]})
    assert reply.status == 200, reply.body
    ask(yard, name)
    eventually(
        lambda: before.pid not in {one.pid for one in yard.engines()} and states(yard, name), WITHIN_S, "it is replaced"
    )
    ask(yard, name)
    until_asleep(yard, name)
    assert yard.call("DELETE", f"/v1/endpoints/{name}").status in (200, 202)
    eventually(lambda: not yard.engines(), WITHIN_S, "it is stopped")


async def test_requests_that_come_just_as_it_falls_asleep_never_meet_an_engine_that_sleeps(
    yard: Yard, name: str
) -> None:
    await asyncio.to_thread(deploy, yard, name, nap_s=0.1, sleep_s=0.05, wake_s=0.05)
    chance, naps = random.Random(5), 0
    async with Load(yard.port, yard.admin_key) as load:
        for turn in range(40):
            load.start(chat(name, f"[[sim: tokens=5]] turn {turn}", max_tokens=20, stream=turn % 2 == 0))
            await asyncio.sleep(chance.uniform(0.0, 0.8))
            naps += len(yard.query("SELECT 1 FROM replicas WHERE state = 'asleep'"))
        await load.finish(WITHIN_S)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}, load.exchanges
    events = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
    kinds = [event["kind"] for event in events]
    assert kinds.count("replica_started") == 1
    assert naps, "it slept in between, and that is what this is about"


def test_who_has_slept_longest_goes_when_the_memory_for_sleepers_is_full_and_is_there_again_when_asked(
    tmp_path: Path,
) -> None:
    with Yard(tmp_path, {"control.sleepers_bytes": 100 * 1024**3}, options=config_in(tmp_path)) as yard:
        for one in ("first", "second"):
            deploy(yard, one, memory_gib=60)
            until_asleep(yard, one)
        eventually(lambda: not yard.engines("first"), WITHIN_S, "it made room: 120 of 100 GiB")
        told = [event["reason"] for event in yard.get("/v1/endpoints/first/events?limit=200")["data"]]
        assert any("no more room for engines that sleep" in reason for reason in told)
        assert states(yard, "second") == ["asleep"]
        ask(yard, "first")
