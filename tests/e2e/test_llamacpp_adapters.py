"""Real adapters of two tenants on one llama.cpp: uploaded, called by their own names, told apart, and billed apart.

``test_guests.py`` has the platform's side of it with a simulated engine; here
is the engine's, where an adapter that is not applied, or applied to another's
request, would answer as well as the right one.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.engines import names_in
from tests.support.guests import Fingerprint, Tenant, asks_for_fingerprint, distance, fingerprint_of
from tests.support.loras import write_lora
from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

from modelyard.engines.llamacpp.adapters import admit, read_base

SEATS = 2
BASE = "llama"
QUESTION = "What is the capital of France?"
SETTINGS = {
    "gateway.load_wait_s": 60,
    "gateway.first_token_timeout_s": 60,
    "gateway.queue_wait_s": 60,
    "control.hang_timeout_s": 60,
}
FAR, NEAR = 0.4, 0.15
"""Mean differences of logprobs: of two adapters, and of one whose prompt was cached or not (other kernels, 4 bits)."""


@pytest.fixture(scope="module")
def base(yard: Yard) -> str:
    """Deploy the base with seats, for all tenants."""
    order = {
        "model_name": BASE,
        "framework": "llamacpp",
        "model_artifact": real_model().as_uri(),
        "options": {"slots": 2, "context_length": 512, "max_adapters": SEATS},
        "shared": True,
    }
    assert yard.call("POST", "/v1/models/deploy", order).status == 202
    yard.wait_ready(BASE, within_s=60)
    return f"{BASE}@v1"


@pytest.fixture(scope="module")
def tenants(yard: Yard) -> tuple[Tenant, Tenant]:
    return Tenant(yard, "anna"), Tenant(yard, "ben")


def ask(tenant: Tenant, model: str) -> tuple[Fingerprint, str]:
    """Return what tells the model apart, and the id of the request."""
    body = asks_for_fingerprint(model, QUESTION)
    reply = tenant.yard.call("POST", "/v1/chat/completions", body, key=tenant.key, within_s=60)
    assert reply.status == 200, reply.body
    assert reply.json()["model"] == model, "its own name, not the engine's"
    return fingerprint_of(reply.json()), reply.headers["x-request-id"]


def test_two_tenants_call_adapters_of_one_name_and_each_gets_and_pays_its_own(
    yard: Yard, base: str, tenants: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    processes = yard.engines()
    plain, _ = ask(tenants[0], BASE)
    found: list[Fingerprint] = []
    for seed, tenant in enumerate(tenants):
        artifact = tenant.upload(write_lora(tmp_path / tenant.name, seed=seed))
        began_s = time.monotonic()
        tenant.place("bot", artifact, base)
        answer, request_id = ask(tenant, "bot")
        print(f"from deploy to first answer: {time.monotonic() - began_s:.2f} s")
        found.append(answer)
        row = yard.row_of(request_id)
        endpoint = tenant.endpoint("bot")
        assert (row["customer_id"], row["model_name"], row["endpoint_id"]) == (tenant.id, "bot", endpoint["id"])
        assert (endpoint["host"], endpoint["current_replicas"]) == (BASE, 1)
    assert yard.engines() == processes, "no replica was started"
    first, second = found
    apart = min(distance(first, plain), distance(second, plain), distance(first, second))
    assert apart > FAR
    own = [
        distance(ask(tenant, "bot")[0], expected)
        for tenant, expected in zip((*tenants, *tenants), (*found, *found), strict=True)
    ]
    assert max(own) < NEAR, "in turns, with their prompts cached"
    print(f"asked again at most {max(own):.3f} from before, from others at least {apart:.3f}")
    assert distance(ask(tenants[1], BASE)[0], plain) < NEAR, "the base is as it was"
    eventually(lambda: [requests_of(one) for one in tenants] == [{"bot": 3, BASE: 1}] * 2, 20, "each is billed its own")
    assert [one.usage()["bot"]["completion_tokens"] for one in tenants] == [3, 3]


def requests_of(tenant: Tenant) -> dict[str, int]:
    return {model: sums["requests"] for model, sums in tenant.usage().items()}


def test_it_answers_as_the_adapter_that_was_trained_and_no_other(
    yard: Yard, base: str, tenants: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    """The same numbers under another name, of another tenant, answer alike; at the strength 0 as the base."""
    anna, ben = tenants
    ben.leave("bot")
    same = write_lora(tmp_path / "same", seed=0)
    gguf = admit("same", same, read_base(real_model()), work_dir=tmp_path, rank_max=8).file
    expected, _ = ask(anna, "bot")
    ben.place("as-gguf", ben.upload(gguf), base)
    assert distance(ask(ben, "as-gguf")[0], expected) < NEAR
    ben.leave("as-gguf")
    config = same / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "meta-llama/Llama-3-8B"}))
    said = ben.modelyard("deploy", str(same), "--base", base, "--name", "as-typed", "--wait")
    assert "'as-typed' is ready" in said.stdout, said.stderr
    doubt = f"it names the base 'meta-llama/Llama-3-8B', and is loaded onto '{base}'"
    assert f"Warning: {doubt}" in said.stderr, "names may differ, so it is loaded"
    events = ben.call("GET", "/v1/endpoints/as-typed/events?limit=50").json()["data"]
    assert [doubt in one["reason"] for one in events if one["kind"] == "guest_ready"] == [True]
    assert distance(ask(ben, "as-typed")[0], expected) < NEAR
    ben.leave("as-typed")
    ben.place("none", ben.upload(write_lora(tmp_path / "none", seed=0, alpha=0)), base)
    assert distance(ask(ben, "none")[0], ask(ben, BASE)[0]) < NEAR
    ben.leave("none")


def test_what_another_tenant_put_there_does_not_exist(
    yard: Yard, base: str, tenants: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    anna, ben = tenants
    body = asks_for_fingerprint("bot", QUESTION)
    (engine,) = yard.engines()
    (engine_name,) = [name for name in names_in(yard, engine) if name.startswith("bot@")]
    for name in ("bot", engine_name, f"anna/{engine_name}"):
        assert ben.call("POST", "/v1/chat/completions", body | {"model": name}).status == 404
    assert ben.call("GET", f"/v1/endpoints/{anna.endpoint('bot')['id']}").status == 404
    assert "bot" not in str(ben.call("GET", "/v1/models").json())


def test_beyond_the_seats_the_oldest_goes_and_comes_back_and_nothing_restarts(
    yard: Yard, base: str, tenants: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    anna, ben = tenants
    processes = yard.engines()
    before, _ = ask(anna, "bot")
    names = [f"lru-{number}" for number in range(SEATS)]
    for seed, name in enumerate(names, 10):
        ben.place(name, ben.upload(write_lora(tmp_path / name, seed=seed)), base)
        ask(ben, name)
    eventually(lambda: anna.seated() == set(), 30, "who was idle longest gave its seat up")
    assert ben.seated() == set(names)
    began_s = time.monotonic()
    again, _ = ask(anna, "bot")
    print(f"one that was let go answers after {time.monotonic() - began_s:.2f} s")
    assert distance(again, before) < NEAR
    eventually(lambda: ben.seated() == set(names[1:]), 30, "the oldest of the others went")
    assert yard.engines() == processes
    ben.leave(*names)
    anna.leave("bot")


def test_more_adapters_than_seats_are_all_answered_each_by_its_own_when_all_are_asked_at_once(
    yard: Yard, base: str, tenants: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    processes = yard.engines()
    bots = [(tenant, f"crowd-{number}") for tenant in tenants for number in range(2)]
    alone = {}
    for seed, (tenant, name) in enumerate(bots, 20):
        tenant.place(name, tenant.upload(write_lora(tmp_path / f"{tenant.name}-{name}", seed=seed)), base)
        alone[tenant.name, name], _ = ask(tenant, name)
    began_s = time.monotonic()
    with ThreadPoolExecutor(3 * len(bots)) as pool:
        found = list(pool.map(lambda bot: (bot, ask(*bot)[0]), bots * 3))
    print(f"{len(found)} requests for {len(bots)} adapters on {SEATS} seats: {time.monotonic() - began_s:.2f} s")
    for (tenant, name), answer in found:
        assert distance(answer, alone[tenant.name, name]) < NEAR
    assert yard.engines() == processes
    for tenant in tenants:
        tenant.leave("crowd-0", "crowd-1")
