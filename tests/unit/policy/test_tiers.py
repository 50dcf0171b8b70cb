"""Hot, warm and cold follow from what is seen, and a pin says when it is not met."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import Tier
from modelyard.policy.tiers import Seen, tier_of


@pytest.mark.parametrize(
    ("seen", "tier", "reason"),
    [
        ({"ready": 2, "in_flight": 3}, Tier.HOT, "3 requests on 2 ready replicas"),
        ({"ready": 1, "idle_s": 4.0}, Tier.HOT, "1 ready; last request 4 s ago"),
        ({"ready": 1, "idle_s": 310.0}, Tier.WARM, "1 ready; no request for 310 s"),
        ({"ready": 1}, Tier.WARM, "1 ready; no request yet"),
        ({"ready": 1, "idle_s": 310.0, "floor": 1}, Tier.HOT, "1 ready; at least 1 is kept"),
        ({"ready": 1, "idle_s": 310.0, "pin": Tier.HOT}, Tier.HOT, "1 ready; at least 1 is kept; pinned hot"),
        (
            {"ready": 1, "idle_s": 310.0, "floor": 1, "pin": Tier.WARM},
            Tier.WARM,
            "1 ready; no request for 310 s; pinned warm",
        ),
        ({"asleep": 1}, Tier.WARM, "1 asleep beside the weights; awake in moments"),
        ({"loading": 1, "cached_on": ["gpu-3"]}, Tier.COLD, "1 loading; weights are cached on gpu-3"),
        ({"cached_on": ["b", "a", "c"]}, Tier.COLD, "nothing runs; weights are cached on a and 2 more"),
        ({}, Tier.COLD, "nothing runs; weights are in the store"),
        ({"has_weights": False}, Tier.COLD, "nothing runs; it has no weights to load"),
        ({"is_stored": False}, Tier.COLD, "nothing runs; weights were not fetched yet"),
    ],
)
def test_the_tier_and_its_reason(seen: dict[str, Any], tier: Tier, reason: str) -> None:
    standing = tier_of(Seen(**seen))
    assert (standing.tier, standing.reason) == (tier, reason)


def test_a_pin_that_is_not_met_yet_is_told() -> None:
    assert tier_of(Seen(loading=1, pin=Tier.HOT)).is_short
    assert not tier_of(Seen(ready=1, pin=Tier.WARM)).is_short
    assert not tier_of(Seen(ready=1, in_flight=1, pin=Tier.COLD)).is_short


@settings(max_examples=100, deadline=None)
@given(ready=st.integers(0, 3), idle=st.floats(0, 1e6), more=st.integers(1, 50), floor=st.integers(0, 2))
def test_more_load_never_makes_an_endpoint_colder(ready: int, idle: float, more: int, floor: int) -> None:
    order = [Tier.COLD, Tier.WARM, Tier.HOT]
    calm = tier_of(Seen(ready=ready, idle_s=idle, floor=floor))
    loaded = tier_of(Seen(ready=ready, idle_s=0.0, in_flight=more, floor=floor))
    assert order.index(loaded.tier) >= order.index(calm.tier)
