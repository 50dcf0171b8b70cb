"""What settings of sizes may be; the defaults may."""

import math

import msgspec
import pytest

from modelyard.domain.autoscale_bounds import RANGES, contradictions, faults
from modelyard.domain.endpoints import Autoscale, Scaling, Tier

DEFAULTS = msgspec.structs.asdict(Autoscale())


def test_every_number_has_bounds_and_the_defaults_are_within() -> None:
    numbers = {
        name for name, value in DEFAULTS.items() if isinstance(value, int | float) and value not in (True, False)
    }
    assert numbers <= RANGES.keys() <= DEFAULTS.keys()
    assert not list(faults(DEFAULTS))
    assert not list(contradictions(Autoscale(), Scaling()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e12])
def test_what_no_range_has_is_refused_everywhere(value: float) -> None:
    assert {name for name, _ in faults(dict.fromkeys(RANGES, value))} == RANGES.keys()


def test_words_and_names_are_checked_and_nothing_is_asked_of_what_is_not_given() -> None:
    bad = {"tier": "tepid", "idle": "never", "burst_pool": "x" * 65, "node_pool": "../x"}
    assert [name for name, _ in faults(bad)] == list(bad)
    assert not list(faults({"tier": None, "burst_pool": "", "target_latency_s": None}))


def test_settings_that_work_against_each_other_are_told() -> None:
    restless = Autoscale(tier=Tier.COLD, down_utilization=85.0)
    assert [name for name, _ in contradictions(restless, Scaling())] == ["down_utilization", "tier"]
    assert not list(contradictions(Autoscale(tier=Tier.COLD), Scaling(scale_to_zero=True)))
