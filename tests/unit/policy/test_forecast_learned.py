"""Weeks learned at once are what they are slot by slot."""

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.forecast import Profile, expected, learned, observe


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 3000), st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 400))
def test_weeks_at_once_teach_what_single_slots_do(first, pattern, gap) -> None:
    counts = (pattern * 60)[:1100] if pattern else []
    one = Profile()
    for slot, requests in enumerate(counts, first):
        one = observe(one, slot, requests)
    assert learned(Profile(), first, counts) == one
    later = first + len(counts) + gap
    more = observe(observe(one, later, 5), later + 1, 0)
    assert learned(learned(Profile(), first, counts), later, [5, 0]) == more
    assert expected(one, later) == expected(learned(Profile(), first, counts), later)
