"""A profile learns when requests come, forgets, survives its store, and never learns from what nobody saw."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.forecast import (
    DAY,
    SLOT_S,
    WEEK,
    Profile,
    Score,
    count,
    decode,
    encode,
    expected,
    observe,
    weeks_seen,
)


def learned(weeks: int, *, active: set[int], requests: int = 60) -> Profile:
    profile = Profile()
    for slot in range(weeks * WEEK):
        profile = observe(profile, slot, requests if slot % WEEK in active else 0)
    return profile


def test_after_one_week_the_same_slot_is_likely_and_others_are_not() -> None:
    profile = learned(1, active={50})
    assert expected(profile, WEEK + 50).probability == pytest.approx(1.25 / 3), "a week ago, not yesterday"
    assert expected(profile, WEEK + 51).probability < 0.15
    assert expected(profile, WEEK + 50).rate == pytest.approx(0.1)
    assert weeks_seen(profile) == pytest.approx(1.0)


def test_yesterday_counts_for_a_week() -> None:
    profile = Profile()
    for slot in range(DAY):
        profile = observe(profile, slot, int(slot == 30))
    assert expected(profile, DAY + 30).probability == pytest.approx(1.25 / 2)
    assert expected(profile, 3 * DAY + 30).probability == pytest.approx(0.25), "nobody knows the day before that day"


def test_many_weeks_make_it_sure_and_new_habits_are_learned() -> None:
    profile = learned(8, active={50})
    assert expected(profile, 8 * WEEK + 50).probability > 0.65
    for slot in range(8 * WEEK, 12 * WEEK):
        profile = observe(profile, slot, 0)
    assert expected(profile, 12 * WEEK + 50).probability < 0.35


def test_requests_are_counted_into_the_slot_in_which_they_came() -> None:
    profile = Profile()
    for at in range(0, 3 * SLOT_S, 30):
        profile = count(profile, float(at), 1 if SLOT_S <= at < 2 * SLOT_S else 0, 30)
    assert profile.last_slot == 1
    assert expected(profile, WEEK + 1).rate == pytest.approx(20 / SLOT_S)
    assert expected(profile, WEEK).probability < 0.15


def test_a_slot_that_nobody_watched_teaches_nothing() -> None:
    profile = count(learned(1, active={50}), float((WEEK + 50) * SLOT_S), 0, 60)
    profile = count(profile, float((WEEK + 60) * SLOT_S), 0, 30)
    assert expected(profile, 2 * WEEK + 50).probability == pytest.approx(1.25 / 2)
    assert expected(profile, WEEK + 50 + DAY).probability == pytest.approx(0.25 / 2), "and yesterday is unknown"


def test_a_clock_that_goes_back_unlearns_nothing() -> None:
    profile = learned(1, active={50})
    profile = count(profile, float((WEEK + 10) * SLOT_S), 5, 30)
    assert count(profile, 0.0, 7, 30) == profile


def test_a_stored_profile_is_small_and_comes_back_whole() -> None:
    profile = learned(2, active=set(range(300, 400)))
    assert decode(encode(profile)) == profile
    assert len(encode(profile)) < 9_000


@pytest.mark.parametrize(
    "text",
    [b"", b"nonsense", encode(Profile())[:-9], zlib.compress(b"\x92\x02\x90"), zlib.compress(bytes(10_000_000))],
)
def test_damaged_profiles_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="profile"):
        decode(text)


def test_scores_are_shares_of_what_happened() -> None:
    assert (Score().hit_rate, Score().precision) == (None, None)
    score = Score(hits=3, misses=1, wasted=2)
    assert (score.hit_rate, score.precision) == (0.75, 0.6)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1000)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_probabilities_are_probabilities(steps: list[tuple[int, int]]) -> None:
    profile, slot = Profile(), 0
    for skipped, requests in steps:
        slot += skipped + 1
        profile = observe(profile, slot, requests)
        for ahead in (1, DAY, WEEK):
            found = expected(profile, slot + ahead)
            assert 0 < found.probability < 1
            assert found.rate >= 0
    assert decode(encode(profile)) == profile
