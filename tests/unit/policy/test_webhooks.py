"""F38: a receiver that is down for a day, in virtual time, gets its message; one that is down for good is given up."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.webhooks import GIVE_UP_S, JITTER, PAUSES_S, next_try

DAY_S = 86_400.0


def tries_until(down_s: float, chance: random.Random) -> tuple[int, float | None]:
    """Return how many tries a receiver sees that is down so long, and when the last one came (None: given up)."""
    since = now = 1_000_000.0
    tries = 0
    while now - since < down_s:
        tries += 1
        due = next_try(tries, since=since, now=now, chance=chance.random())
        if due is None:
            return tries, None
        now = due
    return tries + 1, now - since


@pytest.mark.parametrize("seed", range(20))
def test_a_receiver_that_is_down_for_a_day_gets_its_message(seed: int) -> None:
    tries, delivered = tries_until(DAY_S, random.Random(seed))
    assert delivered is not None
    assert delivered < DAY_S + PAUSES_S[-1] * (1 + JITTER)
    assert 8 <= tries <= 16


@pytest.mark.parametrize("seed", range(20))
def test_one_that_is_down_for_good_is_given_up_after_three_days(seed: int) -> None:
    tries, delivered = tries_until(30 * DAY_S, random.Random(seed))
    assert delivered is None
    assert 20 <= tries <= 40


def test_a_restart_is_waited_out_in_seconds() -> None:
    tries, delivered = tries_until(20.0, random.Random(1))
    assert tries == 3
    assert delivered is not None
    assert delivered < 60


@given(
    tries=st.integers(1, 1000),
    waited=st.floats(0, 2 * GIVE_UP_S),
    chance=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None, max_examples=60)
def test_every_pause_is_within_its_jitter_and_none_comes_too_late(tries: int, waited: float, chance: float) -> None:
    due = next_try(tries, since=0.0, now=waited, chance=chance)
    pause = PAUSES_S[min(tries, len(PAUSES_S)) - 1]
    if due is None:
        assert waited + pause * (1 + JITTER) >= GIVE_UP_S
    else:
        assert pause * (1 - JITTER) * 0.999 <= due - waited <= pause * (1 + JITTER) * 1.001
        assert due <= GIVE_UP_S
