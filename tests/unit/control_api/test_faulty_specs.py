"""Every fault of a deployment at once: wrong types, unknown and missing fields and bad values together."""

from typing import Any

import pytest
from tests.support.management import Management

from modelyard.domain.tenants import Identity

GOOD: dict[str, Any] = {"model_name": "smol", "framework": "simulated"}

SPECS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("nothing", {}, ["model_name", "framework"]),
    ("all names wrong", {"modelname": "x", "framwork": "y"}, ["modelname", "framwork", "model_name", "framework"]),
    ("a number for a name", {**GOOD, "model_name": 7}, ["model_name"]),
    ("null for a name", {**GOOD, "model_name": None}, ["model_name"]),
    ("a list for an engine", {**GOOD, "framework": ["simulated"]}, ["framework"]),
    ("text for numbers", {**GOOD, "hardware": {"gpu_count": "4", "min_replicas": "1"}},
     ["hardware.gpu_count", "hardware.min_replicas"]),
    ("a type and a value", {**GOOD, "hardware": {"gpu_count": "4", "max_replicas": 0}},
     ["hardware.gpu_count", "hardware.max_replicas"]),
    ("text for a table", {**GOOD, "hardware": "h100", "scaling": 7}, ["hardware", "scaling"]),
    ("a list for a table", {**GOOD, "serving": []}, ["serving"]),
    ("a typing error deep down", {**GOOD, "serving": {"timeouts": {"first_tokens_s": 1, "total_s": "x"}}},
     ["serving.timeouts.first_tokens_s", "serving.timeouts.total_s"]),
    ("yes for true", {**GOOD, "scaling": {"scale_to_zero": "yes", "metric": "moon"}},
     ["scaling.scale_to_zero", "scaling.metric"]),
    ("a fraction for a count", {**GOOD, "hardware": {"min_replicas": 1.5}}, ["hardware.min_replicas"]),
    ("options that are no values", {**GOOD, "options": {"slots": [1], "a": {"b": 1}, "c": None}},
     ["options.slots", "options.a", "options.c"]),
    ("options that are a list", {**GOOD, "options": ["slots=1"]}, ["options"]),
    ("a bad option beside a bad type", {**GOOD, "version": 3, "options": {"no_such": 1}},
     ["version", "options.no_such"]),
    ("every kind at once",
     {"model_name": "../x", "framework": "vllm", "sharred": True, "shared": 1, "version": "a b",
      "hardware": {"gpu_type": 5, "min_replicas": 9, "max_replicas": 2}, "scaling": {"target_value": -1}},
     ["model_name", "framework", "sharred", "shared", "version", "hardware.gpu_type", "hardware.max_replicas",
      "scaling.target_value"]),
    ("a base that is none", {**GOOD, "base": 1, "model_artifact": 2}, ["base", "model_artifact"]),
    ("huge numbers", {**GOOD, "hardware": {"gpu_count": 10**30, "max_replicas": 10**9}},
     ["hardware.gpu_count", "hardware.max_replicas"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "params"), [case[1:] for case in SPECS], ids=[case[0] for case in SPECS])
async def test_every_fault_is_named(
    api: Management, manager: Identity, spec: dict[str, Any], params: list[str]
) -> None:
    answer = await api.call(manager, "POST", "/v1/models/deploy", spec)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    named = [part.partition(": ")[0] for part in error["message"].partition("made. ")[2].split("; ") if ": " in part]
    assert set(params) <= set(named), error["message"]
    assert len(named) == len(set(named)), "nothing is told twice"
    assert error["param"] in params
    assert not await api.context.store.endpoints()


async def test_a_near_miss_is_pointed_at(api: Management, manager: Identity) -> None:
    spec = {**GOOD, "hardware": {"min_replica": 1}, "optoins": {}}
    message = (await api.call(manager, "POST", "/v1/models/deploy", spec)).json()["error"]["message"]
    assert "did you mean 'min_replicas'?" in message
    assert "did you mean 'options'?" in message


@pytest.mark.parametrize("body", [[], "x", 7, None])
async def test_a_body_that_is_no_object_is_refused(api: Management, manager: Identity, body: Any) -> None:
    async with api.client(manager) as client:
        answer = await client.post("/v1/models/deploy", json=body)
    assert answer.status_code == 400


async def test_a_thousand_unknown_fields_are_told_in_short(api: Management, manager: Identity) -> None:
    spec = {**GOOD, **{f"field_{at}": at for at in range(1000)}}
    answer = await api.call(manager, "POST", "/v1/models/deploy", spec)
    assert answer.status_code == 400
    assert len(answer.content) < 50_000


async def test_releases_and_registrations_tell_all_too(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", "/v1/models/deploy", GOOD)
    bad = {"framework": "nope", "weight": "10", "version": "a b"}
    message = (await api.call(manager, "POST", "/v1/endpoints/smol/releases", bad)).json()["error"]["message"]
    for param in bad:
        assert f"{param}: " in message
    bad = {"model_name": "..", "framework": 1, "hardware": {"gpu_count": 0}}
    message = (await api.call(manager, "POST", "/v1/registry/models", bad)).json()["error"]["message"]
    for param in ("model_name", "framework", "hardware.gpu_count"):
        assert f"{param}: " in message
