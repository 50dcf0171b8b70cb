"""A controller that is cut off at any write while a cold endpoint takes a replica of a warm pool: nothing is lost."""

import itertools
from pathlib import Path

import msgspec
import pytest
from tests.support.cuts import Cut
from tests.support.reconciling import WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import Endpoint, Scaling
from modelyard.domain.fleet import ReplicaState


async def is_well(site: Site, pool: Endpoint, mine: Endpoint) -> bool:
    """One ready replica each, and no process besides."""
    ready = [one.id for of in (pool, mine) for one in await site.replicas(of, ReplicaState.READY)]
    counts = [len(await site.replicas(of, ReplicaState.READY)) for of in (pool, mine)]
    processes = sorted(process.replica_id for process in await site.fleet.observe())
    return counts == [1, 1] and processes == sorted(ready)


@pytest.mark.timeout(600)
async def test_taking_a_replica_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for writes in itertools.count():
        folder = tmp_path / str(writes)
        folder.mkdir()
        async with open_site(folder) as site:
            pool = msgspec.structs.replace(await site.deploy(name="pool/fast"), pool="fast")
            await site.store.put_endpoint(pool)
            cut = Cut(10_000)
            async with controller(site, through=cut.through) as running:
                (waiting,) = await site.until_ready(pool)
                cut.left = writes
                mine = await site.deploy(name="mine", scaling=Scaling(scale_to_zero=True))
                running.loops.wake()

                async def is_over(
                    site: Site = site, mine: Endpoint = mine, pool: Endpoint = pool, cut: Cut = cut
                ) -> bool:
                    return cut.is_dead or await is_well(site, pool, mine)

                await eventually_async(is_over, WITHIN_S, "cut off or taken")
            was_cut = cut.is_dead
            async with controller(site):

                async def settles(site: Site = site, mine: Endpoint = mine, pool: Endpoint = pool) -> bool:
                    return await is_well(site, pool, mine)

                await eventually_async(settles, WITHIN_S, "both have one")
                (taken,) = await site.replicas(mine, ReplicaState.READY)
            assert taken.id == waiting.id, "whoever was cut off, the next one takes it"
        # Taking and refilling takes more than five writes, but it may be well before the last of them.
        if not was_cut and writes > 5:
            return
