"""How many replicas an endpoint should have.

A fold: ``decide`` takes what it remembers and what is seen now, and returns
the number, the reason and the new memory. Up happens at once, because waiting
requests are people; down waits until the endpoint was calm for its whole idle
period, because it is cheap to be late. Missing data is never taken for
missing demand: while no gateway reports, the size stays what it was.

All times are seconds on one monotonic clock; only differences mean something.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Release, Scaling


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint right now.

    ``replicas`` are those started and not given up (starting, loading, ready);
    ``idle_s`` is the time since any gateway had a request, infinite when none
    ever had. ``is_proven``: it was ready at least once since it was deployed.
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

    @property
    def demand(self) -> int:
        """Requests that want a slot now."""
        return self.queued + self.in_flight


class Memory(msgspec.Struct, frozen=True):
    """What ``decide`` keeps between two passes. ``active_s``: when the endpoint last had a reason to live.

    ``calm_since_s`` is when a smaller size began to suffice, and ``calm_peak``
    the largest size that was needed since.
    """

    replicas: int
    active_s: float
    ready: int = 0
    is_proven: bool = False
    calm_since_s: float | None = None
    calm_peak: int = 0


class Decision(msgspec.Struct, frozen=True):
    """The size to have, why, and what to remember."""

    replicas: int
    reason: str
    memory: Memory


def decide(spec: Scaling, memory: Memory | None, seen: Seen) -> Decision:
    """Return the size that the endpoint should have now; ``memory`` is None at the first look at it."""
    if memory is None:
        memory = Memory(replicas=seen.replicas, active_s=seen.now_s, ready=seen.ready, is_proven=seen.is_proven)
    is_proven = memory.is_proven or seen.is_proven or seen.ready > 0
    # A fresh deploy runs one replica even where zero is allowed: a model that cannot start must say so
    # to whoever deploys it, not to the first customer.
    least = spec.floor if is_proven else max(spec.floor, 1)
    most = max(spec.max_replicas, least, 1)
    current = min(max(memory.replicas, least), most)
    active_s = _active_s(memory, seen)
    memory = msgspec.structs.replace(memory, active_s=active_s, ready=seen.ready, is_proven=is_proven)
    if seen.is_deleted:
        return _settle(memory, 0, "the endpoint is deleted")
    if seen.gateways == 0:
        return _settle(memory, current, f"no gateway reports; the size stays {current}")
    needed = math.ceil(seen.demand / max(seen.slots, 1))
    want = min(max(needed, least), most)
    if want >= current:
        return _settle(memory, want, _reason_up(want, current, seen, spec))
    return _shrink(spec, memory, seen, current=current, want=want)


def _active_s(memory: Memory, seen: Seen) -> float:
    """A request, a replica that just became ready, and not knowing all count as activity."""
    if seen.demand > 0 or seen.gateways == 0 or seen.ready > memory.ready:
        return seen.now_s
    return max(memory.active_s, seen.now_s - seen.idle_s)


def _shrink(spec: Scaling, memory: Memory, seen: Seen, *, current: int, want: int) -> Decision:
    """Fewer would do: wait until that was so for the whole idle period."""
    quiet_s = seen.now_s - memory.active_s
    # A load that somebody asked for is finished even when they left: others will ask, and half a load is wasted.
    is_loading = seen.ready == 0 and seen.replicas > 0
    if want == 0 and quiet_s >= spec.idle_s and not is_loading:
        return _settle(memory, 0, f"no request for {quiet_s:.0f} s")
    since_s = seen.now_s if memory.calm_since_s is None else memory.calm_since_s
    peak = max(memory.calm_peak, want, 1)
    calm_s = seen.now_s - since_s
    if peak < current and calm_s >= spec.idle_s:
        return _settle(memory, peak, f"{peak} of {current} replicas were enough for {calm_s:.0f} s")
    kept = msgspec.structs.replace(memory, replicas=current, calm_since_s=since_s, calm_peak=peak)
    if is_loading:
        return Decision(current, "a replica is loading", kept)
    left_s = spec.idle_s - (quiet_s if want == 0 and current == 1 else calm_s)
    return Decision(current, f"calm; {want} replicas in {max(left_s, 0):.0f} s unless requests come", kept)


def _settle(memory: Memory, replicas: int, reason: str) -> Decision:
    """A size that stands: the calm period starts anew."""
    return Decision(
        replicas, reason, msgspec.structs.replace(memory, replicas=replicas, calm_since_s=None, calm_peak=0)
    )


def _reason_up(want: int, current: int, seen: Seen, spec: Scaling) -> str:
    if want == 0:
        return "no request"
    if seen.demand == 0:
        is_proof = not seen.is_proven and want > spec.floor
        return "the endpoint is new: one replica proves it" if is_proof else f"{want} is the configured least"
    asked = f"{seen.queued} queued and {seen.in_flight} running requests"
    slots = f"{want} x {seen.slots} slots"
    if want > current:
        return f"{asked} need {slots}"
    return f"{asked} fit {slots}" if want * seen.slots >= seen.demand else f"{asked}; {want} is the configured most"


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
