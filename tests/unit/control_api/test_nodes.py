"""GET /v1/nodes and the bound on a tenant's accelerators."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.management import Management, management

from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, Node, Part, Placement
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.fleet.accelerators import Found
from modelyard.fleet.declared import Declared
from modelyard.fleet.local import LocalFleet
from modelyard.fleet.machine import Machine

GIB = 1024**3
GPUS = Node(
    "gpu-0",
    tuple(Accelerator(index, "h100", 80 * GIB, index // 2) for index in range(4)),
    pool="large",
    is_spot=True,
    price_nanousd=2_500_000_000,
    is_simulated=True,
)


async def put(api: Management, admin: Identity, *placements: Placement, stopped: Placement) -> None:
    """Store replicas r-0, r-1 … of an endpoint ``m`` at ``placements``, and one that is gone."""
    spec = {"model_name": "m", "framework": "simulated"}
    assert (await api.call(admin, "POST", "/v1/models/deploy", spec)).status_code == 202
    [endpoint] = await api.context.store.endpoints()
    version = endpoint.releases[0].version_id
    for number, placement in enumerate([*placements, stopped]):
        state = ReplicaState.STOPPED if placement is stopped else ReplicaState.READY
        one = Replica(f"r-{number}", endpoint.id, version, number, 1, state, 0.0, placement=placement)
        await api.context.store.put_replica(one)


@pytest.fixture
async def fleet_of(api: Management) -> None:
    cpu = Found((Accelerator(0, "cpu", 16 * GIB),), {0: 5 * GIB}, "a reason")
    machine = Machine(Declared((GPUS,)), cached=lambda: {"sha256:x": 3 * GIB}, look=lambda **_: cpu)
    api.context.fleet = LocalFleet(api.context.data.replicas, api.clock, machine)


async def nodes(api: Management, identity: Identity, query: str = "") -> list[dict[str, object]]:
    answer = await api.call(identity, "GET", f"/v1/nodes{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, object]] = answer.json()["data"]
    return found


@pytest.mark.usefixtures("fleet_of")
async def test_nodes_show_what_is_on_each_accelerator_and_what_is_free(api: Management, admin: Identity) -> None:
    two, one = Placement((Part("gpu-0", (0, 1), 60 * GIB),)), Placement((Part("gpu-0", (2,), 20 * GIB),))
    await put(api, admin, two, one, stopped=Placement((Part("gpu-0", (2,), 30 * GIB),)))
    local, gpus = await nodes(api, admin)
    assert (local["id"], local["state"], local["reason"]) == ("local", "ready", "a reason")
    assert (local["cached_artifacts"], local["cache_used_bytes"]) == (1, 3 * GIB)
    assert local["accelerators"] == [
        {
            "index": 0, "kind": "cpu", "memory_bytes": 16 * GIB, "island": 0, "free_bytes": 16 * GIB,
            "used_bytes": 5 * GIB, "replicas": [],
        }
    ]  # fmt: skip
    assert (gpus["pool"], gpus["is_spot"], gpus["is_simulated"]) == ("large", True, True)
    assert gpus["nanousd_per_hour"] == 10_000_000_000
    accelerators = gpus["accelerators"]
    assert isinstance(accelerators, list)
    assert [one["free_bytes"] // GIB for one in accelerators] == [0, 0, 60, 80]
    assert [[other["replica_id"] for other in one["replicas"]] for one in accelerators] == [
        ["r-0"],
        ["r-0"],
        ["r-1"],
        [],
    ]
    assert accelerators[2]["replicas"][0] == {
        "replica_id": "r-1", "endpoint": "m", "state": "ready", "memory_bytes": 20 * GIB,
    }  # fmt: skip


@pytest.mark.usefixtures("fleet_of")
async def test_nodes_come_in_pages(api: Management, admin: Identity) -> None:
    assert [node["id"] for node in await nodes(api, admin, "?limit=1")] == ["local"]
    assert [node["id"] for node in await nodes(api, admin, "?limit=1&after=local")] == ["gpu-0"]


async def test_only_the_operator_sees_nodes(api: Management, manager: Identity) -> None:
    assert (await api.call(manager, "GET", "/v1/nodes")).status_code == 403


async def test_a_fleet_that_does_not_answer_is_503(api: Management, admin: Identity) -> None:
    class Gone(LocalFleet):
        async def nodes(self) -> list[object]:  # type: ignore[override]
            raise TimeoutError

    api.context.fleet = Gone(api.context.data.replicas, api.clock)
    assert (await api.call(admin, "GET", "/v1/nodes")).status_code == 503


async def test_accelerators_of_a_tenant_are_bounded_and_of_a_key_are_not(tmp_path: Path) -> None:
    async with management(tmp_path) as api:
        admin = (await api.key(PLATFORM, Scope.ADMIN))[0]
        made = await api.call(
            admin, "POST", "/v1/tenants", {"name": "acme", "limits": {"accelerators": 4, "concurrency": 2}}
        )
        assert made.status_code == 201, made.text
        assert made.json()["limits"] == {"accelerators": 4, "concurrency": 2}
        path = f"/v1/tenants/{made.json()['id']}"
        stored = next(one for one in await api.context.store.tenants() if one.name == "acme")
        assert stored.limits.accelerators == 4
        assert (await api.call(admin, "PATCH", path, {"limits": {}})).json()["limits"] == {}
        assert (await api.call(admin, "PATCH", path, {"limits": {"accelerators": -1}})).status_code == 400
        refused = await api.call(admin, "POST", "/v1/keys", {"name": "k", "limits": {"accelerators": 1}})
        assert refused.status_code == 400
        assert "accelerators" in msgspec.json.decode(refused.content)["error"]["message"]


@pytest.mark.usefixtures("fleet_of")
async def test_a_plan_keeps_to_what_its_tenant_may_have(api: Management, admin: Identity) -> None:
    tenant_id = await api.tenant("acme")
    mine = (await api.key(tenant_id, Scope.MANAGE))[0]
    hardware = {"gpu_type": "h100", "gpu_count": 2, "max_replicas": 2}
    spec = {
        "model_name": "m", "framework": "simulated", "hardware": hardware, "autoscale": {"node_pool": "large"},
    }  # fmt: skip

    async def plan() -> dict[str, Any]:
        answer = await api.call(mine, "POST", "/v1/models/plan", spec)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    free = await plan()
    assert "no node" in free["reason"], "its first replica may not run where it can be taken away"
    machine = Machine(Declared((msgspec.structs.replace(GPUS, is_spot=False),)))
    api.context.fleet = LocalFleet(api.context.data.replicas, api.clock, machine)
    free = await plan()
    limit = {"limits": {"accelerators": 2}}
    assert (await api.call(admin, "PATCH", f"/v1/tenants/{tenant_id}", limit)).status_code == 200
    bounded = await plan()
    assert [bool(one["fits"]) for one in (free, bounded)] == [True, False], (free, bounded)
    assert bounded["reason"] == "1 of 2 fit; its tenant may have 2 accelerators, has 2.00, and this one needs 2.00"
    assert bounded["max_cost_per_hour_usd"] == free["max_cost_per_hour_usd"] / 2
    hardware["gpu_type"] = "h999"
    assert "no node has h999" in (await plan())["reason"], "a slip of the pen is no plan"


@pytest.mark.usefixtures("fleet_of")
async def test_an_endpoint_tells_its_tier_and_where_it_runs_without_replicas_that_ended(
    api: Management, admin: Identity
) -> None:
    await put(api, admin, Placement((Part("gpu-0", (2,), 20 * GIB),)), stopped=Placement((Part("gpu-0", (3,), GIB),)))
    shown = (await api.call(admin, "GET", "/v1/endpoints/m")).json()
    assert shown["tier"] == {"tier": "hot", "reason": "1 ready; at least 1 is kept", "is_short": False}
    answers = {
        one["question"]: one["answer"]
        for one in (await api.call(admin, "GET", "/v1/endpoints/m/why")).json()["answers"]
    }
    assert answers["Where does it run?"] == "r-0 is ready on gpu-0 (20.00 GiB of accelerator 2)"
    assert answers["Why is it hot?"] == "1 ready; at least 1 is kept"
