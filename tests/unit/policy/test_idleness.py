"""How long to stay awake is learned from gaps that gather, and from nothing else."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.idleness import BINS, GAPS_MIN, Gaps, awake, priced, with_gap


def gaps_of(*seconds: float) -> Gaps:
    gaps = Gaps()
    for gap_s in seconds:
        gaps = with_gap(gaps, gap_s)
    return gaps


def test_gaps_that_gather_are_outlasted() -> None:
    found = awake(gaps_of(*[400.0] * 20), 300)
    assert found.is_awake(420)
    assert not found.is_awake(480)
    assert "of 20 gaps" in found.reason


def test_rare_long_gaps_do_not_keep_it_awake_for_ever() -> None:
    found = awake(gaps_of(*[90.0] * 199, 10_000.0), 300)
    assert not found.is_awake(200)


def test_long_gaps_of_one_length_are_slept_through() -> None:
    found = awake(gaps_of(*[3600.0] * 20), 300)
    assert found.is_awake(20)
    assert not found.is_awake(1800)
    assert found.is_awake(3500), "awake before it is asked for"
    assert not found.is_awake(4100)


def test_few_gaps_flat_gaps_and_gaps_of_days_change_nothing() -> None:
    chance = random.Random(1)
    for gaps in (
        gaps_of(*[400.0] * 9),
        gaps_of(*[chance.uniform(0, BINS * 60) for _ in range(2000)]),
        gaps_of(*[400.0] * 10, *[100_000.0] * 30),
    ):
        found = awake(gaps, 300)
        assert (found.is_awake(299), found.is_awake(300)) == (True, False)


@given(st.lists(st.floats(0, 1e6), max_size=60), st.floats(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_it_is_awake_right_after_a_request_and_asleep_in_the_end(seconds: list[float], fixed_s: float) -> None:
    found = awake(gaps_of(*seconds), fixed_s)
    assert found.is_awake(0)
    assert not found.is_awake(max(fixed_s, 1.2 * BINS * 60))
    assert found.reason


def test_a_price_outlasts_what_is_worth_it_and_nothing_else() -> None:
    most_in_time = gaps_of(*[400.0] * 15, *[5000.0] * 5)
    assert 420 < priced(most_in_time, 300, worth_s=900).sleep_s < 480, "the long ones cost more than they are worth"
    assert priced(most_in_time, 300, worth_s=100).sleep_s == 30, "sleeping at once is cheaper than any waiting"
    assert priced(most_in_time, 300, worth_s=100_000).sleep_s > 5000
    assert "worth 900 s" in priced(most_in_time, 300, worth_s=900).reason


def test_a_price_too_needs_gaps_to_learn_from() -> None:
    assert priced(gaps_of(*[400.0] * (GAPS_MIN - 1)), 300, worth_s=900).sleep_s == 300


@given(st.lists(st.integers(1, BINS + 20), min_size=GAPS_MIN, max_size=60), st.floats(60, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_other_time_costs_less(minutes: list[int], worth_s: float) -> None:
    def cost(stay: int) -> float:
        """Waiting and cold starts, in seconds, of who stays awake for so many minutes."""
        return sum(60 * (at + 0.5) if at < stay else 60 * stay + worth_s for at in minutes)

    found = priced(gaps_of(*[60.0 * at for at in minutes]), 300, worth_s)
    stays = max(found.sleep_s / 1.1 / 60, 0.0)
    least = min(cost(stay) for stay in range(BINS + 1))
    assert math.isclose(cost(round(stays) if stays > 0.6 else 0), least)
