"""How long a decision of ``policy/scaling.py`` holds, so that nobody has to ask again before.

``steady`` returns bounds: while what is seen stays within them, ``decide``
would return the size that it returned, whatever the exact numbers are. Who
looks after thousands of endpoints compares numbers instead of deciding anew.
``passed`` brings a memory to where it would be if ``decide`` had been asked all
along. ``tests/unit/policy/test_steadiness.py`` holds both to it: a fold that
skips gives the same sizes at every step as one that does not.
"""

import math

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling, Tier
from modelyard.policy.gates import calm_left_s, latency_limit_s
from modelyard.policy.idleness import BIN_S
from modelyard.policy.job import NEVER_S
from modelyard.policy.scaling import Memory, Seen, idle_limit_s, learned_idle, signals


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds within which the size stays. Shares are 0 to 1, times monotonic seconds.

    Besides: nobody waits, and what is not named here (replicas, readiness, gateways, what is expected) does not change.
    """

    until_s: float
    """From this moment on it must be asked."""
    demand_most: int
    busy_above: float
    """The utilisation is at least this, and below ``busy_below``."""
    busy_below: float
    is_slow: bool = False
    """The p99 is above its limit; it must stay on its side."""
    is_kv_full: bool = False
    sleeps_s: float = NEVER_S
    """Without a request for so long it may sleep; counted from ``active_s`` where that is later."""
    active_s: float = -math.inf


def steady(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale) -> Steady | None:
    """Return the bounds after ``decide`` answered ``memory`` to ``seen``; None: it must be asked every time."""
    current, gates = memory.replicas, memory.gates
    is_pressed = seen.queued > 0 or seen.demand > current * max(seen.slots, 1)
    if is_pressed or seen.gateways == 0 or seen.is_deleted or not memory.is_proven:
        return None
    until_s = NEVER_S
    if seen.demand == 0 and (until_s := _until_learned(spec, memory, seen, rules)) <= seen.now_s:
        return None
    check_s = memory.checked_s + rules.check_s
    for since_s, held_s in (
        (gates.utilization_s, rules.up_utilization_s),
        (gates.latency_s, rules.up_latency_s),
        (gates.kv_s, rules.up_kv_s),
    ):
        if since_s is not None:
            # More than its time: at the very second the gate is still shut.
            until_s = min(until_s, max(since_s + held_s, check_s))
    demand_most = current * max(seen.slots, 1)
    left_s = calm_left_s(gates, rules, seen.now_s)
    if current > max(spec.floor, 1) and left_s is not None:
        until_s = min(until_s, max(seen.now_s + left_s, check_s))
        demand_most = min(demand_most, memory.peak * max(seen.slots, 1))
    above, below = _side(seen.busy, rules)
    signal = signals(seen, rules)
    return Steady(
        until_s=until_s,
        demand_most=demand_most,
        busy_above=above,
        busy_below=below,
        is_slow=signal.latency_s is not None and signal.latency_s > latency_limit_s(rules),
        is_kv_full=signal.kv_use is not None and signal.kv_use * 100 > rules.up_kv,
        sleeps_s=_sleeps_s(spec, memory, seen, rules),
        active_s=memory.active_s,
    )


def holds(bounds: Steady, seen: Seen, rules: Autoscale, *, was_quiet_s: float) -> bool:
    """Say whether ``seen`` lies within ``bounds``; ``was_quiet_s`` is how long nobody had asked at the look before."""
    if seen.now_s >= bounds.until_s or seen.queued or seen.demand > bounds.demand_most:
        return False
    if not bounds.busy_above <= seen.busy < bounds.busy_below:
        return False
    signal = signals(seen, rules)
    if bounds.is_slow != (signal.latency_s is not None and signal.latency_s > latency_limit_s(rules)):
        return False
    if bounds.is_kv_full != (signal.kv_use is not None and signal.kv_use * 100 > rules.up_kv):
        return False
    if seen.demand:
        return was_quiet_s < BIN_S  # a gap ends, and is remembered
    return min(seen.idle_s, seen.now_s - bounds.active_s) < bounds.sleeps_s


def passed(memory: Memory, rules: Autoscale, *, asked_s: float, now_s: float, every_s: float) -> Memory:
    """Return ``memory`` as it would be had ``decide`` been asked every ``every_s`` seconds until before ``now_s``.

    ``asked_s``: when the last request was, as seen at the last of these looks. Bounds held all the time.
    """
    period_s = math.ceil(rules.check_s / every_s) * every_s
    checked_s = memory.checked_s
    if math.isfinite(checked_s):  # never before its first check
        checked_s += max(math.ceil((now_s - checked_s) / period_s) - 1, 0) * period_s
    known_s = memory.asked_s
    asked = known_s if not math.isfinite(asked_s) else asked_s if known_s is None else max(known_s, asked_s)
    active_s = max(memory.active_s, asked_s)
    if checked_s == memory.checked_s and asked == known_s and active_s == memory.active_s:
        return memory
    return msgspec.structs.replace(memory, checked_s=checked_s, asked_s=asked, active_s=active_s)


def _side(busy: float, rules: Autoscale) -> tuple[float, float]:
    """Return the bounds of the side of the two gates that a utilisation is on."""
    low, high = rules.down_utilization / 100, rules.up_utilization / 100
    # As the gates compare: a share times 100, strictly; what lies on a threshold is on the middle side.
    if busy * 100 > rules.up_utilization:
        return math.nextafter(high, math.inf), math.inf
    if busy * 100 < rules.down_utilization:
        return -math.inf, low
    return low, math.nextafter(high, math.inf)


def _sleeps_s(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale) -> float:
    """Return the idle time from which on it must be asked; a learned one that runs already is a moment instead."""
    if spec.floor or not memory.replicas or rules.tier is Tier.HOT or seen.expected:
        return NEVER_S
    fixed_s = idle_limit_s(spec, rules)
    if (learned := learned_idle(memory, spec, rules, seen.accelerators)) is None:
        return fixed_s
    return NEVER_S if seen.demand == 0 else min(fixed_s, learned.sleep_s)


def _until_learned(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale) -> float:
    """Return when a learned idle time may say something else; never, where none is learned.

    What should sleep already, and does not because a gate is open or a replica loads, may do so at any moment.
    """
    learned = learned_idle(memory, spec, rules, seen.accelerators)
    if spec.floor or seen.expected or learned is None or memory.asked_s is None:
        return NEVER_S
    fixed_s = idle_limit_s(spec, rules)
    quiet_s = min(fixed_s, learned.sleep_s)
    # Compared as ``decide`` compares: a sum may round to this very moment where the difference is not there yet.
    unasked_s, idle_s = seen.now_s - memory.asked_s, seen.now_s - memory.active_s
    is_over = learned.sleep_s == fixed_s or not learned.is_awake(unasked_s)
    if memory.replicas and is_over and idle_s >= quiet_s:
        return seen.now_s
    moments = [memory.asked_s + at_s for at_s in (learned.sleep_s, learned.wake_s, learned.until_s) if unasked_s < at_s]
    if idle_s < quiet_s:
        moments.append(memory.active_s + quiet_s)
    return max(min(moments, default=NEVER_S), math.nextafter(seen.now_s, NEVER_S))
