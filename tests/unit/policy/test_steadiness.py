"""Bounds of a decision: who skips while they hold decides the same, at every step, as who never skips."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import Autoscale, IdleTime, Scaling, Tier
from modelyard.policy.engine_model import Capacity
from modelyard.policy.idleness import Gaps
from modelyard.policy.scaling import Memory, Seen, decide
from modelyard.policy.steadiness import holds, passed, steady

EVERY_S = 10.0
STEPS = st.lists(
    st.tuples(
        st.integers(1, 60),  # for how many looks
        st.integers(0, 30),  # requests
        st.sampled_from([0.0, 0.5, 9.0, 30.0]),  # p99
        st.sampled_from([0, 0, 0, 1]),  # expected
        st.sampled_from([None, 0.1, 0.59, 0.6, 0.61, 0.95]),  # how busy engines say they are
        st.sampled_from([None, 0.5, 0.95]),  # of their KV caches
    ),
    min_size=1,
    max_size=12,
)
RULES = st.builds(
    Autoscale,
    idle=st.sampled_from(IdleTime),
    tier=st.sampled_from([None, None, Tier.HOT, Tier.COLD]),
    check_s=st.sampled_from([1.0, 45.0, 60.0]),
    down_utilization=st.sampled_from([0.0, 30.0, 60.0]),
    down_utilization_s=st.sampled_from([0.0, 300.0]),
    up_utilization_s=st.sampled_from([0.0, 120.0]),
    up_kv_s=st.sampled_from([0.0, 60.0]),
)


def looks(steps, spec, rules, *, skips):
    """Fold over a story in which replicas follow two looks later; return all sizes, and how many were asked."""
    memory: Memory | None = None
    bounds, sizes, asked = None, [], 0
    replicas, ready, target, last_s, before_s, now_s = 1, 1, 1, -math.inf, -math.inf, 1000.0
    history = [1, 1, 1]
    changed, last_expected = True, 0
    for number, requests, p99, expected, *engines in steps:
        for _ in range(number):
            now_s += EVERY_S
            history.append(target)
            changed |= (replicas, ready) != (max(target, ready), history[-3])
            ready, replicas = min(history[-3], target), target
            served = min(requests, ready * 4)
            before_s = last_s
            if requests:
                last_s = now_s
            seen = Seen(
                now_s=now_s,
                replicas=replicas,
                ready=ready,
                slots=4,
                gateways=1,
                queued=requests - served,
                in_flight=served,
                idle_s=now_s - last_s,
                is_proven=True,
                ttft_p99_s=p99 or None,
                utilization=engines[0] if engines and ready else None,
                kv_use=engines[1] if engines and ready else None,
                capacity=Capacity(1.0, 100.0, "a test"),
                load_s=20.0,
                expected=expected,
            )
            is_same = bounds is not None and not changed and expected == last_expected
            quiet_s = now_s - before_s
            if not (skips and is_same and holds(bounds, seen, rules, was_quiet_s=quiet_s)):
                if memory is not None and skips:
                    memory = passed(memory, rules, asked_s=before_s, now_s=now_s, every_s=EVERY_S)
                decision = decide(spec, memory, seen, rules)
                memory, target = decision.memory, decision.replicas
                bounds, asked, changed = steady(spec, memory, seen, rules), asked + 1, False
            changed |= replicas != target or ready != target
            last_expected = expected
            sizes.append(target)
    return sizes, asked


@settings(deadline=None, max_examples=150)
@given(STEPS, RULES, st.booleans(), st.integers(1, 8))
def test_skipping_changes_no_decision(steps, rules, is_sleepy, most) -> None:
    spec = Scaling(min_replicas=1, max_replicas=most, scale_to_zero=is_sleepy, idle_s=300.0)
    every, _ = looks(steps, spec, rules, skips=False)
    some, asked = looks(steps, spec, rules, skips=True)
    assert some == every
    assert asked <= len(every)


def test_what_an_open_gate_keeps_awake_may_sleep_between_two_checks() -> None:
    steps = [(20, 2, 0.0, 0), (100, 0, 0.0, 0, None, 0.95)]
    spec = Scaling(1, 2, scale_to_zero=True, idle_s=300.0)
    rules = Autoscale(idle=IdleTime.LEARNED, check_s=25.0, up_kv_s=0.0)
    every, _ = looks(steps, spec, rules, skips=False)
    assert every[-1] == 0
    assert looks(steps, spec, rules, skips=True)[0] == every


def test_a_quiet_day_is_decided_in_a_few_looks() -> None:
    spec = Scaling(min_replicas=1, max_replicas=4, scale_to_zero=True, idle_s=300.0)
    sizes, asked = looks([(10, 2, 0.0, 0), (5000, 0, 0.0, 0)], spec, Autoscale(), skips=True)
    assert sizes[-1] == 0
    assert asked < 20, "of more than five thousand"


def test_a_steady_load_is_decided_in_a_few_looks() -> None:
    spec = Scaling(min_replicas=1, max_replicas=8)
    sizes, asked = looks([(2000, 5, 0.5, 0)], spec, Autoscale(), skips=True)
    assert sizes[-1] == 2
    assert asked < 40


def test_a_moment_that_rounds_to_now_is_not_forgotten() -> None:
    """Awake for 462.00000000000006 s: 462 s after the request it is not over, though their sum is this very moment."""
    spec = Scaling(min_replicas=1, max_replicas=4, scale_to_zero=True, idle_s=300.0)
    rules = Autoscale(idle=IdleTime.PRICED)
    asked_s = 607_200.0
    memory = Memory(1, asked_s, ready=1, is_proven=True, asked_s=asked_s, gaps=Gaps((0,) * 6 + (20,)))
    seen = Seen(now_s=asked_s + 462, replicas=1, ready=1, slots=4, gateways=1, idle_s=462.0, is_proven=True)
    decision = decide(spec, memory, seen, rules)
    assert decision.replicas == 1
    bounds = steady(spec, decision.memory, seen, rules)
    assert bounds is not None
    assert bounds.until_s < seen.now_s + 1.0
