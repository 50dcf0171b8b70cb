"""Room that is kept free for those who ask for little, while somebody else asks for all there is.

Fair shares say who is next, but whoever is next still waits until somebody
who runs is done. Beside a flood all slots are always taken, so a tenant that
asks for one answer in a while waits for the rest of somebody else's.

Where the flood has answers of which nobody has seen anything, the youngest
begins anew later (``making_way.py``). That costs nearly nothing, but streams
are seen from their first token on. So beside streams the flood leaves a few
slots alone: no tenant that runs more than its fair share takes the last
``kept`` of them, as long as others who run less were here in the last minute.

How many is a matter of how often such a request comes while one slot falls
free (``LATE_SHARE``), not of how long answers are: whoever takes a kept slot
is followed by the next that falls free, since the flood may not have it. It
is never more than ``share_max`` of what runs, and nothing where nobody else
comes or somebody can be put out: that is all that it costs.

A request may take a kept slot, or somebody's place, before those who wait if its tenant runs less
than its fair share, has nobody else waiting, and is ahead of the next in line
by no more than what ``LEAD`` requests like this one cost. So a tenant that always
waits never passes anybody, and what fairness promises those who always wait
(``fairness.py``) stays as it is. A state machine without I/O; seconds are the
caller's.
"""

from collections import OrderedDict
from collections.abc import Iterable
from math import exp
from typing import TypeVar

from modelyard.policy.admission import reservation
from modelyard.policy.fairness import cost_of
from modelyard.policy.job import BANDS, Job
from modelyard.policy.queueing import BATCH_BAND, WaitingLine
from modelyard.policy.replica_load import ReplicaLoad

W = TypeVar("W")

SEEN_S = 60.0
"""For so long a tenant that was here counts as one that shares; what is learned fades as fast."""
LATE_SHARE = 0.01
"""Of those who ask for little, the part that may find the kept slots taken by others of them."""
LEAD = 4.0
"""A few requests in quick succession are no flood. With 1 the second of two waits as long as without all this."""
UNSEEN_MIN = 2
"""So many that could be put out for each slot that would be kept are enough to keep none."""
LOST_SHARE = 0.03
"""Of the time that slots work, the part that answers which make way may throw away. Beside a flood on 16 slots it is
less than 1 %. On few slots it would be more, and where somebody comes just before each answer ends, a quarter."""
SPARE_MAX_S = 10.0
"""So many seconds of answers may be thrown away at once, also at the start."""
LOOK_S = 1.0
"""No more often is it thought over how much to keep."""
_FADED = 0.3
"""Requests that nothing is kept for any more: one that came 72 seconds ago."""
_WEIGHT = 0.1


