"""Replicas of popular bases that wait for whoever needs one: how many, who takes which, and when to burst.

A pool keeps replicas of one base (artifact, engine and options) running for
nobody. A cold endpoint of the same base, or of an adapter on it, takes one at
once instead of loading; the pool is refilled in the background. Its size is
what is taken while a refill is under way, with 99 % certainty; all pools
together stay within a budget, which goes where the next replica avoids most
waits. Pure: the answers carry their reasons, others act on them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Autoscale, Tier

CERTAINTY = 0.99
_RANK = {Tier.HOT: 2, Tier.WARM: 1, Tier.COLD: 0}


class Base(msgspec.Struct, frozen=True):
    """What makes two replicas interchangeable before anything of an endpoint is in them."""

    framework: str
    digest: str
    options: tuple[tuple[str, str | int | float | bool], ...]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as it is asked to be. ``activations_s``: cold starts a second that it could have served."""

    id: str
    name: str = ""
    """What people call it."""
    base: Base
    activations_s: float
    refill_s: float
    """From taking a replica to having another one: a load, and finding room."""
    accelerators: int = 1
    size: int | None = None
    """Set by the operator; None: as activations ask for."""
    reserved: Mapping[Tier, int] = {}
    """Replicas that only endpoints pinned to this tier, or a higher one, may take."""


class Plan(msgspec.Struct, frozen=True):
    """The size that a pool should have, and why."""

    pool_id: str
    size: int
    reason: str


class Resident(msgspec.Struct, frozen=True):
    """A replica of a pool. ``since_s`` is when it became ready; None: it loads."""

    replica_id: str
    pool_id: str
    base: Base
    since_s: float | None


class Steal(msgspec.Struct, frozen=True):
    """The replica to take, None for none, and why."""

    replica_id: str | None
    pool_id: str
    reason: str
    needs_adapter: bool = False
    """The endpoint's version is an adapter: it must be loaded into the replica before the first request."""


class Burst(msgspec.Struct, frozen=True):
    """Whether to place in the extra pool, and why. ``calm_since_s``: since when it would not be needed any more."""

    pool: str
    reason: str
    calm_since_s: float | None = None


def base_of(version: ModelVersion, base: ModelVersion | None = None) -> Base:
    """Return the base that serves ``version``: its own, or that of the version which it adapts."""
    served = version if base is None else base
    # Before its first fetch nothing is known of an artifact but where it comes from.
    content = served.artifact.digest or served.artifact.uri
    return Base(served.framework, content, tuple(sorted(served.options.items())))


def concurrent(activations_s: float, refill_s: float, certainty: float = CERTAINTY) -> int:
    """Return how many replicas are taken during one refill, at most, with ``certainty`` (a Poisson quantile)."""
    mean = activations_s * refill_s
    if not mean > 0:
        return 0
    if mean > 500:  # where the sum below would begin with a number too small for a float
        return math.ceil(mean + 2.33 * math.sqrt(mean))
    chance = math.exp(-mean)
    below, taken = chance, 0
    while below < certainty:
        taken += 1
        chance *= mean / taken
        below += chance
    return taken


def blocked(servers: int, offered: float) -> float:
    """Return the share of activations that find the pool empty (Erlang's B formula; the recursion never overflows)."""
    share = 1.0
    for number in range(1, servers + 1):
        share = offered * share / (number + offered * share)
    return share


