"""Replicas are meant to move where that helps, one of an endpoint at a time; what failed is left alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.support.towns import GIB, Town, ask, endpoint, node, replica

from modelyard.clock import ManualClock
from modelyard.control.asking import residents_of
from modelyard.control.moving import PAUSE_S, RETRY_S, Moving
from modelyard.control.placing import Placer
from modelyard.control.promises import Need
from modelyard.control.views import size_of
from modelyard.domain.endpoints import Endpoint, Release
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState
from modelyard.domain.nodes import Part, Placement
from modelyard.domain.rollouts import Rollout, RolloutKind
from modelyard.engines.simulated import SimulatedEngine
from modelyard.policy.asks import NoRoom
from modelyard.policy.defragment import EVERY_S
from modelyard.policy.engine_model import Capacity
from modelyard.policy.takeovers import START_S

NEED = Need("big", queued=1, reload_s=10.0)


def on(name: str, gib: int, *accelerators: int) -> Placement:
    return Placement((Part(name, accelerators or (0,), gib * GIB),))


class City:
    """A town with a placer, and who moves replicas there; nothing runs but records."""

    def __init__(self, *nodes: str, mode: Any = "room", at_once: int = 4) -> None:
        self.town = Town(nodes={one: node(one) for one in nodes})
        self.clock = ManualClock(self.town.now_s)
        self.mode, self.at_once = mode, at_once
        self.loads: dict[str, Any] = {}
        self.start_anew()

    def start_anew(self) -> None:
        """Have another controller."""
        self.placer = Placer()
        sizing = cast("Any", SimpleNamespace(decisions=self.loads))
        engines: Any = {"simulated": SimulatedEngine()}
        self.moving = Moving(self.placer, sizing, engines, self.clock, self.mode, self.at_once)

    def put(self, name: str, gib: int, where: str, load: float = 0.0, **more: object) -> Replica:
        """Have a replica that has been ready for long."""
        one = endpoint(name, **more)
        self.town.settle(one)
        capacity = Capacity(1.0, 1.0, "as said")
        self.loads[one.id] = (SimpleNamespace(requests_s=load, capacity=capacity, ready=1, utilization=None), None)
        return self.town.run(replica(one), on(where, gib))

    def look(self, after_s: float = 0.1) -> None:
        self.town.now_s += after_s
        self.clock.advance(after_s)
        world = self.town.look()
        self.placer.see(world, self.town.nodes.values(), {})
        self.moving.see(world)

    def ask_for(self, name: str, gib: int) -> Placement | NoRoom:
        """Have a pass that asks for room."""
        one = endpoint(name)
        self.town.settle(one)
        self.placer.begin(one.id)
        found = self.placer.place(replica(one, ready_at=None), ask(gib), NEED, list)
        self.placer.end(one.id, ())
        return found

    def begin_move(self, old: Replica, generation: int = 0) -> Replica:
        """Have the pass that starts who takes over."""
        assert self.moving.because(old.endpoint_id)
        new = replica(self.town.endpoints[old.endpoint_id], 1, generation, ready_at=None)
        new = msgspec.structs.replace(new, takes_over=old.id, state=ReplicaState.LOADING)
        self.placer.begin(old.endpoint_id)
        placement = self.placer.move(new)
        assert placement is not None
        self.clock.advance(0.001)
        self.moving.begun(new)
        self.placer.end(old.endpoint_id, [new.id])
        return self.town.run(new, placement)

    def set_state(self, of: Replica, state: ReplicaState) -> None:
        self.town.replicas[of.id] = msgspec.structs.replace(of, state=state)
        if state in (ReplicaState.STOPPED, ReplicaState.FAILED):
            self.town.running.discard(of.id)

    def meant(self) -> set[str]:
        return {id for one in self.town.endpoints for id in self.moving.because(one)}


@pytest.fixture
def pieces() -> City:
    """Two accelerators with 50 of 80 GiB free each."""
    city = City("n1", "n2")
    city.put("a", 30, "n1")
    city.put("b", 30, "n2")
    city.look()
    return city


def test_one_moves_to_the_other_and_what_it_leaves_is_for_who_waits(pieces: City) -> None:
    told = pieces.ask_for("big", 60)
    assert isinstance(told, NoRoom)
    (old_id,) = pieces.meant()
    old = pieces.town.replicas[old_id]
    assert told.reason.endswith(f"a replica moves away from {old.placement.node_id} to make room")
    assert "helps to open 1 x 60.0 GiB" in pieces.moving.because(old.endpoint_id)[old_id]
    assert pieces.moving.endpoint_ids == {old.endpoint_id}
    new = pieces.begin_move(old)
    assert new.placement.node_id != old.placement.node_id
    for _ in range(3):
        pieces.look()
        assert isinstance(pieces.ask_for("big", 60), NoRoom)
    pieces.set_state(new, ReplicaState.READY)
    pieces.set_state(old, ReplicaState.DRAINING)
    pieces.look()
    assert isinstance(pieces.ask_for("big", 60), NoRoom), "it has its memory until it is gone"
    pieces.set_state(old, ReplicaState.STOPPED)
    pieces.look()
    assert pieces.ask_for("big", 60) == on(old.placement.node_id, 60)
    assert not pieces.meant()
    assert pieces.moving.ended() == {("moved",): 1, ("given_up",): 0}


def test_the_room_of_a_move_is_nobody_elses(pieces: City) -> None:
    pieces.ask_for("big", 60)
    for _ in range(3):
        pieces.look(0.5)
        assert isinstance(pieces.ask_for("big", 60), NoRoom)
        assert isinstance(pieces.ask_for("other", 30), NoRoom), "one moves to what is free, or waits for it"
    assert len(pieces.meant()) == 1


def test_a_pass_that_began_before_the_record_was_seen_still_holds_the_room(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    before = pieces.town.look()
    new = pieces.begin_move(pieces.town.replicas[old_id])
    pieces.placer.see(before, pieces.town.nodes.values(), {})
    pieces.moving.see(before)
    assert isinstance(pieces.ask_for("other", 30), NoRoom)
    pieces.look()
    pieces.set_state(new, ReplicaState.FAILED)
    pieces.look()
    assert not isinstance(pieces.ask_for("other", 30), NoRoom)


def test_a_move_that_fails_is_given_up_and_not_tried_again_for_longer_each_time() -> None:
    city = City("n1", "n2")
    old = city.put("a", 30, "n1")
    city.put("b", 30, "n2", pool="fast")
    city.look()
    for times in range(3):
        city.ask_for("big", 60)
        assert city.meant() == {old.id}
        new = city.begin_move(old, times)
        city.look()
        city.set_state(new, ReplicaState.FAILED)
        city.look()
        for seconds in (0.1, PAUSE_S * 2**times - 1):
            told = city.ask_for("big", 60)
            assert isinstance(told, NoRoom)
            assert "moves away" not in told.reason
            assert not city.meant()
            city.look(seconds)
        city.look(RETRY_S)
    assert city.moving.ended() == {("moved",): 0, ("given_up",): 3}


def test_a_move_that_nobody_begins_is_forgotten_with_its_room(pieces: City) -> None:
    tried: set[str] = set()
    for _ in range(2):  # each of the two in its turn
        pieces.ask_for("big", 60)
        assert len(pieces.meant()) == 1
        tried |= pieces.meant()
        pieces.look(START_S + 1)
        assert not pieces.meant()
    assert len(tried) == 2
    pieces.ask_for("big", 90)
    assert not isinstance(pieces.ask_for("other", 50), NoRoom), "nothing is held"


def test_whoever_waits_no_longer_makes_nobody_move(pieces: City) -> None:
    pieces.ask_for("big", 60)
    pieces.placer.begin("ep-big")
    pieces.placer.end("ep-big", ())
    pieces.look()
    assert not pieces.meant()


def test_another_controller_goes_on_with_what_has_begun_and_forgets_what_was_meant(pieces: City) -> None:
    pieces.ask_for("big", 60)
    pieces.start_anew()
    pieces.look()
    assert not pieces.meant()
    pieces.look(RETRY_S)
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    new = pieces.begin_move(pieces.town.replicas[old_id])
    pieces.start_anew()
    pieces.look()
    told = pieces.ask_for("big", 60)
    assert isinstance(told, NoRoom)
    assert not pieces.meant(), "one is on its way to the other, which is full then"
    pieces.set_state(new, ReplicaState.FAILED)
    pieces.look(RETRY_S)
    pieces.ask_for("big", 60)
    assert len(pieces.meant() - {old_id}) == 1, "the one that failed stays, so the other goes"


def test_a_round_that_looked_for_long_looks_no_more(pieces: City) -> None:
    pieces.moving._looking_s = 1.0
    assert isinstance(pieces.ask_for("big", 60), NoRoom)
    assert not pieces.meant()
    pieces.look()
    pieces.ask_for("big", 60)
    assert len(pieces.meant()) == 1


def test_no_more_move_at_once_than_may() -> None:
    city = City("n1", "n2", "n3", "n4", at_once=1)
    for name, gib in (("a", 30), ("b", 30), ("c", 30), ("d", 30)):
        city.put(name, gib, f"n{'abcd'.index(name) + 1}")
    city.look()
    for name in ("big", "too"):
        city.ask_for(name, 60)
    assert len(city.meant()) == 1


def hosting(city: City) -> None:
    city.town.replicas["rep-a-a-0-0"] = msgspec.structs.replace(
        city.town.replicas["rep-a-a-0-0"], guests=(GuestSeat("ep-guest", "ver-g", "g@000000000000"),)
    )


def young(city: City) -> None:
    one = city.town.replicas["rep-a-a-0-0"]
    city.town.replicas[one.id] = msgspec.structs.replace(one, ready_at=city.town.now_s)


def leaving(city: City) -> None:
    city.set_state(city.town.replicas["rep-a-a-0-0"], ReplicaState.DRAINING)


def as_it_is(city: City) -> None:
    """Nothing more."""


ROLLING = Rollout("ver-a", "ver-x", began_at=0.0, kind=RolloutKind.ROLLING)
STAYS = {
    "rollout": ({"rollout": ROLLING}, as_it_is),
    "pool": ({"pool": "fast"}, as_it_is),
    "guest": ({"host_id": "ep-b"}, as_it_is),
    "deleted": ({"is_deleted": True}, as_it_is),
    "replaced": ({"releases": (Release("ver-other"),)}, as_it_is),
    "host": ({}, hosting),
    "just ready": ({}, young),
    "draining": ({}, leaving),
}


@pytest.mark.parametrize(("more", "change"), STAYS.values(), ids=STAYS.keys())
def test_what_does_not_move(more: dict[str, Any], change: Any) -> None:
    city = City("n1", "n2")
    of: Endpoint = endpoint("a", "ver-a")
    city.town.settle(of)
    city.put("a", 30, "n1", **more)
    if "releases" in more:
        city.town.run(replica(of), on("n1", 30))
    city.put("b", 60, "n2")  # too large to move itself
    change(city)
    city.look()
    assert isinstance(city.ask_for("big", 60), NoRoom)
    assert not city.meant()


def test_a_move_that_was_meant_is_forgotten_when_a_rollout_begins(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    of = pieces.town.endpoints[pieces.town.replicas[old_id].endpoint_id]
    pieces.town.endpoints[of.id] = msgspec.structs.replace(of, rollout=ROLLING)
    pieces.look()
    assert not pieces.meant()
    assert not pieces.placer.is_claiming("rep-big-big-0-0"), "it looks for other room"


def test_what_has_several_accelerators_whole_does_not_move() -> None:
    city = City()
    city.town.nodes = {"n1": node("n1", 2), "n2": node("n2", 2)}
    one = endpoint("a")
    city.town.settle(one)
    city.town.run(replica(one), on("n1", 10, 0, 1))
    city.put("b", 60, "n2")
    city.town.run(city.put("c", 60, "n2"), on("n2", 60, 1))
    city.look()
    assert isinstance(city.ask_for("big", 60), NoRoom)
    assert not city.meant()


def test_the_one_that_is_not_on_spot_keeps_its_place_before_those_that_are() -> None:
    city = City("n1", "n2", "spot")
    spot = city.town.nodes["spot"]
    city.town.nodes["spot"] = msgspec.structs.replace(spot, node=msgspec.structs.replace(spot.node, is_spot=True))
    city.put("a", 30, "n1")
    city.town.run(replica(city.town.endpoints["ep-a"], 1), on("spot", 30))
    city.put("b", 40, "n2", pool="fast")
    city.look()
    assert isinstance(city.ask_for("big", 60), NoRoom)
    assert not city.meant(), "with one replica less the one on spot would stay, which is in the first place then"


def test_moving_counts_once_for_a_tenants_quota(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    old = pieces.town.replicas[old_id]
    before = pieces.town.look()
    pieces.placer.see(before, pieces.town.nodes.values(), {"ten-a": 2})
    pieces.begin_move(old)
    assert pieces.placer.over_quota("ten-a", on("n1", 40)) == "", "it is recorded, and not seen yet"
    world = pieces.town.look()
    pieces.placer.see(world, pieces.town.nodes.values(), {"ten-a": 2})
    # Two that have 3/8 each, one that waits with 6/8: 1.5 accelerators. With the one that moves twice it would be more.
    assert pieces.placer.over_quota("ten-a", on("n1", 40)) == ""
    assert pieces.placer.over_quota("ten-a", on("n1", 50)) != ""


def test_who_is_to_take_over_is_neither_counted_nor_evicted_before_it_has() -> None:
    city = City("n1", "n2")
    old = city.put("a", 30, "n1")
    new = msgspec.structs.replace(replica(city.town.endpoints["ep-a"], 1), takes_over=old.id)
    city.town.run(new, on("n2", 30))
    world = city.town.look()
    assert size_of(world.endpoints["ep-a"], world, slots=1).replicas == 1
    assert [one.replica_id for one in residents_of(world, {}, but="ep-big")] == [old.id]
    city.set_state(old, ReplicaState.DRAINING)
    world = city.town.look()
    assert size_of(world.endpoints["ep-a"], world, slots=1).ready == 1
    assert [one.replica_id for one in residents_of(world, {}, but="ep-big")] == [new.id]


def test_whoever_waits_for_a_move_takes_what_gets_free_elsewhere(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    pieces.begin_move(pieces.town.replicas[old_id])
    pieces.look()
    assert isinstance(pieces.ask_for("big", 60), NoRoom)
    pieces.town.nodes["n3"] = node("n3")
    pieces.look()
    assert pieces.ask_for("big", 60) == on("n3", 60)
    pieces.look()
    assert not isinstance(pieces.ask_for("other", 20), NoRoom), "the room that it waited for is nobody's"


# --- now and then ---------------------------------------------------------------------------


def test_the_emptiest_accelerator_is_emptied_now_and_then_where_that_was_asked_for() -> None:
    for mode, expected in (("all", {"rep-b-b-0-0"}), ("room", set()), ("off", set())):
        city = City("n1", "n2", mode=mode)
        city.put("a", 30, "n1")
        city.put("b", 10, "n2")
        city.look()
        assert not city.meant()
        city.look(EVERY_S)
        assert city.meant() == expected


def test_tidying_leaves_a_move_for_who_finds_no_room() -> None:
    city = City("n1", "n2", "n3", "n4", "n5", mode="all", at_once=2)
    for number in range(1, 6):
        city.put(f"e{number}", 30, f"n{number}")
    city.look()
    city.look(EVERY_S)
    assert len(city.meant()) == 1
    told = city.ask_for("big", 70)
    assert isinstance(told, NoRoom)
    assert "moves away from" in told.reason


def test_one_leaves_an_accelerator_that_has_too_much_to_do() -> None:
    city = City("n1", "n2", mode="all")
    city.put("a", 30, "n1", load=0.7)
    city.put("b", 30, "n1", load=0.6)
    city.look()
    city.look(EVERY_S)
    assert "relieves accelerator 0 of n1" in city.moving.because("ep-a")["rep-a-a-0-0"]
    assert city.meant() == {"rep-a-a-0-0"}


def test_nothing_goes_where_one_that_loads_will_have_too_much_to_do_with_it() -> None:
    city = City("n1", "n2", "n3", mode="all")
    city.put("a", 30, "n1", load=0.7)
    city.put("b", 30, "n1", load=0.6)
    city.set_state(city.put("c", 30, "n2", load=0.7), ReplicaState.LOADING)
    city.look()
    city.look(EVERY_S)
    assert "moving it to n3" in city.moving.because("ep-a")["rep-a-a-0-0"]


def test_what_is_asked_to_and_fro_moves_nobody_to_and_fro() -> None:
    city = City("n1", "n2", mode="all")
    for name in ("a", "b"):
        city.put(name, 30, "n1")
    moved = 0
    for minute in range(60):
        for known in city.loads.values():
            known[0].requests_s = 0.7 if minute // 2 % 2 else 0.1
        city.look(EVERY_S)
        for old_id in city.meant():
            old = city.town.replicas[old_id]
            new = city.begin_move(old, minute)
            city.town.replicas[new.id] = msgspec.structs.replace(
                new, state=ReplicaState.READY, ready_at=city.town.now_s
            )
            city.set_state(old, ReplicaState.STOPPED)
            moved += 1
    assert 1 <= moved <= 12, "two endpoints, each six times an hour at most"


def test_nothing_goes_to_an_accelerator_that_one_which_stays_keeps_busy() -> None:
    city = City("n1", "n2", mode="all")
    city.put("a", 30, "n1", load=0.7, pool="fast")
    city.put("b", 10, "n2", load=0.3)
    city.look()
    city.look(EVERY_S)
    assert not city.meant()


def test_nothing_is_done_where_moves_are_off(pieces: City) -> None:
    city = City("n1", "n2", mode="off")
    city.put("a", 30, "n1")
    city.put("b", 30, "n2")
    city.look()
    assert isinstance(city.ask_for("big", 60), NoRoom)
    assert not city.meant()


# --- what is seen late ----------------------------------------------------------------------


def test_a_move_that_was_recorded_while_a_look_read_the_records_is_not_given_up(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    before = pieces.town.look()
    new = pieces.begin_move(pieces.town.replicas[old_id])
    # What a look says of time is of its end; the records it may have read well before that.
    before = replace(before, monotonic_s=pieces.clock.monotonic_s() + 0.1)
    pieces.placer.see(before, pieces.town.nodes.values(), {})
    pieces.moving.see(before)
    assert pieces.placer.is_claiming("rep-big-big-0-0"), "it still waits for this move"
    pieces.look(1.0)
    pieces.set_state(new, ReplicaState.FAILED)
    pieces.look(1.0)
    assert pieces.moving.ended() == {("moved",): 0, ("given_up",): 1}


def test_one_that_crashes_while_the_old_one_still_drains_did_not_move(pieces: City) -> None:
    pieces.ask_for("big", 60)
    (old_id,) = pieces.meant()
    old = pieces.town.replicas[old_id]
    new = pieces.begin_move(old)
    pieces.look()
    pieces.set_state(new, ReplicaState.READY)
    pieces.look()
    pieces.set_state(old, ReplicaState.DRAINING)
    pieces.look()
    assert pieces.moving.ended() == {("moved",): 0, ("given_up",): 0}, "it is not over"
    pieces.set_state(new, ReplicaState.FAILED)
    pieces.set_state(old, ReplicaState.READY)
    pieces.look()
    assert pieces.moving.ended() == {("moved",): 0, ("given_up",): 1}
    pieces.look(RETRY_S)
    pieces.ask_for("big", 60)
    assert old_id not in pieces.meant(), "it is left alone for a while"


def test_an_endpoint_of_which_one_began_to_move_in_this_round_has_no_other_moved_for_someone_else() -> None:
    city = City("n1", "n2", "n3")
    city.put("a", 15, "n1")
    city.town.run(replica(city.town.endpoints["ep-a"], 1), on("n2", 15))
    city.put("b", 40, "n3", pool="fast")
    city.look()
    city.ask_for("big", 70)
    (old_id,) = city.meant()
    city.begin_move(city.town.replicas[old_id], 1)
    city.ask_for("too", 70)
    assert not city.meant()
