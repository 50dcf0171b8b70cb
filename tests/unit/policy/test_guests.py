"""Who sits on which replica of a host: a table of stories, and a machine that drives a host through anything."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelyard.domain.fleet import GuestSeat, SeatState
from modelyard.policy.guests import Drain, HostSeen, Key, Load, Plan, Rule, SeatSeen, Unload, Wanted, plan

NOW_S = 1000.0
PACE = Rule(residency_s=2.0, patience_s=4.0, drain_timeout_s=10.0)


def key(name: str) -> Key:
    return f"ep-{name}", "v1"


def seat(name: str, state: SeatState = SeatState.READY, *, age_s: float = 100.0, **seen: object) -> SeatSeen:
    return SeatSeen(seat=GuestSeat(*key(name), f"{name}@1", state, NOW_S - age_s), **seen)  # type: ignore[arg-type]


def guest(name: str, **more: object) -> Wanted:
    return Wanted(key=key(name), name=name, base="base", **more)  # type: ignore[arg-type]


def host(id: str, capacity: int, *seats: SeatSeen, **more: object) -> HostSeen:
    return HostSeen(id=id, capacity=capacity, bases=frozenset({"base"}), seats=seats, **more)  # type: ignore[arg-type]


def planned(hosts: Sequence[HostSeen], *wanted: Wanted) -> Plan:
    return plan(hosts, wanted, NOW_S, PACE)


def done(found: Plan) -> list[tuple[str, str, str]]:
    return [(type(one).__name__, one.replica_id, one.key[0].removeprefix("ep-")) for one in found.actions]


def test_a_guest_sits_down_where_there_is_room() -> None:
    assert done(planned([host("r1", 2)], guest("a"))) == [("Load", "r1", "a")]


def test_each_goes_to_the_emptiest_replica() -> None:
    found = planned([host("r1", 4, seat("x"), seat("y")), host("r2", 4)], guest("a"), guest("x"), guest("y"))
    assert done(found) == [("Load", "r2", "a")]


def test_who_is_waited_for_comes_before_who_was_just_used() -> None:
    found = planned([host("r1", 1)], guest("used", idle_s=1.0), guest("asked", idle_s=500.0, waited_s=0.1))
    assert done(found) == [("Load", "r1", "asked")]
    assert "used later" in found.waits[key("used")]


def test_the_one_that_was_idle_longest_goes_for_one_that_is_waited_for() -> None:
    found = planned(
        [host("r1", 2, seat("old"), seat("fresh"))],
        guest("old", idle_s=90.0), guest("fresh", idle_s=3.0), guest("asked", waited_s=0.0),
    )  # fmt: skip
    assert done(found) == [("Drain", "r1", "old")]
    assert found.waits[key("asked")] == "a seat is being given up for it"


def test_nobody_goes_for_one_that_nobody_waits_for() -> None:
    found = planned([host("r1", 1, seat("old"))], guest("old", idle_s=900.0), guest("new", idle_s=1.0))
    assert done(found) == []
    assert "the next request loads it" in found.waits[key("new")]


@pytest.mark.parametrize(
    ("age_s", "in_flight", "waited_s", "goes"),
    [
        (1.0, 0, 0.5, False),  # it just came
        (3.0, 0, 0.5, True),
        (3.0, 2, 0.5, False),  # it is in use
        (3.0, 2, 5.0, True),  # nobody waits for ever
    ],
)
def test_a_guest_has_time_to_be_used_but_not_for_ever(
    age_s: float, in_flight: int, waited_s: float, *, goes: bool
) -> None:
    found = planned(
        [host("r1", 1, seat("sitting", age_s=age_s))],
        guest("sitting", in_flight=in_flight, idle_s=0.0 if in_flight else age_s), guest("asked", waited_s=waited_s),
    )  # fmt: skip
    assert done(found) == ([("Drain", "r1", "sitting")] if goes else [])


def test_one_seat_is_given_up_for_one_guest_that_waits() -> None:
    hosts = [host("r1", 3, seat("going", SeatState.DRAINING, age_s=1.0, in_flight=1), seat("b"), seat("c"))]
    found = planned(hosts, guest("b", idle_s=50.0), guest("c", idle_s=60.0), guest("x", waited_s=1.0))
    assert done(found) == []
    both = planned(hosts, guest("b", idle_s=50.0), guest("c", idle_s=60.0), *(guest(n, waited_s=1.0) for n in "xy"))
    assert done(both) == [("Drain", "r1", "c")]


@pytest.mark.parametrize(
    ("in_flight", "age_s", "expected"),
    [(None, 1.0, []), (2, 1.0, []), (0, 1.0, ["Unload"]), (2, 11.0, ["Unload"]), (None, 11.0, ["Unload"])],
)
def test_a_draining_guest_goes_when_nothing_of_it_is_under_way(
    in_flight: int | None, age_s: float, expected: list[str]
) -> None:
    found = planned([host("r1", 1, seat("a", SeatState.DRAINING, age_s=age_s, in_flight=in_flight))])
    assert [kind for kind, _, _ in done(found)] == expected


def test_what_was_begun_or_lost_is_loaded_again_and_what_is_under_way_left_alone() -> None:
    hosts = [
        host(
            "r1", 4, seat("begun", SeatState.LOADING), seat("busy", SeatState.LOADING, is_busy=True),
            seat("lost", is_lost=True), seat("fine"),
        )
    ]  # fmt: skip
    found = planned(hosts, *(guest(name) for name in ("begun", "busy", "lost", "fine")))
    assert done(found) == [("Load", "r1", "begun"), ("Load", "r1", "lost")]
    assert all(isinstance(one, Load) and one.is_again for one in found.actions)


def test_a_version_that_was_replaced_stays_until_the_new_one_is_there() -> None:
    old = SeatSeen(seat=GuestSeat("ep-a", "v0", "a@0", SeatState.READY, 0.0))
    loading = seat("a", SeatState.LOADING, is_busy=True)
    assert done(planned([host("r1", 3, old, loading)], guest("a"))) == []
    assert done(planned([host("r1", 3, old, seat("a"))], guest("a"))) == [("Drain", "r1", "a")]


def test_a_load_that_failed_is_tried_elsewhere_at_once_and_there_later() -> None:
    failed = {key("a"): NOW_S + 5}
    found = planned(
        [host("r1", 2, not_before_s=failed), host("r2", 1, seat("b"))], guest("b"), guest("a", waited_s=9.0)
    )
    assert ("Load", "r1", "a") not in done(found)
    assert done(found) == [("Drain", "r2", "b")], "on the other replica there is a seat"
    alone = planned([host("r1", 2, not_before_s=failed)], guest("a", waited_s=9.0))
    assert (done(alone), "failed" in alone.waits[key("a")]) == ([], True)


def test_what_is_not_on_this_machine_yet_takes_no_seat() -> None:
    found = planned([host("r1", 1)], guest("a", waited_s=1.0, is_supplied=False))
    assert (done(found), found.waits[key("a")]) == ([], "its files are on their way")


def test_an_adapter_goes_only_onto_its_base() -> None:
    other = HostSeen(id="r1", capacity=4, bases=frozenset({"another"}))
    found = planned([other], guest("a", waited_s=1.0))
    assert (done(found), found.waits[key("a")]) == ([], "no replica of its host has seats for it")
    assert planned([], guest("a", waited_s=1.0)).waits[key("a")] == "no replica is ready"


def test_one_with_much_of_the_traffic_sits_on_several_replicas() -> None:
    hosts = [host("r1", 4, seat("hot"), seat("mild")), host("r2", 4), host("r3", 4)]
    found = planned(hosts, guest("hot", rate=8.0, idle_s=0.0), guest("mild", rate=0.2, idle_s=1.0))
    assert sorted(done(found)) == [("Load", "r2", "hot"), ("Load", "r3", "hot")]


def test_on_many_replicas_a_small_share_is_too_much_for_one() -> None:
    hosts = [host("r00", 40, seat("hot"), *(seat(f"g{number}") for number in range(19)))]
    hosts += [host(f"r{number:02}", 40) for number in range(1, 20)]
    others = [guest(f"g{number}", rate=1.0, idle_s=0.0) for number in range(19)]
    # 5 % of the traffic, on one replica of twenty, is all that it can do.
    found = done(planned(hosts, guest("hot", rate=1.0, idle_s=0.0), *others))
    assert [one for one in found if one[2] == "hot"], "it sits on two"
    few = [host("r1", 40, seat("mild"), seat("much")), host("r2", 40)]
    assert not done(planned(few, guest("mild", rate=0.05, idle_s=0.0), guest("much", rate=0.95, idle_s=0.0)))[1:]


def test_copies_take_no_seat_from_anybody() -> None:
    hosts = [host("r1", 1, seat("hot")), host("r2", 1, seat("cold"))]
    assert done(planned(hosts, guest("hot", rate=9.0, idle_s=0.0), guest("cold", idle_s=900.0))) == []


def test_a_second_copy_goes_before_the_only_one_of_another() -> None:
    hosts = [host("r1", 1, seat("hot")), host("r2", 1, seat("hot")), host("r3", 1, seat("cold"))]
    wanted = [guest("hot", rate=9.0, idle_s=0.0, in_flight=3), guest("cold", idle_s=900.0), guest("x", waited_s=0.0)]
    (action,) = planned(hosts, *wanted).actions
    assert isinstance(action, Drain)
    assert action.key == key("hot")


# --- a host through anything -----------------------------------------------------------

NAMES = "abcdefgh"
STEP_S = 0.5


@dataclass
class Replica:
    capacity: int
    seats: dict[Key, GuestSeat] = field(default_factory=dict)
    engine: set[Key] = field(default_factory=set)
    """What is really loaded."""
    began: set[Key] = field(default_factory=set)
    """Loads that were told to the engine and not answered."""


class Machine(RuleBasedStateMachine):
    """Replicas, guests that are asked for, and an executor that may be cut off before or after any step."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = NOW_S
        self.replicas = {"r1": Replica(2), "r2": Replica(2)}
        self.waiting: dict[Key, float] = {}
        self.used_s: dict[Key, float] = {}
        self.gone: set[Key] = set()

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(
                key=one, name=one[0], base="base",
                waited_s=self.now_s - self.waiting[one] if one in self.waiting else None,
                idle_s=self.now_s - self.used_s[one] if one in self.used_s else math.inf,
            )
            for one in map(key, NAMES)
            if one not in self.gone
        ]  # fmt: skip

    def seen(self, busy: Mapping[str, set[Key]]) -> list[HostSeen]:
        return [
            HostSeen(
                id=id, capacity=one.capacity, bases=frozenset({"base"}),
                seats=[
                    SeatSeen(
                        seat=s, in_flight=0, is_busy=s.key in busy[id],
                        is_lost=s.state is SeatState.READY and s.key not in one.engine,
                    )
                    for s in one.seats.values()
                ],
            )
            for id, one in self.replicas.items()
        ]  # fmt: skip

    def round(self, *, cut_after: int = 99) -> None:
        """Plan and carry out; after ``cut_after`` steps nothing arrives any more."""
        found = plan(self.seen({id: set() for id in self.replicas}), self.wanted(), self.now_s, PACE)
        steps = 0
        for action in found.actions:
            replica = self.replicas[action.replica_id]
            for step in self.steps(action, replica):
                if steps >= cut_after:
                    return
                steps += 1
                step()
        for one in list(self.waiting):
            if any(
                one in r.engine and one in r.seats and r.seats[one].state is SeatState.READY
                for r in self.replicas.values()
            ):
                del self.waiting[one]
                self.used_s[one] = self.now_s

    def steps(self, action: Load | Drain | Unload, replica: Replica) -> list:  # type: ignore[type-arg]
        one = action.key

        def put(state: SeatState) -> None:
            replica.seats[one] = GuestSeat(*one, "n", state, self.now_s)

        match action:
            case Load(is_again=True):
                return [lambda: replica.engine.add(one), lambda: put(SeatState.READY)]
            case Load():
                assert one not in replica.seats, "it sits there already"
                return [lambda: put(SeatState.LOADING), lambda: replica.engine.add(one), lambda: put(SeatState.READY)]
            case Drain():
                return [lambda: put(SeatState.DRAINING)]
            case Unload():
                assert replica.seats[one].state is SeatState.DRAINING, "callers must know that it goes"
                return [lambda: replica.engine.discard(one), lambda: replica.seats.pop(one)]

    @rule(name=st.sampled_from(NAMES))
    def is_asked(self, name: str) -> None:
        if key(name) not in self.gone:
            self.waiting.setdefault(key(name), self.now_s)

    @rule(name=st.sampled_from(NAMES[4:]))
    def is_deleted(self, name: str) -> None:
        self.gone.add(key(name))
        self.waiting.pop(key(name), None)

    @rule(id=st.sampled_from(["r1", "r2"]))
    def crashes(self, id: str) -> None:
        self.replicas[id] = Replica(2)

    @rule(id=st.sampled_from(["r1", "r2"]), data=st.data())
    def engine_forgets(self, id: str, data: st.DataObject) -> None:
        if engine := sorted(self.replicas[id].engine):
            self.replicas[id].engine.discard(data.draw(st.sampled_from(engine)))

    @rule(cut_after=st.integers(0, 6))
    def is_cut_off(self, cut_after: int) -> None:
        self.now_s += STEP_S
        self.round(cut_after=cut_after)

    @rule()
    def time_passes(self) -> None:
        self.now_s += STEP_S
        self.round()

    @rule()
    def settles(self) -> None:
        """Whatever happened: who waits is served within a bound, and then nothing moves any more."""
        for _ in range(120):
            self.now_s += STEP_S
            self.round()
            if not self.waiting:
                break
        assert not self.waiting, "somebody waits for ever"
        for _ in range(6):  # loads that were begun, and seats that drain
            self.now_s += STEP_S
            self.round()
        assert plan(self.seen({id: set() for id in self.replicas}), self.wanted(), self.now_s, PACE).actions == ()
        for replica in self.replicas.values():
            assert {one for one, s in replica.seats.items() if s.state is SeatState.READY} <= replica.engine

    @invariant()
    def never_more_than_there_are_seats(self) -> None:
        for replica in self.replicas.values():
            assert len(replica.seats) <= replica.capacity
            assert len(replica.engine) <= replica.capacity


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