def sizes(pools: Sequence[Pool], budget: int) -> list[Plan]:
    """Return the size of each pool; all together use at most ``budget`` accelerators.

    Each next replica goes where it avoids most waiting a second for each accelerator; what operators fixed comes first.
    """
    wanted = {
        pool.id: concurrent(pool.activations_s, pool.refill_s) if pool.size is None else pool.size for pool in pools
    }
    given = dict.fromkeys(wanted, 0)
    left = budget
    for pool in sorted(pools, key=lambda pool: (pool.size is None, pool.id)):
        if pool.size is not None:
            given[pool.id] = max(min(pool.size, left // pool.accelerators), 0)
            left -= given[pool.id] * pool.accelerators
    while candidates := [
        pool for pool in pools if pool.size is None and given[pool.id] < wanted[pool.id] and pool.accelerators <= left
    ]:
        best = max(candidates, key=lambda pool: (_gain(pool, given[pool.id]), pool.id))
        given[best.id] += 1
        left -= best.accelerators
    return [Plan(pool.id, given[pool.id], _why(pool, wanted[pool.id], given[pool.id], budget)) for pool in pools]


def _gain(pool: Pool, size: int) -> float:
    """Return the seconds of waiting a second that one more replica avoids, for each of its accelerators."""
    offered = pool.activations_s * pool.refill_s
    fewer = blocked(size, offered) - blocked(size + 1, offered)
    return pool.activations_s * fewer * pool.refill_s / pool.accelerators


def _why(pool: Pool, wanted: int, given: int, budget: int) -> str:
    if pool.size is not None:
        text = f"set to {pool.size}"
    else:
        hourly = pool.activations_s * 3600
        text = f"{hourly:.1f} activations an hour, {pool.refill_s:.0f} s a refill: {wanted} in {CERTAINTY:.0%} of cases"
    return text if given == wanted else f"{text}; {given} within the budget of {budget} accelerators"


def steal(
    wanted: Base,
    residents: Iterable[Resident],
    pools: Mapping[str, Pool],
    *,
    rules: Autoscale,
    is_adapter: bool = False,
) -> Steal:
    """Return the pool's replica that a cold endpoint takes: the one that has waited longest, above what is reserved."""
    rank = _RANK[rules.tier or Tier.WARM]
    by_pool: dict[str, list[Resident]] = {}
    same = [one for one in residents if one.base == wanted and one.pool_id in pools]
    for resident in same:
        if resident.since_s is not None:
            by_pool.setdefault(resident.pool_id, []).append(resident)
    reasons = []
    for pool_id, ready in sorted(by_pool.items()):
        name = pools[pool_id].name or pool_id
        floor = sum(count for tier, count in pools[pool_id].reserved.items() if _RANK[tier] > rank)
        if len(ready) > floor:
            taken = min(ready, key=lambda one: (one.since_s or 0.0, one.replica_id))
            text = f"taken from pool '{name}', {len(ready) - 1} left"
            return Steal(taken.replica_id, pool_id, text, needs_adapter=is_adapter)
        reasons.append(f"the {len(ready)} of pool '{name}' are reserved for a higher tier")
    if not reasons:
        loading = len(same)
        reasons.append(f"all {loading} of its base are loading" if loading else "no pool has its base")
    return Steal(None, "", "; ".join(reasons))


def burst(
    rules: Autoscale, *, now_s: float, wait_s: float, is_full: bool, is_bursting: bool, calm_since_s: float | None
) -> Burst:
    """Say whether new replicas of an endpoint go to its extra pool.

    In when every other pool is full and the predicted wait breaks the promise; back when it was calm for as long as
    the down gates ask for (so that a price is not paid twice an hour for a start).
    """
    pool, limit_s = rules.burst_pool, rules.target_ttft_s
    if not pool:
        return Burst("", "no burst pool is named")
    is_late = wait_s > limit_s
    if is_full and is_late:
        return Burst(pool, f"all pools are full and callers would wait {wait_s:.1f} s, above {limit_s:g} s")
    if not is_bursting:
        why = f"the predicted wait of {wait_s:.1f} s is within {limit_s:g} s" if is_full else "there is room elsewhere"
        return Burst("", why)
    if is_late:
        return Burst(pool, f"callers still wait {wait_s:.1f} s")
    since_s = now_s if calm_since_s is None else calm_since_s
    if is_full or now_s - since_s <= rules.down_queue_s:
        left = "the other pools are full" if is_full else f"calm for {now_s - since_s:.0f} of {rules.down_queue_s:g} s"
        return Burst(pool, f"it stays: {left}", None if is_full else since_s)
    return Burst("", f"calm for {now_s - since_s:.0f} s and there is room elsewhere: back")
