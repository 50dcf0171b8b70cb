"""How many replicas an endpoint should have.

A fold: ``decide`` takes what it remembers and what is seen now, and returns
the number, the reason and the new memory. Three things change a size:

* the *fast path*, at once: more requests than slots, or a predicted wait above
  what is promised. Waiting requests are people.
* the *gates* (``policy/gates.py``), every ``check_s``: up when any signal was
  high for its time, down when all were calm for theirs. Gates say when; how
  many follows from the load and from what one replica serves, because one more
  replica a check is too slow by far (``bench/autoscale``).
* idle time and expectation: to zero after the idle time (fixed, or learned by
  ``policy/idleness.py``), up before requests that the forecast expects.

Replicas that load count as there; nothing is asked for twice, and none of them
is stopped. Missing data is never taken for missing demand: while no gateway
reports, the size stays what it was. All times are seconds on one monotonic
clock; only differences mean something.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Autoscale, IdleTime, Release, Scaling, Tier
from modelyard.policy import gates as gate
from modelyard.policy.engine_model import Capacity
from modelyard.policy.gates import Gates, Signals
from modelyard.policy.idleness import BIN_S, Awake, Gaps, awake, priced, with_gap

COLD_IDLE_S = 30.0
"""Longest idle time of an endpoint that is pinned cold."""
_DEFAULTS = Autoscale()
_ALMOST = 1e-9


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint right now.

    ``replicas`` are those started and not given up (starting, loading, ready);
    ``idle_s`` is the time since any gateway had a request, infinite when none
    ever had. ``is_proven``: it was ready at least once since it was deployed.
    Shares are 0 to 1, rates are of all replicas together, None is not known.
    """

    now_s: float
    replicas: int
    ready: int
    slots: int
    gateways: int
    queued: int = 0
    in_flight: int = 0
    idle_s: float = math.inf
    is_proven: bool = False
    is_deleted: bool = False
    wait_s: float = 0.0
    """How long a request that came now would wait, as the gateways predict it."""
    utilization: float | None = None
    """How busy ready replicas are, by their own pages; the share of their slots that gateways use is known anyhow."""
    kv_use: float | None = None
    ttft_p99_s: float | None = None
    latency_p99_s: float | None = None
    requests_s: float | None = None
    tokens_s: float | None = None
    capacity: Capacity | None = None
    load_s: float = 0.0
    """How long a replica takes from start to ready."""
    accelerators: int = 1
    """Of one replica."""
    expected: int = 0
    """Replicas that the forecast wants for requests to come."""
    expected_reason: str = ""
    gaps: Gaps = Gaps()
    """Idle times that an earlier controller saw; only the first look takes them."""

    @property
    def demand(self) -> int:
        """Requests that want a slot now."""
        return self.queued + self.in_flight

    @property
    def busy(self) -> float:
        """Utilisation of ready replicas; what has none is wholly busy as soon as somebody wants it."""
        if self.ready == 0:
            return 1.0 if self.demand else 0.0
        by_slots = self.in_flight / (self.ready * max(self.slots, 1))
        return by_slots if self.utilization is None else max(by_slots, self.utilization)

    @property
    def load(self) -> float:
        """What is asked for, in replicas that are wholly busy."""
        load = self.busy * self.ready
        if (capacity := self.capacity) is not None:
            if self.requests_s is not None and capacity.requests_s > 0:
                load = max(load, self.requests_s / capacity.requests_s)
            if self.tokens_s is not None and capacity.tokens_s > 0:
                load = max(load, self.tokens_s / capacity.tokens_s)
        return load


class Memory(msgspec.Struct, frozen=True):
    """What ``decide`` keeps between two passes.

    ``active_s``: when the endpoint last had a reason to live. ``asked_s``: when it last had a request. ``peak`` is the
    most replicas whose slots were needed since the down gates began to be calm.
    """

    replicas: int
    active_s: float
    ready: int = 0
    is_proven: bool = False
    gates: Gates = gate.SHUT
    peak: int = 0
    asked_s: float | None = None
    raised_s: float = -math.inf
    checked_s: float = -math.inf
    gaps: Gaps = Gaps()


class Decision(msgspec.Struct, frozen=True):
    """The size to have, why, and what to remember."""

    replicas: int
    reason: str
    memory: Memory


class _Size(msgspec.Struct, frozen=True):
    """A size that something asks for, and why."""

    replicas: int
    reason: str


