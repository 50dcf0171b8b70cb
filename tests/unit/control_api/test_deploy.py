"""POST /v1/models/deploy."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.management import URL, Management
from tests.support.models import Tensor, gguf, llama, tiny_gguf

from modelyard.domain.tenants import PLATFORM, Identity, Scope

SPEC: dict[str, Any] = {
    "model_name": "my-finetuned-llama",
    "framework": "simulated",
    "hardware": {"gpu_type": "h100", "gpu_count": 4, "min_replicas": 1, "max_replicas": 8},
    "scaling": {
        "metric": "gpu_utilization",
        "target_value": 70,
        "scale_to_zero": True,
        "scale_to_zero_after_idle_seconds": 300,
    },
}


async def test_answer_is_the_one_of_the_source(api: Management, manager: Identity) -> None:
    answer = await api.call(manager, "POST", "/v1/models/deploy", SPEC)
    assert answer.status_code == 202, answer.text
    body = answer.json()
    assert set(body) == {"endpoint_id", "status", "estimated_ready_seconds", "endpoint_url"}
    assert body["endpoint_id"].startswith("ep-")
    assert body["status"] == "provisioning"
    assert isinstance(body["estimated_ready_seconds"], int)
    assert body["endpoint_url"] == f"{URL}/v1/models/{body['endpoint_id']}"
    assert api.waked
    assert api.refreshed
    (endpoint,) = await api.context.store.endpoints()
    assert (endpoint.id, endpoint.name, endpoint.tenant_id) == (body["endpoint_id"], SPEC["model_name"], "ten-acme")
    assert (endpoint.scaling.min_replicas, endpoint.scaling.max_replicas) == (1, 8)
    assert (endpoint.scaling.scale_to_zero, endpoint.scaling.idle_s) == (True, 300.0)
    (version,) = await api.context.store.versions()
    assert (version.version, version.gpu_type, version.gpu_count) == ("v1", "h100", 4)
    assert [event.kind for event in await api.context.store.events(endpoint.id, limit=5)] == ["deployed"]


async def test_estimate_is_the_median_of_measured_loads(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "model_name": "first"})
    (version,) = await api.context.store.versions()
    for seconds in (10.0, 20.2, 99.0):
        await api.context.store.add_observed_load(version.id, seconds)
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "model_name": "second"})
    assert answer.json()["estimated_ready_seconds"] == 21


async def test_estimate_without_weights_takes_measured_loads_of_equal_options_only(
    api: Management, manager: Identity
) -> None:
    slow = {**SPEC, "options": {"load_s": 60.0}}
    await api.call(manager, "POST", "/v1/models/deploy", {**slow, "model_name": "slow"})
    (version,) = await api.context.store.versions()
    await api.context.store.add_observed_load(version.id, 61.5)
    quick = {**SPEC, "options": {"load_s": 3.0}, "model_name": "quick"}
    answer = await api.call(manager, "POST", "/v1/models/deploy", quick)
    assert answer.json()["estimated_ready_seconds"] == 4, "what its engine expects: the load and its start"
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**slow, "model_name": "slow-too"})
    assert answer.json()["estimated_ready_seconds"] == 62, "as measured"


async def test_all_faults_are_listed_at_once(api: Management, manager: Identity) -> None:
    bad = {
        "model_name": "../../etc/passwd",
        "framework": "vllm",
        "hardware": {"gpu_count": 0, "min_replicas": 5, "max_replicas": 2},
        "scaling": {"metric": "moon", "target_value": -1, "scale_to_zero_after_idle_seconds": 0},
        "version": "no spaces",
        "options": {"journal": "/etc/passwd"},
    }
    answer = await api.call(manager, "POST", "/v1/models/deploy", bad)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model_name"
    for param in (
        "model_name",
        "version",
        "framework",
        "hardware.gpu_count",
        "hardware.max_replicas",
        "scaling.metric",
        "scaling.target_value",
        "scaling.scale_to_zero_after_idle_seconds",
        "options.journal",
    ):
        assert f"{param}: " in error["message"]
    assert "'simulated'" in error["message"], "the engines that there are"
    assert not await api.context.store.endpoints()
    assert not api.waked


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"framework": "broken"}, "framework"),
        ({"options": {"no_such_option": 1}}, "options.no_such_option"),
        ({"model_artifact": "file:///tmp/x"}, "model_artifact"),
        ({"model_name": "a/b/c"}, "model_name"),
        ({"model_name": "a/events"}, "model_name"),
        ({"model_name": "a\u202eb"}, "model_name"),
        ({"model_name": "a" * 300}, "model_name"),
        ({"model_name": ""}, "model_name"),
        ({"hardware": {"min_replicas": 0}}, "hardware.min_replicas"),
        ({"hardware": {"max_replicas": 10**9}}, "hardware.max_replicas"),
        ({"framework": "weighed", "model_artifact": "s3://bucket/model"}, "hardware.gpu_type"),
    ],
)
async def test_one_fault_names_its_parameter(
    api: Management, manager: Identity, change: dict[str, Any], param: str
) -> None:
    scaling = {} if "hardware" in change else SPEC["scaling"]
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "scaling": scaling, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_every_wrong_option_is_told_by_its_name(api: Management, manager: Identity) -> None:
    options = {"slots": "x", "context_length": -1, "zz": 2, "load_s": 1.0}
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "options": options})
    message = answer.json()["error"]["message"]
    assert (
        "options.slots: 'x' is no whole number from 1 to 1,000,000; options.context_length: -1 is no whole" in message
    )
    assert "options.zz: the engine 'simulated' has no such option; it takes adapter_load_s, batch_slowdown, " in message
    assert "load_s: " not in message


async def test_an_artifact_that_no_engine_could_have_is_told_beside_an_unknown_engine(
    api: Management, manager: Identity
) -> None:
    for artifact, reason in (("bogus://x", "'bogus:' cannot be fetched"), ("file:///x", "needs a key with the scope")):
        wrong = {**SPEC, "framework": "vllm", "model_artifact": artifact}
        message = (await api.call(manager, "POST", "/v1/models/deploy", wrong)).json()["error"]["message"]
        assert "framework: there is no engine 'vllm'" in message
        assert "model_artifact: " in message
        assert reason in message


async def test_the_fix_of_a_missing_engine_is_told(api: Management, manager: Identity) -> None:
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "framework": "broken"})
    assert "pip install broken" in answer.json()["error"]["message"]


async def test_file_of_the_host_needs_admin(
    api: Management, manager: Identity, admin: Identity, tmp_path: Path
) -> None:
    file = tmp_path / "a model.gguf"
    tiny_gguf(file)
    wanted = {"model_name": "weights", "framework": "weighed", "model_artifact": str(file)}
    refused = await api.call(manager, "POST", "/v1/models/deploy", wanted)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model_artifact"
    taken = await api.call(admin, "POST", "/v1/models/deploy", wanted)
    assert taken.status_code == 202, taken.text
    (version,) = await api.context.store.versions()
    assert version.artifact.uri == file.as_uri()
    assert version.artifact.size_bytes == file.stat().st_size
    assert (version.facts.architecture, version.facts.context_length) == ("llama", 1024)
    (shown,) = (await api.call(admin, "GET", "/v1/registry/models")).json()["data"]
    assert shown["facts"]["kv_bytes_per_token"] == 256
    assert (shown["files"], shown["base_id"], shown["parent_id"]) == ([], "", "")
    assert version.tenant_id == PLATFORM


@pytest.mark.parametrize(
    "reference", ["file:///no/such/file", "file://other-host/x", "/tmp/\0x", "/", "relative.gguf", ""]
)
async def test_artifact_that_cannot_be_read_is_a_fault(api: Management, admin: Identity, reference: str) -> None:
    wanted = {"model_name": "weights", "framework": "weighed", "model_artifact": reference}
    answer = await api.call(admin, "POST", "/v1/models/deploy", wanted)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model_artifact"


async def test_artifact_of_another_format_is_a_fault(api: Management, admin: Identity, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\3\4")
    wanted = {"model_name": "weights", "framework": "weighed", "model_artifact": file.as_uri()}
    answer = await api.call(admin, "POST", "/v1/models/deploy", wanted)
    assert answer.status_code == 400
    assert "no GGUF file" in answer.json()["error"]["message"]


async def test_what_the_header_says_is_wrong_or_too_little_is_a_fault(
    api: Management, admin: Identity, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    wanted = {"model_name": "weights", "framework": "weighed", "model_artifact": str(file)}
    lora = {"general.architecture": "llama", "general.type": "adapter", "general.base_model.0.name": "Smol"}
    for content, said in (
        (b"GGUF" + bytes(96), "GGUF version 0"),
        (gguf(llama(llama__block_count=513)), "llama.block_count"),
        (gguf(lora, [Tensor("q.lora_a", (64, 8))]), "a LoRA adapter of 'Smol'"),
    ):
        file.write_bytes(content)
        answer = await api.call(admin, "POST", "/v1/models/deploy", wanted)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model_artifact"
        assert said in answer.json()["error"]["message"]


async def test_taken_name_is_a_conflict_for_its_tenant_only(api: Management, manager: Identity) -> None:
    assert (await api.call(manager, "POST", "/v1/models/deploy", SPEC)).status_code == 202
    again = await api.call(manager, "POST", "/v1/models/deploy", SPEC)
    assert again.status_code == 409
    assert again.headers["x-should-retry"] == "false"
    assert again.json()["error"]["param"] == "model_name"
    other, _ = await api.key(await api.tenant("other"), Scope.MANAGE)
    assert (await api.call(other, "POST", "/v1/models/deploy", SPEC)).status_code == 202


async def test_deleted_name_is_free_and_gets_the_next_version(api: Management, manager: Identity) -> None:
    await api.call(manager, "POST", "/v1/models/deploy", SPEC)
    await api.call(manager, "DELETE", f"/v1/endpoints/{SPEC['model_name']}")
    assert (await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "version": "v1"})).status_code == 409
    assert (await api.call(manager, "POST", "/v1/models/deploy", SPEC)).status_code == 202
    assert {version.version for version in await api.context.store.versions()} == {"v1", "v2"}
    shown = (await api.call(manager, "GET", f"/v1/endpoints/{SPEC['model_name']}")).json()
    assert (shown["is_deleted"], shown["model_version"]) == (False, "v2"), "the one that drains has given its name away"


async def test_shared_endpoint_needs_admin(api: Management, manager: Identity, admin: Identity) -> None:
    wanted = {**SPEC, "shared": True}
    assert (await api.call(manager, "POST", "/v1/models/deploy", wanted)).status_code == 403
    assert (await api.call(admin, "POST", "/v1/models/deploy", wanted)).status_code == 202
    assert (await api.context.store.endpoints())[0].is_shared
