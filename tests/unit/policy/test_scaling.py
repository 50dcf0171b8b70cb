"""How many replicas an endpoint should have: a table of stories, and what no sequence of observations may break."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.endpoints import Release, Scaling
from modelyard.policy.scaling import Decision, Memory, Seen, decide, split

SLEEPY = Scaling(min_replicas=1, max_replicas=4, scale_to_zero=True, idle_s=300)
STEADY = Scaling(min_replicas=2, max_replicas=4, idle_s=300)


def seen(now_s: float = 1000.0, **changes: object) -> Seen:
    usual = {"replicas": 1, "ready": 1, "slots": 4, "gateways": 1, "is_proven": True}
    return Seen(now_s=now_s, **{**usual, **changes})  # type: ignore[arg-type]


def follow(spec: Scaling, *steps: Seen) -> list[Decision]:
    """Feed the steps one after the other, as a controller does."""
    memory: Memory | None = None
    decisions = []
    for step in steps:
        decision = decide(spec, memory, step)
        memory = decision.memory
        decisions.append(decision)
    return decisions


STORIES = {
    "a fresh deploy starts one even where zero is allowed": (
        SLEEPY,
        [seen(replicas=0, ready=0, is_proven=False)],
        [1],
    ),
    "a fresh deploy starts its least number": (STEADY, [seen(replicas=0, ready=0, is_proven=False)], [2]),
    "a fresh deploy starts without any gateway": (
        SLEEPY,
        [seen(replicas=0, ready=0, is_proven=False, gateways=0)],
        [1],
    ),
    "a proven endpoint at zero stays there": (SLEEPY, [seen(replicas=0, ready=0)], [0]),
    "a queued request wakes it at once": (
        SLEEPY,
        [seen(replicas=0, ready=0), seen(1000.001, replicas=0, ready=0, queued=1)],
        [0, 1],
    ),
    "a request that a gateway counts as running wakes it as well": (
        SLEEPY,
        [seen(replicas=0, ready=0, in_flight=1)],
        [1],
    ),
    "the size follows demand in one step": (SLEEPY, [seen(in_flight=4, queued=5)], [3]),
    "never more than configured": (SLEEPY, [seen(in_flight=4, queued=500)], [4]),
    "to zero after the idle time and not before": (
        SLEEPY,
        [seen(idle_s=0), seen(1299, idle_s=299), seen(1300, idle_s=300)],
        [1, 1, 0],
    ),
    "idle time counts from ready, not from the request long ago": (
        SLEEPY,
        [
            seen(1000, ready=0, is_proven=False, idle_s=math.inf),
            seen(1400, ready=1, idle_s=math.inf),
            seen(1699, idle_s=math.inf),
            seen(1700, idle_s=math.inf),
        ],
        [1, 1, 1, 0],
    ),
    "a load is finished even when whoever asked has left": (
        SLEEPY,
        [
            seen(1000, replicas=0, ready=0, queued=1),
            seen(1001, replicas=1, ready=0, idle_s=1),
            seen(1900, replicas=1, ready=0, idle_s=900),
            seen(1901, replicas=1, ready=1, idle_s=901),
            seen(2201, replicas=1, ready=1, idle_s=1201),
        ],
        [1, 1, 1, 1, 0],
    ),
    "a proven endpoint that only crashes sleeps in the end": (
        SLEEPY,
        [
            seen(1000, replicas=0, ready=0, queued=1),
            seen(1001, replicas=1, ready=0, idle_s=1),
            seen(1400, replicas=0, ready=0, idle_s=400),
        ],
        [1, 1, 0],
    ),
    "without a gateway it is neither put to sleep nor shrunk": (
        SLEEPY,
        [seen(in_flight=8), seen(9000, gateways=0), seen(9001, gateways=1, idle_s=8001)],
        [2, 2, 2],
    ),
    "down only after a whole calm period, to the most that was needed in it": (
        STEADY,
        [
            seen(1000, replicas=4, ready=4, in_flight=16),
            seen(1001, replicas=4, ready=4, in_flight=4),
            seen(1100, replicas=4, ready=4, in_flight=12),
            seen(1300, replicas=4, ready=4, in_flight=4),
            seen(1301, replicas=4, ready=4, in_flight=4),
        ],
        [4, 4, 4, 4, 3],
    ),
    "full demand starts the calm period anew": (
        STEADY,
        [
            seen(1000, replicas=3, ready=3, in_flight=12),
            seen(1001, replicas=3, ready=3),
            seen(1200, replicas=3, ready=3, in_flight=12),
            seen(1301, replicas=3, ready=3),
            seen(1600, replicas=3, ready=3),
            seen(1601, replicas=3, ready=3),
        ],
        [3, 3, 3, 3, 3, 2],
    ),
    "a deleted endpoint has none": (STEADY, [seen(in_flight=8, is_deleted=True)], [0]),
    "a raised minimum is followed": (STEADY, [seen(replicas=1, ready=1)], [2]),
}


@pytest.mark.parametrize(("spec", "steps", "sizes"), STORIES.values(), ids=STORIES.keys())
def test_size_follows_the_story(spec: Scaling, steps: list[Seen], sizes: list[int]) -> None:
    decisions = follow(spec, *steps)
    assert [decision.replicas for decision in decisions] == sizes, [decision.reason for decision in decisions]


def test_every_decision_says_why() -> None:
    assert (
        "1 queued and 0 running requests need 1 x 4 slots"
        in follow(SLEEPY, seen(replicas=0, ready=0, queued=1))[0].reason
    )
    assert follow(SLEEPY, seen(), seen(1300, idle_s=300))[1].reason == "no request for 300 s"
    assert "no gateway reports" in follow(SLEEPY, seen(gateways=0))[0].reason


scalings = st.builds(
    lambda least, more, zero, idle_s: Scaling(least, least + more, scale_to_zero=zero, idle_s=idle_s),
    st.integers(1, 3),
    st.integers(0, 4),
    st.booleans(),
    st.floats(1, 100),
)
steps = st.lists(
    st.builds(
        lambda gap_s, **rest: (gap_s, Seen(now_s=0, slots=3, **rest)),
        st.floats(0, 60),
        replicas=st.integers(0, 4),
        ready=st.integers(0, 4),
        gateways=st.integers(0, 2),
        queued=st.integers(0, 20),
        in_flight=st.integers(0, 20),
        idle_s=st.floats(0, 200) | st.just(math.inf),
        is_proven=st.booleans(),
    ),
    max_size=30,
)


@given(scalings, steps)
def test_no_history_leads_out_of_bounds_or_to_sleep_without_proof(
    spec: Scaling, history: list[tuple[float, Seen]]
) -> None:
    now_s, memory, before = 0.0, None, None
    for gap_s, timeless in history:
        now_s += gap_s
        one = msgspec.structs.replace(timeless, now_s=now_s)
        decision = decide(spec, memory, one)
        assert spec.floor <= decision.replicas <= spec.max_replicas
        assert decision.reason
        if one.demand > 0 and one.gateways > 0:
            assert decision.replicas >= 1, "demand is never answered with zero"
        if one.gateways == 0 and before is not None:
            assert decision.replicas == max(before, spec.floor), "missing data changes nothing"
        if decision.replicas == 0 and before:
            assert now_s - decision.memory.active_s >= spec.idle_s, "it went to sleep before its time"
        memory, before = decision.memory, decision.replicas


@given(st.integers(0, 40), st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_replicas_are_divided_wholly_and_every_release_with_traffic_has_one(replicas: int, weights: list[int]) -> None:
    releases = [Release(f"ver-{index}", weight) for index, weight in enumerate(weights)]
    shares = split(replicas, releases)
    weighted = sum(weight > 0 for weight in weights)
    assert sum(shares.values()) == (max(replicas, weighted) if replicas and weighted else 0)
    for release in releases:
        assert (shares[release.version_id] > 0) == (release.weight > 0 and replicas > 0)


def test_replicas_are_divided_by_weight() -> None:
    assert split(10, [Release("stable", 90), Release("canary", 10)]) == {"stable": 9, "canary": 1}
    assert split(1, [Release("stable", 90), Release("canary", 10)]) == {"stable": 1, "canary": 1}
    assert split(3, [Release("stable", 100), Release("old", 0)]) == {"stable": 3, "old": 0}


def test_a_release_that_shadows_gets_one_replica_on_top_and_sleeps_with_the_others() -> None:
    releases = [Release("stable", 100), Release("next", 0, shadow=10), Release("old", 0)]
    assert split(3, releases) == {"stable": 3, "next": 1, "old": 0}
    assert split(0, releases) == {"stable": 0, "next": 0, "old": 0}
