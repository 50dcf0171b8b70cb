"""Who leaves memory for whom."""

from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.onnx.residency import Resident, Room, make_room

MAIN = Resident("main", 100, used_s=0.0, is_pinned=True)


def test_without_a_limit_nobody_leaves() -> None:
    assert make_room([MAIN], needed_bytes=10**12, limit_bytes=0, base_bytes=50) == Room()


def test_those_unused_for_longest_leave_and_no_more_than_needed() -> None:
    guests = [Resident("a", 100, 3.0), Resident("b", 100, 1.0), Resident("c", 100, 2.0)]
    room = make_room([MAIN, *guests], needed_bytes=160, limit_bytes=500, base_bytes=50)
    assert room == Room(("b", "c"))


def test_a_model_in_use_stays() -> None:
    guests = [Resident("a", 100, 1.0, uses=1), Resident("b", 100, 2.0)]
    assert make_room([MAIN, *guests], needed_bytes=100, limit_bytes=400, base_bytes=50) == Room(("b",))


def test_nobody_leaves_when_it_would_not_be_enough() -> None:
    guests = [Resident("a", 100, 1.0)]
    assert make_room([MAIN, *guests], needed_bytes=400, limit_bytes=400, base_bytes=0) == Room((), 100)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10), st.integers(0, 1), st.booleans()), max_size=10),
    st.integers(0, 200),
    st.integers(1, 500),
)
def test_what_remains_fits_or_the_lack_is_told(
    given_: list[tuple[int, float, int, bool]], needed: int, limit: int
) -> None:
    residents = [
        Resident(str(place), size, used, uses, is_pinned=pinned)
        for place, (size, used, uses, pinned) in enumerate(given_)
    ]
    room = make_room(residents, needed_bytes=needed, limit_bytes=limit, base_bytes=10)
    rest = sum(one.memory_bytes for one in residents if one.name not in room.evict) + needed + 10
    assert rest <= limit if not room.lacking_bytes else not room.evict
    assert all(not residents[int(name)].uses and not residents[int(name)].is_pinned for name in room.evict)