class Headroom:
    """What one endpoint keeps free, and for whom. ``share_max``: of what runs there at most, 0 keeps nothing."""

    __slots__ = (
        "_ends",
        "_ends_new",
        "_light",
        "_light_new",
        "_looked_s",
        "_peak",
        "_running",
        "_seen",
        "_tokens",
        "_total",
        "_unseen",
        "_weight",
        "kept",
        "share_max",
        "spare_s",
    )

    def __init__(self, share_max: float) -> None:
        self.share_max = share_max
        self.kept = [0] * len(BANDS)
        """By band, requests of usual size that must still find room when somebody above its share has started there:
        for those who ask for little and are no less urgent."""
        self.spare_s = SPARE_MAX_S
        """So old may the answer be that makes way now; whoever has it thrown away takes off what it was."""
        self._running: dict[str, int] = {}
        self._total = self._peak = 0
        self._unseen = 0
        """Of those who run, how many could be put out."""
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """When a tenant was last here, and its weight; who was here last comes last."""
        self._weight = 0.0
        self._looked_s = 0.0
        # Requests of tenants within their share, and slots that fell free: faded sums, and what came since.
        self._light = [0.0] * len(BANDS)
        self._light_new = [0] * len(BANDS)
        self._ends = 0.0
        self._ends_new = 0
        self._tokens = 0.0
        """Memory that a request of those usually takes, in tokens."""

    def __repr__(self) -> str:
        return f"<Headroom: {max(self.kept)} kept, {len(self._seen)} tenants share {self._total} running>"

    # --- what happens ---

    def came(self, job: Job, now_s: float, *, waits: bool) -> None:
        """Note that a request comes; ``waits``: others of its tenant stand in line, so that it asks for much."""
        tenant_id, weight, seen = job.tenant_id, job.weight, self._seen
        known = seen.get(tenant_id)
        # To the second is often enough: every request comes by here.
        if known is None or known[1] != weight or now_s - known[0] >= LOOK_S:
            self._weight += weight - (known[1] if known else 0.0)
            seen[tenant_id] = (now_s, weight)
            seen.move_to_end(tenant_id)
        if not waits and len(seen) > 1 and self.is_light(job):
            new = self._light_new
            if not new[job.band]:
                # One a look is enough to know their size by.
                self._tokens += (_WEIGHT if self._tokens else 1.0) * (reservation(job) - self._tokens)
            new[job.band] += 1
        if now_s - self._looked_s >= LOOK_S:
            self._look(now_s)

    def look(self, now_s: float) -> None:
        """Think it over again how much to keep, if that is due."""
        if now_s - self._looked_s >= LOOK_S:
            self._look(now_s)

    def started(self, job: Job) -> None:
        """Note that a request takes a slot."""
        running, tenant_id = self._running, job.tenant_id
        running[tenant_id] = running.get(tenant_id, 0) + 1
        self._total = total = self._total + 1
        if total > self._peak:  # noqa: PLR1730 - a comparison, not a call: every request comes by here
            self._peak = total
        if not job.is_seen:
            self._unseen += 1

    def ended(self, job: Job) -> None:
        """Note that it gives the slot back."""
        running, tenant_id = self._running, job.tenant_id
        if (own := running[tenant_id]) > 1:
            running[tenant_id] = own - 1
        else:
            del running[tenant_id]
        self._total -= 1
        if not job.is_seen:
            self._unseen -= 1
        self._ends_new += 1

    # --- what follows ---

    def is_light(self, job: Job) -> bool:
        """Say whether room may be kept for the likes of ``job``: its tenant asks for little, and not for a batch."""
        if job.band >= BATCH_BAND or len(self._seen) <= 1:
            return False
        # ``is_within_share`` written out: every request comes by here.
        own = self._running.get(job.tenant_id)
        return own is None or (own + 1) * self._weight <= job.weight * (self._total + 1)

    def is_within_share(self, job: Job) -> bool:
        """Say whether a tenant, with ``job``, runs no more than its fair share of what runs; one request always is."""
        own = self._running.get(job.tenant_id, 0)
        return not own or (own + 1) * self._weight <= job.weight * (self._total + 1)

    def is_above_share(self, job: Job) -> bool:
        """Say whether the tenant of a job that runs would still run its fair share without it."""
        own = self._running.get(job.tenant_id, 0)
        return own > 1 and (own - 1) * self._weight >= job.weight * self._total

    def may_pass(self, job: Job, first: Job, line: WaitingLine[W]) -> bool:
        """Say whether one who waits may have kept room before ``first``, who is the first in line."""
        return (
            job.band <= first.band
            and line.is_alone(job)
            and self.is_within_share(job)
            and line.lead(job) * job.weight <= LEAD * cost_of(job)
        )

    def may_help(self, job: Job, line: WaitingLine[W]) -> bool:
        """Say whether one who comes to a line may soon get what is kept, or the place of somebody above its share."""
        if not (self.kept[job.band] or self._unseen) or line.waits(job) or not self.is_light(job):
            return False
        return not line.depths[job.band] or line.lead(job) * job.weight <= LEAD * cost_of(job)

    def leaves_room(self, job: Job, replica: ReplicaLoad, replicas: Iterable[ReplicaLoad], kv_share_max: float) -> bool:
        """Say whether ``job`` may start on ``replica``: its tenant is within its share, or it leaves what is kept."""
        if self.is_within_share(job):
            return True
        left = self.kept[job.band]
        for one in replicas:
            if not one.is_draining and not one.ejected_until_s:
                left -= self._room(one, kv_share_max, None if one is not replica else job)
                if left <= 0:
                    return True
        return False

    def _room(self, replica: ReplicaLoad, kv_share_max: float, job: Job | None) -> int:
        """Return how many requests of usual size a replica still takes, after ``job`` if that starts there."""
        room = replica.slots - replica.running - (job is not None)
        kv = replica.kv
        if kv.capacity and self._tokens and room > 0:
            free = kv_share_max * kv.capacity - kv.reserved - (0 if job is None else reservation(job))
            room = min(room, max(0, int(free / self._tokens)))
        return max(0, room)

    def _look(self, now_s: float) -> None:
        """Forget who has not been here for long, and think over how much to keep."""
        passed_s = min(now_s - self._looked_s, SEEN_S)
        self.spare_s = min(SPARE_MAX_S, self.spare_s + LOST_SHARE * self._total * passed_s)
        fade = exp((self._looked_s - now_s) / SEEN_S)
        self._looked_s = now_s
        seen = self._seen
        while seen:
            tenant_id, (seen_s, weight) = next(iter(seen.items()))
            if seen_s >= now_s - SEEN_S:
                break
            self._weight -= weight
            del seen[tenant_id]
        self._ends = self._ends * fade + self._ends_new
        self._ends_new = 0
        # Of what really runs: where memory is short, most slots are never taken.
        most, self._peak = self._peak + max(self.kept), self._total
        light = 0.0
        for band, new in enumerate(self._light_new):
            self._light[band] = self._light[band] * fade + new
            light += self._light[band]
            self.kept[band] = 0
            if len(seen) > 1 and light > _FADED:
                slots = wanted(light / max(1.0, self._ends))
                if self._unseen < UNSEEN_MIN * slots:
                    self.kept[band] = min(int(self.share_max * most), slots)
        self._light_new = [0] * len(BANDS)


def wanted(rate: float) -> int:
    """Return how many slots to keep when ``rate`` requests come for each slot that falls free.

    One that comes finds them all taken if as many came while the first of them was filled again; how many come
    in that time is a matter of chance (Poisson), and they shall be as many no more often than ``LATE_SHARE``.
    """
    slots, chance, late = 0, exp(-rate), 1.0
    while late > LATE_SHARE and slots < 1000:
        late -= chance
        slots += 1
        chance *= rate / slots
    return slots
