"""Virtual time only goes on, and equal moments keep their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.sim.events import Events


@given(st.lists(st.integers(0, 5), max_size=40))
def test_events_happen_by_time_and_then_in_the_order_they_were_put_in(moments: list[int]) -> None:
    events, seen = Events(), []
    for number, at_s in enumerate(moments):
        events.at(float(at_s), lambda number=number: seen.append((events.now_s, number)))
    events.run()
    assert seen == sorted((float(at_s), number) for number, at_s in enumerate(moments))
    assert events.happened == len(moments)


def test_what_an_event_puts_in_for_its_own_moment_still_comes() -> None:
    events, seen = Events(), []
    events.at(1.0, lambda: events.at(1.0, lambda: seen.append(events.now_s)))
    events.run(1.0)
    assert seen == [1.0]


def test_an_event_that_was_called_off_does_not_happen() -> None:
    events, seen = Events(), []
    late = events.at(2.0, lambda: seen.append("late"))
    events.at(1.0, late.call_off)
    assert events.next_s == 1.0
    events.run(5.0)
    assert (seen, events.now_s, events.happened) == ([], 5.0, 1)


def test_nothing_can_be_put_into_the_past() -> None:
    events = Events(3.0)
    with pytest.raises(AssertionError, match=r"at 3\.0 s"):
        events.at(2.0, lambda: None)
    assert repr(events.after(1.0, lambda: None)) == "<Event 1 at 4.000000>"
