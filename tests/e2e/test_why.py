"""Why a request went the way it went, asked of two workers: words and numbers for its tenant, and for nobody else."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2, "gateway.queue_max": 1}
OPTIONS = {"ttft_ms": 1, "itl_ms": 1}


def why(yard: Yard, request_id: str | None, *, key: str | None = None) -> dict[str, Any]:
    """Ask; anything but 200 fails."""
    reply = yard.call("GET", f"/v1/requests/{request_id}/why", key=key)
    assert reply.status == 200, f"{reply.status} {reply.body!r}"
    answer: dict[str, Any] = reply.json()
    return answer


def routed(yard: Yard, model: str) -> list[float]:
    """Return how many replicas of a model each worker may use."""
    page = yard.call("GET", "/metrics").body.decode().splitlines()
    wanted = f'model="{model}"'
    return [
        float(line.rpartition(" ")[2]) for line in page if line.startswith("modelyard_replicas{") and wanted in line
    ]


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options=OPTIONS | {"slots": 8}, shared=True)
    return "sim"


@pytest.fixture(scope="module")
def stranger(yard: Yard) -> str:
    return yard.new_tenant("stranger")


async def test_a_request_that_was_answered_says_where_it_went_and_what_it_cost(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, "tell me why", stream=True))
        await load.finish(40)
    assert exchange.outcome is Outcome.COMPLETE
    answer = await asyncio.to_thread(why, yard, exchange.request_id)
    row = yard.row_of(exchange.request_id)
    assert answer["source"].startswith("gateway-")
    assert (answer["status"], answer["model"], answer["next_step"]) == (200, model, "")
    assert answer["replica_id"] == row["replica_id"]
    assert answer["completion_tokens"] == row["completion_tokens"] > 0
    assert float(answer["cost_usd"]) * 1e9 == pytest.approx(row["cost_nanousd"])
    assert 0 < answer["ttft_s"] <= answer["latency_s"]
    assert row["replica_id"] in " ".join(answer["why"])
    assert "tell me" not in json.dumps(answer), "never a prompt"


async def test_of_several_replicas_the_seconds_each_would_have_added_are_told(yard: Yard) -> None:
    await asyncio.to_thread(yard.deploy, "pair", options=OPTIONS | {"slots": 8}, replicas=2)
    await eventually_async(lambda: routed(yard, "pair") == [2.0, 2.0], 40, "both workers know both replicas")
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat("pair", "which one"))
        await load.finish(40)
    answer = await asyncio.to_thread(why, yard, exchange.request_id)
    seen = answer["considered"]
    assert len(seen) == 2
    assert [one["replica_id"] for one in seen if one["is_chosen"]] == [answer["replica_id"]]
    assert {one["replica_id"] for one in seen} == {engine.replica_id for engine in yard.engines("pair")}
    for one in seen:
        assert one["wait_s"] + one["prefill_s"] + one["others_s"] == pytest.approx(one["total_s"])


async def test_a_request_that_a_limit_refused_says_which_and_when_to_come_back(yard: Yard, model: str) -> None:
    key = yard.new_key(name="slow", limits={"requests_per_minute": 1})
    async with Load(yard.port, key) as load:
        for number in range(4):
            load.start(chat(model, f"again {number}"))
        await load.finish(40)
        refused = next(exchange for exchange in load.exchanges if exchange.status == 429)
    answer = await asyncio.to_thread(why, yard, refused.request_id, key=key)
    assert (answer["status"], answer["code"]) == (429, "rate_limit_exceeded")
    assert answer["facts"]["kind"] == "requests"
    assert (answer["facts"]["limit"], answer["facts"]["whose"]) == (1, "this key")
    assert answer["limits"] == [{"whose": "key", "kind": "requests_per_minute", "limit": 1}]
    assert answer["retry_after_s"] > 0
    assert "Send it again in" in answer["next_step"]
    assert "It cost nothing." in answer["why"]


async def test_a_request_that_found_the_line_full_says_what_was_before_it(yard: Yard) -> None:
    await asyncio.to_thread(yard.deploy, "narrow", options=OPTIONS | {"slots": 1})
    await eventually_async(lambda: routed(yard, "narrow") == [1.0, 1.0], 40, "both workers know the replica")
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(12):
            load.start(chat("narrow", f"[[sim: tokens=40 slow=20]] {number}"))
        await load.finish(30)
        refused = [exchange for exchange in load.exchanges if exchange.status == 429]
        waited = [exchange for exchange in load.exchanges if exchange.header("x-modelyard-queued-ms")]
    assert refused, [(exchange.status, exchange.outcome) for exchange in load.exchanges]
    answer = await asyncio.to_thread(why, yard, refused[0].request_id)
    assert answer["code"] == "queue_full"
    assert (answer["facts"]["places"], answer["facts"]["waiting"]) == (1, 1)
    assert answer["facts"]["slots"] == answer["facts"]["running"] == 1
    assert "more replicas" in answer["next_step"]
    answer = await asyncio.to_thread(why, yard, waited[0].request_id)
    assert answer["line"] == {"ahead": 0, "predicted_s": answer["line"]["predicted_s"], "is_cold": False}
    assert answer["waited_s"] == pytest.approx(int(waited[0].header("x-modelyard-queued-ms") or 0) / 1000, abs=0.002)
    assert "every replica of 'narrow' was full" in " ".join(answer["why"])


async def test_a_request_whose_engine_was_killed_says_what_it_left_and_why(yard: Yard) -> None:
    await asyncio.to_thread(yard.deploy, "twins", options=OPTIONS | {"slots": 4}, replicas=2)
    await eventually_async(lambda: routed(yard, "twins") == [2.0, 2.0], 40, "both workers know both replicas")
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat("twins", "[[sim: ttft=5000]] four words to echo"))
        engines = {engine.pid: engine.replica_id for engine in yard.engines("twins")}

        def begun() -> list[int]:
            return [
                record["pid"] for record in yard.journal() if record["event"] == "begin" and record["pid"] in engines
            ]

        pid = (await eventually_async(begun, 20, "an engine has the request"))[0]
        yard.kill(pid)
        await load.finish(30)
    assert exchange.outcome is Outcome.COMPLETE
    answer = await asyncio.to_thread(why, yard, exchange.request_id)
    assert answer["attempts"] == 2
    (move,) = answer["moves"]
    assert move["replica_id"] == engines[pid] != answer["replica_id"]
    assert f"{engines[pid]} failed it" in " ".join(answer["why"])
    # What one release failed counts against it, although another replica answered.
    await eventually_async(lambda: counted(yard, "twins") == (2, 1), 30, "both attempts are counted, one as failed")


def counted(yard: Yard, name: str) -> tuple[int, int]:
    """Return requests and errors of the last minute."""
    stats = yard.get(f"/v1/endpoints/{name}/stats")["stats"]
    return stats["requests"], stats["errors"]


async def refused_for_an_unknown_model(yard: Yard, key: str) -> Exchange:
    async with Load(yard.port, key) as load:
        exchange = load.start(chat("nothing-like-it", "hello"))
        await load.finish(40)
    assert exchange.status == 404
    return exchange


async def test_another_tenants_request_is_as_good_as_none(yard: Yard, model: str, stranger: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, "mine"))
        await load.finish(40)
    other = yard.call("GET", f"/v1/requests/{exchange.request_id}/why", key=stranger)
    unknown = yard.call("GET", "/v1/requests/req_abcdefghijkmnpqr00000001/why", key=stranger)
    assert (other.status, unknown.status) == (404, 404)
    assert other.json()["error"]["code"] == unknown.json()["error"]["code"]
    refused = await refused_for_an_unknown_model(yard, stranger)
    answer = await asyncio.to_thread(why, yard, refused.request_id, key=stranger)
    assert (answer["status"], answer["code"]) == (404, "model_not_found")


async def test_of_a_shared_endpoint_a_tenant_sees_its_own_request_and_no_load_of_others(
    yard: Yard, model: str, stranger: str
) -> None:
    async with Load(yard.port, stranger) as load:
        exchange = load.start(chat(model, "shared"))
        await load.finish(40)
    answer = await asyncio.to_thread(why, yard, exchange.request_id, key=stranger)
    assert answer["status"] == 200
    assert (answer["replica_id"], answer["version_id"], answer["considered"]) == ("", "", [])
    assert "rep-" not in " ".join(answer["why"])


async def test_what_no_gateway_remembers_is_told_from_the_ledger(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, "long ago"))
        await load.finish(40)
    yard.row_of(exchange.request_id)
    for pid in yard.plane_pids("gateway"):
        yard.kill(pid)

    def told() -> Any:
        try:
            reply = yard.call("GET", f"/v1/requests/{exchange.request_id}/why")
        except OSError:
            return None
        return reply.json() if reply.status == 200 else None

    answer = eventually(told, 40, "the workers are back")
    assert (answer["source"], answer["status"]) == ("ledger", 200)
    assert answer["completion_tokens"] > 0


def test_the_command_line_tells_it_in_words(yard: Yard, model: str) -> None:
    reply = yard.call(
        "POST", "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    )
    request_id = reply.headers["x-request-id"]
    command = [sys.executable, "-m", "modelyard", "why", request_id, "--url", yard.url, "--key", yard.admin_key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{request_id}: /v1/chat/completions for '{model}'")
    assert "It was answered after" in done.stdout
    stats = [sys.executable, "-m", "modelyard", "endpoints", "stats", model, "--url", yard.url, "--key", yard.admin_key]
    shown = subprocess.run(stats, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "LATENCY p99" in shown.stdout


def ask_cli(yard: Yard, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", "why", *arguments, "--url", yard.url, "--key", yard.admin_key]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_tells_of_an_endpoint_its_size_place_and_tier(yard: Yard, model: str) -> None:
    done = ask_cli(yard, model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{model}: running, ready"
    assert {"Why is it running?", "Why 1 replica?", "Where does it run?"} <= set(lines)
    assert lines[lines.index("Where does it run?") + 1].startswith("  rep-")
    assert any(line in lines for line in ("Why is it hot?", "Why is it warm?"))
    answer = json.loads(ask_cli(yard, yard.get(f"/v1/endpoints/{model}")["id"], "--json").stdout)
    assert (answer["name"], answer["answers"][1]["data"]["ready"]) == (model, 1)


def test_an_endpoint_that_cannot_be_placed_says_what_to_do(yard: Yard) -> None:
    order = {
        "model_name": "homeless",
        "framework": "simulated",
        "autoscale": {"node_pool": "nowhere"},
    }
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    eventually(lambda: "nowhere" in ask_cli(yard, "homeless").stdout, 60, "the reason is told")
    assert "modelyard nodes" in ask_cli(yard, "homeless", "--quiet").stdout
    yard.call("DELETE", "/v1/endpoints/homeless")


def test_a_misspelt_endpoint_is_pointed_at(yard: Yard, model: str) -> None:
    done = ask_cli(yard, "simm")
    assert done.returncode == 3
    assert f"Did you mean '{model}'?" in done.stderr
