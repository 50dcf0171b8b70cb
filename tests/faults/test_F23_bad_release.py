"""F23: a new version whose artifact is corrupt, or that cannot load, goes back; the previous one serves everything."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load
from tests.support.models import tiny_gguf
from tests.support.rollouts import OPTIONS, canary, failed, traffic, until_state, versions_of
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"control.rollout_interval_s": 0.2}
SEEN: list[Exchange] = []


@pytest.mark.parametrize("fault", ["weights that are noise", "load failure"])
async def test_previous_version_serves_everything_and_the_reason_is_shown(
    yard: Yard, fault: str, tmp_path: Path
) -> None:
    name = fault.replace(" ", "-")
    yard.deploy(name, options=OPTIONS)
    wanted: dict[str, Any] = {"options": {"fail_load": True}}
    if fault != "load failure":
        # Its header is in order, so it is taken; llama.cpp finds out what is behind it.
        model = tiny_gguf(tmp_path / "noise.gguf")
        wanted = {"framework": "llamacpp", "model_artifact": model.as_uri(), "options": {}}
    async with Load(yard.port, yard.admin_key) as load:
        async with traffic(load, name, clients=4):
            view = await asyncio.to_thread(canary, yard, name, 50, version="bad", **wanted)
            shown = await until_state(yard, name, "rolled_back", 60)
        SEEN.extend(load.exchanges)
    assert not failed(load.exchanges), failed(load.exchanges)[:5]
    check_ledger(yard, SEEN)
    assert set(versions_of(yard, load.exchanges).values()) == {view["rollout"]["stable_id"]}, "it never got a request"
    assert shown["reason"].startswith("the candidate cannot start: "), shown["reason"]
    print(f"{fault}: {shown['reason']}")
    endpoint = yard.get(f"/v1/endpoints/{name}")
    assert [(one["version"], one["weight"]) for one in endpoint["releases"]] == [("v1", 100)]
    assert endpoint["failure"] == ""
    assert any(event["kind"] == "rollout_rolled_back" for event in endpoint["events"])
    eventually(lambda: len(yard.engines(name)) == 1, 30, "nothing of the bad version is left")


async def test_artifact_with_a_corrupt_header_is_refused_at_once(yard: Yard, tmp_path: Path) -> None:
    yard.deploy("whole", options=OPTIONS)
    file = tmp_path / "corrupt.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(range(256)))
    order = {"framework": "llamacpp", "model_artifact": file.as_uri(), "weight": 10}
    reply = yard.call("POST", "/v1/endpoints/whole/canary", order)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "model_artifact"), reply.body
    assert yard.get("/v1/endpoints/whole")["rollout"] is None
