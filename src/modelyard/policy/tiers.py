"""How close an endpoint is to answering: hot, warm or cold, and why (the source's tiers 1 to 3).

What pinning an endpoint to a tier asks of the others:

* *hot*: at least one replica runs, whatever the traffic; nobody's need evicts it.
* *warm*: it may sleep, but for want of traffic only: its idle replicas are evicted for hot endpoints alone.
* *cold*: after half a minute without a request nothing of it runs, and nobody starts it before a request comes.
"""

from collections.abc import Sequence

import msgspec

from modelyard.domain.endpoints import Autoscale, Tier

JUST_NOW_S = 10.0
"""Between two requests that come so close after each other an endpoint does not turn warm and hot again."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint; ``floor``: replicas that are kept whatever the traffic."""

    ready: int = 0
    loading: int = 0
    asleep: int = 0
    in_flight: int = 0
    idle_s: float | None = None
    """None: no request yet."""
    floor: int = 0
    pin: Tier | None = None
    cached_on: Sequence[str] = ()
    """Nodes with its weights in their cache."""
    is_stored: bool = True
    """Its weights lie in the platform's store."""
    has_weights: bool = True
    """Its engine loads any."""


class Standing(msgspec.Struct, frozen=True):
    """The tier and the reason. ``is_short``: it is not what its owner pinned."""

    tier: Tier
    reason: str
    is_short: bool = False


_ORDER = {Tier.COLD: 0, Tier.WARM: 1, Tier.HOT: 2}


def tier_of(seen: Seen) -> Standing:
    """Return the tier that the endpoint is in now."""
    tier, reason = _standing(seen)
    if seen.pin is None:
        return Standing(tier, reason)
    is_short = _ORDER[tier] < _ORDER[seen.pin]
    return Standing(tier, f"{reason}; pinned {seen.pin}", is_short)


def may_be_expected(rules: Autoscale) -> bool:
    """Say whether forecasts and warm pools may start an endpoint before a request comes."""
    return rules.tier is not Tier.COLD


def _standing(seen: Seen) -> tuple[Tier, str]:
    if seen.ready:
        return _loaded(seen)
    if seen.asleep:
        return Tier.WARM, f"{seen.asleep} asleep beside the weights; awake in moments"
    loading = f"{seen.loading} loading; " if seen.loading else "nothing runs; "
    if seen.cached_on:
        more = f" and {len(seen.cached_on) - 1} more" if len(seen.cached_on) > 1 else ""
        return Tier.COLD, f"{loading}weights are cached on {min(seen.cached_on)}{more}"
    if not seen.has_weights:
        return Tier.COLD, loading + "it has no weights to load"
    return Tier.COLD, loading + ("weights are in the store" if seen.is_stored else "weights were not fetched yet")


def _loaded(seen: Seen) -> tuple[Tier, str]:
    if seen.in_flight:
        return Tier.HOT, f"{seen.in_flight} requests on {seen.ready} ready replicas"
    if seen.pin is Tier.HOT or (seen.floor and seen.pin is not Tier.WARM):
        return Tier.HOT, f"{seen.ready} ready; at least {max(seen.floor, 1)} is kept"
    if seen.idle_s is None:
        return Tier.WARM, f"{seen.ready} ready; no request yet"
    if seen.idle_s < JUST_NOW_S:
        return Tier.HOT, f"{seen.ready} ready; last request {seen.idle_s:.0f} s ago"
    return Tier.WARM, f"{seen.ready} ready; no request for {seen.idle_s:.0f} s"
