"""Replicas on declared nodes, by real processes: what fits runs where the packer says, what does not says why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.support.yard import Yard

FLEET = """
[[fleet.nodes]]
id = "gpu-1"
price = 2.5
accelerators = [{ kind = "h100", count = 4, memory = "80 GiB", island = 4 }]
[[fleet.nodes]]
id = "gpu-2"
price = 2.5
accelerators = [{ kind = "h100", count = 2, memory = "80 GiB" }]
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    config = folder / "modelyard.toml"
    config.write_text(FLEET)
    with Yard(folder, options=("--config", str(config))) as running:
        yield running


@pytest.fixture
def name(yard: Yard, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an endpoint that is gone after the test, with its replicas."""
    name = f"m{abs(hash(request.node.name)) % 10_000}"
    yield name
    if yard.call("GET", f"/v1/endpoints/{name}").status == 200:
        yard.call("DELETE", f"/v1/endpoints/{name}")
        eventually(lambda: not yard.query("SELECT * FROM replicas"), 60, "nothing of it is left")


def order(name: str, *, memory_gib: float = 0.0, count: int = 1, replicas: int = 1) -> dict[str, Any]:
    return {
        "model_name": name,
        "framework": "simulated",
        "options": {"memory_gib": memory_gib} if memory_gib else {},
        "hardware": {"gpu_type": "h100", "gpu_count": count, "min_replicas": replicas, "max_replicas": replicas},
    }


def placed(yard: Yard) -> list[tuple[str, tuple[int, ...]]]:
    """Return node and accelerators of each replica, as recorded."""
    import json

    rows = yard.query("SELECT placement FROM replicas WHERE state = 'ready' ORDER BY replica_id")
    parts = [json.loads(row["placement"])["parts"] for row in rows]
    return [(part["node_id"], tuple(part["accelerators"])) for (part,) in parts]


def test_several_small_models_share_an_accelerator(yard: Yard, name: str) -> None:
    other = f"{name}-too"
    for one in (name, other):
        assert yard.call("POST", "/v1/models/deploy", order(one, memory_gib=30)).status == 202
        yard.wait_ready(one)
    first, second = placed(yard)
    yard.call("DELETE", f"/v1/endpoints/{other}")
    assert first == second, "30 GiB fit twice into 80: the packer leaves whole accelerators to those who need them"


def test_two_of_one_model_do_not_share_one_since_they_would_be_no_faster(yard: Yard, name: str) -> None:
    assert yard.call("POST", "/v1/models/deploy", order(name, memory_gib=30, replicas=2)).status == 202
    yard.wait_ready(name, 2)
    first, second = placed(yard)
    assert first != second


def test_a_model_over_four_accelerators_gets_one_island(yard: Yard, name: str) -> None:
    assert yard.call("POST", "/v1/models/deploy", order(name, memory_gib=280, count=4)).status == 202
    yard.wait_ready(name)
    assert placed(yard) == [("gpu-1", (0, 1, 2, 3))]


def test_what_fits_nowhere_waits_and_says_why_and_starts_when_there_is_room(yard: Yard, name: str) -> None:
    assert yard.call("POST", "/v1/models/deploy", order("big", memory_gib=280, count=4)).status == 202
    yard.wait_ready("big")
    assert yard.call("POST", "/v1/models/deploy", order(name, memory_gib=280, count=4)).status == 202

    def waits() -> bool:
        progress = yard.get(f"/v1/endpoints/{name}")["progress"]
        return progress["stage"] == "placing" and "needs 4 whole h100" in progress["reason"]

    eventually(waits, 30, "it waits for room")
    answers = yard.get(f"/v1/endpoints/{name}/why")["answers"]
    assert "needs 4 whole h100" in answers[0]["answer"]
    assert "modelyard nodes" in answers[0]["next_step"]

    yard.call("DELETE", "/v1/endpoints/big")
    yard.wait_ready(name)
    assert placed(yard) == [("gpu-1", (0, 1, 2, 3))]


def test_a_plan_says_where_it_would_run_what_it_would_cost_and_does_nothing(yard: Yard, name: str) -> None:
    reply = yard.call("POST", "/v1/models/plan", order(name, memory_gib=160, count=2, replicas=4))
    assert reply.status == 200, reply.body
    plan = reply.json()
    assert not plan["fits"]
    assert "3 of 4 fit; needs 2 whole h100" in plan["reason"]
    assert [one["node"] for one in plan["replicas"]].count("gpu-1") == 2
    assert plan["memory"]["accelerator_bytes"] >= 80 * 1024**3 * 0.99
    assert plan["max_cost_per_hour_usd"] == pytest.approx(3 * 2 * 2.5)
    assert yard.call("GET", f"/v1/endpoints/{name}").status == 404


def test_a_plan_lists_the_same_faults_as_a_deployment(yard: Yard) -> None:
    wrong = {**order("no spaces please"), "framework": "nonsense"}
    plan, deploy = (yard.call("POST", path, wrong) for path in ("/v1/models/plan", "/v1/models/deploy"))
    assert plan.status == deploy.status == 400
    assert plan.json()["error"]["message"] == deploy.json()["error"]["message"]


def sleeper(name: str, memory_gib: float, count: int = 1) -> dict[str, Any]:
    asleep = order(name, memory_gib=memory_gib, count=count)
    asleep["hardware"] |= {"min_replicas": 0}
    return asleep | {"scaling": {"scale_to_zero": True}}


def test_an_idle_model_makes_room_for_one_that_somebody_waits_for(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    config.write_text('[[fleet.nodes]]\nid = "gpu"\naccelerators = [{ kind = "h100", count = 1 }]\n')
    with Yard(tmp_path, {"control.min_residency_s": 1}, options=("--config", str(config))) as yard:
        for name in ("first", "second"):
            assert yard.call("POST", "/v1/models/deploy", sleeper(name, 60)).status == 202
        eventually(
            lambda: yard.ready_replicas("first") + yard.ready_replicas("second") == 1, 60, "one of them is ready"
        )
        here, waiting = ("first", "second") if yard.ready_replicas("first") else ("second", "first")

        answer = yard.call(
            "POST",
            "/v1/chat/completions",
            {"model": waiting, "messages": [{"role": "user", "content": "hello"}]},
            within_s=60,
        )
        assert answer.status == 200, answer.body
        assert yard.ready_replicas(here) == 0
        evicted = [one for one in yard.get(f"/v1/endpoints/{here}/events")["data"] if one["kind"] == "evicted"]
        assert f"`{waiting}` needs the room" in evicted[-1]["reason"]
        assert "frees 60.0 GiB on gpu" in evicted[-1]["reason"]
        assert any("evicted" in one["question"] for one in yard.get(f"/v1/endpoints/{here}/why")["answers"])


def test_a_tenant_gets_no_more_accelerators_than_its_quota(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    config.write_text('[[fleet.nodes]]\nid = "gpu"\naccelerators = [{ kind = "h100", count = 8 }]\n')
    with Yard(tmp_path, options=("--config", str(config))) as yard:
        tenant = yard.call("POST", "/v1/tenants", {"name": "small", "limits": {"accelerators": 2}})
        assert tenant.status == 201, tenant.body
        key = yard.new_key(name="small", tenant_id=tenant.json()["id"], scopes=["manage"])
        for name in ("one", "two"):
            reply = yard.call("POST", "/v1/models/deploy", order(name, memory_gib=160, count=2), key=key)
            assert reply.status == 202, reply.body
        eventually(lambda: yard.ready_replicas("one") + yard.ready_replicas("two") == 1, 60, "one of them is ready")
        waiting = "two" if yard.ready_replicas("one") else "one"
        eventually(
            lambda: "may have 2 accelerators" in yard.get(f"/v1/endpoints/{waiting}")["progress"]["reason"],
            30,
            "the other one says why it is not",
        )


def test_a_replica_that_died_is_tried_on_another_node(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    config.write_text('[[fleet.nodes]]\nid = "gpu"\nnumber = 2\naccelerators = [{ kind = "h100", count = 1 }]\n')
    with Yard(tmp_path, options=("--config", str(config))) as yard:
        assert yard.call("POST", "/v1/models/deploy", order("one", memory_gib=60)).status == 202
        yard.wait_ready("one")
        ((first, _),) = placed(yard)
        yard.kill(yard.engines("one")[0].pid)
        eventually(lambda: placed(yard) and placed(yard)[0][0] != first, 60, "it runs on the other node")
        (failed,) = [one for one in yard.get("/v1/endpoints/one/events")["data"] if one["kind"] == "replica_failed"]
        assert failed["reason"] == "killed by SIGKILL"


def test_who_waits_too_long_for_full_nodes_is_started_in_the_burst_pool_and_says_so(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    nodes = ['id = "own"', 'id = "rented"\npool = "extra"']
    config.write_text(
        "".join(f'[[fleet.nodes]]\n{one}\naccelerators = [{{ kind = "h100", count = 1 }}]\n' for one in nodes)
    )
    with Yard(tmp_path, options=("--config", str(config))) as yard:
        assert yard.call("POST", "/v1/models/deploy", order("full", memory_gib=60)).status == 202
        yard.wait_ready("full")
        late = sleeper("late", 60) | {"autoscale": {"burst_pool": "extra", "target_ttft_s": 0.5}}
        assert yard.call("POST", "/v1/models/deploy", late).status == 202
        rented = {**late, "model_name": "other", "autoscale": {"node_pool": "extra"}}
        (planned,) = yard.call("POST", "/v1/models/plan", rented).json()["replicas"]
        assert planned["node"] == "rented", "a plan is for the nodes that the deployment asks for"
        eventually(
            lambda: "burst pool extra is not used" in yard.get("/v1/endpoints/late")["progress"]["reason"],
            30,
            "nobody waits yet, so that nothing is rented",
        )
        answer = yard.call(
            "POST",
            "/v1/chat/completions",
            {"model": "late", "messages": [{"role": "user", "content": "hello"}]},
            within_s=60,
        )
        assert answer.status == 200, answer.body
        assert ("rented", (0,)) in placed(yard)
        started = [one for one in yard.get("/v1/endpoints/late/events")["data"] if one["kind"] == "replica_started"]
        assert "in burst pool extra: all pools are full and callers would wait" in started[-1]["reason"]
