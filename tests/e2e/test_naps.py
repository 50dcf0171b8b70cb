"""Engines that sleep between requests and take turns on an accelerator: real processes, real requests."""

import asyncio
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
    with Yard(folder, options=config_in(folder)) as running:
        yield running


@pytest.fixture
def name(yard: Yard, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an endpoint that is gone after the test."""
    name = f"m{abs(hash(request.node.name)) % 10_000}"
    yield name
    if yard.call("GET", f"/v1/endpoints/{name}").status == 200:
        yard.call("DELETE", f"/v1/endpoints/{name}")
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
        assert shown["status"] == "stopped"
        assert "its engine sleeps" in shown["progress"]["reason"]
        assert (shown["tier"]["tier"], "asleep" in shown["tier"]["reason"]) == ("warm", True)
        (engine,) = yard.engines(name)
        async with Load(yard.port, yard.admin_key) as load:
            load.start(chat(name, "[[sim: tokens=40]] on and on", max_tokens=60, stream=True))
            await load.finish(WITHIN_S)
            assert [exchange.outcome for exchange in load.exchanges] == [Outcome.COMPLETE]
        assert [one.pid for one in yard.engines(name)] == [engine.pid], "it woke, nothing was started"
    kinds = [event["kind"] for event in yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]]
    assert kinds.count("replica_asleep") == 2
    assert kinds.count("replica_started") == 1


def test_whoever_keeps_one_ready_has_it_awake(yard: Yard, name: str) -> None:
    deploy(yard, name, least=1, nap_s=0.1)

    def has_been_idle() -> bool:
        shown = yard.get(f"/v1/endpoints/{name}")
        assert [replica["state"] for replica in shown["replicas"]] == ["ready"]
        return shown["idle_s"] is None or shown["idle_s"] > 2

    ask(yard, name)
    eventually(has_been_idle, WITHIN_S, "it is idle for longer than naps take to begin")
