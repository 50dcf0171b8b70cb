"""Searching settings: what is tried, who goes on, and who is judged on what."""

import random

import msgspec
import pytest

from modelyard.domain.endpoints import IdleTime
from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.fleet.search import Days, apply, drawn, grid, halved, judged, loss
from modelyard.sim.fleet.tally import Outcome

SPACE = {"down_utilization": (30.0, 45.0, 60.0), "idle_s": (60.0, 300.0)}
DAYS = Days(training=(7.0, 8.0), held_out=(12.0, 13.0))


def outcome(gpu_hours: float, **changes: object) -> Outcome:
    """Return an outcome of which all that is not named is nothing."""
    hints = {name: 0 for name in Outcome.__struct_fields__ if name not in {"by_kind", "series"}}
    return msgspec.convert({**hints, "online_gpu_hours": gpu_hours, **changes}, Outcome)


class Runs:
    """Costs more the farther settings are from the best; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []

    def __call__(self, scenario: Scenario, seed: int) -> Outcome:
        self.asked.append((scenario.start_day, scenario.hours))
        off = abs(scenario.rules.down_utilization - 45) + abs(scenario.idle_s - 60) / 10
        return outcome(100 + off + seed)


def test_settings_are_applied_by_name() -> None:
    found = apply(Scenario(), {"idle": "learned", "down_utilization": 45.0, "idle_s": 60.0})
    assert (found.rules.idle, found.rules.down_utilization, found.idle_s) == (IdleTime.LEARNED, 45.0, 60.0)
    with pytest.raises(ValueError, match="no settings of the autoscaler: nonsense"):
        apply(Scenario(), {"nonsense": 1.0})


def test_candidates_are_different_and_the_same_for_a_seed() -> None:
    assert len(grid(SPACE)) == 6
    some = drawn(SPACE, 4, random.Random(1))
    assert len({tuple(one.items()) for one in some}) == 4
    assert some == drawn(SPACE, 4, random.Random(1))
    assert len(drawn(SPACE, 99, random.Random(1))) == 6


def test_the_better_half_goes_on_with_twice_the_hours_on_training_days_only() -> None:
    runs = Runs()
    trials = halved(Scenario(), grid(SPACE), DAYS, runs, hours=2.0)
    assert trials[0].settings == {"down_utilization": 45.0, "idle_s": 60.0}
    assert runs.asked == [(7.0, 2.0)] * 6 + [(8.0, 4.0)] * 3
    assert sorted(len(trial.losses) for trial in trials) == [1, 1, 1, 2, 2, 2]


def test_the_verdict_is_of_days_that_nobody_was_tuned_on() -> None:
    runs = Runs()
    verdict = judged(Scenario(), {"down_utilization": 45.0, "idle_s": 60.0}, DAYS, runs, (1, 2))
    assert {day for day, _ in runs.asked} == {12.0, 13.0}
    assert len(verdict.gains) == 4
    assert verdict.is_clear


def test_callers_who_wait_cost_too() -> None:
    assert loss(outcome(10.0, activations=4)) == 11.0
    assert loss(outcome(10.0, requests=3600.0, late=0.1, dropped=0.01)) == pytest.approx(12.0)
