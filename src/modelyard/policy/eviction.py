"""Which idle replicas make room for one that somebody waits for, and whose turn it is.

What is evicted is the set that costs least: the seconds its models take to
load again, times the chance that they are asked for soon, for each byte it
frees (GreedyDual-Size with an expected rate in place of its ageing). A replica
that just came is left alone for its least residency, so that a herd on many
cold models takes turns instead of thrashing, and turns go round the tenants.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Tier
from modelyard.domain.nodes import Placement
from modelyard.policy.asks import Ask, gib, refused
from modelyard.policy.cluster import Block, Cluster
from modelyard.policy.packing import find


class Rule(msgspec.Struct, frozen=True):
    """When an eviction may be, in seconds."""

    min_residency_s: float = 60.0
    """Time that a replica stays once it is ready, whoever waits."""
    horizon_s: float = 600.0
    """A request within it counts as soon."""
    patience_s: float = 120.0
    """Whoever waited so long gets room whatever it costs: nobody starves behind models that are worth more."""


STANDARD = Rule()


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that holds memory."""

    replica_id: str
    name: str
    """Of its endpoint; "" where whoever reads the reasons must not know it."""
    tenant_id: str
    placement: Placement
    is_idle: bool
    """Ready, and nobody's request is on it or waits for it."""
    resident_s: float
    """Seconds since it became ready."""
    idle_s: float = 0.0
    reload_s: float = 0.0
    """Seconds until it would be ready again."""
    rate_per_s: float = 0.0
    """Requests of its endpoint that are expected."""
    pin: Tier | None = None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that has no room."""

    ask: Ask
    name: str
    reload_s: float
    queued: int = 0
    """Requests that wait for it now."""
    rate_per_s: float = 0.0
    waiting_s: float = 0.0


class Eviction(msgspec.Struct, frozen=True):
    """Replicas to drain and stop, what then has room, and why."""

    replica_ids: tuple[str, ...]
    placement: Placement
    freed_bytes: int
    cost_s: float
    reason: str


class NoEviction(msgspec.Struct, frozen=True):
    """Nothing may go, or nothing that may would do. ``retry_s``: when a residency ends that stands in the way."""

    reason: str
    retry_s: float | None = None


class _Set(msgspec.Struct, frozen=True, order=True):
    """Residents that free enough in one place."""

    cost_s: float
    number: int
    order: int
    residents: tuple[int, ...]


def evict(
    wanted: Wanted, cluster: Cluster, residents: Sequence[Resident], rule: Rule = STANDARD
) -> Eviction | NoEviction:
    """Return the cheapest set of idle residents without which ``wanted`` has room.

    ``cluster`` has all residents on it, and is as it was when this returns.
    """
    if (there := find(wanted.ask, cluster)) is not None:
        return Eviction((), there, 0, 0.0, f"there is room on {there.node_id}")
    free = [number for number, resident in enumerate(residents) if not kept_because(resident, rule, wanted.ask.tier)]
    best = _cheapest(wanted.ask, cluster, residents, free, rule)
    if best is None:
        return _nothing(wanted.ask, cluster, residents, rule)
    is_due = wanted.waiting_s >= rule.patience_s
    gain_s = wanted.reload_s * (1.0 if wanted.queued else _soon(wanted.rate_per_s, rule))
    chosen, placement = _least(wanted.ask, cluster, residents, best, rule)
    cost_s = sum(_cost_s(resident, rule) for resident in chosen)
    if cost_s >= gain_s and not is_due:
        names = _names(chosen)
        return NoEviction(f"idle {names} will be asked for sooner: evicting costs {cost_s:.1f} s, gains {gain_s:.1f} s")
    freed = sum(_bytes(resident.placement) for resident in chosen)
    longest = max(resident.reload_s for resident in chosen)
    reason = f"evicting idle {_names(chosen)} frees {gib(freed)} GiB on {placement.node_id}; back in {longest:.0f} s"
    return Eviction(tuple(resident.replica_id for resident in chosen), placement, freed, cost_s, reason)


def kept_because(resident: Resident, rule: Rule = STANDARD, tier: Tier | None = None) -> str:
    """Return why ``resident`` may not be evicted for one of ``tier``, "" where it may."""
    if not resident.is_idle:
        return "has requests"
    if resident.pin is Tier.HOT or (resident.pin is Tier.WARM and tier is not Tier.HOT):
        return f"pinned {resident.pin}"
    if resident.resident_s < rule.min_residency_s:
        return f"ready for {resident.resident_s:.0f} of at least {rule.min_residency_s:.0f} s"
    return ""


class Waiting(msgspec.Struct, frozen=True):
    """An endpoint that waits for room; ``loads``: how many its tenant was given in the recent past, by any measure."""

    endpoint_id: str
    tenant_id: str
    since_s: float
    tier: Tier | None = None


def turns(waiting: Sequence[Waiting], loads: Mapping[str, float]) -> list[Waiting]:
    """Return who gets room first: pinned hot ones, then round the tenants, those with the fewest ``loads`` first.

    Within a tenant the longest wait goes first.
    """
    nth: dict[tuple[str, bool], int] = {}
    ranked = []
    for one in sorted(waiting, key=lambda one: (one.since_s, one.endpoint_id)):
        is_hot = one.tier is Tier.HOT
        number = nth[one.tenant_id, is_hot] = nth.get((one.tenant_id, is_hot), -1) + 1
        ranked.append((not is_hot, loads.get(one.tenant_id, 0.0) + number, one.since_s, one.endpoint_id, one))
    return [rank[-1] for rank in sorted(ranked, key=lambda rank: rank[:4])]


def eta_s(position: int, *, room: int, reload_s: float, rule: Rule = STANDARD) -> float:
    """Return when the one at ``position`` (from 0) of the turns will be ready, where ``room`` of them fit at once."""
    return (position // max(room, 1)) * (rule.min_residency_s + reload_s) + reload_s


def _soon(rate_per_s: float, rule: Rule) -> float:
    """Return the chance of a request within the horizon."""
    return -math.expm1(-rate_per_s * rule.horizon_s)


def _cost_s(resident: Resident, rule: Rule) -> float:
    return 0.0 if resident.pin is Tier.COLD else resident.reload_s * _soon(resident.rate_per_s, rule)


def _bytes(placement: Placement) -> int:
    return sum(part.memory_bytes * len(part.accelerators) for part in placement.parts)


def _names(residents: Sequence[Resident]) -> str:
    return " and ".join(_named(resident.name) for resident in residents)


def _named(name: str) -> str:
    return f"`{name}`" if name else "a model of another tenant"


def _cheapest(
    ask: Ask, cluster: Cluster, residents: Sequence[Resident], free: Sequence[int], rule: Rule
) -> _Set | None:
    """Return the cheapest set over all blocks that ``ask`` may be on."""
    here: dict[tuple[str, int], list[int]] = {}
    for number, resident in enumerate(residents):
        for part in resident.placement.parts:
            for index in part.accelerators:
                here.setdefault((part.node_id, index), []).append(number)
    evictable = set(free)
    cost_s = {number: _cost_s(residents[number], rule) for number in evictable}
    best: _Set | None = None
    nodes = {node_id for node_id, _ in here}
    for block in (block for node_id in sorted(nodes) for block in cluster.blocks_of(node_id)):
        if not block.is_open or refused(ask, block.shape):
            continue
        on = [here.get((block.node.id, index), []) for index in block.indices]
        for found in _sets(ask, block, on, residents, cost_s):
            total = sum(cost_s[number] for number in found)
            one = _Set(total, len(found), block.order, tuple(sorted(found)))
            best = one if best is None else min(best, one)
    return best


def _sets(
    ask: Ask, block: Block, on: list[list[int]], residents: Sequence[Resident], cost_s: Mapping[int, float]
) -> list[set[int]]:
    """Return, of one block, the sets of evictable residents that free enough."""
    if ask.count == 1:
        found = [_shares(ask, block, position, on[position], residents, cost_s) for position in range(len(on))]
        return [one for one in found if one]
    # Whole accelerators: those that are empty, or become so.
    clear = [
        (sum(cost_s[number] for number in on[position]), position)
        for position in range(len(on))
        if block.capacity[position] - _left(block, position, on[position], residents) >= ask.memory_bytes
        and all(number in cost_s for number in on[position])
        and block.shares[position] == len(on[position])
    ]
    islands = [None, *sorted(set(block.islands))]
    sets = []
    for island in islands:
        of_it = sorted(one for one in clear if island is None or block.islands[one[1]] == island)[: ask.count]
        if len(of_it) == ask.count:
            sets.append({number for _, position in of_it for number in on[position]})
    return [one for one in sets if one]


def _left(block: Block, position: int, on: Sequence[int], residents: Sequence[Resident]) -> int:
    """Return what is taken of an accelerator beside ``residents``: the contexts of engines that sleep there."""
    return block.taken[position] - sum(residents[number].placement.parts[0].memory_bytes for number in on)


def _shares(
    ask: Ask, block: Block, position: int, on: list[int], residents: Sequence[Resident], cost_s: Mapping[int, float]
) -> set[int]:
    """Return the residents of one accelerator to evict, least cost a byte first; empty where all are not enough."""

    def size(number: int) -> int:
        return max(residents[number].placement.parts[0].memory_bytes, 1)

    taken, exclusive = block.taken[position], block.exclusive[position]
    gone: set[int] = set()
    for number in sorted(
        (one for one in on if one in cost_s), key=lambda one: (cost_s[one] / size(one), -size(one), one)
    ):
        gone.add(number)
        taken -= size(number)
        exclusive -= residents[number].placement.is_exclusive
        if not exclusive and block.capacity[position] - taken >= ask.memory_bytes:
            return gone
    return set()


def _least(
    ask: Ask, cluster: Cluster, residents: Sequence[Resident], best: _Set, rule: Rule
) -> tuple[list[Resident], Placement]:
    """Return what of ``best`` is needed, dearest left in place first, and where ``ask`` then goes."""
    gone = [residents[number] for number in best.residents]
    for resident in gone:
        cluster.give_back(resident.placement)
    placement = find(ask, cluster)
    assert placement is not None, "what was to be freed is enough"
    for resident in sorted(gone, key=lambda one: (-_cost_s(one, rule), one.replica_id)):
        cluster.take(resident.placement)
        without = find(ask, cluster)
        if without is None:
            cluster.give_back(resident.placement)
        else:
            placement = without
            gone.remove(resident)
    placement = find(ask, cluster) or placement
    for resident in gone:
        cluster.take(resident.placement)
    return gone, placement


def _nothing(ask: Ask, cluster: Cluster, residents: Sequence[Resident], rule: Rule) -> NoEviction:
    """Say why no eviction would do: what is in the way, and when that may end."""
    nodes = {block.node.id for block in cluster.blocks if block.is_open and not refused(ask, block.shape)}
    reasons: dict[str, list[str]] = {}
    waits = []
    for resident in residents:
        if not nodes.intersection(part.node_id for part in resident.placement.parts):
            continue
        why = kept_because(resident, rule, ask.tier)
        reasons.setdefault(why or "too small", []).append(resident.name)
        if resident.is_idle and resident.pin is not Tier.HOT and resident.resident_s < rule.min_residency_s:
            waits.append(rule.min_residency_s - resident.resident_s)
    parts = [f"{_some(names)} {why}" for why, names in sorted(reasons.items())]
    return NoEviction("; ".join(parts) or "nothing is there that could be evicted", min(waits, default=None))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(_named(name) for name in sorted(names, reverse=not min(names))[:2]) + more
