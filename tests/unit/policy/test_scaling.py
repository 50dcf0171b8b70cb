"""How many replicas an endpoint should have: a table of stories, and what no sequence of observations may break."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import SOURCE, Autoscale, IdleTime, Release, Scaling, Tier
from modelyard.policy.engine_model import Capacity
from modelyard.policy.scaling import Decision, Memory, Seen, decide, is_kept_awake, numbers, split

SLEEPY = Scaling(min_replicas=1, max_replicas=4, scale_to_zero=True, idle_s=300)
STEADY = Scaling(min_replicas=2, max_replicas=4, idle_s=300)
FLEET = Scaling(min_replicas=1, max_replicas=64)
DEFAULTS = SOURCE
"""Stories are told with the source's numbers, so that its triggers are held to the letter."""
FAST = Capacity(requests_s=1.0, tokens_s=100.0, source="a test")


def seen(now_s: float = 1000.0, **changes: object) -> Seen:
    usual = {"replicas": 1, "ready": 1, "slots": 4, "gateways": 1, "is_proven": True}
    return Seen(now_s=now_s, **{**usual, **changes})  # type: ignore[arg-type]


def follow(spec: Scaling, *steps: Seen, rules: Autoscale = DEFAULTS) -> list[Decision]:
    """Feed the steps one after the other, as a controller does."""
    memory: Memory | None = None
    decisions = []
    for step in steps:
        decision = decide(spec, memory, step, rules)
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
    "down only when no queue was there for five minutes and use was low for ten": (
        STEADY,
        [
            seen(1000, replicas=4, ready=4, in_flight=16),
            seen(1001, replicas=4, ready=4, in_flight=1),
            seen(1500, replicas=4, ready=4, in_flight=1),
            seen(1601, replicas=4, ready=4, in_flight=1),
            seen(1632, replicas=4, ready=4, in_flight=1),
            seen(1700, replicas=2, ready=2, in_flight=1),
            seen(9999, replicas=2, ready=2, in_flight=1),
        ],
        [4, 4, 4, 4, 2, 2, 2],
    ),
    "a request that waits starts the calm period anew": (
        STEADY,
        [
            seen(1000, replicas=4, ready=4),
            seen(1590, replicas=4, ready=4, queued=1),
            seen(1700, replicas=4, ready=4),
            seen(1999, replicas=4, ready=4),
            seen(2030, replicas=4, ready=4),
        ],
        [4, 4, 4, 4, 2],
    ),
    "use in the dead band keeps the size for ever": (
        STEADY,
        [seen(1000 + 600 * step, replicas=4, ready=4, in_flight=8) for step in range(6)],
        [4] * 6,
    ),
    "at most half goes at once, and never below what was needed since": (
        FLEET,
        [
            seen(1000, replicas=16, ready=16),
            seen(1300, replicas=16, ready=16, in_flight=18),
            seen(1700, replicas=16, ready=16),
            seen(1731, replicas=8, ready=8),
            seen(2400, replicas=8, ready=8),
        ],
        [16, 16, 8, 8, 4],
    ),
    "what loads is never stopped": (
        STEADY,
        [
            seen(1000, replicas=4, ready=3),
            seen(1700, replicas=4, ready=3),
            seen(1731, replicas=4, ready=4),
            seen(1770, replicas=4, ready=4),
        ],
        [4, 4, 2, 2],
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


# --- gates, target sizes, expectation ------------------------------------------------------------

BUSY = {"replicas": 4, "ready": 4, "slots": 40, "capacity": FAST}
RULED = {
    "more than 100 queued for more than 30 s": (
        FLEET,
        Autoscale(),
        [
            seen(1000, replicas=4, ready=4, slots=40, queued=101, in_flight=40),
            seen(1030, replicas=4, ready=4, slots=40, queued=101, in_flight=40),
            seen(1061, replicas=4, ready=4, slots=40, queued=101, in_flight=40),
        ],
        [4, 4, 5],  # 30 s is not more than 30 s
    ),
    "exactly 100 queued open nothing": (
        FLEET,
        Autoscale(),
        [seen(1000 + 31 * step, replicas=4, ready=4, slots=40, queued=100, in_flight=40) for step in range(5)],
        [4] * 5,
    ),
    "use above 85 % for more than two minutes": (
        FLEET,
        Autoscale(),
        [seen(1000 + 31 * step, **BUSY, in_flight=140, requests_s=3.5, load_s=60) for step in range(6)],
        [4, 4, 4, 4, 5, 5],
    ),
    "the engines' own word counts as well": (
        FLEET,
        Autoscale(),
        [seen(1000 + 31 * step, replicas=4, ready=4, slots=40, in_flight=1, utilization=0.9) for step in range(5)],
        [4, 4, 4, 4, 5],
    ),
    "p99 above twice the target for more than a minute": (
        FLEET,
        Autoscale(target_ttft_s=2.0),
        [seen(1000 + 31 * step, **BUSY, in_flight=1, ttft_p99_s=4.1) for step in range(3)],
        [4, 4, 5],
    ),
    "a target of whole answers is watched instead": (
        FLEET,
        msgspec.structs.replace(SOURCE, target_latency_s=10.0),
        [seen(1000 + 31 * step, **BUSY, in_flight=60, ttft_p99_s=60.0, latency_p99_s=19.0) for step in range(4)]
        + [seen(2000 + 31 * step, **BUSY, in_flight=60, ttft_p99_s=0.1, latency_p99_s=21.0) for step in range(3)],
        [4] * 6 + [5],
    ),
    "KV caches above 90 % for more than two minutes": (
        FLEET,
        Autoscale(),
        [seen(1000 + 31 * step, **BUSY, in_flight=1, kv_use=0.95) for step in range(5)],
        [4, 4, 4, 4, 5],
    ),
    "a spike that ends opens no gate": (
        FLEET,
        Autoscale(),
        [seen(1000 + 31 * step, **BUSY, in_flight=140 if step % 3 else 0) for step in range(9)],
        [4] * 9,
    ),
    "a wait above what is promised does not wait for a check": (
        FLEET,
        Autoscale(),
        [seen(1000, **BUSY, queued=2, in_flight=120), seen(1001, **BUSY, queued=2, in_flight=120, wait_s=5.5)],
        [4, 5],
    ),
    "while replicas load, only what the load itself needs comes on top": (
        FLEET,
        Autoscale(),
        [
            seen(1000, **BUSY, queued=20, in_flight=140, wait_s=9.0, load_s=60),
            seen(1001, **{**BUSY, "replicas": 5}, queued=20, in_flight=140, wait_s=9.0, load_s=60),
            seen(1002, **{**BUSY, "replicas": 5}, queued=20, in_flight=140, wait_s=9.0, requests_s=7.0, load_s=60),
            seen(1030, **{**BUSY, "replicas": 11, "ready": 11}, queued=1, in_flight=200, wait_s=6.0, load_s=60),
            seen(1063, **{**BUSY, "replicas": 11, "ready": 11}, queued=1, in_flight=200, wait_s=6.0, load_s=60),
        ],
        # 3.5 / 0.75 + 1 for the queue; 7 / 0.75 + 1; then one more only when the time of a load has passed.
        [6, 6, 11, 11, 12],
    ),
    "a target of utilisation says how busy they are meant to be": (
        msgspec.structs.replace(FLEET, metric="gpu_utilization", target_value=50.0),
        Autoscale(up_utilization_s=0),
        [seen(1000, **BUSY, in_flight=144), seen(1031, **BUSY, in_flight=144)],
        [4, 8],
    ),
    "a target of queue depth says how many may wait at each": (
        msgspec.structs.replace(FLEET, metric="queue_depth", target_value=20.0),
        Autoscale(),
        [seen(1000 + 31 * step, replicas=4, ready=4, slots=100, queued=150, load_s=60) for step in range(3)],
        [4, 8, 8],
    ),
    "no more than allowed, however late": (
        STEADY,
        Autoscale(),
        [seen(1000, replicas=4, ready=4, queued=1, in_flight=15, wait_s=60.0)],
        [4],
    ),
    "pinned hot never sleeps": (
        SLEEPY,
        Autoscale(tier=Tier.HOT),
        [seen(1000, idle_s=0), seen(9000, idle_s=8000)],
        [1, 1],
    ),
    "pinned hot wakes by itself": (SLEEPY, Autoscale(tier=Tier.HOT), [seen(1000, replicas=0, ready=0)], [1]),
    "pinned cold sleeps after half a minute": (
        SLEEPY,
        Autoscale(tier=Tier.COLD),
        [seen(1000, idle_s=0), seen(1029, idle_s=29), seen(1030, idle_s=30)],
        [1, 1, 0],
    ),
    "expected requests start it, hold it, and let it go": (
        SLEEPY,
        Autoscale(),
        [
            seen(1000, replicas=0, ready=0, idle_s=5000),
            seen(1010, replicas=0, ready=0, idle_s=5010, expected=2, expected_reason="nine o'clock"),
            seen(1100, replicas=2, ready=2, idle_s=5100, expected=2, expected_reason="nine o'clock"),
            seen(1900, replicas=2, ready=2, idle_s=5900, expected=1, expected_reason="nine o'clock"),
            seen(1910, replicas=1, ready=1, idle_s=5910),
        ],
        [0, 2, 2, 1, 0],
    ),
}


@pytest.mark.parametrize(("spec", "rules", "steps", "sizes"), RULED.values(), ids=RULED.keys())
def test_size_follows_the_rules(spec: Scaling, rules: Autoscale, steps: list[Seen], sizes: list[int]) -> None:
    decisions = follow(spec, *steps, rules=rules)
    assert [decision.replicas for decision in decisions] == sizes, [decision.reason for decision in decisions]


def test_what_is_pinned_cold_tells_its_own_idle_time() -> None:
    steps = seen(1000, idle_s=0), seen(1012, idle_s=12)
    assert follow(SLEEPY, *steps)[1].reason == "no request; asleep in 288 s unless one comes"
    cold = follow(SLEEPY, *steps, rules=Autoscale(tier=Tier.COLD))[1]
    assert cold.reason == "no request; asleep in 18 s unless one comes"


def regular(rules: Autoscale, every_s: int = 400) -> tuple[Memory, float]:
    """Return what is remembered after 15 requests, one every ``every_s``, and when the last of them came."""
    memory, now_s = None, 0.0
    for _ in range(15):
        for at in range(0, every_s, 20):
            memory = decide(SLEEPY, memory, seen(now_s + at, in_flight=int(at == 0), idle_s=float(at)), rules).memory
        now_s += every_s
    return decide(SLEEPY, memory, seen(now_s, in_flight=1), rules).memory, now_s


@pytest.mark.parametrize("idle", [IdleTime.LEARNED, IdleTime.PRICED])
def test_learned_idle_time_outlasts_the_gaps_there_were(idle: IdleTime) -> None:
    rules = Autoscale(idle=idle)
    memory, now_s = regular(rules)  # a fixed time of 300 s would sleep before each
    later = [decide(SLEEPY, memory, seen(now_s + at, idle_s=at), rules) for at in (301.0, 450.0, 800.0)]
    assert [decision.replicas for decision in later] == [1, 1, 0]
    assert later[0].reason == "no request; asleep in 161 s unless one comes"
    assert "gaps" in later[-1].reason


def test_an_idle_time_that_is_not_worth_it_sleeps_earlier_than_the_fixed_one() -> None:
    rules = Autoscale(idle=IdleTime.PRICED, prewarm_cold_cost_s=60)
    memory, now_s = regular(rules)
    later = [decide(SLEEPY, memory, seen(now_s + at, idle_s=at), rules) for at in (20.0, 40.0)]
    assert [decision.replicas for decision in later] == [1, 0]


def test_a_replica_of_many_accelerators_waits_for_less() -> None:
    rules = Autoscale(idle=IdleTime.PRICED)
    memory, now_s = regular(rules)
    one, eight = (seen(now_s + 301, idle_s=301.0, accelerators=number) for number in (1, 8))
    assert [decide(SLEEPY, memory, step, rules).replicas for step in (one, eight)] == [1, 0]


@pytest.mark.parametrize("idle", [IdleTime.LEARNED, IdleTime.PRICED])
def test_what_is_pinned_cold_learns_no_longer_time_and_wakes_for_requests_alone(idle: IdleTime) -> None:
    for every_s in (400, 4000):  # one to outlast, one to sleep through and to wake before
        memory, now_s = regular(Autoscale(idle=idle), every_s)
        cold = Autoscale(idle=idle, tier=Tier.COLD)
        asleep = decide(SLEEPY, memory, seen(now_s + 31, idle_s=31.0), cold)
        assert asleep.replicas == 0
        late = every_s - 20.0
        assert decide(SLEEPY, asleep.memory, seen(now_s + late, idle_s=late, replicas=0, ready=0), cold).replicas == 0


@pytest.mark.parametrize("idle", IdleTime)
def test_without_gaps_to_learn_from_the_fixed_time_holds(idle: IdleTime) -> None:
    rules = Autoscale(idle=idle)
    memory = decide(SLEEPY, None, seen(1000, in_flight=1), rules).memory
    later = [decide(SLEEPY, memory, seen(1000 + at, idle_s=at), rules) for at in (20.0, 299.0, 300.0)]
    assert [decision.replicas for decision in later] == [1, 1, 0]
    assert later[0].reason == "no request; asleep in 280 s unless one comes"


def test_who_is_kept_awake_by_idle_time_alone_is_not_waiting_for_a_forecast() -> None:
    rules = Autoscale(idle=IdleTime.LEARNED)
    memory, _ = regular(rules)
    kept = [is_kept_awake(memory, SLEEPY, rules, idle_s) for idle_s in (301.0, 450.0, 800.0)]
    assert kept == [True, True, False]
    assert is_kept_awake(None, SLEEPY, rules, 299.0)
    assert not is_kept_awake(memory, SLEEPY, Autoscale(idle=IdleTime.FIXED), 301.0)
    assert not is_kept_awake(msgspec.structs.replace(memory, replicas=0), SLEEPY, rules, 10.0)


def test_reasons_tell_gates_from_the_fast_path_and_events_get_the_numbers() -> None:
    late = seen(1000, **BUSY, queued=2, in_flight=120, wait_s=5.5)
    assert follow(FLEET, late)[0].reason.startswith("fast path: predicted wait 5.5 s, above 5 s: 5 replicas")
    full = [seen(1000 + 31 * step, **BUSY, in_flight=140) for step in range(5)]
    assert follow(FLEET, *full)[-1].reason.startswith("at the 30 s check: utilisation 88 %, above 85 % for 124 s")
    told = numbers(late, 5)
    assert (told["replicas"], told["queued"], told["wait_s"], told["utilization"]) == (5, 2, 5.5, 0.75)


loads = st.builds(
    dict,
    queued=st.integers(0, 300),
    in_flight=st.integers(0, 200),
    wait_s=st.floats(0, 20),
    utilization=st.floats(0, 1),
    kv_use=st.floats(0, 1),
    ttft_p99_s=st.floats(0, 30),
    requests_s=st.floats(0, 30),
)
busy_steps = st.lists(
    st.tuples(st.floats(0, 400), loads, st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)),
    min_size=1,
    max_size=15,
)


