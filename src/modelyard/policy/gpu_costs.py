"""What accelerators cost, who pays for them, and what is wasted.

The cost of a replica is the price of its share of accelerators for as long as
it is there. Of that, the time in which it works is shared out among those who
used its endpoint, or a guest that sits on it, by tokens; the rest (loading,
idle, draining) is its owner's: whoever keeps a replica waiting has it waiting
for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from modelyard.domain.books import EndpointUse, ReplicaHour
from modelyard.domain.nodes import Node, Placement
from modelyard.domain.tenants import PLATFORM
from modelyard.policy.hardware import KINDS

HOUR_S = 3600
IDLE_USD_MIN_NANO = 10_000_000
"""Waste below a cent is not worth a line."""
IDLE_SHARE = 0.5
"""Share of its ready time above which an idle replica is worth a line."""
IDLE_S = 300.0
"""Time without a request after which an idle endpoint should sleep."""
IDLE_S_MIN = 60.0
"""Below that a start costs more than it saves."""
CANARY_S = 86_400.0
"""How long two versions may share traffic before somebody is reminded."""
COMPLETION_WEIGHT = 4
"""A generated token takes an engine about as long as four of a prompt; it weighs as much when cost is shared out."""


def shares(placement: Placement, nodes: Mapping[str, Node], prices: Mapping[str, int]) -> tuple[str, float, int]:
    """Return the kind of accelerator of a place, how many whole ones it takes, and what that costs in an hour.

    The price of a node comes first, then ``prices`` (nano-dollars by kind), then that of the table.
    """
    kind, count, total = "", 0.0, 0.0
    for part in placement.parts:
        node = nodes.get(part.node_id)
        for accelerator in node.accelerators if node else ():
            if node is None or accelerator.index not in part.accelerators:
                continue
            share = 1.0 if placement.is_exclusive else part.memory_bytes / max(accelerator.memory_bytes, 1)
            price = price_of(node, accelerator.kind, prices)
            kind = kind or accelerator.kind
            count += min(share, 1.0)
            total += price * min(share, 1.0)
    return kind, count, round(total)


def price_of(node: Node, kind: str, prices: Mapping[str, int]) -> int:
    """Return what a whole accelerator of a node costs in an hour."""
    known = KINDS.get(kind)
    return node.price_nanousd or prices.get(kind, round(known.price_usd * 1e9) if known else 0)


class EndpointCost(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint over the asked time. ``utilisation`` is the share of ready time with a request."""

    endpoint_id: str
    model: str
    owner_id: str
    accelerator: str
    accelerator_hours: float
    idle_accelerator_hours: float
    ready_hours: float
    utilisation: float
    cost_nanousd: int
    idle_nanousd: int
    revenue_nanousd: int
    margin_nanousd: int
    requests: int
    tokens: int
    nanousd_per_million_tokens: int | None
    """Of all that it cost; None where there were no tokens."""


class CustomerCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one customer's use of one model cost, and what it brought. ``tenant_name`` is empty of one that is gone."""

    tenant_id: str
    tenant_name: str = ""
    model: str
    endpoint_id: str
    accelerator_hours: float
    cost_nanousd: int
    revenue_nanousd: int
    margin_nanousd: int
    tokens: int
    nanousd_per_million_tokens: int | None