def decide(spec: Scaling, memory: Memory | None, seen: Seen, rules: Autoscale = _DEFAULTS) -> Decision:
    """Return the size that the endpoint should have now; ``memory`` is None at the first look at it."""
    if memory is None:
        memory = Memory(seen.replicas, seen.now_s, ready=seen.ready, is_proven=seen.is_proven, gaps=seen.gaps)
    is_proven = memory.is_proven or seen.is_proven or seen.ready > 0
    # A fresh deploy runs one replica even where zero is allowed: a model that cannot start must say so
    # to whoever deploys it, not to the first customer.
    is_awake = not is_proven or rules.tier is Tier.HOT
    least = max(spec.floor, 1) if is_awake else spec.floor
    most = max(spec.max_replicas, least, 1)
    current = min(max(memory.replicas, least), most)
    is_due = seen.now_s - memory.checked_s >= rules.check_s
    memory = _remember(memory, seen, rules, is_proven=is_proven, is_due=is_due)
    if seen.is_deleted:
        return _settle(memory, 0, "the endpoint is deleted")
    if seen.gateways == 0:
        return _settle(memory, current, f"no gateway reports; the size stays {current}")
    wanted = _grown(spec, memory, seen, rules, current=current, is_due=is_due)
    if wanted.replicas > current:
        return _raise(memory, seen, _Size(min(wanted.replicas, most), wanted.reason), current)
    if least == 0 and seen.demand == 0 and (slept := _sleep(spec, memory, seen, rules, current)) is not None:
        return slept
    # While a gate is open nothing is calm, even where no more replicas are allowed.
    if is_due and not wanted.reason:
        fewer = _shrunk(spec, memory, seen, rules, current=current, least=least)
        if fewer.replicas < current:
            return _settle_down(memory, seen, fewer)
    return _settle(memory, current, wanted.reason or _reason_to_stay(current, seen, spec, rules, memory))


def numbers(seen: Seen, replicas: int) -> dict[str, str | int | float | bool | None]:
    """Return what a decision was made from, for an event."""
    capacity = seen.capacity
    return {
        "replicas": replicas,
        "ready": seen.ready,
        "loading": max(seen.replicas - seen.ready, 0),
        "queued": seen.queued,
        "in_flight": seen.in_flight,
        "slots": seen.slots,
        "wait_s": round(seen.wait_s, 3),
        "utilization": round(seen.busy, 3),
        "kv_use": None if seen.kv_use is None else round(seen.kv_use, 3),
        "ttft_p99_s": seen.ttft_p99_s,
        "latency_p99_s": seen.latency_p99_s,
        "requests_s": None if seen.requests_s is None else round(seen.requests_s, 3),
        "tokens_s": None if seen.tokens_s is None else round(seen.tokens_s, 1),
        "capacity_requests_s": None if capacity is None else round(capacity.requests_s, 3),
        "capacity_source": None if capacity is None else capacity.source,
        "load": round(seen.load, 3),
        "load_s": round(seen.load_s, 1),
        "expected": seen.expected,
    }


# --- memory ------------------------------------------------------------------------------


def _remember(memory: Memory, seen: Seen, rules: Autoscale, *, is_proven: bool, is_due: bool) -> Memory:
    """Return ``memory`` with what is seen; the size is left to the decision."""
    asked_s, gaps = _asked(memory, seen)
    # A request, a replica that just became ready, and not knowing all count as activity.
    if seen.demand > 0 or seen.gateways == 0 or seen.ready > memory.ready:
        active_s = seen.now_s
    else:
        active_s = max(memory.active_s, seen.now_s - seen.idle_s)
    open_gates, peak = gate.SHUT, 0
    if seen.gateways > 0:
        open_gates = gate.watch(memory.gates, rules, signals(seen, rules), seen.now_s)
        if open_gates.empty_s is not None and open_gates.unused_s is not None:
            peak = max(memory.peak, _by_slots(seen))
    return Memory(
        replicas=memory.replicas,
        active_s=active_s,
        ready=seen.ready,
        is_proven=is_proven,
        gates=open_gates,
        peak=peak,
        asked_s=asked_s,
        raised_s=memory.raised_s,
        checked_s=seen.now_s if is_due else memory.checked_s,
        gaps=gaps,
    )


def signals(seen: Seen, rules: Autoscale) -> Signals:
    """Return what the gates watch."""
    latency_s = seen.ttft_p99_s if rules.target_latency_s is None else seen.latency_p99_s
    return Signals(seen.queued, seen.busy, seen.kv_use, latency_s)


