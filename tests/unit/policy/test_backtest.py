"""A replay shows what the forecast would have changed."""

import random

import pytest
from bench.autoscale.traces import office

from modelyard.domain.endpoints import Autoscale
from modelyard.policy.backtest import backtest, by_slot
from modelyard.policy.forecast import WEEK


def test_an_office_that_opens_at_nine_is_foreseen_from_its_second_week_on() -> None:
    chance = random.Random(5)
    history = {slot: 9 for slot, rate in enumerate(office(4, chance)) if rate}
    found = backtest(history, Autoscale(), idle_s=300, load_s=60, first=0, last=4 * WEEK - 1)
    assert (found.days, found.learned_days) == (21, 7)
    assert found.forecast.cold_starts < found.fixed.cold_starts / 2
    assert found.forecast.gpu_hours < 1.3 * found.fixed.gpu_hours
    assert found.hit_rate is not None
    assert found.hit_rate > 0.5
    assert found.precision is not None
    assert found.precision > 0.8
    assert found.recall is not None
    assert found.recall > 0.8


def test_chance_is_not_foreseen_and_costs_little() -> None:
    chance = random.Random(5)
    history = {chance.randrange(4 * WEEK): 1 for _ in range(100)}
    rules = Autoscale(prewarm_cold_cost_s=900)
    found = backtest(history, rules, idle_s=300, load_s=60, first=0, last=4 * WEEK - 1)
    assert found.forecast.cold_starts <= found.fixed.cold_starts
    assert found.forecast.gpu_hours < 1.6 * found.fixed.gpu_hours + 5


def test_without_pre_warming_nothing_changes() -> None:
    history = dict.fromkeys(range(0, 2 * WEEK, 50), 1)
    found = backtest(history, Autoscale(prewarm=False), idle_s=300, load_s=60)
    assert found.fixed == found.forecast
    assert found.hit_rate == 0


def test_cold_starts_and_hours_are_exact_where_they_can_be_counted() -> None:
    found = backtest({0: 1, 10: 1}, Autoscale(prewarm=False), idle_s=300, load_s=60, accelerators=2)
    assert found.fixed.cold_starts == 2
    assert found.fixed.gpu_hours == pytest.approx(2 * 2 * 360 / 3600)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        backtest({}, Autoscale(), idle_s=300, load_s=60)
    with pytest.raises(ValueError, match="more than 400 days"):
        backtest({0: 1, 10**6: 1}, Autoscale(), idle_s=300, load_s=60)


def test_moments_are_kept_by_ten_minutes() -> None:
    assert by_slot([0.0, 599.9, 600.0, 1800.0]) == {0: [0.0, 599.9], 1: [600.0], 3: [1800.0]}


def test_a_burst_is_replayed_at_its_exact_times() -> None:
    burst = by_slot(at / 2 for at in range(100))
    found = backtest(burst, Autoscale(), idle_s=5, load_s=5)
    assert (found.requests, found.fixed.cold_starts) == (100, 1)
    assert found.fixed.gpu_hours == pytest.approx((49.5 + 5) / 3600)


def test_requests_that_come_during_a_load_wait_for_the_same_one() -> None:
    found = backtest(by_slot([0.0, 20.0, 40.0]), Autoscale(), idle_s=5, load_s=60)
    assert found.fixed.cold_starts == 1
    assert found.fixed.gpu_hours == pytest.approx(65 / 3600)