class WasteKind(StrEnum):
    """Why money is spent for nothing."""

    NEVER_USED = "never_used"
    TOO_MANY = "too_many_replicas"
    IDLE = "idle"
    CANARY = "forgotten_canary"
    FAILING = "failing_starts"


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Money that is spent for nothing, and what to do about it."""

    kind: WasteKind
    endpoint_id: str
    model: str
    nanousd: int
    why: str
    fix: str


class Setup(msgspec.Struct, frozen=True):
    """What is set of an endpoint now. ``canary_since``: since when two versions share its traffic; None: none do.

    ``host_id``: the endpoint on whose replicas it sits; ``is_pool``: it is a warm pool.
    """

    name: str
    owner_id: str
    min_replicas: int
    max_replicas: int
    scale_to_zero: bool
    canary_since: float | None = None
    idle_s: float = 0.0
    """Time without a request after which it sleeps, where it may."""
    host_id: str = ""
    is_pool: bool = False


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    endpoints: list[EndpointCost]
    customers: list[CustomerCost]
    waste: list[Waste]


def report(
    hours: Sequence[ReplicaHour],
    uses: Sequence[EndpointUse],
    setups: Mapping[str, Setup],
    *,
    now_s: float,
) -> Report:
    """Return costs, their shares, and waste, the dearest first."""
    by_endpoint = _grouped(hours)
    used = _uses(uses)
    ids = by_endpoint.keys() | used.keys()
    costs = {id: _endpoint(id, by_endpoint.get(id, []), used.get(id, [])) for id in ids}
    asked = {id: cost.requests for id, cost in costs.items()}
    for host_id, guests in _guests(costs, setups).items():
        asked[host_id] += sum(costs[id].requests for id in guests)
        costs |= _seated(costs[host_id], [costs[id] for id in guests], used, setups)
    endpoints = list(costs.values())
    customers = [one for cost in endpoints for one in _customers(cost, used.get(cost.endpoint_id, []))]
    waste = [
        one
        for cost in endpoints
        for one in _waste(cost, by_endpoint.get(cost.endpoint_id, []), setups, asked[cost.endpoint_id], now_s)
    ]
    return Report(
        sorted(endpoints, key=lambda one: (-one.cost_nanousd, one.endpoint_id)),
        sorted(customers, key=lambda one: (-one.cost_nanousd, one.tenant_id, one.endpoint_id)),
        sorted(waste, key=lambda one: (-one.nanousd, one.endpoint_id, one.kind)),
    )


def _grouped(hours: Iterable[ReplicaHour]) -> dict[str, list[ReplicaHour]]:
    found: dict[str, list[ReplicaHour]] = {}
    for hour in hours:
        found.setdefault(hour.endpoint_id, []).append(hour)
    return found


def _uses(uses: Iterable[EndpointUse]) -> dict[str, list[EndpointUse]]:
    """Return use by endpoint, each customer once: an endpoint may have had another name before."""
    found: dict[str, dict[str, EndpointUse]] = {}
    for use in uses:
        of_it = found.setdefault(use.endpoint_id, {})
        before = of_it.get(use.tenant_id)
        of_it[use.tenant_id] = use if before is None else _together(before, use)
    return {endpoint_id: list(of_it.values()) for endpoint_id, of_it in found.items()}


def _together(one: EndpointUse, other: EndpointUse) -> EndpointUse:
    counts = ("requests", "prompt_tokens", "completion_tokens", "revenue_nanousd")
    return msgspec.structs.replace(other, **{name: getattr(one, name) + getattr(other, name) for name in counts})


def _idle_share(hour: ReplicaHour) -> float:
    """Return the part of an hour's cost that nobody used."""
    return 1.0 - min(hour.busy_s / hour.present_s, 1.0) if hour.present_s > 0 else 0.0


def _endpoint(id: str, hours: Sequence[ReplicaHour], uses: Sequence[EndpointUse]) -> EndpointCost:
    cost = sum(hour.cost_nanousd for hour in hours)
    idle = sum(round(hour.cost_nanousd * _idle_share(hour)) for hour in hours)
    revenue = sum(use.revenue_nanousd for use in uses)
    tokens = sum(use.prompt_tokens + use.completion_tokens for use in uses)
    ready_s = sum(hour.ready_s for hour in hours)
    busy_s = sum(hour.busy_s for hour in hours)
    return EndpointCost(
        endpoint_id=id,
        model=hours[-1].model if hours else uses[-1].model,
        owner_id=hours[-1].owner_id if hours else "",
        accelerator=hours[-1].accelerator if hours else "",
        accelerator_hours=sum(hour.accelerator_s for hour in hours) / HOUR_S,
        idle_accelerator_hours=sum(hour.accelerator_s * _idle_share(hour) for hour in hours) / HOUR_S,
        ready_hours=ready_s / HOUR_S,
        utilisation=min(busy_s / ready_s, 1.0) if ready_s else 0.0,
        cost_nanousd=cost,
        idle_nanousd=idle,
        revenue_nanousd=revenue,
        margin_nanousd=revenue - cost,
        requests=sum(use.requests for use in uses),
        tokens=tokens,
        nanousd_per_million_tokens=_per_million(cost, tokens),
    )


