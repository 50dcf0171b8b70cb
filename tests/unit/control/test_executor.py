"""What an engine is started with, besides what its version says."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.support.towns import GIB, endpoint, replica, version

from modelyard.clock import ManualClock
from modelyard.control.executor import Executor, Records
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.supplies import Supplied
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.fleet import OUT_OF_MEMORY, Replica, ReplicaState
from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.domain.tenants import Tenant
from modelyard.engines import EngineCommand, LaunchSpec
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.policy.actions import StartReplica
from modelyard.stores.sql import SqlControlStore, open_database

CORES = len(os.sched_getaffinity(0))


class Listening(SimulatedEngine):
    """The simulated engine, but it remembers what it was asked to run with."""

    spec: LaunchSpec | None = None

    def command(self, spec: LaunchSpec) -> EngineCommand:
        self.spec = spec
        return super().command(spec)


async def started(
    tmp_path: Path, records: Records, *, kind: str = "cpu", indices: tuple[int, ...] = (0,), most: int = 0
) -> tuple[LaunchSpec, Replica]:
    """Start a replica beside ``records``; return what its engine was asked to run with, and its record."""
    accelerators = tuple(Accelerator(one, kind, 80 * GIB) for one in range(4 if kind != "cpu" else 1))
    clock, engine = ManualClock(), Listening()
    store = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    one, of_it = endpoint("one"), version("one")
    settings = engine.settings({"slots": 8}, artifact_bytes=0, facts=of_it.facts)
    placement = Placement((Part("n1", indices, GIB),))
    start = StartReplica(replica(one, ready_at=None), "it is needed")
    try:
        async with asyncio.TaskGroup() as group:
            executor = Executor(
                store=store,
                fleet=LocalFleet(tmp_path / "replicas", clock),
                tasks=KeyedTasks(group),
                loads=LoadTimes(store),
                clock=clock,
                grace_s=0.0,
                threads=most,
                nodes=lambda: {"n1": NodeSeen(node=Node("n1", accelerators))},
            )
            await store.add_tenant(Tenant("ten-a", "acme", 0))
            await store.add_deployment(of_it, one)
            await executor.start(start, one, Supplied(of_it, engine, settings, None), placement, records)
    finally:
        await store.close()
        await asyncio.to_thread(stop_all, tmp_path / "replicas", 0.0)
    assert engine.spec is not None
    return engine.spec, records[start.replica.id]


@pytest.mark.parametrize(
    ("kind", "indices", "most", "threads"),
    [("cpu", (0,), 0, CORES), ("cpu", (0,), 1, 1), ("h100", (0,), 0, max(1, CORES // 4)), ("h100", (0, 1), 1, 1)],
)
async def test_an_engine_gets_the_cores_of_its_share(
    tmp_path: Path, kind: str, indices: tuple[int, ...], most: int, threads: int
) -> None:
    spec, _ = await started(tmp_path, {}, kind=kind, indices=indices, most=most)
    assert spec.threads == threads
    assert (spec.accelerators, spec.accelerator_kind, spec.memory_bytes) == (indices, kind, GIB)


@pytest.mark.parametrize(
    ("reasons", "slots"),
    [
        ([OUT_OF_MEMORY], 8),
        ([OUT_OF_MEMORY, "exited with code 1"], 8),
        ([OUT_OF_MEMORY, OUT_OF_MEMORY], 4),
        ([OUT_OF_MEMORY] * 9, 1),
    ],
)
async def test_what_ran_out_of_memory_twice_is_given_fewer_requests_at_once(
    tmp_path: Path, reasons: list[str], slots: int
) -> None:
    plain = replica(endpoint("one"), ready_at=None)
    failed = [
        msgspec.structs.replace(plain, id=f"rep-{number}", state=ReplicaState.FAILED, reason=reason)
        for number, reason in enumerate(reasons)
    ]
    spec, record = await started(tmp_path, {one.id: one for one in failed})
    assert (spec.slots, record.slots) == (slots, slots)


async def test_moves_that_ran_out_of_memory_leave_later_starts_their_slots(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(replica(endpoint("one"), ready_at=None), takes_over="rep-old")
    failed = [
        msgspec.structs.replace(plain, id=f"rep-{number}", state=ReplicaState.FAILED, reason=OUT_OF_MEMORY)
        for number in range(4)
    ]
    spec, _ = await started(tmp_path, {one.id: one for one in failed})
    assert spec.slots == 8
