"""Who is awake: as many as are needed, for as long as it pays, and by turns on the same accelerators."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.policy.sleepers import Bed, Rule, Seen, decide, spared, turn

RULE = Rule(idle_s=15, residency_s=5, share_up=80, share_down=60)


def seen(**changes: float) -> Seen:
    plain = Seen(now_s=100.0, awake=1, asleep=0, demand=1, slots=8, load=0.1, idle_s=0.0)
    return msgspec.structs.replace(plain, **changes)


STORIES = {
    "somebody asks for one that sleeps": (seen(awake=0, asleep=2, demand=1, load=0.0), 1),
    "as many wake as slots are needed": (seen(awake=0, asleep=4, demand=17, load=0.0), 3),
    "as many wake as the load needs": (seen(awake=1, asleep=4, demand=8, load=2.0), 2),
    "no more wake than sleep": (seen(awake=0, asleep=1, demand=80), 1),
    "nobody asked for long enough": (seen(demand=0, idle_s=15.0), -1),
    "not for long enough": (seen(demand=0, idle_s=14.0), 0),
    "the rate of the last minute keeps nobody awake": (seen(demand=0, idle_s=20.0, load=0.9), -1),
    "one that must stay": (seen(demand=0, idle_s=900.0, floor=1), 0),
    "a load that is between the two shares": (seen(awake=2, asleep=1, demand=4, load=1.4), 0),
}


@pytest.mark.parametrize("story", STORIES)
def test_as_many_are_awake_as_are_needed(story: str) -> None:
    observed, change = STORIES[story]
    assert decide(None, observed, RULE).change == change


def test_of_several_one_sleeps_once_fewer_did_for_a_while() -> None:
    calm = seen(awake=3, demand=2, load=0.5)
    first = decide(None, calm, RULE)
    assert (first.change, first.spare_since_s) == (0, 100.0)
    later = decide(first.spare_since_s, msgspec.structs.replace(calm, now_s=114.0), RULE)
    assert later.change == 0
    assert decide(later.spare_since_s, msgspec.structs.replace(calm, now_s=115.0), RULE).change == -2


def test_a_load_that_comes_back_starts_the_time_anew() -> None:
    busy = decide(100.0, seen(awake=3, demand=8, load=2.5, now_s=110.0), RULE)
    assert busy.spare_since_s is None


@given(
    awake=st.integers(0, 9), asleep=st.integers(0, 9), demand=st.integers(0, 200), load=st.floats(0, 9),
    idle_s=st.floats(0, 1e4), floor=st.integers(0, 2), since_s=st.none() | st.floats(0, 100),
)  # fmt: skip
def test_nobody_who_is_needed_sleeps_and_no_more_wake_than_there_are(
    awake: int, asleep: int, demand: int, load: float, idle_s: float, floor: int, since_s: float | None
) -> None:
    observed = seen(awake=awake, asleep=asleep, demand=demand, load=load, idle_s=idle_s, floor=floor)
    change = decide(since_s, observed, RULE).change
    assert -awake <= change <= asleep
    if change < 0:
        assert (awake + change) * observed.slots >= demand
        assert awake + change >= floor
        assert demand == 0 or awake + change >= load


def test_first_where_others_are_awake_then_where_there_is_room_then_in_somebodys_place() -> None:
    beside, empty = Bed(replica_id="beside", is_held=True), Bed(replica_id="empty")
    full = Bed(replica_id="full", is_held=True, in_the_way=(("other", 9.0),))
    assert turn([full, empty, beside]).replica_id == "beside"
    assert turn([full, empty]).replica_id == "empty"
    found = turn([full])
    assert (found.replica_id, found.instead_of) == ("full", ("other",))


def test_whom_nobody_asked_for_longest_makes_room() -> None:
    beds = [
        Bed(replica_id="a", in_the_way=(("recent", 6.0),)),
        Bed(replica_id="b", in_the_way=(("old", 60.0),)),
        Bed(replica_id="c", in_the_way=(("older", 90.0), ("oldest", 99.0))),
    ]
    assert turn(beds, RULE).instead_of == ("old",)


def test_nobody_gives_way_who_is_needed_or_was_a_moment_ago() -> None:
    assert turn([Bed(replica_id="a", in_the_way=None)], RULE).replica_id is None
    assert turn([Bed(replica_id="a", in_the_way=(("just", 4.0),))], RULE).replica_id is None
    assert turn([], RULE).replica_id is None


def test_those_alone_on_their_accelerators_sleep_first_then_the_newest() -> None:
    awake = [("old", False), ("alone", True), ("new", False)]
    assert spared(awake, 2) == ["alone", "new"]