def _guests(costs: Mapping[str, EndpointCost], setups: Mapping[str, Setup]) -> dict[str, list[str]]:
    """Return by host the guests that were used and have no replica of their own."""
    found: dict[str, list[str]] = {}
    for id, cost in sorted(costs.items()):
        host_id = setup.host_id if (setup := setups.get(id)) is not None else ""
        if host_id in costs and host_id != id and not cost.accelerator_hours and not cost.cost_nanousd:
            found.setdefault(host_id, []).append(id)
    return found


def _seated(
    host: EndpointCost,
    guests: Sequence[EndpointCost],
    used: Mapping[str, Sequence[EndpointUse]],
    setups: Mapping[str, Setup],
) -> dict[str, EndpointCost]:
    """Share what a host's replicas worked among the host and its guests, by id; what they idled stays the host's."""
    together = [host, *guests]
    weights = [sum(map(_weight, used.get(one.endpoint_id, ()))) for one in together]
    total = sum(weights)
    if not total:
        return {}
    busy_hours = host.accelerator_hours - host.idle_accelerator_hours
    parts = _parted(host.cost_nanousd - host.idle_nanousd, weights)
    found = {}
    for one, part, weight in zip(together, parts, weights, strict=True):
        is_host = one is host
        cost = part + (host.idle_nanousd if is_host else 0)
        found[one.endpoint_id] = msgspec.structs.replace(
            one,
            owner_id=host.owner_id if is_host else setups[one.endpoint_id].owner_id,
            accelerator=host.accelerator,
            accelerator_hours=busy_hours * weight / total + (host.idle_accelerator_hours if is_host else 0.0),
            cost_nanousd=cost,
            margin_nanousd=one.revenue_nanousd - cost,
            nanousd_per_million_tokens=_per_million(cost, one.tokens),
        )
    return found


def _weight(use: EndpointUse) -> int:
    return use.prompt_tokens + COMPLETION_WEIGHT * use.completion_tokens


def _customers(cost: EndpointCost, uses: Sequence[EndpointUse]) -> list[CustomerCost]:
    """Share an endpoint's cost out: what worked by weighted tokens, what idled to its owner. Nothing gets lost."""
    busy = cost.cost_nanousd - cost.idle_nanousd
    busy_hours = cost.accelerator_hours - cost.idle_accelerator_hours
    weights = [_weight(use) for use in uses]
    total = sum(weights)
    parts = _parted(busy, weights)
    left = busy - sum(parts)
    found: dict[str, CustomerCost] = {}
    for use, part, weight in zip(uses, parts, weights, strict=True):
        found[use.tenant_id] = _customer(cost, use, part, busy_hours * weight / total if total else 0.0)
    idle, idle_hours = cost.idle_nanousd + left, cost.idle_accelerator_hours + (0.0 if total else busy_hours)
    if idle or idle_hours:
        owner_id = cost.owner_id or PLATFORM  # nobody knows any more whose it was; the accelerators are the operator's
        nothing = EndpointUse(cost.endpoint_id, owner_id, cost.model, 0, 0, 0, 0)
        before = found.get(owner_id) or _customer(cost, nothing, 0, 0.0)
        found[owner_id] = _with_idle(before, idle, idle_hours)
    return list(found.values())


def _parted(amount: int, weights: Sequence[int]) -> list[int]:
    """Share ``amount`` out by weight in whole numbers that add up to it; nothing where nobody weighs anything."""
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    parts, before, done = [], 0, 0
    for weight in weights:
        before += weight
        upto = amount * before // total
        parts.append(upto - done)
        done = upto
    return parts


def _customer(cost: EndpointCost, use: EndpointUse, part: int, hours: float) -> CustomerCost:
    tokens = use.prompt_tokens + use.completion_tokens
    return CustomerCost(
        tenant_id=use.tenant_id,
        model=cost.model,
        endpoint_id=cost.endpoint_id,
        accelerator_hours=hours,
        cost_nanousd=part,
        revenue_nanousd=use.revenue_nanousd,
        margin_nanousd=use.revenue_nanousd - part,
        tokens=tokens,
        nanousd_per_million_tokens=_per_million(part, tokens),
    )