def _asked(memory: Memory, seen: Seen) -> tuple[float | None, Gaps]:
    """Return when the last request was, and the gaps with the one that it ended."""
    now_s = seen.now_s
    last_s = now_s if seen.demand > 0 else now_s - seen.idle_s
    if not math.isfinite(last_s) or seen.gateways == 0:
        return memory.asked_s, memory.gaps
    if memory.asked_s is None:
        return last_s, memory.gaps
    gap_s = last_s - memory.asked_s
    if gap_s < BIN_S:  # shorter ones end no sleep, and would hide those that do
        return max(last_s, memory.asked_s), memory.gaps
    return last_s, with_gap(memory.gaps, gap_s)


# --- up ----------------------------------------------------------------------------------


def _by_slots(seen: Seen) -> int:
    return math.ceil(seen.demand / max(seen.slots, 1))


def _grown(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale, *, current: int, is_due: bool) -> _Size:
    """Return the largest size that anything asks for; ``current`` or less means that nothing grows."""
    asked = _Size(_by_slots(seen), "")
    if asked.replicas > current:
        asked = _at_once(seen, rules, asked.replicas, _sized(spec, seen, rules))
    if cause := _cause(memory, seen, rules, is_due=is_due):
        is_cooling = seen.replicas > seen.ready or seen.now_s - memory.raised_s < seen.load_s
        sized = _sized(spec, seen, rules)
        # Those that load may be enough; only what the load itself asks for comes on top of them.
        larger = sized if is_cooling else max(sized, current + 1)
        if larger > max(asked.replicas, current):
            asked = _Size(larger, f"{cause}: {_why_sized(seen, larger)}")
        elif asked.replicas <= current:
            loading = max(seen.replicas - seen.ready, 0)
            asked = _Size(current, f"{cause}; {loading} loading, {current} should do" if is_cooling else cause)
    if seen.expected > max(asked.replicas, current):
        return _Size(seen.expected, f"expected: {seen.expected_reason}")
    return asked


def _at_once(seen: Seen, rules: Autoscale, by_slots: int, sized: int) -> _Size:
    """Return what requests without a slot ask for: slots for all, or as many as serve them within ``backlog_s``."""
    text = f"{_requests(seen)} need {by_slots} x {seen.slots} slots"
    if seen.capacity is None or sized >= by_slots:
        return _Size(by_slots, text)
    # A queue that grew while replicas loaded asks for far more slots than it takes to work it off.
    size = max(sized, 1)
    return _Size(size, f"{text}; {size} serve them within {rules.backlog_s:g} s by {seen.capacity.source}")


def _cause(memory: Memory, seen: Seen, rules: Autoscale, *, is_due: bool) -> str:
    """Return why to grow by load: the fast path at any time, the gates when they are asked."""
    if seen.ready > 0 and seen.queued > 0 and (wait_s := _wait_s(seen)) > rules.target_ttft_s:
        return f"fast path: predicted wait {wait_s:.1f} s, above {rules.target_ttft_s:g} s"
    if is_due and (why := gate.reason_up(memory.gates, rules, signals(seen, rules), seen.now_s)):
        return f"at the {rules.check_s:g} s check: {why}"
    return ""


def _wait_s(seen: Seen) -> float:
    """Return the wait that gateways predict, or what the queue comes to where they predict none."""
    if seen.capacity is None or seen.capacity.requests_s <= 0:
        return seen.wait_s
    return max(seen.wait_s, seen.queued / (seen.capacity.requests_s * seen.ready))


def _sized(spec: Scaling, seen: Seen, rules: Autoscale) -> int:
    """Return the size that carries the load at its target and works off the queue in time."""
    size = math.ceil(seen.load / _share_up(spec, rules) - _ALMOST)
    if seen.capacity is not None and seen.capacity.requests_s > 0:
        size += math.ceil(seen.queued / (seen.capacity.requests_s * rules.backlog_s) - _ALMOST)
    if spec.metric == "queue_depth":
        size = max(size, math.ceil(seen.queued / spec.target_value))
    return size


def _share_up(spec: Scaling, rules: Autoscale) -> float:
    """Return how busy replicas are meant to be: the endpoint's own target where it is one of utilisation."""
    return (spec.target_value if spec.metric == "gpu_utilization" else rules.load_share_up) / 100


