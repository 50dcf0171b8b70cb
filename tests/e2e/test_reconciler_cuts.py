"""A controller that is cut off at any call to its store or fleet leaves nothing that the next one cannot finish."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.reconciling import WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import Endpoint, Scaling
from modelyard.domain.fleet import ReplicaState
from modelyard.fleet import Fleet
from modelyard.stores import ControlStore, StoreUnavailableError

WRITES = frozenset(
    {
        "put_replica", "remove_replica", "put_outlook", "remove_endpoint", "put_version", "add_event",
        "add_observed_load", "reserve", "start", "stop", "forget",
    }
)  # fmt: skip


class CutError(Exception):
    """The controller is dead: nothing of what it does arrives any more."""


class Cut:
    """Counts the writes of a controller down and lets none pass after the last."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    @property
    def is_dead(self) -> bool:
        return self.left < 0

    def through(self, store: ControlStore, fleet: Fleet) -> tuple[Any, Any]:
        return Mortal(store, self), Mortal(fleet, self)

    def spend(self, name: str) -> None:
        self.left -= name in WRITES and not self.is_dead
        if self.is_dead and name == "ping":
            # The loop that asks whether the store is there may do so before the test looks: to it, it is away.
            raise StoreUnavailableError("cut off")
        if self.is_dead:
            raise CutError(f"cut off before {name}")


class Mortal:
    """Passes calls on while its controller lives."""

    def __init__(self, inner: Any, cut: Cut) -> None:
        self._inner = inner
        self._cut = cut

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        async def call(*args: Any, **names: Any) -> Any:
            self._cut.spend(name)
            return await method(*args, **names)

        return call


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


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(300)
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
