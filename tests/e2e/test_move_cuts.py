"""A controller that is cut off at any write while a replica moves: the next one ends the move, or drops it."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.cuts import Cut
from tests.support.reconciling import PACE, WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import Endpoint, Scaling
from modelyard.domain.fleet import ReplicaState
from modelyard.domain.nodes import Part, Placement

NODES: list[dict[str, Any]] = [
    {"id": name, "accelerators": [{"kind": "h100", "count": 1, "memory": "80 GiB"}]} for name in ("gpu-1", "gpu-2")
]
MOVING = msgspec.structs.replace(PACE, moves="room", min_residency_s=0.05, hang_timeout_s=10)
AT_ONCE = 3
LONG_S = 2 * WITHIN_S


async def deploy(site: Site, name: str, gib: int) -> Endpoint:
    return await site.deploy({"memory_gib": gib}, kind="h100", name=name, scaling=Scaling(min_replicas=1))


async def in_pieces(site: Site) -> list[Endpoint]:
    """Have two models of 30 GiB that a controller will find on different nodes."""
    endpoints = [await deploy(site, name, 30) for name in ("one", "two")]
    for endpoint, node in zip(endpoints, ("gpu-1", "gpu-2"), strict=True):

        async def is_ready(endpoint: Endpoint = endpoint) -> bool:
            return len(await site.replicas(endpoint, ReplicaState.READY)) == 1

        await eventually_async(is_ready, WITHIN_S, "it is ready")
        (replica,) = await site.replicas(endpoint, ReplicaState.READY)
        placement = Placement((Part(node, (0,), replica.placement.parts[0].memory_bytes),))
        await site.store.put_replica(msgspec.structs.replace(replica, placement=placement))
    return endpoints


async def is_well(site: Site, endpoints: list[Endpoint]) -> bool:
    """Each has one replica that is ready, and nothing else runs; the large one has a node of its own."""
    ready = [one for of in endpoints for one in await site.replicas(of, ReplicaState.READY)]
    processes = sorted(process.replica_id for process in await site.fleet.observe())
    nodes = [one.placement.node_id for one in ready]
    large = ready[-1].placement.node_id if ready else ""
    return (
        [one.endpoint_id for one in ready] == [one.id for one in endpoints]
        and processes == sorted(one.id for one in ready)
        and nodes.count(large) == 1
    )


@pytest.mark.timeout(600)
async def test_a_move_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for first in itertools.count(0, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        # Each on a site of its own: most of the time they wait for engines.
        were_cut = await asyncio.gather(*(is_cut_at(made(tmp_path / str(writes)), writes) for writes in numbers))
        # A move and a start take more than ten writes, but it may be well before the last of them.
        if not were_cut[-1] and first > 10:
            return


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def is_cut_at(folder: Path, writes: int) -> bool:
    """Cut a controller off after so many writes, and have the next one go on; say whether it was."""
    async with open_site(folder, pace=MOVING, nodes=NODES) as site:
        cut = Cut(10_000)
        async with controller(site, through=cut.through) as running:
            endpoints = await in_pieces(site)
            cut.left = writes
            endpoints.append(await deploy(site, "large", 60))
            running.loops.wake()

            async def is_over() -> bool:
                return cut.is_dead or await is_well(site, endpoints)

            await eventually_async(is_over, LONG_S, "cut off or moved")
        was_cut = cut.is_dead
        async with controller(site):

            async def settles() -> bool:
                return await is_well(site, endpoints)

            await eventually_async(settles, LONG_S, "each has its one")
    return was_cut


async def test_what_lies_apart_comes_together_and_then_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.control.moving.EVERY_S", 0.5)
    together = msgspec.structs.replace(MOVING, moves="all")
    async with open_site(tmp_path, pace=MOVING, nodes=NODES) as site:
        async with controller(site):
            endpoints = await in_pieces(site)
        async with controller(replace(site, config=msgspec.structs.replace(site.config, control=together))) as running:

            async def nodes() -> list[str]:
                """Return where those that are ready run, once nothing else does."""
                ready = [one for of in endpoints for one in await site.replicas(of, ReplicaState.READY)]
                processes = sorted(process.replica_id for process in await site.fleet.observe())
                assert processes == sorted(one.id for one in ready)
                assert [one.endpoint_id for one in ready] == [one.id for one in endpoints]
                return [one.placement.node_id for one in ready]

            async def is_together() -> bool:
                return len(set(await nodes())) == 1 and running.loops.moves()["moved",] == 1

            await eventually_async(is_together, WITHIN_S, "one moved to the other")
            before = await nodes()
            looks = set()

            async def has_looked_again() -> bool:
                tools = running.loops._tools
                looks.add(tools.moving._due_s if tools else None)
                return len(looks) > 3

            await eventually_async(has_looked_again, WITHIN_S, "it was looked at three times more")
            assert await nodes() == before
            assert running.loops.moves() == {("moved",): 1, ("given_up",): 0}