def _with_idle(before: CustomerCost, idle: int, hours: float) -> CustomerCost:
    cost = before.cost_nanousd + idle
    return msgspec.structs.replace(
        before,
        cost_nanousd=cost,
        accelerator_hours=before.accelerator_hours + hours,
        margin_nanousd=before.revenue_nanousd - cost,
        nanousd_per_million_tokens=_per_million(cost, before.tokens),
    )


def _per_million(nanousd: int, tokens: int) -> int | None:
    return round(nanousd * 1_000_000 / tokens) if tokens else None


def _waste(
    cost: EndpointCost, hours: Sequence[ReplicaHour], setups: Mapping[str, Setup], asked: int, now_s: float
) -> list[Waste]:
    """Return what an endpoint wastes and what to do; each reason once, and no money twice.

    ``asked`` is how many requests came, those for its guests too.
    """
    setup = setups.get(cost.endpoint_id)
    found: list[Waste] = []

    def add(kind: WasteKind, nanousd: int, why: str, fix: str) -> None:
        if nanousd >= IDLE_USD_MIN_NANO:
            found.append(
                Waste(kind=kind, endpoint_id=cost.endpoint_id, model=cost.model, nanousd=nanousd, why=why, fix=fix)
            )

    # One that was still loading when an hour ended was ready in the next.
    were_ready = {hour.replica_id for hour in hours if hour.ready_s}
    never_ready = sum(hour.cost_nanousd for hour in hours if hour.replica_id not in were_ready)
    see = f"see why: modelyard why {cost.model}"
    add(WasteKind.FAILING, never_ready, "replicas that started and were never ready", see)
    idle = cost.idle_nanousd - never_ready
    if setup is None or idle < IDLE_USD_MIN_NANO:
        return found
    if setup.canary_since is not None and now_s - setup.canary_since > CANARY_S:
        days = (now_s - setup.canary_since) / (24 * HOUR_S)
        why = f"two versions have shared its traffic for {days:.0f} days"
        fix = f"decide: modelyard canary promote {setup.name}, or modelyard rollback {setup.name}"
        add(WasteKind.CANARY, idle, why, fix)
    elif setup.is_pool:
        why = "its replicas wait to be taken"
        add(
            WasteKind.NEVER_USED, idle, why, f"see whether any are: modelyard pools; or modelyard pools rm {setup.name}"
        )
    elif not asked:
        add(WasteKind.NEVER_USED, idle, "nobody used it", f"{_sleep(setup)}, or modelyard endpoints rm {setup.name}")
    elif setup.min_replicas > 1 and cost.utilisation < IDLE_SHARE / setup.min_replicas:
        need = max(1, round(cost.utilisation * setup.min_replicas * 2))
        why = f"{setup.min_replicas} replicas are kept, and they work {cost.utilisation:.0%} of the time"
        fix = f"modelyard endpoints set {setup.name} --scale {need}..{max(need, setup.max_replicas)}"
        add(WasteKind.TOO_MANY, idle, why, fix)
    elif cost.utilisation < 1 - IDLE_SHARE and not (setup.scale_to_zero and 0 < setup.idle_s <= IDLE_S_MIN):
        why = f"it works {cost.utilisation:.0%} of its ready time"
        add(WasteKind.IDLE, idle, why, f"let it sleep sooner: {_sleep(setup)}")
    return found


def _sleep(setup: Setup) -> str:
    """Return the command that lets an endpoint sleep, or sleep sooner than it does."""
    idle_s = IDLE_S
    if setup.scale_to_zero and setup.idle_s:
        idle_s = max(IDLE_S_MIN, min(IDLE_S, setup.idle_s / 2))
    idle = f"{idle_s / 60:.0f}m" if not idle_s % 60 else f"{idle_s:.0f}s"
    return f"modelyard endpoints set {setup.name} --scale 0..{max(1, setup.max_replicas)} --idle {idle}"
