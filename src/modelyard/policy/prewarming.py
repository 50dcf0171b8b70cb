"""What to start, and to hold, for requests that the forecast expects; a fold over its profile.

Before a slot that will probably be active a replica is started, early enough
to be loaded five minutes ahead; between two such slots it is held. It pays
when the chance outweighs the costs: P > c·T / (c·T + cost of a cold start),
c being its accelerators and T the time that they would wait for nothing. A day's budget of accelerator
time bounds what a wrong forecast can cost. Hits and misses are counted, so
that people see what they pay for.
"""

import math

import msgspec

from modelyard.domain.endpoints import Autoscale, Tier
from modelyard.policy.forecast import SLOT_S, Profile, Score, Slot, expected, slot_of
from modelyard.policy.tiers import may_be_expected

HOUR_S = 3600.0
_DAY_S = 86_400
_LEFT_S = 60.0
"""Budget that must be left for one more look: looks come far more often."""
_LOOK_MAX_S = 3600.0
"""A controller that was away for longer does not know what ran meanwhile."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as it is now; ``now_s`` is unix seconds.

    ``needed``: replicas that would run without a forecast. ``capacity``: requests/s of one replica.
    """

    now_s: float
    ready: int
    demand: int
    needed: int
    load_s: float
    accelerators: int = 1
    capacity: float | None = None


class Memory(msgspec.Struct, frozen=True):
    """What is kept between two looks. ``waiting``: replicas that waited at the last one, for requests to come."""

    profile: Profile = Profile()
    looked_s: float | None = None
    waiting: int = 0
    is_cold: bool = False
    """Requests wait for a replica that nobody foresaw."""


class Expected(msgspec.Struct, frozen=True):
    """Replicas to have for requests to come (0: none), why, and what to remember."""

    replicas: int
    reason: str
    memory: Memory


def threshold(rules: Autoscale, load_s: float, accelerators: int = 1) -> float:
    """Return the probability from which waiting is cheaper than a cold start; ``accelerators`` of one replica wait."""
    held_s = (load_s + rules.prewarm_s + SLOT_S) * max(accelerators, 1)
    return held_s / (held_s + rules.prewarm_cold_cost_s)


def expect(rules: Autoscale, memory: Memory, seen: Situation) -> Expected:
    """Return what is to be had for requests to come."""
    memory = _account(memory, seen)
    memory = _judge(memory, seen)
    if not rules.prewarm or not may_be_expected(rules):
        why = "pinned cold" if rules.tier is Tier.COLD else "pre-warming is off"
        return _answer(memory, seen, 0, why)
    limit = threshold(rules, seen.load_s, seen.accelerators)
    likely = _likeliest(memory.profile, rules, seen, limit)
    if likely is None:
        return _answer(memory, seen, 0, f"no slot ahead is likely to {limit:.0%}")
    replicas = 1 if not seen.capacity else max(1, math.ceil(likely.rate / (seen.capacity * rules.load_share_up / 100)))
    extra = max(replicas - seen.needed, 0) * seen.accelerators
    spent_s = memory.profile.score.day_s
    text = f"requests at {_clock(likely.begin_s)} UTC with {likely.probability:.0%}, worth it from {limit:.0%}"
    if extra and spent_s + extra * _LEFT_S > rules.prewarm_budget * HOUR_S:
        return _answer(memory, seen, 0, f"{text}; the day's {rules.prewarm_budget:g} GPU-hours are used up")
    return _answer(memory, seen, replicas, text)


def _likeliest(profile: Profile, rules: Autoscale, seen: Situation, limit: float) -> Slot | None:
    """Return the busiest slot of those worth waiting for that are under way or begin before a start would be late."""
    now = slot_of(seen.now_s)
    last = slot_of(seen.now_s + seen.load_s + rules.prewarm_s)
    slots = [slot for at in range(now, last + 1) if (slot := expected(profile, at)).probability > limit]
    return max(slots, key=lambda slot: (slot.rate, -slot.slot)) if slots else None


def _account(memory: Memory, seen: Situation) -> Memory:
    """Book the time since the last look on what waited then."""
    score, day = memory.profile.score, int(seen.now_s // _DAY_S)
    if day > score.day:
        score = msgspec.structs.replace(score, day=day, day_s=0.0)
    passed_s = 0.0 if memory.looked_s is None else min(max(seen.now_s - memory.looked_s, 0.0), _LOOK_MAX_S)
    waited_s = passed_s * memory.waiting * seen.accelerators
    score = msgspec.structs.replace(score, day_s=score.day_s + waited_s, waiting_s=score.waiting_s + waited_s)
    return _scored(memory, score, looked_s=seen.now_s)


def _judge(memory: Memory, seen: Situation) -> Memory:
    """Count an awakening: foreseen, or not."""
    score = memory.profile.score
    if seen.demand and memory.waiting and seen.ready:
        return _scored(memory, msgspec.structs.replace(score, hits=score.hits + 1), waiting=0)
    if seen.demand and seen.ready == 0 and not memory.is_cold:
        return _scored(memory, msgspec.structs.replace(score, misses=score.misses + 1), waiting=0, is_cold=True)
    if seen.ready and memory.is_cold:
        return msgspec.structs.replace(memory, is_cold=False)
    return memory


def _answer(memory: Memory, seen: Situation, replicas: int, reason: str) -> Expected:
    waiting = 0 if seen.demand else max(replicas - seen.needed, 0)
    if memory.waiting and not waiting and not seen.demand and replicas == 0:
        score = memory.profile.score
        memory = _scored(memory, msgspec.structs.replace(score, wasted=score.wasted + 1))
    return Expected(replicas, reason, msgspec.structs.replace(memory, waiting=waiting))


def _scored(memory: Memory, score: Score, **changes: float | int | bool) -> Memory:
    return msgspec.structs.replace(memory, profile=msgspec.structs.replace(memory.profile, score=score), **changes)


def _clock(unix_s: float) -> str:
    """Return the time of day; a policy knows no calendar."""
    minutes = int(unix_s // 60) % 1440
    return f"{minutes // 60:02}:{minutes % 60:02}"
