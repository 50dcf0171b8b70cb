"""Whole models of many tenants in one process of the engine ``onnx``: called by their own names, metered apart."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.customers import Customer
from tests.support.waiting import eventually
from tests.support.yard import Reply, Yard

pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
pytest.importorskip("onnx", reason="needs the extra 'convert'")

from tests.support.smallmodels import converted, minilm_onnx, packed_model, tiny_bert

SEATS = 3


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("models")) as yard:
        deploy(yard, "minilm", minilm_onnx(), {"task": "embeddings", "guests": SEATS}, shared=True)
        yard.wait_ready("minilm")
        yield yard


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sentiment")
    source = tiny_bert(root / "source", "BertForSequenceClassification", labels=["good", "bad"])
    return converted(source, root / "sentiment")


def deploy(yard: Yard, name: str, place: Path, options: dict[str, object], **more: object) -> Reply:
    order = {"model_name": name, "framework": "onnx", "model_artifact": place.as_uri(), "options": options, **more}
    reply = yard.call("POST", "/v1/models/deploy", order)
    assert reply.status == 202, reply.body
    return reply


def hears(tenant: Customer, model: str = "vad") -> Reply:
    """Ask Silero whether silence is speech."""
    inputs = [
        {"name": "input", "shape": [1, 576], "datatype": "FP32", "data": [0.0] * 576},
        {"name": "state", "shape": [2, 1, 128], "datatype": "FP32", "data": [0.0] * 256},
        {"name": "sr", "shape": [], "datatype": "INT64", "data": [16000]},
    ]
    return tenant.yard.call("POST", f"/v2/models/{model}/infer", {"inputs": inputs}, key=tenant.key, within_s=30)


def classifies(tenant: Customer, model: str) -> Reply:
    body = {"model": model, "input": "a good day"}
    return tenant.yard.call("POST", "/v1/classify", body, key=tenant.key, within_s=30)


def embeds(tenant: Customer, model: str) -> Reply:
    body = {"model": model, "input": "one text"}
    return tenant.yard.call("POST", "/v1/embeddings", body, key=tenant.key, within_s=30)


def sit(tenant: Customer, name: str, place: Path, *options: str) -> None:
    done = tenant.modelyard("deploy", str(place), "--on", "minilm", "--name", name, "--wait", "-q", *options)
    assert done.returncode == 0, done.stderr


def test_tenants_bring_models_of_their_own_which_answer_in_one_process_and_are_metered_apart(
    yard: Yard, sentiment: Path
) -> None:
    listener, reader = Customer(yard, "listener"), Customer(yard, "reader")
    sit(listener, "vad", packed_model("silero") / "silero_vad.onnx")
    sit(reader, "mood", sentiment, "--option", "task=classify")
    heard, read = hears(listener), classifies(reader, "mood")
    assert heard.status == 200, heard.body
    assert heard.json()["model_name"] == "vad", "its own name, not the engine's"
    speech = next(one for one in heard.json()["outputs"] if one["name"] == "output")
    assert speech["data"][0] < 0.1
    assert read.status == 200, read.body
    assert (read.json()["model"], read.json()["data"][0]["label"] in ("good", "bad")) == ("mood", True)
    assert embeds(reader, "minilm").json()["model"] == "minilm", "the host answers beside them"
    assert len(yard.engines()) == 1, "no further replica was started"
    rows = [yard.row_of(reply.headers["x-request-id"]) for reply in (heard, read)]
    assert [(row["customer_id"], row["model_name"]) for row in rows] == [(listener.id, "vad"), (reader.id, "mood")]
    assert rows[1]["prompt_tokens"] == read.json()["usage"]["prompt_tokens"] > 0
    assert {one["is_guest"] for one in engine_models(yard, "minilm").values()} == {False, True}
    listener.drop("vad")
    reader.drop("mood")
    assert list(engine_models(yard, "minilm")) == ["minilm"], "the engine forgot them"


def test_a_plan_says_what_a_guest_takes_and_a_model_that_no_seat_is_for_is_refused(yard: Yard, sentiment: Path) -> None:
    words = ("deploy", str(sentiment), "--name", "mood", "--dry-run", "--data-dir", str(yard.data))
    operator = Customer(yard, "operator")
    operator.key = yard.admin_key
    plan = operator.modelyard(*words, "--on", "minilm")
    assert plan.returncode == 0, plan.stderr
    assert "the replicas of 'minilm', beside others" in plan.stdout
    assert "a replica" not in plan.stdout
    seats = operator.modelyard(*words, "--on", "minilm", "--option", "guests=2")
    assert "options.guests: a guest takes in no guests, its host does; leave this out" in seats.stderr
    deploy(yard, "seatless", sentiment, {"task": "classify"})
    refused = operator.modelyard(*words, "--on", "seatless")
    assert "'seatless' has no seats for guests: set its option guests" in refused.stderr
    assert yard.call("DELETE", "/v1/endpoints/seatless").status == 202
    eventually(lambda: len(yard.engines()) == 1, 30, "it is gone")


def test_what_another_tenant_has_does_not_exist(yard: Yard) -> None:
    owner, other = Customer(yard, "owner"), Customer(yard, "other")
    sit(owner, "vad", packed_model("silero") / "silero_vad.onnx")
    (engine_name,) = [name for name, one in engine_models(yard, "minilm").items() if one["is_guest"]]
    assert engine_name.startswith("vad@")
    assert hears(owner).status == 200
    for model in ("vad", engine_name, engine_name.replace("@", "%40")):
        assert hears(other, model).status == 404, model
    assert hears(owner, engine_name).status == 404, "not even by its owner: it is the engine's name"
    assert other.call("GET", "/v1/endpoints/vad").status == 404
    assert "vad" not in [one["id"] for one in other.call("GET", "/v1/models").json()["data"]]
    owner.drop("vad")


def test_a_wrong_request_is_its_callers_fault_and_costs_nobody_a_seat(yard: Yard) -> None:
    tenant = Customer(yard, "wrong")
    sit(tenant, "vad", packed_model("silero") / "silero_vad.onnx")
    reply = yard.call("POST", "/v2/models/vad/infer", {"inputs": [
        {"name": "sr", "shape": [], "datatype": "INT64", "data": [16000]},
    ]}, key=tenant.key)  # fmt: skip
    assert (reply.status, reply.json()["error"]["param"]) == (400, "inputs")
    assert "'input' is missing" in reply.json()["error"]["message"]
    assert hears(tenant).status == 200
    told = yard.call("GET", "/v2/models/vad", key=tenant.key)
    assert told.status == 200, told.body
    assert told.json()["name"] == "vad"
    assert {"name": "sr", "datatype": "INT64", "shape": []} in told.json()["inputs"]
    assert {one["name"] for one in told.json()["outputs"]} == {"output", "stateN"}
    assert yard.call("GET", "/v2/models/vad/ready", key=tenant.key).status == 200
    assert yard.call("GET", "/v2/models/vad", key=Customer(yard, "stranger").key).status == 404
    assert tenant.call("GET", "/v1/endpoints/vad").json()["routes"] == ["/v2/models/{model}/infer"]
    kinds = [one["kind"] for one in tenant.call("GET", "/v1/endpoints/vad/events?limit=50").json()["data"]]
    assert "guest_lost" not in kinds
    tenant.drop("vad")


def test_a_host_does_not_lose_its_seats_while_somebody_sits_there(yard: Yard) -> None:
    tenant = Customer(yard, "seated")
    sit(tenant, "vad", packed_model("silero") / "silero_vad.onnx")
    order = {"framework": "onnx", "model_artifact": minilm_onnx().as_uri(), "options": {"task": "embeddings"}}
    reason = "1 guests sit on 'minilm', and this has no seats for them; set its option guests"
    for path, body in (("releases", {"weight": 100}), ("releases", {"weight": 5}), ("releases", {}), ("canary", {})):
        reply = yard.call("POST", f"/v1/endpoints/minilm/{path}", {**order, **body})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "options"), (path, body)
        assert reason in reply.body.decode()
    copied = yard.call("POST", "/v1/endpoints/minilm/releases", {**order, "shadow": 5, "version": "bare"})
    assert copied.status == 202, "what answers nobody needs no seats"
    reply = yard.call("PATCH", "/v1/endpoints/minilm", {"releases": [{"version": "bare", "weight": 5}]})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "releases")
    assert f"version 'bare': {reason}" in reply.body.decode()
    assert yard.call("DELETE", "/v1/endpoints/minilm/releases/bare").status == 202
    eventually(lambda: len(yard.engines()) == 1, 40, "its replica is gone")
    tenant.drop("vad")


def test_beyond_the_seats_the_least_recently_used_goes_and_comes_back_when_asked(yard: Yard, sentiment: Path) -> None:
    tenant = Customer(yard, "many")
    names = [f"mood-{number}" for number in range(SEATS + 1)]
    for name in names:
        sit(tenant, name, sentiment, "--option", "task=classify")
        assert classifies(tenant, name).status == 200

    def seated() -> set[str]:
        every = tenant.call("GET", "/v1/endpoints").json()["data"]
        return {one["name"] for one in every if one["current_replicas"]}

    eventually(lambda: seated() == set(names[1:]), 30, "the last ones sit")
    assert classifies(tenant, names[0]).status == 200
    eventually(lambda: seated() == {names[0], *names[2:]}, 30, "it took the seat of the oldest")
    assert len(yard.engines()) == 1
    tenant.drop(*names)


def test_models_that_do_not_fit_together_take_turns_in_memory_and_all_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Yard(tmp_path_factory.mktemp("yard")) as yard:
        # Room for the process and for one MiniLM, which takes some 127 MiB.
        options = {"guests": 4, "guests_mib": 140, "batch_tokens_max": 16, "context_length": 16}
        deploy(yard, "vad", packed_model("silero") / "silero_vad.onnx", options)
        yard.wait_ready("vad")
        names = ["first", "second"]
        for name in names:
            deploy(yard, name, minilm_onnx(), {"task": "embeddings"}, host="vad")
            eventually(lambda name=name: yard.get(f"/v1/endpoints/{name}")["current_replicas"] == 1, 60, "it sits")

        def loaded() -> list[str]:
            return [name.partition("@")[0] for name, one in engine_models(yard, "vad").items() if one["is_loaded"]]

        assert loaded() == ["vad", "second"], "one of them fits"
        for name in [*names, *names]:
            reply = yard.call("POST", "/v1/embeddings", {"model": name, "input": "one text"}, within_s=30)
            assert reply.status == 200, reply.body
            assert loaded() == ["vad", name]
        events = [one["kind"] for one in yard.get("/v1/endpoints/first/events?limit=50")["data"]]
        assert events.count("guest_ready") == 1, "to the platform it sat there all the time"


def engine_models(yard: Yard, host: str) -> dict[str, Any]:
    """Return what the engine itself says that it has, by its own names."""
    (engine,) = yard.engines(host)
    (record,) = yard.query(f"SELECT secret FROM replicas WHERE replica_id = '{engine.replica_id}'")
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=30)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {record['secret']}"})
        return {one["id"]: one for one in json.loads(connection.getresponse().read())["data"]}
    finally:
        connection.close()
