"""Lines of requests: in order of arrival, and nobody is lost or counted twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.sim.fleet.lines import Lines


def test_who_came_first_is_served_first() -> None:
    lines = Lines()
    lines.join(7, 10.0, 2.0)
    lines.join(7, 12.0, 3.0)
    assert lines.serve(7, 3.0) == [(10.0, 2.0), (12.0, 1.0)]
    assert lines.serve(7, 5.0) == [(12.0, 2.0)]
    assert len(lines) == 0


def test_who_waited_too_long_leaves_and_who_came_last_finds_no_place() -> None:
    lines = Lines()
    for at_s in (0.0, 10.0, 20.0):
        lines.join(1, at_s, 4.0)
    assert lines.give_up(1, before_s=5.0) == 4.0
    assert lines.turn_away(1, places=5.0) == 3.0
    assert lines.serve(1, 100.0) == [(10.0, 4.0), (20.0, 1.0)]


@given(st.lists(st.tuples(st.sampled_from("jsgt"), st.integers(1, 9)), max_size=40))
def test_everybody_leaves_once(steps) -> None:
    lines, joined, left, now_s = Lines(), 0.0, 0.0, 0.0
    for what, number in steps:
        now_s += 1.0
        if what == "j":
            lines.join(0, now_s, number)
            joined += number
        elif what == "s":
            left += sum(count for _, count in lines.serve(0, number))
        elif what == "g":
            left += lines.give_up(0, now_s - number)
        else:
            left += lines.turn_away(0, number)
    assert joined == pytest.approx(left + sum(count for _, count in lines.serve(0, 1e9)))