def _why_sized(seen: Seen, size: int) -> str:
    text = f"{size} replicas for a load of {seen.load:.2f}"
    return text if seen.capacity is None else f"{text} by {seen.capacity.source}"


def _raise(memory: Memory, seen: Seen, wanted: _Size, current: int) -> Decision:
    if wanted.replicas <= current:  # all that is allowed runs already
        return _settle(memory, current, f"{_requests(seen)}; {current} is the configured most")
    # How little it was used before says nothing of what it has grown for.
    grown = msgspec.structs.replace(memory.gates, unused_s=None)
    kept = msgspec.structs.replace(memory, replicas=wanted.replicas, raised_s=seen.now_s, gates=grown, peak=0)
    return Decision(wanted.replicas, wanted.reason, kept)


# --- down --------------------------------------------------------------------------------


def _sleep(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale, current: int) -> Decision | None:
    """Return the decision to sleep or to wake by learned gaps; None: neither is due."""
    quiet_s = seen.now_s - memory.active_s
    fixed_s = idle_limit_s(spec, rules)
    learned = learned_idle(memory, spec, rules, seen.accelerators)
    unasked_s = quiet_s if memory.asked_s is None else seen.now_s - memory.asked_s
    if current == 0:
        if learned is not None and unasked_s >= learned.wake_s and learned.is_awake(unasked_s):
            size = _Size(1, f"expected after {unasked_s:.0f} s: {learned.reason}")
            return _raise(memory, seen, size, current)
        return _settle(memory, 0, "no request")
    if seen.expected > 0:
        return None
    # A load that somebody asked for is finished even when they left: others will ask, and half a load is wasted.
    if seen.replicas > seen.ready:
        return Decision(current, "a replica is loading", _kept(memory, current))
    if learned is None or learned.sleep_s == fixed_s:
        is_over = quiet_s >= fixed_s
    else:
        is_over = not learned.is_awake(unasked_s) and quiet_s >= min(fixed_s, learned.sleep_s)
    if not is_over:
        return None
    why = f" ({learned.reason})" if learned is not None else ""
    return _settle(memory, 0, f"no request for {unasked_s if learned else quiet_s:.0f} s{why}")


def idle_limit_s(spec: Scaling, rules: Autoscale) -> float:
    """Return the idle time after which it sleeps where none is learned."""
    return min(spec.idle_s, COLD_IDLE_S) if rules.tier is Tier.COLD else spec.idle_s


def learned_idle(memory: Memory, spec: Scaling, rules: Autoscale, accelerators: int) -> Awake | None:
    """Return when it is to be awake by the gaps that there were; None where they do not matter."""
    # Pinned cold it sleeps soon, and nobody wakes it but a request.
    if rules.idle is IdleTime.FIXED or rules.tier is Tier.COLD or memory.asked_s is None:
        return None
    if rules.idle is IdleTime.PRICED:
        return priced(memory.gaps, spec.idle_s, rules.prewarm_cold_cost_s / max(accelerators, 1))
    return awake(memory.gaps, spec.idle_s)


def is_kept_awake(memory: Memory | None, spec: Scaling, rules: Autoscale, idle_s: float, accelerators: int = 1) -> bool:
    """Say whether a replica runs on by idle time alone, ``idle_s`` seconds after the last request."""
    if memory is not None and memory.replicas == 0:
        return False
    learned = None if memory is None else learned_idle(memory, spec, rules, accelerators)
    return idle_s < idle_limit_s(spec, rules) if learned is None else learned.is_awake(idle_s)


def _shrunk(spec: Scaling, memory: Memory, seen: Seen, rules: Autoscale, *, current: int, least: int) -> _Size:
    """Return a smaller size if all gates were calm for their time and fewer replicas carry the load, else this one."""
    fewest = max(least, 1, seen.expected)
    left_s = gate.calm_left_s(memory.gates, rules, seen.now_s)
    if current <= fewest or seen.replicas > seen.ready or left_s is None or left_s >= 0:
        return _Size(current, "")
    load = seen.load
    size = max(
        fewest,
        memory.peak,
        math.ceil(load / (rules.load_share_down / 100) - _ALMOST),
        current - math.ceil(current / 2),
        # The check of what would come of it: it must open no gate.
        math.floor(load / min(_share_up(spec, rules), rules.up_utilization / 100)) + 1,
        math.ceil((seen.kv_use or 0.0) * seen.ready / (rules.up_kv / 100) - _ALMOST),
    )
    text = gate.calm_text(memory.gates, seen.now_s)
    return _Size(size, f"at the {rules.check_s:g} s check: {text}: {size} of {current} replicas carry {load:.2f}")


