"""A controller that is cut off at any write while guests come, change seats and go: the next one goes on from there."""

import itertools
import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.cuts import Cut
from tests.support.reconciling import WITHIN_S, Controller, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState, SeatState
from modelyard.domain.tenants import PLATFORM
from modelyard.fleet import Fleet
from modelyard.ids import new_id
from modelyard.stores import ControlStore, StoreUnavailableError

SEATS = 2


async def guest_of(site: Site, host: Endpoint, name: str) -> Endpoint:
    """Store a guest as the management API does."""
    version = ModelVersion(
        id=new_id("ver-"), tenant_id=PLATFORM, name=name, version="v1", framework="simulated", artifact=Artifact(""),
        options={}, created_at=1, base_id=host.releases[0].version_id,
    )  # fmt: skip
    endpoint = Endpoint(new_id("ep-"), PLATFORM, name, (Release(version.id),), Scaling(), created_at=1, host_id=host.id)
    await site.store.add_deployment(version, endpoint)
    return endpoint


def in_engine(replica: Replica) -> set[str]:
    """Return the guests that the engine of a replica says it has."""
    request = urllib.request.Request(
        f"http://{replica.host}:{replica.port}/v1/models", headers={"authorization": f"Bearer {replica.secret}"}
    )
    with urllib.request.urlopen(request, timeout=20) as page:
        return {one["id"] for one in json.load(page)["data"] if one["parent"]}


async def seated(site: Site, host: Endpoint) -> set[str]:
    """Return the guest endpoints that sit ready, if records and engine agree on all of them."""
    ready = await site.replicas(host, ReplicaState.READY)
    if len(ready) != 1:
        return set()
    (replica,) = ready
    seats = replica.guests
    is_settled = all(seat.state is SeatState.READY for seat in seats)
    return (
        {seat.endpoint_id for seat in seats} if is_settled and {s.name for s in seats} == in_engine(replica) else set()
    )


def routed(running: Controller, guest: Endpoint) -> list[str]:
    return running.gateway.routed(guest)


@pytest.mark.timeout(600)
async def test_a_change_of_seats_survives_a_cut_at_any_write(tmp_path: Path) -> None:
    for writes in itertools.count():
        folder = tmp_path / str(writes)
        folder.mkdir()
        async with open_site(folder) as site:
            host = await site.deploy({"max_adapters": SEATS}, name="base")
            first, second = [await guest_of(site, host, name) for name in ("first", "second")]
            cut = Cut(10_000)
            async with controller(site, through=cut.through) as running:

                async def both(
                    site: Site = site, host: Endpoint = host, wanted: tuple[Endpoint, ...] = (first, second)
                ) -> bool:
                    return await seated(site, host) == {one.id for one in wanted}

                await eventually_async(both, WITHIN_S, "two sit")
                # One goes, another comes, and a third is asked for beyond the seats.
                cut.left = writes
                third = await guest_of(site, host, "third")
                await site.store.put_endpoint(msgspec.structs.replace(first, is_deleted=True))
                running.gateway.say(third, queued=1)
                running.loops.wake()

                async def is_over(
                    site: Site = site,
                    host: Endpoint = host,
                    cut: Cut = cut,
                    wanted: tuple[Endpoint, ...] = (second, third),
                ) -> bool:
                    return cut.is_dead or await seated(site, host) == {one.id for one in wanted}

                await eventually_async(is_over, WITHIN_S, "cut off, or they changed seats")
            was_cut = cut.is_dead
            async with controller(site) as running:
                running.gateway.say(third, queued=1)

                async def settles(
                    site: Site = site, host: Endpoint = host, running: Controller = running,
                    gone: Endpoint = first, second: Endpoint = second, third: Endpoint = third,
                ) -> bool:  # fmt: skip
                    return (
                        await seated(site, host) == {second.id, third.id}
                        and await site.endpoint(gone) is None
                        and [len(routed(running, one)) for one in (second, third)] == [1, 1]
                    )

                await eventually_async(settles, WITHIN_S, "all sit where they should")
                assert len(await site.running()) == 1
        if not was_cut:
            assert writes > 5, "changing seats takes more writes than that"
            return


def take_in(replica: Replica, name: str) -> None:
    """Load an adapter behind the controller's back, as a load does that it has given up."""
    request = urllib.request.Request(
        f"http://{replica.host}:{replica.port}/v1/load_lora_adapter",
        json.dumps({"lora_name": name}).encode(),
        {"authorization": f"Bearer {replica.secret}"},
    )
    with urllib.request.urlopen(request, timeout=20) as page:
        assert page.status == 200


async def test_what_an_engine_has_without_a_seat_does_not_take_the_room_of_others(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, controller(site):
        host = await site.deploy({"max_adapters": SEATS}, name="base")

        async def is_up() -> bool:
            return len(await site.replicas(host, ReplicaState.READY)) == 1

        await eventually_async(is_up, WITHIN_S, "the host is ready")
        (replica,) = await site.replicas(host, ReplicaState.READY)
        take_in(replica, "lost@0123456789ab")
        guests = [await guest_of(site, host, name) for name in ("first", "second")]

        async def both() -> bool:
            return await seated(site, host) == {one.id for one in guests}

        await eventually_async(both, WITHIN_S, "both sit, and nothing else")


class Failing:
    """A store that loses one write of seats, and remembers how many sit after each of the others."""

    def __init__(self, store: ControlStore, lost: int) -> None:
        self._store = store
        self._lost = lost
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_guests(self, replica_id: str, guests: tuple[GuestSeat, ...]) -> None:
        self._lost -= 1
        if not self._lost:
            raise StoreUnavailableError("away for a moment")
        await self._store.put_guests(replica_id, guests)
        self.sizes.append(len(guests))


@pytest.mark.parametrize("lost", [1, 4, 5])
async def test_a_write_of_seats_that_fails_takes_nobody_s_seat(tmp_path: Path, lost: int) -> None:
    stores: list[Failing] = []

    def through(store: ControlStore, fleet: Fleet) -> tuple[Any, Fleet]:
        stores.append(Failing(store, lost))
        return stores[-1], fleet

    async with open_site(tmp_path) as site:
        host = await site.deploy({"max_adapters": 3, "adapter_load_s": 0.2}, name="base")
        async with controller(site, through=through):

            async def is_up() -> bool:
                return len(await site.replicas(host, ReplicaState.READY)) == 1

            await eventually_async(is_up, WITHIN_S, "the host is ready")
            guests = [await guest_of(site, host, name) for name in ("first", "second", "third")]

            async def all_sit() -> bool:
                return await seated(site, host) == {one.id for one in guests}

            await eventually_async(all_sit, WITHIN_S, "all sit")
        (store,) = stores
        assert store.sizes == sorted(store.sizes)
