"""Engines that sleep beside others: who goes, who waits for whom, and what is left of a claim."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.support.towns import GIB
from tests.support.wards import Ward

from modelyard.domain.endpoints import Release, Scaling
from modelyard.domain.fleet import ReplicaState as S


@pytest.fixture
async def ward() -> AsyncIterator[Ward]:
    async with asyncio.TaskGroup() as group:
        ward = Ward(group)
        yield ward
        ward.engines.gate.set()


async def test_a_request_that_comes_as_it_falls_asleep_wakes_it_where_it_is(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 11)
    ward.has_way = True
    ward.engines.gate.clear()
    await ward.rounds(3)
    ward.ask("one", 1)
    ward.engines.gate.set()
    await ward.let_engines()
    await ward.rounds(5)
    assert ward.state(one) is S.READY, ward.town.replicas[one.id].reason


async def test_the_room_of_one_that_falls_asleep_and_is_woken_is_taken_once(ward: Ward) -> None:
    one = ward.add("one")
    small = msgspec.structs.replace(one.placement.parts[0], memory_bytes=30 * GIB)
    one = ward.town.run(one, msgspec.structs.replace(one.placement, parts=(small,)))
    ward.idle("one", 11)
    ward.engines.gate.clear()
    await ward.rounds(3)
    ward.ask("one", 1)
    ward.engines.gate.set()
    await ward.let_engines()
    await ward.rounds(5)
    assert ward.state(one) is S.READY
    assert ward.placer._cluster.free_bytes("n1", 0) == 50 * GIB


async def test_one_that_falls_asleep_by_itself_is_waited_for(ward: Ward) -> None:
    first, second = ward.add("first", state=S.READY), ward.add("second", state=S.ASLEEP)
    ward.idle("first", 11)
    ward.engines.gate.clear()
    await ward.rounds(3)
    assert ward.state(first) is S.FALLING_ASLEEP
    ward.has_way = True
    ward.ask("second", 1)
    await ward.rounds(2)
    assert ward.state(second) is S.ASLEEP, ward.town.replicas[second.id].reason
    ward.engines.gate.set()
    await ward.rounds(5)
    assert ward.state(second) is S.READY


@pytest.mark.parametrize(
    "releases", [(Release("ver-main"), Release("ver-first", 0, fallback=True)), (Release("ver-main"),)]
)
async def test_what_takes_no_turns_is_in_nobodys_way(releases: tuple[Release, ...], ward: Ward) -> None:
    """A fallback stays, and what was replaced goes soon: to wait for either would be to wait for ever."""
    first, second = ward.add("first", releases=releases), ward.add("second", state=S.ASLEEP)
    first = ward.town.run(msgspec.structs.replace(first, version_id="ver-first"))
    ward.idle("first", 60)
    ward.has_way = True
    ward.ask("second", 1)
    await ward.rounds(4)
    assert ward.state(first) is S.READY
    assert ward.state(second) is S.STOPPED, "another one is started elsewhere"
    assert not ward.placer.claimed


async def test_of_two_versions_the_one_that_is_asked_for_wakes(ward: Ward) -> None:
    old = ward.add("one", state=S.ASLEEP, scaling=Scaling(0, 4))
    ward.town.versions["ver-new"] = msgspec.structs.replace(ward.town.versions["ver-one"], id="ver-new")
    new = ward.town.run(
        msgspec.structs.replace(old, id="rep-one-zzz-0-0", version_id="ver-new", ready_at=5.0), old.placement
    )
    ward.engines.asleep.add(new.id)
    ward.town.endpoints["ep-one"] = msgspec.structs.replace(
        ward.town.endpoints["ep-one"], releases=(Release("ver-new"),)
    )
    ward.ask("one", 1)
    await ward.rounds(4)
    assert (ward.state(old), ward.state(new)) == (S.ASLEEP, S.READY)


@pytest.mark.parametrize("floor", [1, 0])
async def test_one_that_stays_awake_is_not_looked_at_all_the_time(floor: int, ward: Ward) -> None:
    one = ward.add("one", scaling=Scaling(floor, 1))
    ward.sleeping.dormitory.restless[one.id] = 1e9
    ward.idle("one", 60)
    tended = await ward.rounds(3)
    assert tended["one"].look_in_s is None


async def test_sleepers_whose_contexts_are_in_the_way_of_one_that_is_asked_for_go(ward: Ward) -> None:
    first, second, third = (ward.add(name, state=S.ASLEEP) for name in ("first", "second", "third"))
    large = msgspec.structs.replace(first.placement.parts[0], memory_bytes=79 * GIB)
    ward.town.run(first, msgspec.structs.replace(first.placement, parts=(large,)))
    ward.ask("first", 1)
    tended = await ward.rounds(3)
    assert "contexts" in tended["first"].waits
    gone = ward.sleeping.outgrown([first.id, second.id, third.id])
    assert len(gone) == 1, "79 GiB and one context fit"
    assert ward.sleeping.pressing == {ward.town.replicas[id].endpoint_id for id in gone}
    for id in gone:
        ward.town.running.discard(id)
        ward.town.replicas[id] = msgspec.structs.replace(ward.town.replicas[id], state=S.STOPPED)
    await ward.rounds(4)
    assert ward.state(first) is S.READY
    assert not ward.sleeping.outgrown([second.id, third.id])


async def test_one_wakes_where_nothing_new_is_placed(ward: Ward) -> None:
    """A cordon says that what is there goes on: one that sleeps is there."""
    one = ward.add("one", state=S.ASLEEP)
    seen = ward.town.nodes["n1"]
    ward.town.nodes["n1"] = msgspec.structs.replace(seen, node=msgspec.structs.replace(seen.node, is_cordoned=True))
    ward.ask("one", 1)
    await ward.rounds(4)
    assert ward.state(one) is S.READY


async def test_one_that_does_not_come_to_sleep_is_not_waited_for_for_ever(ward: Ward) -> None:
    first, second = ward.add("first", state=S.READY), ward.add("second", state=S.ASLEEP)
    ward.idle("first", 11)
    ward.is_known = False
    await ward.rounds(2)
    ward.ask("second", 1)
    ward.has_way = True
    await ward.rounds(2)
    assert (ward.state(first), ward.state(second)) == (S.FALLING_ASLEEP, S.ASLEEP)
    ward.clock.advance(31)
    await ward.rounds(3)
    assert ward.state(second) is S.STOPPED, "another one is started elsewhere"
