"""A controller that is cut off at any call to its store or fleet leaves nothing that the next one cannot finish."""

import itertools
import os
import signal
from pathlib import Path

import msgspec
import pytest
from tests.support.cuts import Cut
from tests.support.reconciling import WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import Endpoint, Scaling
from modelyard.domain.fleet import ReplicaState


async def deploy(site: Site) -> Endpoint:
    return await site.deploy(scaling=Scaling(min_replicas=2, max_replicas=2))


async def is_served(site: Site, endpoint: Endpoint) -> bool:
    running = {process.replica_id for process in await site.running()}
    ready = {replica.id for replica in await site.replicas(endpoint, ReplicaState.READY)}
    return len(ready) == 2 and running == ready


async def until_all_well(site: Site, endpoint: Endpoint) -> None:
    """Every place once, nothing else on record or running, and no process without its record."""
    ready = await site.until_ready(endpoint, 2)
    assert sorted(replica.ordinal for replica in ready) == [0, 1]
    known = {process.replica_id for process in await site.fleet.observe()}
    assert known == {replica.id for replica in ready}


@pytest.mark.timeout(600)
async def test_deployment_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for writes in itertools.count():
        async with open_site(_folder(tmp_path, writes)) as site:
            endpoint = await deploy(site)
            cut = Cut(writes)
            async with controller(site, through=cut.through):

                async def is_over(site: Site = site, endpoint: Endpoint = endpoint, cut: Cut = cut) -> bool:
                    return cut.is_dead or await is_served(site, endpoint)

                await eventually_async(is_over, WITHIN_S, "cut off or served")
            was_cut = cut.is_dead
            async with controller(site):
                await until_all_well(site, endpoint)
        if not was_cut:
            assert writes > 10, "a deployment takes more writes than that"
            return


@pytest.mark.timeout(600)
async def test_crashed_engine_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for writes in itertools.count():
        async with open_site(_folder(tmp_path, writes)) as site:
            endpoint = await deploy(site)
            cut = Cut(10_000)
            async with controller(site, through=cut.through):
                first, _ = await site.until_ready(endpoint, 2)
                cut.left = writes
                os.kill(next(one.pid for one in await site.running() if one.replica_id == first.id), signal.SIGKILL)

                async def is_over(
                    site: Site = site, endpoint: Endpoint = endpoint, cut: Cut = cut, first: str = first.id
                ) -> bool:
                    replaced = await is_served(site, endpoint) and all(
                        replica.id != first for replica in await site.replicas(endpoint, ReplicaState.READY)
                    )
                    return cut.is_dead or replaced

                await eventually_async(is_over, WITHIN_S, "cut off or replaced")
            was_cut = cut.is_dead
            async with controller(site):
                await until_all_well(site, endpoint)
        if not was_cut:
            assert writes > 5, "a replacement takes more writes than that"
            return


@pytest.mark.timeout(600)
async def test_deletion_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for writes in itertools.count():
        async with open_site(_folder(tmp_path, writes)) as site:
            endpoint = await deploy(site)
            cut = Cut(10_000)
            async with controller(site, through=cut.through) as running:
                await site.until_ready(endpoint, 2)
                cut.left = writes
                await site.store.put_endpoint(msgspec.structs.replace(endpoint, is_deleted=True))
                running.loops.wake()

                async def is_over(site: Site = site, endpoint: Endpoint = endpoint, cut: Cut = cut) -> bool:
                    return cut.is_dead or await site.endpoint(endpoint) is None

                await eventually_async(is_over, WITHIN_S, "cut off or gone")
            was_cut = cut.is_dead
            async with controller(site):

                async def is_gone(site: Site = site, endpoint: Endpoint = endpoint) -> bool:
                    return await site.endpoint(endpoint) is None and await site.fleet.observe() == []

                await eventually_async(is_gone, WITHIN_S, "all of it is gone")
        if not was_cut:
            assert writes > 5, "a deletion takes more writes than that"
            return


def _folder(root: Path, number: int) -> Path:
    folder = root / str(number)
    folder.mkdir()
    return folder
