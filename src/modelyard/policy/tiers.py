"""Hot, warm and cold: how close an endpoint is to answering, and what pinning it to a tier asks of the others.

* *hot*: at least one replica runs, whatever the traffic; nobody's need evicts it.
* *warm*: it may sleep, but stays beside its weights: an engine that can sleep
  sleeps instead of stopping, else the weights stay in the node's cache. Its
  replicas may be evicted for hot endpoints, its weights may not.
* *cold*: after half a minute without a request nothing of it is kept, and
  nobody starts it before a request comes.
"""

import msgspec

from modelyard.domain.endpoints import Autoscale, Tier


class Kept(msgspec.Struct, frozen=True):
    """What the tier of an endpoint asks of those who place and evict."""

    is_evictable: bool
    """Its idle replicas may be stopped for somebody else's."""
    keeps_weights: bool
    """Its weights may not leave the node's cache."""
    sleeps: bool
    """An engine that can sleep does so instead of being stopped."""
    is_expected: bool
    """Forecasts and warm pools may start it."""


_ANY = Kept(is_evictable=True, keeps_weights=False, sleeps=True, is_expected=True)
_PINNED = {
    Tier.HOT: Kept(is_evictable=False, keeps_weights=True, sleeps=False, is_expected=True),
    Tier.WARM: Kept(is_evictable=True, keeps_weights=True, sleeps=True, is_expected=True),
    Tier.COLD: Kept(is_evictable=True, keeps_weights=False, sleeps=False, is_expected=False),
}


def kept(rules: Autoscale) -> Kept:
    """Return what is kept of an endpoint with these rules."""
    return _ANY if rules.tier is None else _PINNED[rules.tier]


def tier_of(*, ready: int, quiet_s: float, idle_s: float, sleeping: int = 0, has_weights: bool = False) -> Tier:
    """Return the tier that an endpoint is in now; ``quiet_s`` is since its last request.

    Ready and asked for within its idle time is hot; ready and waiting, or asleep beside its weights, is warm.
    """
    if ready > 0:
        return Tier.HOT if quiet_s < idle_s else Tier.WARM
    return Tier.WARM if sleeping > 0 or has_weights else Tier.COLD
