"""Who gets the next slot of a replica that several endpoints send requests to.

A guest endpoint has no replicas of its own: its adapter is loaded into
replicas of a host, where it has *seats* (``seats.py``). Every endpoint keeps
its dispatcher and its line, so a guest that is nowhere resident holds nobody
up; what they share is the replica, and here is decided whose line a slot that
falls free goes to.

The order between lines is the one that each keeps within itself: the most
urgent band first, with a small reserved share for less urgent ones; in it the
tenant with the least service on this replica (``fairness.py``: tokens over
weight, charged at dispatch and corrected at the end). Which line had the slot
before plays no part, or the busiest endpoint would keep what it has.

Counters are those of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
1996): the floor is the least counter of those who wait, and whoever comes
back is lifted to it. Two tenants that both wait all the time therefore differ
by at most the largest cost of one request of each, where predictions are right.

A state machine without I/O. A slot costs O(lines that wait for this replica),
whatever the number of endpoints.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Protocol
from weakref import ref

from modelyard.policy.fairness import OUTPUT_WEIGHT, BandShares, cost_of
from modelyard.policy.job import BANDS, Job
from modelyard.policy.replica_load import ReplicaLoad

_FORGET_FROM = 1024
_NOBODY = (0,) * len(BANDS)
_counter = itemgetter(0)


class Line(Protocol):
    """The waiting line of one endpoint, with its dispatcher."""

    def claim(self) -> tuple[int, str] | None:
        """Return the most urgent band in which somebody waits, and the tenant of the next in line; None: nobody.

        The band is not that of the next in line: where a batch job has its reserved turn, the others behind it wait no
        less.
        """
        ...

    def serve_one(self, *, now_s: float) -> bool:
        """Hand a slot to the next in line if there is one for it; say whether anything changed."""
        ...

    def waits_for_memory(self, occupancy: "Occupancy") -> bool:
        """Say whether all that keeps the next in line from this replica is its KV cache."""
        ...


class Turns:
    """The service that tenants got on one replica, of one band: tokens over weight."""

    __slots__ = ("_counters", "_forget_from", "floor")

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._forget_from = _FORGET_FROM
        self.floor = 0.0

    def __repr__(self) -> str:
        return f"<Turns: {len(self._counters)} tenants, floor {self.floor:.0f}>"

    def counter(self, tenant_id: str) -> float:
        """Return what counts for a tenant: never less than the floor."""
        return max(self.floor, self._counters.get(tenant_id, 0.0))

    def charge(self, job: Job) -> None:
        """Note that a job starts: its predicted cost is charged at once."""
        if len(self._counters) >= self._forget_from:
            self._counters = {tenant_id: count for tenant_id, count in self._counters.items() if count > self.floor}
            self._forget_from = max(_FORGET_FROM, 2 * len(self._counters))
        tenant_id = job.tenant_id
        self._counters[tenant_id] = self.counter(tenant_id) + cost_of(job) / job.weight

    def settle(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Correct the charge by what was really used; ``0, 0`` gives all of it back."""
        change = prompt_tokens - job.prompt_tokens + OUTPUT_WEIGHT * (output_tokens - job.output_tokens)
        if change and (counter := self._counters.get(job.tenant_id)) is not None:
            self._counters[job.tenant_id] = counter + change / job.weight


class Occupancy:
    """Everybody who sends requests to one replica, and the lines that wait for it."""

    __slots__ = ("_bands", "_base", "_kept_for", "_turns", "_waiting", "lines", "turn_of")

    def __init__(self, base: ReplicaLoad) -> None:
        # Not held: the replica holds this, and a cycle would leave it to the collector's whim when `Seats` forgets it.
        self._base = ref(base)
        self.lines: dict[Line, None] = {}
        """Those that wait; who had its turn last comes last."""
        self.turn_of: Line | None = None
        """Whose turn it is while slots are handed out."""
        self._kept_for: Line | None = None
        """Who had its turn last, and has to wait until there is memory enough."""
        self._bands = BandShares()
        self._turns = [Turns() for _ in BANDS]
        self._waiting: list[int] = [0] * len(BANDS)
        """How many lines waited by band when the last turn was given."""

    def __repr__(self) -> str:
        return f"<Occupancy of {self._base()!r}: {len(self.lines)} lines wait>"

    # --- what runs there ---

    def charge(self, job: Job) -> None:
        """Note that a request was sent to the replica, whoever sent it: after it left its line, if it waited."""
        turns = self._turns[job.band]
        turns.charge(job)
        if self.lines:
            self._bands.charge(job.band, cost_of(job), self._waiting)
            return
        # Without a line there is nothing to share: everybody who comes now starts where the last one is.
        turns.floor = turns.counter(job.tenant_id)
        if not self._bands.is_even:
            self._bands.charge(job.band, cost_of(job), _NOBODY)

    def settle(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Note what a request that was charged really used."""
        self._turns[job.band].settle(job, prompt_tokens, output_tokens)

    # --- who is next ---

    def keeps_from(self, line: Line, job: Job) -> bool:
        """Say whether the replica's memory is kept for somebody in another line, who is no less urgent than ``job``.

        Small requests of one endpoint would else keep a large one of another waiting for ever.
        """
        if not self.lines or line is self.turn_of:
            return False
        kept_for = self._kept_for
        if kept_for is not None and kept_for is not line and kept_for in self.lines and kept_for.waits_for_memory(self):
            return True  # also from more urgent ones: it is the turn reserved for its band
        return any(
            other is not line
            and (claim := other.claim()) is not None
            and claim[0] <= job.band
            and other.waits_for_memory(self)
            for other in self.lines
        )

    def serve(self, *, now_s: float) -> None:
        """Hand free slots to those who wait, in order; those that cannot use one are passed over."""
        base, lines = self._base(), self.lines
        has_changed = True
        while base is not None and has_changed and lines and base.running < base.slots and not base.ejected_until_s:
            has_changed = False
            for line in self._in_order():
                self.turn_of = line
                try:
                    has_changed = line.serve_one(now_s=now_s)
                finally:
                    self.turn_of = None
                if has_changed:
                    if line in lines:
                        del lines[line]
                        lines[line] = None
                    break
                if line.waits_for_memory(self):
                    self._kept_for = line
                    return

    def _in_order(self) -> Iterator[Line]:
        """Yield the lines that wait, the one whose turn it is first."""
        turns = self._turns
        found: list[list[tuple[float, Line]]] = [[] for _ in BANDS]
        for line in self.lines:
            if (claim := line.claim()) is not None:
                found[claim[0]].append((turns[claim[0]].counter(claim[1]), line))
        waiting = self._waiting = [len(each) for each in found]
        if not any(waiting):
            return
        first = self._bands.first(waiting)
        bests = [min(each, key=_counter) if each else None for each in found]
        for band, best in enumerate(bests):
            if best is not None:
                # Of all who wait: who must be passed over, because it waits for something else, loses nothing by it.
                turns[band].floor = max(turns[band].floor, best[0])
        for band in sorted(range(len(BANDS)), key=lambda band: band != first):
            if (best := bests[band]) is not None:
                yield best[1]
                yield from (line for _, line in sorted(found[band], key=_counter) if line is not best[1])
