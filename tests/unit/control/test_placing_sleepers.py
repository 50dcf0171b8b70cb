"""The room of those that sleep: others have it, and it is taken again once, where it was."""

from dataclasses import replace

import msgspec
import pytest
from tests.support.towns import GIB, Town, ask, endpoint, node, replica

from modelyard.control.asking import residents_of
from modelyard.control.beds import residue
from modelyard.control.placing import Placer
from modelyard.control.promises import Need
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Part, Placement
from modelyard.policy.asks import NoRoom

NEED = Need("new", queued=1, reload_s=10.0, may_evict=False)


@pytest.fixture
def town() -> Town:
    return Town(nodes={"n1": node("n1", 2)})


def settled(town: Town, name: str, state: ReplicaState, *accelerators: int, gib: int = 60) -> Replica:
    one = endpoint(name)
    town.settle(one)
    placement = Placement((Part("n1", accelerators or (0,), gib * GIB),))
    return town.run(msgspec.structs.replace(replica(one), state=state), placement)


def looked(town: Town, placer: Placer | None = None) -> Placer:
    placer = placer or Placer()
    placer.see(town.look(), town.nodes.values(), {})
    return placer


def fits(placer: Placer, gib: float, count: int = 1) -> bool:
    found = placer.place(replica(endpoint("new"), ready_at=None), ask(gib, count=count), NEED, list)
    placer.give_up(replica(endpoint("new")).id)
    return not isinstance(found, NoRoom)


def test_who_sleeps_leaves_all_but_its_context(town: Town) -> None:
    first = settled(town, "first", ReplicaState.ASLEEP, 0)
    settled(town, "second", ReplicaState.READY, 1)
    placer = looked(town)
    rest = 80 - residue(first.placement) / GIB
    assert fits(placer, rest - 0.01)
    assert not fits(placer, rest + 0.01)


def test_whole_accelerators_are_whole_though_somebody_sleeps_there(town: Town) -> None:
    settled(town, "first", ReplicaState.ASLEEP, 0, 1)
    assert fits(looked(town), 70, count=2)


def test_a_controller_that_goes_on_counts_as_one_that_begins(town: Town) -> None:
    one = settled(town, "one", ReplicaState.READY, 0, gib=80)
    settled(town, "two", ReplicaState.READY, 1, gib=80)
    placer = looked(town)
    for state, has_room in (
        (ReplicaState.FALLING_ASLEEP, False),
        (ReplicaState.ASLEEP, True),
        (ReplicaState.WAKING, False),
    ):
        town.replicas[one.id] = msgspec.structs.replace(one, state=state)
        town.now_s += 1
        assert fits(looked(town, placer), 70) == fits(looked(town), 70) == has_room, state


def test_its_bed_is_there_or_in_the_way_of_who_is_idle_longest_or_not_to_be_had(town: Town) -> None:
    sleeper = settled(town, "sleeper", ReplicaState.ASLEEP, 0)
    assert looked(town).bed(sleeper, ()).in_the_way == ()
    one = settled(town, "one", ReplicaState.READY, 0, gib=30)
    two = settled(town, "two", ReplicaState.READY, 0, gib=30)
    settled(town, "elsewhere", ReplicaState.READY, 1)
    placer = looked(town)
    assert placer.bed(sleeper, ()).in_the_way is None
    bed = placer.bed(sleeper, [(one, 7.0), (two, 9.0)])
    assert (bed.is_held, bed.in_the_way) == (True, (("rep-two-two-0-0", 9.0), ("rep-one-one-0-0", 7.0)))
    assert not fits(placer, 30), "asking changed nothing"


