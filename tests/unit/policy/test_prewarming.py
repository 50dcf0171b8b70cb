"""It starts before requests that are expected, within a budget, and counts how often that was right."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import Autoscale, Tier
from modelyard.policy.forecast import SLOT_S, WEEK, Profile, observe
from modelyard.policy.prewarming import Expected, Memory, Situation, expect, threshold

RULES = Autoscale()
NINE = 54
"""The slot of nine o'clock on the first day of the week."""
AT_NINE = float((2 * WEEK + NINE) * SLOT_S)


def known(active: range = range(NINE, NINE + 6), requests: int = 600) -> Memory:
    profile = Profile()
    for slot in range(2 * WEEK):
        profile = observe(profile, slot, requests if slot % WEEK in active else 0)
    return Memory(profile)


def seen(now_s: float, **changes: object) -> Situation:
    usual = {"ready": 0, "demand": 0, "needed": 0, "load_s": 60.0}
    return Situation(now_s=now_s, **{**usual, **changes})  # type: ignore[arg-type]


def test_it_starts_a_load_and_five_minutes_before_and_says_why() -> None:
    assert expect(RULES, known(), seen(AT_NINE - 361)).replicas == 0
    answer = expect(RULES, known(), seen(AT_NINE - 359))
    assert answer.replicas == 1
    assert answer.reason.startswith("requests at 09:00 UTC with ")


def test_it_holds_while_more_is_expected_and_no_longer() -> None:
    end_s = AT_NINE + 6 * SLOT_S
    assert expect(RULES, known(), seen(end_s - 1)).replicas == 1
    assert expect(RULES, known(), seen(end_s)).replicas == 0


def test_a_busier_hour_gets_more_replicas() -> None:
    assert expect(RULES, known(), seen(AT_NINE, capacity=0.25)).replicas == 6  # 1 a second / (0.75 · 0.25)


def test_the_more_accelerators_wait_the_surer_it_has_to_be() -> None:
    at_900 = Autoscale(prewarm_cold_cost_s=900)
    assert threshold(at_900, 60.0, accelerators=8) > 0.89 > 0.55 > threshold(at_900, 60.0)


def test_a_cold_start_that_costs_little_is_not_avoided() -> None:
    cheap = Autoscale(prewarm_cold_cost_s=60)
    assert threshold(cheap, 60.0) > 0.9
    assert expect(cheap, known(), seen(AT_NINE)).replicas == 0


@pytest.mark.parametrize("rules", [Autoscale(prewarm=False), Autoscale(tier=Tier.COLD)])
def test_whoever_does_not_want_it_gets_none(rules: Autoscale) -> None:
    assert expect(rules, known(), seen(AT_NINE)).replicas == 0


def follow(rules: Autoscale, memory: Memory, *steps: Situation) -> list[Expected]:
    answers = []
    for step in steps:
        answers.append(expect(rules, memory, step))
        memory = answers[-1].memory
    return answers


def test_hits_misses_and_waits_for_nothing_are_counted() -> None:
    score = follow(
        RULES,
        known(),
        seen(AT_NINE - 300),
        seen(AT_NINE - 200, ready=1),
        seen(AT_NINE + 10, ready=1, demand=1),
        seen(AT_NINE + 20, ready=1, demand=1),
    )[-1].memory.profile.score
    assert (score.hits, score.misses, score.wasted) == (1, 0, 0)
    score = follow(RULES, known(), seen(0.0, demand=1), seen(1.0, demand=2), seen(60.0, ready=1, demand=2))
    assert score[-1].memory.profile.score.misses == 1
    end_s = AT_NINE + 6 * SLOT_S
    score = follow(RULES, known(), seen(end_s - 60, ready=1), seen(end_s + 60, ready=1), seen(end_s + 90))
    assert score[-1].memory.profile.score.wasted == 1


def test_only_what_waits_for_requests_is_booked() -> None:
    answers = follow(
        Autoscale(prewarm_cold_cost_s=3600),
        known(),
        seen(AT_NINE, accelerators=4),
        seen(AT_NINE + 30, ready=1, accelerators=4),
        seen(AT_NINE + 60, ready=1, needed=1, demand=3, accelerators=4),
        seen(AT_NINE + 90, ready=1, needed=1, demand=3, accelerators=4),
    )
    assert answers[-1].memory.profile.score.day_s == pytest.approx(4 * 60)


@given(
    st.floats(0.0, 3.0),
    st.lists(st.tuples(st.floats(0, 59), st.integers(0, 2), st.integers(0, 1), st.integers(0, 2)), max_size=80),
    st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_the_budget_of_a_day_is_never_exceeded(
    budget: float, steps: list[tuple[float, int, int, int]], accelerators: int
) -> None:
    rules = Autoscale(prewarm_budget=budget, prewarm_cold_cost_s=7200)
    memory, now_s = known(range(NINE, NINE + 60), requests=6000), AT_NINE
    for gap_s, ready, demand, needed in steps * 4:
        now_s += gap_s
        one = seen(now_s, ready=ready, demand=demand, needed=needed, accelerators=accelerators, capacity=2.0)
        memory = expect(rules, memory, one).memory
        assert memory.profile.score.day_s <= budget * 3600 + 1e-6


def test_a_new_day_has_a_new_budget() -> None:
    memory = known(range(WEEK))
    spent = msgspec.structs.replace(memory.profile.score, day=int(AT_NINE // 86_400), day_s=7200.0)
    memory = msgspec.structs.replace(memory, profile=msgspec.structs.replace(memory.profile, score=spent))
    used_up = expect(RULES, memory, seen(AT_NINE))
    assert (used_up.replicas, "used up" in used_up.reason) == (0, True)
    assert expect(RULES, memory, seen(AT_NINE + 86_400)).replicas == 1