def _at(now_s: float, step: tuple[float, dict[str, float], int, int, int]) -> Seen:
    _, load, ready, loading, expected = step
    return seen(
        now_s, **load, replicas=ready + loading, ready=ready, slots=8, capacity=FAST, load_s=20.0, expected=expected
    )


@given(scalings, busy_steps, loads, st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_more_load_never_gives_fewer_replicas(
    spec: Scaling, history: list[tuple[float, dict[str, float], int, int, int]], more: dict[str, float], seed: int
) -> None:
    now_s, memory = 0.0, None
    for step in history[:-1]:
        now_s += step[0]
        memory = decide(spec, memory, _at(now_s, step)).memory
    last = history[-1]
    one = _at(now_s + last[0], last)
    grown = {name: getattr(one, name) + value for name, value in more.items()}
    assert decide(spec, memory, msgspec.structs.replace(one, **grown)).replicas >= decide(spec, memory, one).replicas


@given(scalings, busy_steps)
@settings(max_examples=100, deadline=None)
def test_it_shrinks_only_when_all_gates_are_calm_and_nothing_loads(
    spec: Scaling, history: list[tuple[float, dict[str, float], int, int, int]]
) -> None:
    rules = Autoscale(down_queue_s=100, down_utilization=30.0, down_utilization_s=200)
    now_s, memory, queued_s, used_s = 0.0, None, 0.0, 0.0
    for step in history:
        now_s += step[0]
        one = _at(now_s, step)
        queued_s = now_s if one.queued else queued_s
        used_s = now_s if one.busy >= 0.3 else used_s
        before = spec.floor if memory is None else memory.replicas
        decision = decide(spec, memory, one, rules)
        if 0 < decision.replicas < before:
            assert now_s - queued_s > 100
            assert now_s - used_s > 200
            assert one.replicas <= one.ready
            assert decision.replicas >= before - math.ceil(before / 2)
        memory = decision.memory


@given(st.floats(0, 40), st.integers(1, 20), st.floats(10, 120), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_constant_load_finds_its_size_and_stays_there(
    rate: float, begin: int, load_s: float, knows_capacity: bool
) -> None:
    """A replica serves eight at once, each for 8 s: 1/s. The world does what is decided, after the time of a load."""
    spec, memory = Scaling(min_replicas=1, max_replicas=100), None
    ready, starts, queue, sizes = begin, [], 0.0, []
    for now_s in range(0, 14400, 10):
        ready += sum(at <= now_s for at in starts)
        starts = [at for at in starts if at > now_s]
        served = min(ready * 1.0, rate + queue / 10)
        queue = max(0.0, queue + (rate - served) * 10)
        one = seen(
            float(now_s),
            replicas=ready + len(starts),
            ready=ready,
            slots=8,
            queued=int(queue),
            in_flight=min(math.ceil(served * 8), ready * 8),
            wait_s=queue / max(ready, 1),
            requests_s=rate,
            capacity=FAST if knows_capacity else None,
            load_s=load_s,
        )
        decision = decide(spec, memory, one)
        memory = decision.memory
        missing = decision.replicas - ready - len(starts)
        starts += [now_s + load_s] * max(missing, 0)
        ready = min(ready, decision.replicas) if missing < 0 else ready
        sizes.append(decision.replicas)
    assert len(set(sizes[-360:])) == 1, "the last hour moved"
    assert sizes[-1] >= min(rate, 100), "it is too small for the load"
    assert queue < 1
    turns = sum((b > a) != (c > b) for a, b, c in zip(sizes, sizes[1:], sizes[2:], strict=False) if a != b != c)
    assert turns <= 1, "it went up and down again"
