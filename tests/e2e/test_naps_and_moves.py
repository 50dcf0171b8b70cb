"""Engines that sleep and replicas that move, on the same accelerators, while the controller is killed."""

import asyncio
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import CONTEXT, Yard

NODES = '[[fleet.nodes]]\nid = "gpu"\nnumber = 2\naccelerators = [{ kind = "h100", count = 2 }]\n'
SETTINGS = {
    "control.moves": "all",
    "control.min_residency_s": 0.5,
    "control.sleepers_bytes": 600 * 1024**3,
    "gateway.queue_wait_s": 90,
    "gateway.load_wait_s": 90,
}
WITHIN_S = 90.0
HOLDING = ("starting", "loading", "ready", "falling_asleep", "waking", "draining")
GPU_GIB = 80
SLEEPY = {f"nap-{at}": gib for at, gib in enumerate((70, 70, 60, 60, 45, 30, 30))}
AWAKE = {f"stay-{at}": gib for at, gib in enumerate((20, 20, 15))}


def order(yard: Yard, name: str, gib: float, *, sleeps: bool) -> dict[str, Any]:
    journal = yard.folder / "tokens" / f"{name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    naps = {"sleep": True, "sleep_s": 0.1, "wake_s": 0.2} if sleeps else {}
    return {
        "model_name": name,
        "framework": "simulated",
        "options": {"memory_gib": gib, "context_length": CONTEXT, "journal": str(journal), "itl_ms": 5, **naps},
        "hardware": {"gpu_type": "h100", "gpu_count": 1, "min_replicas": 0 if sleeps else 1, "max_replicas": 1},
        "scaling": {"scale_to_zero": sleeps},
        "autoscale": {"nap_s": 0.5, "prewarm": False},
    }


def crowded(yard: Yard) -> dict[tuple[str, int], float]:
    """Return the accelerators on which more is recorded than they have, in GiB."""
    taken: dict[tuple[str, int], float] = defaultdict(float)
    for row in yard.query("SELECT state, placement FROM replicas"):
        for part in json.loads(row["placement"] or "{}").get("parts", ()) if row["state"] in HOLDING else ():
            for index in part["accelerators"]:
                taken[part["node_id"], index] += part["memory_bytes"] / 1024**3
    return {place: gib for place, gib in taken.items() if gib > GPU_GIB}


def asleep(yard: Yard) -> bool:
    return bool(yard.query("SELECT 1 FROM replicas WHERE state = 'asleep'"))


async def test_nobody_is_dropped_and_no_accelerator_has_too_much(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    config.write_text(NODES)
    chance = random.Random(7)
    with Yard(tmp_path, SETTINGS, options=("--config", str(config))) as yard:
        for name, gib in {**SLEEPY, **AWAKE}.items():
            reply = yard.call("POST", "/v1/models/deploy", order(yard, name, gib, sleeps=name in SLEEPY))
            assert reply.status == 202, reply.body
        async with Load(yard.port, yard.admin_key) as load:
            for turn in range(30):
                name = chance.choice([*SLEEPY, *AWAKE])
                load.start(chat(name, f"[[sim: tokens=40]] {turn}", stream=turn % 2 == 0), within_s=WITHIN_S)
                if turn % 10 == 5:
                    yard.kill(yard.plane_pids("control")[0])
                await asyncio.sleep(chance.uniform(0.0, 0.6))
                assert not crowded(yard)

            async def are_answered() -> bool:
                assert not await asyncio.to_thread(crowded, yard)
                return all(one.outcome is not None for one in load.exchanges)

            await eventually_async(are_answered, WITHIN_S, "all are answered")
            assert {one.outcome for one in load.exchanges} == {Outcome.COMPLETE}, load.exchanges
            # What all of them need is more than there is, so that some must have slept meanwhile.
            await eventually_async(lambda: asleep(yard), WITHIN_S, "some sleep")
        check_ledger(yard, load.exchanges)
