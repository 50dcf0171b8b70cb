"""What becomes of engines that sleep, round by round: who is needed is awake, and two never have one room."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.towns import GIB
from tests.support.wards import Ward

from modelyard.control.sleeping import Tended
from modelyard.domain.endpoints import Autoscale, Release, Scaling, Tier
from modelyard.domain.fleet import ReplicaState as S
from modelyard.domain.nodes import Accelerator, Node, NodeSeen
from modelyard.policy.cluster import CPU


@pytest.fixture
async def ward() -> AsyncIterator[Ward]:
    async with asyncio.TaskGroup() as group:
        yield Ward(group)


async def test_one_that_nobody_needs_leaves_the_gateways_first_and_sleeps_once_nothing_is_on_it(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 11)
    ward.is_known = False
    await ward.rounds(3)
    assert (ward.state(one), ward.engines.made) == (S.FALLING_ASLEEP, []), "a gateway may not know it yet"
    ward.is_known = True
    ward.in_flight[one.id] = 1
    await ward.rounds(3)
    assert (ward.state(one), ward.engines.made) == (S.FALLING_ASLEEP, []), "a request is on it"
    ward.in_flight.clear()
    await ward.rounds(3)
    assert (ward.state(one), ward.engines.made) == (S.ASLEEP, [(one.id, "/sleep")])
    assert ward.town.replicas[one.id].reason == "no request for 11 s"
    assert ward.sleeping.dormant == {"ep-one"}


async def test_a_request_wakes_it_and_it_is_ready_when_its_engine_says_so(ward: Ward) -> None:
    one = ward.add("one", state=S.ASLEEP)
    ward.ask("one", 1)
    ward.engines.gate.clear()
    await ward.rounds(3)
    assert (ward.state(one), ward.engines.made) == (S.WAKING, [(one.id, "/wake_up")])
    ward.engines.gate.set()
    await ward.rounds(2)
    assert ward.state(one) is S.READY
    assert not ward.sleeping.dormant


async def test_requests_that_come_while_it_falls_asleep_have_it_woken_after_that(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 11)
    ward.engines.gate.clear()
    await ward.rounds(3)
    ward.ask("one", 1)
    await ward.rounds(2)
    assert ward.engines.made == [(one.id, "/sleep")], "one call at a time"
    ward.engines.gate.set()
    await ward.rounds(5)
    assert ward.engines.made == [(one.id, "/sleep"), (one.id, "/wake_up")]
    assert ward.state(one) is S.READY


KEPT = {
    "its owner keeps one": {"scaling": Scaling(1, 1)},
    "it is pinned hot": {"autoscale": Autoscale(tier=Tier.HOT)},
    "its owner wants none of it": {"autoscale": Autoscale(nap_s=0)},
    "two versions share its traffic": {"releases": (Release("ver-one", 50), Release("ver-two", 50))},
    "it is a warm pool": {"pool": "pool"},
}


@pytest.mark.parametrize("why", KEPT)
async def test_it_stays_awake_where(why: str, ward: Ward) -> None:
    one = ward.add("one", **KEPT[why])
    ward.idle("one", 9e9)
    tended = await ward.rounds(2)
    assert ward.state(one) is S.READY
    assert tended["one"].look_in_s is None, "nobody has to look again soon"


async def test_on_a_cpu_weights_are_in_the_memory_of_the_machine_already(ward: Ward) -> None:
    ward.town.nodes["n1"] = NodeSeen(node=Node("n1", (Accelerator(0, CPU, 64 * GIB),)))
    one = ward.add("one")
    ward.idle("one", 9e9)
    tended = await ward.rounds(2)
    assert (ward.state(one), tended["one"].look_in_s) == (S.READY, None)


async def test_one_that_is_awake_is_looked_at_when_it_may_be_due(ward: Ward) -> None:
    ward.add("one")
    ward.idle("one", 4)
    assert (await ward.rounds(1))["one"].look_in_s == 6.0


async def test_an_engine_that_cannot_sleep_costs_one_look(ward: Ward) -> None:
    one = ward.add("one")
    ward.town.versions["ver-one"] = msgspec.structs.replace(ward.town.versions["ver-one"], options={})
    ward.idle("one", 9e9)
    tended = await ward.rounds(2)
    assert ward.state(one) is S.READY
    assert tended["one"] == Tended()


async def test_two_take_turns_and_never_have_the_accelerator_both(ward: Ward) -> None:
    first, second = ward.add("first"), ward.add("second", state=S.ASLEEP)
    ward.idle("first", 6)
    ward.ask("second", 1)
    for _ in range(12):
        tended = await ward.round()
        await ward.let_engines()
        states = {ward.state(first), ward.state(second)}
        assert len(states & {S.READY, S.FALLING_ASLEEP, S.WAKING}) <= 1, "60 of 80 GiB fit once"
        if ward.state(second) is S.ASLEEP:
            assert "once" in tended["second"].waits
            assert tended["second"].is_coming
    assert (ward.state(first), ward.state(second)) == (S.ASLEEP, S.READY)
    assert ward.engines.made == [(first.id, "/sleep"), (second.id, "/wake_up")]


async def test_who_is_needed_is_in_nobodys_way_and_another_one_is_started_elsewhere(ward: Ward) -> None:
    first, second = ward.add("first"), ward.add("second", state=S.ASLEEP)
    ward.ask("first", 1)
    ward.ask("second", 1)
    tended = await ward.rounds(3)
    assert (ward.state(first), ward.state(second)) == (S.READY, S.ASLEEP)
    assert "are needed" in tended["second"].waits
    ward.has_way = True
    await ward.rounds(1)
    assert ward.state(second) is S.STOPPED
    assert "started elsewhere" in ward.town.replicas[second.id].reason


async def test_a_fallback_is_in_nobodys_way(ward: Ward) -> None:
    """It answers whatever sleeps."""
    first = ward.add("first")
    ward.add("second", state=S.ASLEEP)
    releases = (Release("ver-main", 100), Release("ver-first", 0, fallback=1))
    ward.town.endpoints["ep-first"] = msgspec.structs.replace(ward.town.endpoints["ep-first"], releases=releases)
    ward.idle("first", 60)
    ward.ask("second", 1)
    tended = await ward.rounds(3)
    assert (ward.state(first), ward.placer.claimed) == (S.READY, frozenset())
    assert "are needed" in tended["second"].waits


async def test_one_that_is_asked_again_just_then_keeps_its_place(ward: Ward) -> None:
    first, second = ward.add("first"), ward.add("second", state=S.ASLEEP)
    ward.idle("first", 6)
    ward.ask("second", 1)
    await ward.round("second")
    ward.ask("first", 1)
    await ward.rounds(4)
    assert (ward.state(first), ward.state(second)) == (S.READY, S.ASLEEP)
    assert not ward.placer.claimed, "its place is not waited for any more"


async def test_one_that_does_not_wake_is_killed_and_says_why(ward: Ward) -> None:
    one = ward.add("one", state=S.ASLEEP)
    ward.engines.failing.add((one.id, "/wake_up"))
    ward.ask("one", 1)
    await ward.rounds(3)
    assert ward.state(one) is S.FAILED
    assert ward.town.replicas[one.id].reason == "it did not wake: the engine refused it (500)"


async def test_one_that_does_not_fall_asleep_is_woken_to_be_sure_and_left_alone(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 11)
    ward.engines.failing.add((one.id, "/sleep"))
    await ward.rounds(20)
    assert [path for _, path in ward.engines.made] == ["/sleep", "/wake_up"], "no second try at once"
    assert ward.state(one) is S.READY


@pytest.mark.parametrize("is_asleep", [True, False])
@pytest.mark.parametrize("state", [S.FALLING_ASLEEP, S.WAKING])
async def test_a_controller_that_starts_anew_makes_the_call_again(state: S, is_asleep: bool, ward: Ward) -> None:
    one = ward.add("one", state=state)
    (ward.engines.asleep.add if is_asleep else ward.engines.asleep.discard)(one.id)
    ward.idle("one", 1)
    await ward.rounds(4)
    assert ward.state(one) is (S.ASLEEP if state is S.FALLING_ASLEEP else S.READY)
    assert (one.id in ward.engines.asleep) is (state is S.FALLING_ASLEEP)


async def test_what_an_engine_says_of_itself_comes_before_what_is_recorded(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 1)
    ward.engines.asleep.add(one.id)
    await ward.rounds(1)
    assert ward.state(one) is S.WAKING
    await ward.rounds(2)
    assert ward.state(one) is S.READY
    ward.idle("one", 11)
    await ward.rounds(6)
    assert ward.state(one) is S.READY, "it was ready for a moment only"
    ward.clock.advance(11)
    await ward.rounds(6)
    assert ward.state(one) is S.ASLEEP
    ward.engines.asleep.clear()
    await ward.rounds(4)
    assert (ward.state(one), one.id in ward.engines.asleep) == (S.ASLEEP, True)


async def test_who_has_slept_longest_goes_when_its_node_has_no_memory_left() -> None:
    async with asyncio.TaskGroup() as group:
        ward = Ward(group, memory_bytes=130 * GIB)
        for name in ("one", "two", "three"):
            ward.add(name, state=S.ASLEEP)
        first = ward.town.replicas[ward.add("one", state=S.ASLEEP).id]
        ward.town.replicas[first.id] = msgspec.structs.replace(first, state_since=-5.0)
        await ward.round()
        assert len(ward.sleeping.outgrown(ward.town.replicas)) == 2, "two of 60 GiB fit"
        assert first.id in ward.sleeping.outgrown([first.id])
        assert "ep-one" in ward.sleeping.pressing


async def test_one_that_is_larger_than_the_memory_of_its_node_never_sleeps() -> None:
    async with asyncio.TaskGroup() as group:
        ward = Ward(group, memory_bytes=59 * GIB)
        one = ward.add("one")
        ward.idle("one", 9e9)
        await ward.rounds(3)
        assert ward.state(one) is S.READY


async def _story(steps: list[tuple[str, int]]) -> None:
    """Live through ``steps``; whatever they were, whoever is asked for then is awake soon."""
    async with asyncio.TaskGroup() as group:
        ward = Ward(group)
        ones = [ward.add(f"e{number}", state=S.ASLEEP if number else S.READY) for number in range(3)]

        async def go_on() -> None:
            await ward.round()
            await ward.let_engines()
            holding = [one for one in ones if ward.state(one) in (S.READY, S.FALLING_ASLEEP, S.WAKING)]
            assert len(holding) <= 1, "60 of 80 GiB fit once"
            served = [one for one in ones if ward.state(one) is S.READY]
            assert not any(one.id in ward.engines.asleep for one in served), "callers meet an engine that sleeps"

        for what, number in steps:
            match what:
                case "ask":
                    ward.ask(f"e{number}", number + 1)
                case "idle":
                    ward.idle(f"e{number}", 4.0 * number)
                case "wait":
                    ward.clock.advance(6.0)
                case "hold":
                    ward.engines.gate.clear()
                case "answer":
                    ward.engines.gate.set()
                case "kill":
                    ward.kill()
            await go_on()
        ward.engines.gate.set()
        for number in range(3):
            ward.idle(f"e{number}", 60.0)
        for number in (0, 1, 2):
            ward.ask(f"e{number}", 1)
            for _ in range(16):
                ward.clock.advance(1.0)
                await go_on()
            assert ward.state(ones[number]) is S.READY, "whoever is asked for is awake"
            ward.idle(f"e{number}", 60.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "idle", "wait", "hold", "answer", "kill"]), st.integers(0, 2)), max_size=20
    )
)
def test_whatever_comes_two_never_have_one_room_and_whoever_is_asked_for_wakes(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_story(steps))


async def test_nobody_turns_while_no_gateway_tells_what_is_wanted(ward: Ward) -> None:
    one = ward.add("one")
    ward.idle("one", 11)
    look = ward.town.look
    ward.town.look = lambda: replace(look(), are_gateways_known=False)  # type: ignore[method-assign]
    await ward.rounds(2)
    assert ward.state(one) is S.READY
