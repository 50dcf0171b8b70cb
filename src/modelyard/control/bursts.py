"""The extra pool of an endpoint: where a replica goes when its own nodes are full and callers would wait too long.

``policy/warm_pool.py: burst`` decides, this file keeps what it must remember:
whether an endpoint bursts, and since when it would not need to. That is lost
with the controller, and costs one more late moment after a restart.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

from modelyard.control.placing import Placer
from modelyard.control.promises import Need, Residents
from modelyard.domain.endpoints import Autoscale
from modelyard.domain.fleet import Replica
from modelyard.domain.nodes import Placement
from modelyard.policy.asks import Ask, NoRoom
from modelyard.policy.warm_pool import Burst, burst


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a replica goes. ``reason`` is why there, "" where there is nothing to explain."""

    placement: Placement
    reason: str = ""


@dataclass(slots=True)
class Bursts:
    """Places by ``placer``, in an endpoint's own pool first."""

    placer: Placer
    _last: dict[str, Burst] = field(default_factory=dict)

    def keep(self, endpoint_ids: Collection[str]) -> None:
        """Forget endpoints that are gone."""
        for endpoint_id in self._last.keys() - set(endpoint_ids):
            del self._last[endpoint_id]

    def place(
        self, replica: Replica, ask: Ask, need: Need, residents: Residents, rules: Autoscale, *, now_s: float
    ) -> Placed | NoRoom:
        """Return where ``replica`` goes, and hold the room, as ``Placer.place`` does."""
        elsewhere = msgspec.structs.replace(ask, pool=rules.burst_pool)
        if rules.burst_pool and self.placer.is_promised(replica.id, elsewhere):
            found = self.placer.place(replica, elsewhere, need, residents)  # its artifact is on the way
            if isinstance(found, Placement):
                return _rented(found, self._last[replica.endpoint_id])
        found = self.placer.place(replica, ask, need, residents)
        if not rules.burst_pool:
            return found if isinstance(found, NoRoom) else Placed(found)
        is_near = self.placer.is_claiming(replica.id) and not self.placer.is_left_later(replica.id, elsewhere)
        is_full = isinstance(found, NoRoom) and not is_near
        wait_s = need.wait_s
        if need.queued and not need.ready:
            # Nobody answers, so nobody predicts: who waits has waited, and waits for a load at least.
            wait_s = max(wait_s, self.placer.waited_s(replica.endpoint_id) + need.reload_s)
        before = self._last.get(replica.endpoint_id, Burst("", ""))
        told = self._last[replica.endpoint_id] = burst(
            rules,
            now_s=now_s,
            wait_s=wait_s,
            is_full=is_full,
            is_bursting=bool(before.pool),
            calm_since_s=before.calm_since_s,
        )
        if isinstance(found, Placement):
            return Placed(found)  # whatever was decided: there is room where it costs less
        if not is_full or not told.pool:
            if not is_full:
                return found
            helps = (*found.helps, f"burst pool {rules.burst_pool} is not used: {told.reason}")
            return NoRoom(found.reason, found.needed_bytes, helps=helps)
        extra = self.placer.place(replica, elsewhere, replace(need, may_evict=False), residents)
        if isinstance(extra, NoRoom):
            helps = (f"burst pool {told.pool} is full, too: {extra.reason}", *found.helps)
            return NoRoom(found.reason, found.needed_bytes, helps=helps)
        return _rented(extra, told)


def _rented(placement: Placement, told: Burst) -> Placed:
    return Placed(placement, f"in burst pool {told.pool}: {told.reason}")