def _settle_down(memory: Memory, seen: Seen, wanted: _Size) -> Decision:
    """The next step down needs a calm period of its own, at the new size."""
    calm = msgspec.structs.replace(memory.gates, empty_s=seen.now_s, unused_s=None)
    kept = msgspec.structs.replace(memory, replicas=wanted.replicas, gates=calm, peak=0)
    return Decision(wanted.replicas, wanted.reason, kept)


# --- neither -----------------------------------------------------------------------------


def _kept(memory: Memory, replicas: int) -> Memory:
    return memory if memory.replicas == replicas else msgspec.structs.replace(memory, replicas=replicas)


def _settle(memory: Memory, replicas: int, reason: str) -> Decision:
    return Decision(replicas, reason, _kept(memory, replicas))


def _requests(seen: Seen) -> str:
    return f"{seen.queued} queued and {seen.in_flight} running requests"


def _reason_to_stay(current: int, seen: Seen, spec: Scaling, rules: Autoscale, memory: Memory) -> str:
    needed = _by_slots(seen)
    if needed >= current and seen.demand:
        fits = current * seen.slots >= seen.demand
        return (
            f"{_requests(seen)} fit {current} x {seen.slots} slots"
            if fits
            else (f"{_requests(seen)}; {current} is the configured most")
        )
    if seen.expected >= current:
        return f"expected: {seen.expected_reason}"
    if current <= spec.floor:
        return f"{current} is the configured least"
    if not memory.is_proven:
        return "the endpoint is new: one replica proves it"
    if current <= 1 and rules.tier is Tier.HOT:
        return "pinned hot: one replica stays"
    if seen.demand == 0 and current == 1:
        return f"no request; asleep in {max(_awake_s(seen, spec, rules, memory), 0):.0f} s unless one comes"
    left_s = gate.calm_left_s(memory.gates, rules, seen.now_s)
    if left_s is None:
        return f"busy {100 * seen.busy:.0f} %: {current} replicas stay"
    return f"calm; fewer than {current} replicas in {max(left_s, 0):.0f} s if they carry {seen.load:.2f}"


def _awake_s(seen: Seen, spec: Scaling, rules: Autoscale, memory: Memory) -> float:
    """Return the seconds that are left until it sleeps, as ``_sleep`` has it."""
    quiet_s, fixed_s = seen.now_s - memory.active_s, idle_limit_s(spec, rules)
    learned = learned_idle(memory, spec, rules, seen.accelerators)
    if learned is None or learned.sleep_s == fixed_s:
        return fixed_s - quiet_s
    unasked_s = quiet_s if memory.asked_s is None else seen.now_s - memory.asked_s
    until_s = learned.until_s if unasked_s >= learned.wake_s else learned.sleep_s
    return max(until_s - unasked_s, min(fixed_s, learned.sleep_s) - quiet_s)


def split(replicas: int, releases: Sequence[Release]) -> dict[str, int]:
    """Return the replicas of each release: ``replicas`` divided by weight, and one for each that shadows.

    With more releases than replicas the total is the number of releases: a
    release without a replica would refuse its share of the traffic. Those that
    shadow come on top, since they take nothing off the others, and sleep with them.
    """
    shares = divide(replicas, {release.version_id: release.weight for release in releases})
    is_awake = any(shares.values())
    return {
        release.version_id: shares[release.version_id] or int(is_awake and release.shadow > 0) for release in releases
    }


def divide(whole: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Divide ``whole`` by weight, at least 1 for each above 0 (largest remainder); nothing where nothing has weight."""
    weighted = {name: weight for name, weight in weights.items() if weight > 0}
    total = sum(weighted.values())
    if whole <= 0 or total == 0:
        return dict.fromkeys(weights, 0)
    exact = {name: whole * weight / total for name, weight in weighted.items()}
    shares = {name: max(1, math.floor(share)) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: (shares[name] - exact[name], name)):
        if sum(shares.values()) < whole:
            shares[name] += 1
    while sum(shares.values()) > max(whole, len(weighted)):
        shares[max(shares, key=lambda name: (shares[name], name))] -= 1
    return {name: shares.get(name, 0) for name in weights}
