"""A real model from zero to one, to zero, and to one again: the second time the weights are there already."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.origin import origin
from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {
    "fetch.private_networks": "127.0.0.1/32",
    "gateway.load_wait_s": 120,
    "gateway.first_token_timeout_s": 60,
    "gateway.total_timeout_s": 120,
    "control.hang_timeout_s": 60,
}


@pytest.mark.timeout(300)
def test_the_second_cold_start_fetches_nothing(tmp_path: Path) -> None:
    with origin() as web, Yard(tmp_path, SETTINGS) as yard:
        web.put("/smol.gguf", real_model().read_bytes(), bytes_per_s=50e6)
        order = {
            "model_name": "smol",
            "framework": "llamacpp",
            "model_artifact": f"{web.url}/smol.gguf",
            "options": {"slots": 1, "context_length": 256},
            "hardware": {"min_replicas": 0, "max_replicas": 1},
            "scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1},
        }
        assert yard.call("POST", "/v1/models/deploy", order).status == 202
        answers(yard)
        # 0 -> 1: it was fetched, whole and once.
        assert web.sent_bytes("/smol.gguf") >= real_model().stat().st_size
        first = ready_ids(yard)
        eventually(lambda: endpoint(yard)["status"] == "stopped", 60, "1 -> 0 after its idle time")
        eventually(lambda: not yard.engines(), 60, "and its engine has ended")
        asked = len(web.seen)
        answers(yard)
        assert ready_ids(yard) != first, "0 -> 1 by the request alone"
        assert len(web.seen) == asked, "nothing was fetched again"
        scaled = [one for one in events(yard) if one["kind"] == "scaled"]
        # It may sleep again by now.
        assert [one["reason"].split(":")[0] for one in scaled[:2]] == ["to 0", "to 1"]
        starts = [one["data"]["fetch_s"] for one in events(yard) if one["kind"] == "replica_started"]
        assert starts[0] > 0
        assert starts[1:] == [None]
        why = {one["question"]: one["answer"] for one in yard.get("/v1/endpoints/smol/why")["answers"]}
        assert "its weights were on the node" in why["What did its last start take?"]
        # What the platform learned of both: a start takes as long as the last ones did.
        loads = "SELECT count(*) AS n FROM observed_loads"
        eventually(lambda: yard.query(loads)[0]["n"] >= 2, 20, "both loads are noted")
        assert yard.query(loads)[0]["n"] == 2


def endpoint(yard: Yard) -> dict[str, Any]:
    return dict(yard.get("/v1/endpoints/smol"))


def events(yard: Yard) -> list[dict[str, Any]]:
    return list(yard.get("/v1/endpoints/smol/events?limit=200")["data"])


def ready_ids(yard: Yard) -> set[str]:
    return {one["id"] for one in endpoint(yard)["replicas"] if one["state"] == "ready"}


def answers(yard: Yard) -> None:
    body = {"model": "smol", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    reply = yard.call("POST", "/v1/chat/completions", body, within_s=120)
    assert reply.status == 200, reply.body
