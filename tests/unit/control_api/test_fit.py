"""``POST /v1/models/fit``, and deployments that leave their hardware out."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.management import Management, WeighedEngine
from tests.support.models import tiny_gguf
from tests.support.shapes import LLAMA_3_8B, LLAMA_3_70B, facts_of_config

from modelyard.clock import ManualClock
from modelyard.control.api.artifact_sources import ArtifactSource
from modelyard.control.api.deploy_spec import Hardware, HardwareBody
from modelyard.control.api.hardware import choose_hardware, known_facts
from modelyard.control.api.versions import Findings
from modelyard.domain.facts import ModelFacts
from modelyard.domain.nodes import Accelerator, NodeSeen
from modelyard.domain.tenants import Identity
from modelyard.engines import Engine
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.fleet.accelerators import Found
from modelyard.fleet.declared import Declared, parse
from modelyard.fleet.local import LocalFleet
from modelyard.fleet.machine import Machine
from modelyard.policy.hardware import GIB

FIT = "/v1/models/fit"
FACTS = msgspec.to_builtins(facts_of_config(LLAMA_3_70B))
NODES = [
    {"id": "h100", "price": 2.5, "accelerators": [{"kind": "h100", "count": 8}]},
    {"id": "l4", "price": 0.7, "accelerators": [{"kind": "l4", "count": 4}]},
]


def declared() -> Declared:
    found, faults = parse([(f"nodes[{at}]", row) for at, row in enumerate(NODES)])
    assert not faults
    return found


def with_nodes(api: Management, folder: Path) -> None:
    def look(*, reserve_bytes: int) -> Found:
        gpus = tuple(Accelerator(1 + at, "l40s", 48 * GIB) for at in range(2))
        return Found((Accelerator(0, "cpu", 8 * GIB), *gpus))

    api.context.fleet = LocalFleet(folder / "replicas", ManualClock(), Machine(declared(), look=look))


async def test_facts_are_advised_on_with_the_prices_of_the_fleet(
    api: Management, manager: Identity, tmp_path: Path
) -> None:
    with_nodes(api, tmp_path)
    answer = await api.call(manager, "POST", FIT, {"facts": FACTS, "gpu": ["h100", "h200"]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    of = {(row["precision"], row["kind"], row["count"]): row for row in body["rows"]}
    assert (of["bf16", "h100", 4]["usd_per_hour"], of["bf16", "h100", 4]["is_in_fleet"]) == (10.0, True)
    assert not of["bf16", "h200", 4]["is_in_fleet"]
    assert body["recommended"] in body["rows"]
    only = (await api.call(manager, "POST", FIT, {"facts": FACTS, "fleet_only": True})).json()
    assert {row["kind"] for row in only["rows"]} == {"cpu", "h100", "l4", "l40s"}


async def test_without_a_context_it_is_the_models_own_where_that_is_shorter(api: Management, manager: Identity) -> None:
    short = {**FACTS, "context_length": 512}
    for facts, context in ((short, 512), (FACTS, 4096)):
        body = (await api.call(manager, "POST", FIT, {"facts": facts, "gpu": ["h100"]})).json()
        assert (body["context"], body["output_tokens"]) == (context, 256)


async def test_a_registered_model_is_found_by_name_version_and_uri_by_its_owner_only(
    api: Management, admin: Identity, manager: Identity, tmp_path: Path
) -> None:
    uri = tiny_gguf(tmp_path / "tiny.gguf").as_uri()
    order = {"model_name": "tiny", "framework": "weighed", "model_artifact": uri}
    registered = await api.call(admin, "POST", "/v1/registry/models", order)
    assert registered.status_code == 201, registered.text
    for name in ("tiny", "tiny@v1", "model:tiny@v1", uri, registered.json()["id"]):
        answer = await api.call(admin, "POST", FIT, {"model": name})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["model"], answer.json()["parameters"]) == ("tiny@v1", 32)
    assert (await api.call(manager, "POST", FIT, {"model": "tiny@v1"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "model: give it, or 'facts' instead"),
        ({"facts": FACTS, "context": 1}, "context: must be 2 to 10000000"),
        ({"facts": FACTS, "context": 100, "output_tokens": 100}, "output_tokens: must be 1 to fewer than 'context'"),
        ({"facts": FACTS, "context": 100_000}, "context: the model takes 8,192 tokens at most"),
        ({"facts": FACTS, "concurrency": 0}, "concurrency: must be 1 to 100000"),
        ({"facts": FACTS, "gpu": ["abacus"]}, "gpu: nothing is known of 'abacus'"),
        ({"facts": FACTS, "gpu": ["h100"], "fleet_only": True}, "gpu: the fleet has no 'h100'"),
        ({"facts": {**FACTS, "layers": -1}}, "facts: a number is below 0"),
        ({"facts": {**FACTS, "layer": 3}}, "facts.layer"),
        ({"facts": {}}, "facts: parameters or weights_bytes is needed"),
        ({"facts": FACTS, "itl_ms": -1}, "itl_ms: must be 0 or more"),
    ],
)
async def test_faults_are_told(api: Management, manager: Identity, body: dict[str, Any], told: str) -> None:
    answer = await api.call(manager, "POST", FIT, body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


async def test_a_deployment_without_hardware_is_told_what_it_got_and_why(
    api: Management, admin: Identity, tmp_path: Path
) -> None:
    with_nodes(api, tmp_path)
    uri = tiny_gguf(tmp_path / "tiny.gguf").as_uri()
    order = {"model_name": "tiny", "framework": "weighed", "model_artifact": uri}
    plan = (await api.call(admin, "POST", "/v1/models/plan", order)).json()
    answer = await api.call(admin, "POST", "/v1/models/deploy", order)
    assert answer.status_code == 202, answer.text
    hardware = answer.json()["hardware"]
    assert hardware["reason"].startswith("no hardware was named: 1 x l40s is the cheapest")  # others are only declared
    assert (plan["gpu_type"], plan["hardware_reason"]) == (hardware["gpu_type"], hardware["reason"])
    (version,) = await api.context.store.versions()
    assert (version.gpu_type, version.gpu_count) == (hardware["gpu_type"], hardware["gpu_count"])

    explicit = {**order, "model_name": "mine", "hardware": {"gpu_type": "cpu", "gpu_count": 1}}
    assert "hardware" not in (await api.call(admin, "POST", "/v1/models/deploy", explicit)).json()
    assert (await api.call(admin, "POST", "/v1/models/plan", explicit)).json()["gpu_type"] == "cpu"


async def test_without_gpus_a_deployment_is_as_it_was(api: Management, admin: Identity, tmp_path: Path) -> None:
    uri = tiny_gguf(tmp_path / "tiny.gguf").as_uri()
    order = {"model_name": "tiny", "framework": "weighed", "model_artifact": uri}
    assert "hardware" not in (await api.call(admin, "POST", "/v1/models/deploy", order)).json()
    (version,) = await api.context.store.versions()
    assert (version.gpu_type, version.gpu_count) == ("cpu", 1)


def findings(facts: ModelFacts, *, engine: Engine | None = None, context: int = 4096) -> Findings:
    found = engine or WeighedEngine()
    options = {"slots": 8, "context_length": context}
    settings = found.settings(options, artifact_bytes=facts.weights_bytes, facts=facts)
    return Findings([], found, settings, ArtifactSource(facts=facts))


def choice(asked: HardwareBody, found: Findings) -> Hardware:
    return choose_hardware(
        asked,
        found,
        found.source.facts,
        [NodeSeen(node=msgspec.structs.replace(node, is_simulated=False)) for node in declared().nodes],
        {},
    )


def with_weights(config: dict[str, Any]) -> ModelFacts:
    facts = facts_of_config(config)
    return msgspec.structs.replace(facts, weights_bytes=2 * facts.parameters)


def test_the_cheapest_that_holds_the_model_is_chosen_and_what_is_asked_for_is_kept() -> None:
    eight, seventy = with_weights(LLAMA_3_8B), with_weights(LLAMA_3_70B)
    assert (choice(HardwareBody(), findings(eight)).gpu_count) == 1
    chosen = choice(HardwareBody(), findings(seventy))
    assert (chosen.gpu_type, chosen.gpu_count) == ("h100", 2)
    assert choice(HardwareBody(gpu_type="h100"), findings(seventy)).gpu_count == 2
    assert choice(HardwareBody(gpu_type="l4", gpu_count=1), findings(seventy)) == Hardware("l4", 1)
    assert choice(HardwareBody(gpu_count=8), findings(seventy)).gpu_type == "h100"
    assert choice(HardwareBody(gpu_type="cpu"), findings(seventy)) == Hardware("cpu", 1)


def test_where_nothing_holds_it_the_reason_says_so_and_other_engines_stay_on_the_cpu() -> None:
    seventy = with_weights(LLAMA_3_70B)
    none = choice(HardwareBody(gpu_type="l4"), findings(seventy))
    assert (none.gpu_type, none.gpu_count) == ("l4", 1)
    assert none.reason.startswith("no GPU of the fleet (l4) was chosen: nothing fits: the least is ")
    cpu_only = findings(with_weights(LLAMA_3_8B), engine=LlamaCppEngine())
    assert choice(HardwareBody(), cpu_only) == Hardware("cpu", 1)
    assert choice(HardwareBody(), findings(ModelFacts())) == Hardware("cpu", 1)


async def test_what_is_known_of_an_artifact_by_an_earlier_version_counts_for_one_that_is_elsewhere(
    api: Management, admin: Identity, tmp_path: Path
) -> None:
    uri = tiny_gguf(tmp_path / "tiny.gguf").as_uri()
    order = {"model_name": "tiny", "framework": "weighed", "model_artifact": uri}
    assert (await api.call(admin, "POST", "/v1/models/deploy", order)).status_code == 202
    unread = findings(ModelFacts())._replace(source=ArtifactSource(uri))
    assert (await known_facts(api.context, unread)).parameters == 32
    assert await known_facts(api.context, findings(ModelFacts())) == ModelFacts()
