"""An endpoint grows under load, shrinks when it is calm, sleeps and wakes: real processes, real requests."""

import asyncio
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import CONTEXT, Yard

from modelyard.control.forecasts import LOOK_S

RULES = {
    "check_s": 0.2,
    "up_utilization_s": 0.3,
    "down_queue_s": 0.5,
    "down_utilization_s": 0.5,
    "target_ttft_s": 0.5,
    "prewarm": False,
}
OPTIONS = {"slots": 2, "ttft_ms": 1, "itl_ms": 20, "load_s": 0.2, "context_length": CONTEXT}
WITHIN_S = 40.0


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    # Callers wait until an endpoint has grown, however long starts take on a busy machine.
    settings = {"gateway.queue_wait_s": 50, "gateway.load_wait_s": 50}
    with Yard(tmp_path_factory.mktemp("scaled"), settings) as running:
        yield running


def deploy(yard: Yard, name: str, scaling: dict[str, Any], least: int, most: int, **rules: object) -> None:
    order = {
        "model_name": name,
        "framework": "simulated",
        "options": OPTIONS,
        "hardware": {"min_replicas": least, "max_replicas": most},
        "scaling": scaling,
        "autoscale": {**RULES, **rules},
    }
    reply = yard.call("POST", "/v1/models/deploy", order)
    assert reply.status == 202, reply.body


def sizes(yard: Yard, name: str) -> list[int]:
    """Return every size that was decided, in order."""
    rows = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
    return [int(event["data"]["replicas"]) for event in rows if event["kind"] == "scaled"]


def reasons(yard: Yard, name: str) -> list[str]:
    rows = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
    return [event["reason"] for event in rows if event["kind"] == "scaled"]


async def test_from_one_to_zero_to_one_to_zero_to_one(yard: Yard) -> None:
    sleepy = {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1}
    deploy(yard, "sleepy", sleepy, 0, 1)
    for _ in range(2):
        yard.wait_asleep("sleepy")
        reply = await asyncio.to_thread(
            yard.call, "POST", "/v1/chat/completions", chat("sleepy", "wake up"), within_s=WITHIN_S
        )
        assert reply.status == 200, reply.body
        assert reply.json()["usage"]["completion_tokens"] > 0
    eventually(lambda: sizes(yard, "sleepy")[:5] == [0, 1, 0, 1, 0], WITHIN_S, "it sleeps again")
    yard.wait_asleep("sleepy")
    assert any("no request for 1 s" in reason for reason in reasons(yard, "sleepy"))


async def test_it_grows_under_load_and_shrinks_when_it_is_calm(yard: Yard) -> None:
    deploy(yard, "busy", {}, 1, 3)
    yard.wait_ready("busy")
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(12):
            load.start(chat("busy", "[[sim: tokens=200 slow=20]] on", max_tokens=300, stream=True), within_s=60)

        async def has_grown() -> bool:
            return await asyncio.to_thread(yard.ready_replicas, "busy") == 3

        await eventually_async(has_grown, WITHIN_S, "three replicas")
        shown = await asyncio.to_thread(yard.get, "/v1/endpoints/busy")
        assert shown["size"]["replicas"] == 3
        assert shown["size"]["seen"]["ready"] <= 3
        await load.finish(60)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}, "growing and shrinking hurt"
    eventually(lambda: yard.ready_replicas("busy") == 1, WITHIN_S, "one replica")
    grown = reasons(yard, "busy")
    # The first look may come before the last of the requests, so that what it counts is not known here.
    counted = re.match(r"to [23]: (\d+) queued and (\d+) running requests need (\d+) x 2 slots", grown[0])
    assert counted, grown
    queued, running, replicas = map(int, counted.groups())
    assert 2 < queued + running <= 12
    assert replicas == math.ceil((queued + running) / 2), "each request wants one slot"
    assert "check: no queue for" in grown[-1]
    assert sizes(yard, "busy")[-1] == 1


async def test_pinned_hot_it_never_sleeps_and_changes_are_taken_at_once(yard: Yard) -> None:
    sleepy = {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1}
    deploy(yard, "pinned", sleepy, 0, 1, tier="hot")
    yard.wait_ready("pinned")

    def says_so() -> bool:
        shown = yard.get("/v1/endpoints/pinned")
        assert len(yard.engines("pinned")) == 1
        return shown["idle_s"] >= 3 and shown["size"]["reason"] == "pinned hot: one replica stays"

    eventually(says_so, WITHIN_S, "it stays for longer than its idle time")
    reply = yard.call("PATCH", "/v1/endpoints/pinned", {"autoscale": {"tier": "cold"}})
    assert reply.status == 200, reply.body
    eventually(lambda: not yard.engines("pinned"), WITHIN_S, "it sleeps")
    reply = yard.call("PATCH", "/v1/endpoints/pinned", {"autoscale": {"tier": "hot"}})
    eventually(lambda: len(yard.engines("pinned")) == 1, WITHIN_S, "it is back without a request")


def test_forecasts_are_kept_by_a_controller_that_stops(tmp_path: Path) -> None:
    with Yard(tmp_path) as yard:
        yard.deploy("known")
        until_s = time.monotonic() + 3 * LOOK_S  # what came before the first look may be from before the controller

        def has_asked_for_a_while() -> bool:
            assert yard.call("POST", "/v1/chat/completions", chat("known", "hello")).status == 200
            return time.monotonic() > until_s

        eventually(has_asked_for_a_while, WITHIN_S, "requests at three looks")
    assert yard.query("SELECT length(profile) AS n FROM forecasts")[0]["n"] > 50
