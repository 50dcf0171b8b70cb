"""The bounded line before an endpoint: the urgent band first, tenants by fair shares, one tenant's jobs by due time.

Refusing early is kinder than a long line: a caller that is told "full, retry
in 2 s" can go elsewhere, one that waits behind 500 others only times out. So
the line is bounded by count and by the bytes that it holds in memory, batch
may fill only half of either, and in a full line a more urgent job takes the
place of the youngest of the least urgent ones. Places are shared fairly too,
or a flood would fill the line and leave others nothing to be served from.

Who is next: the most urgent band that has waiters, or a less urgent one that
is owed its reserved share; in it the tenant with the least service so far; of
that tenant the job that is due first, then the one that came first (see
``fairness``). A state machine without I/O: whoever uses it says ``served``
for every job that starts, whether it waited or not, and ``settled`` when it
is known what it used.

Joining and leaving are O(log n) amortised, and much cheaper than that where
jobs leave in the order in which they came.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import exp
from operator import attrgetter
from typing import Generic, TypeVar

from modelyard.domain.tenants import Plan
from modelyard.policy.fairness import RESERVED_ONE_IN, BandShares, FairShares, cost_of
from modelyard.policy.job import BANDS, FIRST_S, NEVER_S, Job

W = TypeVar("W")

BATCH_BAND = BANDS.index(Plan.BATCH)

WAIT_MAX_S = 3600.0
"""No predicted wait is longer: beyond it, a prediction says nothing but "not now"."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[W]):
    who: W
    job: Job
    cost: int
    number: int
    deadline_s: float
    is_gone: bool = False


class _Own(Generic[W]):
    """What one tenant has in one band: a heap by due time and arrival, and what it costs and holds in all."""

    __slots__ = ("cost", "count", "heap", "size")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, _Waiter[W]]] = []
        self.cost = 0
        self.count = 0
        self.size = 0

    def forget(self, record: _Waiter[W], left: int) -> None:
        """Drop one of ``left`` + 1 waiters: at once from the top, else when it gets there."""
        self.cost -= record.cost
        self.count = left
        self.size -= record.job.size_bytes
        heap = self.heap
        record.is_gone = True
        if heap[0][2] is record:
            heapq.heappop(heap)
            while heap[0][2].is_gone:
                heapq.heappop(heap)
        elif len(heap) > 2 * left + 8:
            self.heap = [entry for entry in heap if not entry[2].is_gone]
            heapq.heapify(self.heap)


