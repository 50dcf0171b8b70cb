"""A warm pool, by real processes: a cold endpoint takes a replica that is loaded, and the pool starts another one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.support.yard import Yard

LOAD_S = 8.0
"""Longer than a test waits for an answer: who is answered in time did not wait for a load."""
OPTIONS = {"load_s": LOAD_S, "itl_ms": 1, "ttft_ms": 1}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("pool")) as running:
        order = {**sleeping("base"), "options": OPTIONS}
        assert running.call("POST", "/v1/models/deploy", order).status == 202
        assert running.call("PUT", "/v1/pools/fast", {"model": "base", "replicas": 1}).status == 200
        eventually(lambda: pool(running)["ready"] == 1, 60, "the pool has a replica")
        yield running


def sleeping(name: str) -> dict[str, Any]:
    return {
        "model_name": name,
        "framework": "simulated",
        "options": OPTIONS,
        "hardware": {"min_replicas": 0, "max_replicas": 2},
        "scaling": {"scale_to_zero": True},
    }


def pool(yard: Yard) -> dict[str, Any]:
    (one,) = yard.get("/v1/pools")["data"]
    return dict(one)


def ask(yard: Yard, model: str, *, stream: bool = False) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], "stream": stream}
    reply = yard.call("POST", "/v1/chat/completions", body, within_s=LOAD_S * 0.75)
    assert reply.status == 200, reply.body
    return reply.body


def test_a_cold_endpoint_takes_a_loaded_replica_and_answers_under_its_own_name(yard: Yard) -> None:
    waiting = pool(yard)["id"]
    (taken,) = [
        row["replica_id"] for row in yard.query(f"SELECT replica_id FROM replicas WHERE endpoint_id='{waiting}'")
    ]
    assert yard.call("POST", "/v1/models/deploy", sleeping("mine")).status == 202
    assert json.loads(ask(yard, "mine"))["model"] == "mine"
    events = [json.loads(line[6:]) for line in ask(yard, "mine", stream=True).decode().split("\n\n") if "{" in line]
    assert {event["model"] for event in events} == {"mine"}
    (replica,) = yard.get("/v1/endpoints/mine")["replicas"]
    assert (replica["id"], replica["state"]) == (taken, "ready")
    kinds = [event["kind"] for event in yard.get("/v1/endpoints/mine/events")["data"]]
    assert "replica_taken" in kinds
    assert "replica_started" not in kinds
    billed = "SELECT status FROM inference_requests WHERE model_name = 'mine'"
    eventually(lambda: [row["status"] for row in yard.query(billed)] == ["success"] * 2, 20, "both are billed")


def test_the_pool_is_filled_again_and_what_was_taken_outlives_it_and_the_controller(yard: Yard) -> None:
    eventually(lambda: pool(yard)["ready"] == 1, 60, "the pool has a replica again")
    before = {engine.pid for engine in yard.engines("mine")}
    assert len(before) == 1
    yard.kill(yard.plane_pids("control")[0])
    eventually(lambda: yard.call("GET", "/v1/pools").status == 200, 40, "the next controller answers")
    assert yard.call("DELETE", "/v1/pools/fast").status == 202
    eventually(
        lambda: len(yard.engines()) == yard.ready_replicas("mine") + yard.ready_replicas("base"), 40, "it is gone"
    )
    assert {engine.pid for engine in yard.engines("mine")} == before
    assert json.loads(ask(yard, "mine"))["model"] == "mine"


def test_a_pool_is_no_model(yard: Yard) -> None:
    assert yard.call("PUT", "/v1/pools/other", {"model": "base", "replicas": 1}).status == 200
    names = {endpoint["name"] for endpoint in yard.get("/v1/endpoints")["data"]}
    assert names == {"base", "mine"}
    assert yard.call("GET", "/v1/endpoints/pool/other").status == 404
    models = {model["id"] for model in yard.get("/v1/models")["data"]}
    assert models == {"base", "mine"}
    assert yard.call("DELETE", "/v1/pools/other").status == 202


def test_a_pool_with_faults_tells_all_of_them(yard: Yard) -> None:
    reply = yard.call("PUT", "/v1/pools/x", {"model": "nobody", "replicas": 0})
    assert reply.status == 400
    message = reply.json()["error"]["message"]
    assert "there is no version 'nobody'" in message
    assert "replicas: must be 1 to 64" in message