def test_what_is_taken_for_one_is_nobody_elses_until_it_is_given_up(town: Town) -> None:
    sleeper = settled(town, "sleeper", ReplicaState.ASLEEP, 0)
    settled(town, "other", ReplicaState.READY, 1)
    placer = looked(town)
    placer.begin(sleeper.endpoint_id)
    placer.take_bed(sleeper, "ten-a", (), "somebody asks")
    placer.end(sleeper.endpoint_id, ())
    assert not fits(looked(town, placer), 30)
    placer.begin(sleeper.endpoint_id)
    placer.end(sleeper.endpoint_id, ())
    assert fits(looked(town, placer), 30), "the pass did not ask for it again"


def test_a_claim_becomes_a_promise_once_those_in_the_way_sleep(town: Town) -> None:
    sleeper = settled(town, "sleeper", ReplicaState.ASLEEP, 0)
    victim = settled(town, "victim", ReplicaState.READY, 0)
    settled(town, "other", ReplicaState.READY, 1)
    placer = looked(town)
    placer.begin(sleeper.endpoint_id)
    placer.take_bed(sleeper, "ten-a", [victim.id], "`sleeper` is asked for")
    placer.end(sleeper.endpoint_id, ())
    assert placer.lulled([victim.id], "ten-a") == {victim.id: "`sleeper` is asked for"}
    assert "another tenant" in placer.lulled([victim.id], "ten-b")[victim.id]
    assert placer.evicted([victim.id], "ten-a") == {}, "it is to sleep, not to go"
    assert placer.is_claiming(sleeper.id)
    town.replicas[victim.id] = msgspec.structs.replace(victim, state=ReplicaState.ASLEEP)
    looked(town, placer)
    assert not placer.is_claiming(sleeper.id)
    assert placer.keeps_bed(sleeper)
    assert not fits(placer, 30)


def test_who_is_needed_after_all_ends_the_claim(town: Town) -> None:
    sleeper = settled(town, "sleeper", ReplicaState.ASLEEP, 0)
    victim = settled(town, "victim", ReplicaState.READY, 0)
    placer = looked(town)
    placer.begin(sleeper.endpoint_id)
    placer.take_bed(sleeper, "ten-a", [victim.id], "`sleeper` is asked for")
    placer.refuse(victim.id)
    assert not placer.claimed
    assert not placer.keeps_bed(sleeper)


def test_room_that_only_sleepers_contexts_take_is_no_reason_to_fail(town: Town) -> None:
    settled(town, "sleeper", ReplicaState.ASLEEP, 0, 1)
    idle = settled(town, "idle", ReplicaState.READY, 0, 1)
    town.run(msgspec.structs.replace(idle, ready_at=1.0))
    placer = looked(town)
    residents = residents_of(town.look(), {}, but="ep-new")
    wanted = replace(NEED, may_evict=True)
    assert isinstance(
        placer.place(replica(endpoint("new"), ready_at=None), ask(79.9, count=2), wanted, lambda: residents), NoRoom
    )
    assert not placer.claimed


def test_another_way_is_none_beyond_the_quota_or_over_those_that_go_for_others(town: Town) -> None:
    settled(town, "busy", ReplicaState.READY, 0)
    placer = Placer()
    placer.see(town.look(), town.nodes.values(), {"ten-a": 1})
    assert not placer.has_way(ask(60), NEED, list)
    placer.see(town.look(), town.nodes.values(), {"ten-a": 2})
    assert placer.has_way(ask(60), NEED, list)


@pytest.mark.parametrize(("gib", "goes"), [(79.5, True), (81, False), (60, False)])
def test_sleepers_go_where_only_their_contexts_keep_another_one_from_starting(
    gib: float, goes: bool, town: Town
) -> None:
    sleeper = settled(town, "sleeper", ReplicaState.ASLEEP, 0)
    settled(town, "busy", ReplicaState.READY, 1)
    placer = looked(town)
    placer.place(replica(endpoint("new"), ready_at=None), ask(gib), replace(NEED, may_evict=True), list)
    assert set(placer.crowd) == ({sleeper.id} if goes else set())
    assert not fits(placer, 79.5), "it is asleep yet"