class WaitingLine(Generic[W]):
    """Waiters with their jobs and deadlines (seconds on the caller's clock). Waiters are told apart by identity."""

    __slots__ = (
        "_bands",
        "_bytes",
        "_costs",
        "_earliest_s",
        "_joined",
        "_order",
        "_owns",
        "_shares",
        "_waiting",
        "bytes_max",
        "light",
        "places",
        "waiters",
    )

    def __init__(self, places: int, bytes_max: int) -> None:
        self.places = places
        self.bytes_max = bytes_max
        self.waiters: dict[W, _Waiter[W]] = {}
        """Everybody who waits, in order of arrival; read only. Asking it directly spares hot callers a call."""
        self.light: dict[W, None] = {}
        """Those of them whose tenants asked for little when they came; read only."""
        self._joined = 0
        self._bands = BandShares()
        self._shares = [FairShares() for _ in BANDS]
        self._owns: list[dict[str, _Own[W]]] = [{} for _ in BANDS]
        self._waiting = [0] * len(BANDS)
        self._bytes = [0] * len(BANDS)
        self._costs = [0] * len(BANDS)
        # No deadline is before this one; the true first one may be later, when whoever had it has left.
        self._earliest_s = NEVER_S
        # waiter -> (position, cost of those ahead), once somebody asks, until anything changes.
        self._order: dict[W, tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.waiters)

    def __iter__(self) -> Iterator[W]:
        return iter(list(self.waiters))

    def __contains__(self, waiter: object) -> bool:
        return waiter in self.waiters

    def __repr__(self) -> str:
        bands = ", ".join(f"{count} {band}" for count, band in zip(self._waiting, BANDS, strict=True) if count)
        return f"<WaitingLine {len(self.waiters)}/{self.places}{': ' if bands else ''}{bands}>"

    @property
    def is_empty(self) -> bool:
        """Say whether nobody waits."""
        return not self.waiters

    @property
    def size_bytes(self) -> int:
        """Return how much memory the waiting requests hold."""
        return sum(self._bytes)

    @property
    def depths(self) -> tuple[int, ...]:
        """Return how many wait in each of ``BANDS``."""
        return tuple(self._waiting)

    @property
    def urgency(self) -> int:
        """Return the most urgent band in which somebody waits, the last one where nobody does."""
        waiting = self._waiting
        return 0 if waiting[0] else 1 if waiting[1] else 2

    def is_full_for(self, job: Job) -> bool:
        """Say whether a job must be refused, unless ``make_room`` helps."""
        size = job.size_bytes
        if len(self.waiters) >= self.places or sum(self._bytes) + size > self.bytes_max:
            return True
        return job.band == BATCH_BAND and (
            self._waiting[BATCH_BAND] >= (self.places + 1) // 2 or self._bytes[BATCH_BAND] + size > self.bytes_max // 2
        )

    def make_room(self, job: Job) -> W | None:
        """Put somebody out of a full line who has less right to stand there than the job; return whom, to be refused.

        That is the youngest waiter of the least urgent band below the job's, else the youngest of the tenant of its
        own band that holds most of what is short (places or bytes, over its weight), if that is still no less than
        the job's tenant would then hold: a flood must not keep others from even waiting. To be asked as long as the
        line ``is_full_for`` the job, since one waiter may not hold enough bytes. Returns None, and puts nobody out,
        when there is no need or it would not help.
        """
        if not self.is_full_for(job):
            return None
        record = self._least_urgent(job) or self._youngest_of_largest(job)
        if record is None:
            return None
        self.leave(record.who)
        return record.who

    def join(self, waiter: W, job: Job, *, deadline_s: float, is_light: bool = False) -> None:
        """Stand in line. The job must not change while it waits. ``is_light``: its tenant asks for little."""
        assert len(self.waiters) < self.places, "joined a full line"
        assert waiter not in self.waiters, "joined twice"
        band, tenant_id = job.band, job.tenant_id
        self._joined = number = self._joined + 1
        cost = cost_of(job)
        self.waiters[waiter] = record = _Waiter(waiter, job, cost, number, deadline_s)
        owns = self._owns[band]
        own = owns.get(tenant_id)
        if own is None:
            own = owns[tenant_id] = _Own()
        heapq.heappush(own.heap, (job.due_s, number, record))
        own.cost += cost
        own.size += job.size_bytes
        own.count = self._shares[band].join(tenant_id)
        self._waiting[band] += 1
        self._bytes[band] += job.size_bytes
        self._costs[band] += cost
        self._earliest_s = min(self._earliest_s, deadline_s)
        self._order = None
        if is_light:
            self.light[waiter] = None

    def leave(self, waiter: W) -> bool:
        """Go away, to a replica or elsewhere; say whether the waiter stood here."""
        record = self.waiters.pop(waiter, None)
        if record is None:
            return False
        if self.light:
            self.light.pop(waiter, None)
        job = record.job
        band, tenant_id = job.band, job.tenant_id
        left = self._shares[band].leave(tenant_id)
        if left:
            self._owns[band][tenant_id].forget(record, left)
        else:
            del self._owns[band][tenant_id]
        self._waiting[band] -= 1
        self._bytes[band] -= job.size_bytes
        self._costs[band] -= record.cost
        self._order = None
        return True

    def first(self) -> W | None:
        """Return who is next, without removing."""
        if not self.waiters:
            return None
        band = self._bands.first(self._waiting)
        tenant_id = self._shares[band].first()
        assert tenant_id is not None, "a band with waiters and no tenant"
        return self._owns[band][tenant_id].heap[0][2].who

    def waits(self, job: Job) -> bool:
        """Say whether others of the job's tenant stand in its band."""
        return job.tenant_id in self._owns[job.band]

    def is_alone(self, job: Job) -> bool:
        """Say whether a job that stands here is the only one of its tenant in its band."""
        return self._owns[job.band][job.tenant_id].count == 1

    def lead(self, job: Job) -> float:
        """Return how much more weighted service the job's tenant has had than the next in line of its band, in tokens.

        Somebody must wait in that band.
        """
        shares = self._shares[job.band]
        first = shares.first()
        assert first is not None, "nobody waits in this band"
        return shares.counter(job.tenant_id) - shares.counter(first)

    def alike(self, at_most: int) -> list[W]:
        """Return who is next and those who would be next if only its tenant's jobs of its band waited, in that order.

        Among these the shares of tenants and bands do not care who is served first.
        """
        if not self.waiters:
            return []
        band = self._bands.first(self._waiting)
        tenant_id = self._shares[band].first()
        assert tenant_id is not None, "a band with waiters and no tenant"
        heap = self._owns[band][tenant_id].heap
        # Twice as many, because some entries may be of jobs that have gone.
        return [entry[2].who for entry in heapq.nsmallest(2 * at_most, heap) if not entry[2].is_gone][:at_most]

    def jobs(self, at_most: int) -> list[Job]:
        """Return the jobs of those who have waited longest."""
        return [record.job for record in islice(self.waiters.values(), at_most)]

    def served(self, job: Job) -> None:
        """Note that a job starts on a replica now, whether it waited or not: after ``leave``, if it did."""
        self._shares[job.band].charge(job)
        if self.waiters or not self._bands.is_even:
            self._bands.charge(job.band, cost_of(job), self._waiting)
            self._order = None

    def settled(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Note what a job that was ``served`` really used; 0 and 0 when it failed, which gives its charge back."""
        self._shares[job.band].settle(job, prompt_tokens, output_tokens)
        self._order = None

    def expired(self, now_s: float) -> list[W]:
        """Return those whose deadline has passed, in order of arrival, without removing; O(1) while none can have."""
        if now_s < self._earliest_s:
            return []
        # Those returned still wait, so the next call looks again unless they leave.
        self._earliest_s = min((record.deadline_s for record in self.waiters.values()), default=NEVER_S)
        return [waiter for waiter, record in self.waiters.items() if record.deadline_s <= now_s]

    def order(self) -> list[W]:
        """Return everybody in the order in which they would be served if nothing else came and all went as predicted.

        O(n log n); kept until anything changes, so that all waiters may ask for their position.
        """
        return list(self._looked_ahead())

    def position(self, waiter: W) -> int:
        """Return how many would be served before a waiter if nothing else came; 0 is next. KeyError: not here."""
        return self._looked_ahead()[waiter][0]

    def tokens_ahead(self, waiter: W | None) -> int:
        """Return the cost of all that would be served before a waiter, or, for None, of everything that waits.

        In units of prompt tokens (``cost_of``). KeyError: not here.
        """
        if waiter is None:
            return sum(self._costs)
        return self._looked_ahead()[waiter][1]

    def tokens_before(self, job: Job) -> int:
        """Estimate the cost of what would be served before a job if it joined now: what its predicted wait comes from.

        O(tenants of its band). Counts all of more urgent bands and of its own tenant; of other tenants what they get
        until the shares are even; of less urgent bands their reserved share. Off by at most one job of each tenant
        and band, and too high for a job that is due before others of its tenant.
        """
        band = job.band
        shares, owns = self._shares[band], self._owns[band]
        own = owns.get(job.tenant_id)
        ahead = float(sum(self._costs[:band]) + (own.cost if own else 0))
        if len(owns) > (own is not None):
            standing = shares.standing()
            floor = min(standing)[0]
            mark = max(shares.counter(job.tenant_id), floor) + (own.cost / job.weight if own else 0)
            for counter, _, tenant_id in standing:
                if tenant_id != job.tenant_id and counter <= mark:
                    other = owns[tenant_id]
                    head = other.heap[0][2]
                    ahead += min(other.cost, (mark - counter) * head.job.weight + head.cost)
        for less in range(band + 1, len(BANDS)):
            ahead += min(self._costs[less], ahead / RESERVED_ONE_IN)
        return int(ahead)

    def _least_urgent(self, job: Job) -> _Waiter[W] | None:
        least = next((band for band in range(len(BANDS) - 1, job.band, -1) if self._waiting[band]), None)
        if least is None or sum(self._bytes[: job.band + 1]) + job.size_bytes > self.bytes_max:
            return None
        records = reversed(self.waiters.values())
        return next((one for one in records if one.job.band == least and one.job.due_s != FIRST_S), None)

    def _youngest_of_largest(self, job: Job) -> _Waiter[W] | None:
        band, size = job.band, job.size_bytes
        is_batch = band == BATCH_BAND
        owns = self._owns[band]
        mine = owns.get(job.tenant_id)
        if len(owns) == (mine is not None):
            return None
        places_short = len(self.waiters) >= self.places or (
            is_batch and self._waiting[BATCH_BAND] >= (self.places + 1) // 2
        )
        bytes_short = sum(self._bytes) + size - self.bytes_max
        if is_batch:
            bytes_short = max(bytes_short, self._bytes[BATCH_BAND] + size - self.bytes_max // 2)

        def held(own: _Own[W]) -> float:
            return (own.count if places_short else own.size) / own.heap[0][2].job.weight

        largest = max((own for own in owns.values() if own is not mine), key=held)
        # Who made way on a replica has been promised to begin anew; it came back last, but is not the youngest.
        others = (entry[2] for entry in largest.heap if not entry[2].is_gone and entry[0] != FIRST_S)
        if (record := max(others, key=attrgetter("number"), default=None)) is None:
            return None
        would_be = ((mine.count if mine else 0) + 1) if places_short else ((mine.size if mine else 0) + size)
        left = (largest.count - 1) if places_short else (largest.size - record.job.size_bytes)
        if record.job.size_bytes < bytes_short or left / record.job.weight < would_be / job.weight:
            return None
        return record

    def _looked_ahead(self) -> dict[W, tuple[int, int]]:
        if self._order is None:
            # In a band the order does not depend on when the other bands are served.
            queues = [self._band_order(band) for band in range(len(BANDS))]
            waiting, bands = list(self._waiting), self._bands.copy()
            order: dict[W, tuple[int, int]] = {}
            ahead = 0
            for position in range(len(self.waiters)):
                band = bands.first(waiting)
                record = queues[band][-waiting[band]]
                waiting[band] -= 1
                bands.charge(band, record.cost, waiting)
                order[record.who] = (position, ahead)
                ahead += record.cost
            self._order = order
        return self._order

    def _band_order(self, band: int) -> list[_Waiter[W]]:
        standing = self._shares[band].standing()
        heapq.heapify(standing)
        queues = {
            tenant_id: [entry[2] for entry in sorted(own.heap, reverse=True) if not entry[2].is_gone]
            for tenant_id, own in self._owns[band].items()
        }
        order: list[_Waiter[W]] = []
        while standing:
            counter, activation, tenant_id = standing[0]
            queue = queues[tenant_id]
            record = queue.pop()
            order.append(record)
            if queue:
                heapq.heapreplace(standing, (counter + record.cost / record.job.weight, activation, tenant_id))
            else:
                heapq.heappop(standing)
        return order


class DrainRate:
    """How fast a line empties: a smoothed rate, and from it how long a wait will be.

    Amounts are requests, or tokens if ``note`` is told how many. The rate is what left over the time in which the
    line was not empty, both fading with ``window_s`` (so a change is half seen after 0.7 of it), and is unknown until
    four departures and half a second of such time. For departures at a constant rate it is exact; for bursts of k it
    is too high by at most the first burst. Waits are between 0 and ``WAIT_MAX_S``.
    """

    __slots__ = ("_amount", "_departures", "_last_s", "_noted", "_time_s", "window_s")

    _NOTED_MIN = 4
    _TIME_MIN_S = 0.5

    def __init__(self, window_s: float = 30.0) -> None:
        self.window_s = window_s
        self._amount = 0.0
        self._departures = 0.0
        self._time_s = 0.0
        self._last_s: float | None = None
        self._noted = 0

    def __repr__(self) -> str:
        return f"<DrainRate: {self._amount:.1f} in {self._time_s:.1f} s>"

    def resume(self, now_s: float) -> None:
        """Say that the line has just stopped being empty: the time since the last note said nothing of its speed."""
        self._last_s = now_s

    def note(self, now_s: float, amount: float = 1.0) -> None:
        """Note that a request has left the line for a replica."""
        last_s = self._last_s
        self._last_s = now_s
        if last_s is None:
            return
        fade, seen_s, part = self._since(last_s, now_s)
        self._amount = self._amount * fade + amount * part
        self._departures = self._departures * fade + part
        self._time_s = self._time_s * fade + seen_s
        self._noted += 1

    def wait_s(self, ahead: int, now_s: float | None = None) -> float | None:
        """Return in how many seconds one with ``ahead`` before it will leave the line; None while unknown.

        With ``now_s``, the time since the last departure counts too, so that a line that has stopped is noticed.
        """
        amount, departures, time_s = self._amount, self._departures, self._time_s
        if self._noted < self._NOTED_MIN or time_s < self._TIME_MIN_S or amount <= 0:
            return None
        each = amount / departures
        wait_s = (ahead + each) * time_s / amount
        if now_s is not None and self._last_s is not None:
            # As if one had left now, if that is slower than what was seen.
            fade, seen_s, part = self._since(self._last_s, now_s)
            wait_s = max(wait_s, (ahead + each) * (time_s * fade + seen_s) / (amount * fade + each * part))
        return min(wait_s, WAIT_MAX_S)

    def _since(self, last_s: float, now_s: float) -> tuple[float, float, float]:
        """Return what is left of the past, and the faded length of the gap and of something spread evenly over it."""
        gap_s = now_s - last_s
        if gap_s <= 0:
            return 1.0, 0.0, 1.0
        fade = exp(-gap_s / self.window_s)
        seen_s = self.window_s * (1.0 - fade)
        return fade, seen_s, seen_s / gap_s
