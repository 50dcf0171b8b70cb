"""A replica that finds no room since what is free lies in pieces: another one moves, and nobody's answer suffers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import CONTEXT, Yard

NODES = '[[fleet.nodes]]\nid = "gpu"\nnumber = 2\naccelerators = [{ kind = "h100", count = 1 }]\n'
SETTINGS = {"control.moves": "room", "control.min_residency_s": 0.5, "control.drain_timeout_s": 60}
WITHIN_S = 60.0


def order(yard: Yard, name: str, memory_gib: int, **options: object) -> dict[str, Any]:
    journal = yard.folder / "tokens" / f"{name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    taken = {"memory_gib": memory_gib, "context_length": CONTEXT, "journal": str(journal), "slots": 16}
    return {
        "model_name": name,
        "framework": "simulated",
        "options": {**taken, "ttft_ms": 1, "itl_ms": 10, **options},
        "hardware": {"gpu_type": "h100", "gpu_count": 1, "min_replicas": 1, "max_replicas": 1},
    }


def deploy(yard: Yard, name: str, memory_gib: int, **options: object) -> None:
    reply = yard.call("POST", "/v1/models/deploy", order(yard, name, memory_gib, **options))
    assert reply.status == 202, reply.body


def living(yard: Yard) -> dict[str, dict[str, Any]]:
    """Return the records of replicas that have not ended, by id, with the node of each."""
    rows = yard.query("SELECT * FROM replicas WHERE state NOT IN ('stopped', 'failed')")
    return {row["replica_id"]: row | {"node": json.loads(row["placement"])["parts"][0]["node_id"]} for row in rows}


def moving(yard: Yard) -> dict[str, Any] | None:
    """Return the replica that loads to take over from another one."""
    return next((one for one in living(yard).values() if one["takes_over"] and one["state"] == "loading"), None)


def events(yard: Yard, name: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in yard.get(f"/v1/endpoints/{name}/events")["data"] if one["kind"] == kind]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Two accelerators of 80 GiB, each with a model of 30: `one` and `two`."""
    config = tmp_path / "modelyard.toml"
    config.write_text(NODES)
    with Yard(tmp_path, SETTINGS, options=("--config", str(config))) as running:
        deploy(running, "full", 50)
        running.wait_ready("full")
        # The first goes beside it, the second does not fit there any more.
        for name in ("one", "two"):
            deploy(running, name, 30, load_s=2)
            running.wait_ready(name)
        assert running.call("DELETE", "/v1/endpoints/full").status in (200, 202, 204)
        eventually(lambda: len(living(running)) == 2, WITHIN_S, "the large one is gone")
        yield running


def is_settled(yard: Yard) -> bool:
    """Say whether each endpoint has its one replica, and nothing else runs."""
    records = living(yard)
    assert sorted(one["state"] for one in records.values()) == ["ready"] * 3, records
    assert len({one["endpoint_id"] for one in records.values()}) == 3, records
    assert {one.replica_id for one in yard.engines()} == records.keys()
    return True


async def test_one_moves_for_a_large_one_and_every_answer_is_whole(yard: Yard) -> None:
    nodes = {one["node"] for one in living(yard).values()}
    assert len(nodes) == 2, "they lie apart"
    async with Load(yard.port, yard.admin_key) as load:
        long = [load.start(chat(name, f"[[sim: tokens=600]] {at}", stream=True), within_s=WITHIN_S)
                for name in ("one", "two") for at in range(3)]  # fmt: skip
        for stream in long:
            await load.delivered(stream, 3, within_s=WITHIN_S)
        deploy(yard, "large", 60)
        told: list[str] = []

        def is_there() -> bool:
            told.extend(yard.get(f"/v1/endpoints/{name}")["progress"]["reason"] for name in ("large", "one", "two"))
            if sum(one.outcome is None for one in load.exchanges) < 16:
                for name in ("one", "two"):
                    load.start(chat(name, "[[sim: tokens=20]] more", stream=True), within_s=WITHIN_S)
            return yard.ready_replicas("large") == 1

        await eventually_async(is_there, WITHIN_S, "the large one has room")
        await load.finish(WITHIN_S)
        assert {one.outcome for one in load.exchanges} == {Outcome.COMPLETE}
        exchanges = list(load.exchanges)
    check_ledger(yard, exchanges)
    assert all(len(engines) == 1 for engines in yard.generated().values()), "nothing was computed twice"
    eventually(lambda: is_settled(yard), WITHIN_S, "each has its one replica")
    assert any("a replica moves away from gpu" in one for one in told), "who waits is told"
    assert any("a replica moves to gpu" in one and "helps to open 1 x 60.0 GiB" in one for one in told)
    (moved,) = [one for name in ("one", "two") for one in events(yard, name, "moved")]
    assert "is ready on gpu" in moved["reason"]
    name = "one" if events(yard, "one", "moved") else "two"
    (answer,) = [one for one in yard.get(f"/v1/endpoints/{name}/why")["answers"] if " move?" in one["question"]]
    assert "helps to open" in answer["answer"]
    assert answer["answer"].endswith("took over")
    assert not any(events(yard, one, "evicted") for one in ("one", "two"))


def test_a_controller_that_is_killed_while_one_moves_takes_the_move_to_its_end(yard: Yard) -> None:
    deploy(yard, "large", 60)
    new = eventually(lambda: moving(yard), WITHIN_S, "one is on its way")
    assert yard.get("/v1/status")["moving"] == 1
    yard.kill(yard.plane_pids("control")[0])
    eventually(lambda: yard.ready_replicas("large") == 1, WITHIN_S, "the large one has room")
    eventually(lambda: is_settled(yard), WITHIN_S, "each has its one replica")
    assert living(yard)[new["replica_id"]]["state"] == "ready", "the move that had begun was the one"
    assert new["takes_over"] not in living(yard)


def test_a_move_whose_new_replica_cannot_start_leaves_all_as_it_was_and_another_is_tried(yard: Yard) -> None:
    before = living(yard)
    deploy(yard, "large", 60)
    first = eventually(lambda: moving(yard), WITHIN_S, "one is on its way")
    name = next(one for one in ("one", "two") if yard.get(f"/v1/endpoints/{one}")["id"] == first["endpoint_id"])

    def is_killed() -> bool:
        for engine in yard.engines():
            if engine.replica_id == first["replica_id"]:
                yard.kill(engine.pid)
        return bool(events(yard, name, "replica_failed"))

    eventually(is_killed, WITHIN_S, "its engine does not get ready")
    assert yard.get(f"/v1/endpoints/{name}")["status"] == "running"
    (answer,) = [one for one in yard.get(f"/v1/endpoints/{name}/why")["answers"] if " move?" in one["question"]]
    assert "is tried again after a pause" in answer["answer"]
    eventually(lambda: yard.ready_replicas("large") == 1, WITHIN_S, "the other one moved")
    eventually(lambda: is_settled(yard), WITHIN_S, "each has its one replica")
    assert first["takes_over"] in living(yard).keys() & before.keys(), "who was to move serves where it was"
    assert not events(yard, name, "moved")
