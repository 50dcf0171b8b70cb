"""Engines that sleep beside others: who goes, who waits for whom, and what is left of a claim."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.support.wards import Ward

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
    small = msgspec.structs.replace(one.placement.parts[0], memory_bytes=30 * 1024**3)
    one = ward.town.run(one, msgspec.structs.replace(one.placement, parts=(small,)))
    ward.idle("one", 11)
    ward.engines.gate.clear()
    await ward.rounds(3)
    ward.ask("one", 1)
    ward.engines.gate.set()
    await ward.let_engines()
    await ward.rounds(5)
    assert ward.state(one) is S.READY
    assert ward.placer._cluster.free_bytes("n1", 0) == 50 * 1024**3
