"""Fifty endpoints on simulated replicas: one host; all answer, sleepers wake, and they outlive the controller."""

import signal
from pathlib import Path

import pytest
from tests.support import processes
from tests.support.waiting import eventually
from tests.support.yard import Yard

ENDPOINTS = 50
WITHIN_S = 120.0


def ready(yard: Yard) -> int:
    replicas = yard.get("/v1/status")["replicas"] or {}
    return int(replicas.get("ready", 0))


def answer(yard: Yard, name: str) -> int:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    return yard.call("POST", "/v1/chat/completions", body, within_s=30.0).status


@pytest.mark.timeout(300)
def test_fifty_endpoints_share_one_host_answer_and_outlive_the_controller(tmp_path: Path) -> None:
    with Yard(tmp_path, settings={"fleet.kind": "simulated", "control.pass_interval_s": 1}) as yard:
        for number in range(ENDPOINTS):
            yard.deploy(f"m-{number}", wait=False)
        eventually(lambda: ready(yard) == ENDPOINTS, WITHIN_S, "all replicas ready")
        assert len({engine.pid for engine in yard.engines()}) == 1
        assert [answer(yard, f"m-{number}") for number in range(0, ENDPOINTS, 7)] == [200] * 8

        before = {engine.replica_id for engine in yard.engines()}
        (control,) = yard.plane_pids("control")
        yard.kill(control)
        eventually(lambda: yard.call("GET", "/v1/status").status == 200, WITHIN_S, "a new controller")
        eventually(lambda: ready(yard) == ENDPOINTS, WITHIN_S, "all replicas are known again")
        assert {engine.replica_id for engine in yard.engines()} == before

        sleep = {"scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1}}
        assert yard.call("PATCH", "/v1/endpoints/m-3", sleep).status == 200
        eventually(lambda: yard.ready_replicas("m-3") == 0, WITHIN_S, "m-3 sleeps in its time, though it rests")
        assert answer(yard, "m-3") == 200


@pytest.mark.timeout(300)
def test_the_end_of_the_host_is_the_end_of_its_replicas_and_all_of_them_come_back(tmp_path: Path) -> None:
    with Yard(tmp_path, settings={"fleet.kind": "simulated"}) as yard:
        for number in range(5):
            yard.deploy(f"m-{number}", wait=False)
        eventually(lambda: ready(yard) == 5, WITHIN_S, "all replicas ready")
        (host,) = {engine.pid for engine in yard.engines()}
        processes.send_signal(host, signal.SIGKILL)

        def told() -> bool:
            events = yard.get("/v1/endpoints/m-0/events?limit=100")["data"]
            return any("its host ended" in event["reason"] for event in events)

        eventually(told, WITHIN_S, "an event says how the replica ended")
        eventually(lambda: {e.pid for e in yard.engines()} and ready(yard) == 5, WITHIN_S, "all are back")
        assert {engine.pid for engine in yard.engines()} != {host}
