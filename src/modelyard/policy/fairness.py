"""Who is next by right: fair shares of tokens between tenants, and a small reserved share for less urgent bands.

Between tenants of one band: the Virtual Token Counter with weights and
prediction (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). Every tenant has a counter of the service it got, in tokens over
its weight; whoever has the smallest goes first. The whole predicted cost is
charged at dispatch and corrected when the real one is known, which keeps the
counters closer together than charging while tokens come.

What it promises, with U the largest cost of one request over its weight, and
E what the predictions of all requests in flight can be wrong by together: two
tenants that both wait all the time differ by at most 2 U + 4 E in weighted
service (2 U where predictions are right: theorem 4.4 of the paper), and a
tenant that was away has no credit, only its place. No clock, no chance.
"""

import heapq
from collections.abc import Sequence

from modelyard.policy.job import BANDS, Job

OUTPUT_WEIGHT = 2
"""What a generated token costs in tokens of the prompt (``w_out`` of the paper, whose ``w_in`` is 1)."""

RESERVED_ONE_IN = 20
"""One in so many served tokens goes to a less urgent band at least, as long as somebody waits in it: 5 %."""

_FORGET_FROM = 1024


def cost_of(job: Job) -> int:
    """Return the predicted cost of a job in units of prompt tokens, before the weight of its tenant."""
    return job.prompt_tokens + OUTPUT_WEIGHT * job.output_tokens


class FairShares:
    """The counters of the tenants of one band of one endpoint.

    A tenant is active while it waits (``join`` and ``leave``, once per waiter).
    The floor is the smallest counter of the active ones as last seen, or, where
    nobody waits, that of the tenant charged last; it never falls. A counter of
    somebody inactive at or below the floor says nothing any more, as its owner
    would be lifted to the floor anyway: it may be forgotten at any time, which
    bounds the memory by the tenants that are ahead or wait.

    ``charge`` and ``settle`` are on the path of every request and are plain
    arithmetic; the others cost O(log active tenants), amortised.
    """

    __slots__ = ("_activations", "_active", "_counters", "_entries", "_floor", "_forget_from", "_heap", "_last")

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._floor = 0.0
        self._last = ""
        self._activations = 0
        self._forget_from = _FORGET_FROM
        # A heap by (counter when pushed, activation). The valid entry of a tenant is the one in _entries, and never
        # above its counter: raising a counter costs nothing until the entry comes to the top.
        self._heap: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}

    def __len__(self) -> int:
        return len(self._counters)

    def __repr__(self) -> str:
        return f"<FairShares: {len(self._active)} of {len(self._counters)} tenants wait, floor {self._floor:.0f}>"

    def counter(self, tenant_id: str) -> float:
        """Return the weighted service of a tenant; the floor for one that is not known."""
        return self._counters.get(tenant_id, self._floor)

    def charge(self, job: Job) -> None:
        """Note that a job starts now: its predicted cost is charged at once."""
        tenant_id = job.tenant_id
        counters = self._counters
        counter = counters.get(tenant_id)
        if counter is None:
            self._make_room()
            counters = self._counters
            counter = self._floor
        elif counter < self._floor and tenant_id not in self._active:
            counter = self._floor
        counter += (job.prompt_tokens + OUTPUT_WEIGHT * job.output_tokens) / job.weight
        counters[tenant_id] = counter
        self._last = tenant_id
        if not self._active:
            # Without a line there is nothing to share: everybody who comes now starts where the last one is.
            self._floor = counter

    def settle(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Correct the charge by what was really used; ``0, 0`` gives all of it back. The job must not have changed."""
        change = prompt_tokens - job.prompt_tokens + OUTPUT_WEIGHT * (output_tokens - job.output_tokens)
        if not change:
            return
        tenant_id = job.tenant_id
        counter = self._counters.get(tenant_id)
        if tenant_id in self._active:
            assert counter is not None, "an active tenant without a counter"
            self._counters[tenant_id] = counter = counter + change / job.weight
            entry = self._entries[tenant_id]
            if counter < entry[0]:
                self._push((counter, entry[1], tenant_id))
        elif change > 0:
            # Lifted first: whether its counter was forgotten must make no difference.
            if counter is None:
                self._make_room()
            self._counters[tenant_id] = max(self._floor, counter or 0.0) + change / job.weight
        elif counter is not None:
            self._counters[tenant_id] = counter + change / job.weight

    def join(self, tenant_id: str) -> int:
        """Note that one more job of a tenant waits; returns how many now do.

        Coming back, a tenant is lifted to the floor: what it did not use while it was away is not saved up.
        """
        active = self._active
        waiting = active.get(tenant_id, 0)
        if not waiting:
            floor = self._raise_floor()
            counter = self._counters.get(tenant_id)
            if counter is None:
                self._make_room()
            self._counters[tenant_id] = counter = max(floor, counter or 0.0)
            self._activations += 1
            self._push((counter, self._activations, tenant_id))
        active[tenant_id] = waiting = waiting + 1
        return waiting

    def leave(self, tenant_id: str) -> int:
        """Note that one job of a tenant waits no more, served or not; returns how many still do."""
        active = self._active
        waiting = active[tenant_id] - 1
        if waiting:
            active[tenant_id] = waiting
        else:
            # Before it goes: the one that is served next must not be lifted over its own counter by those it leaves.
            self._raise_floor()
            del active[tenant_id]
            del self._entries[tenant_id]
        return waiting

    def first(self) -> str | None:
        """Return the active tenant with the smallest counter (ties: who became active first)."""
        active = self._active
        if len(active) < 2:
            return next(iter(active), None)
        heap, entries, counters = self._heap, self._entries, self._counters
        while True:
            entry = heap[0]
            tenant_id = entry[2]
            if entries.get(tenant_id) is not entry:
                heapq.heappop(heap)
                continue
            counter = counters[tenant_id]
            if counter == entry[0]:
                return tenant_id
            entries[tenant_id] = entry = (counter, entry[1], tenant_id)
            heapq.heapreplace(heap, entry)

    def standing(self) -> list[tuple[float, int, str]]:
        """Return ``(counter, activation, tenant)`` of the active tenants: who is next if it is sorted."""
        counters = self._counters
        return [(counters[tenant_id], activation, tenant_id) for _, activation, tenant_id in self._entries.values()]

    def _raise_floor(self) -> float:
        """Bring the floor up to date and return it."""
        first = self.first()
        counter = self._counters.get(self._last if first is None else first, 0.0)
        self._floor = max(self._floor, counter)
        return self._floor

    def _push(self, entry: tuple[float, int, str]) -> None:
        self._entries[entry[2]] = entry
        heap = self._heap
        if len(heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(heap, entry)

    def _make_room(self) -> None:
        if len(self._counters) >= self._forget_from:
            self._forget()

    def _forget(self) -> None:
        if self._active:
            self._raise_floor()
        floor, active = self._floor, self._active
        self._counters = {
            tenant_id: counter
            for tenant_id, counter in self._counters.items()
            if counter > floor or tenant_id in active
        }
        self._forget_from = max(_FORGET_FROM, 2 * len(self._counters))


class BandShares:
    """Which band is next: the most urgent, unless a less urgent one is owed its reserved share.

    Each less urgent band earns what is served, whoever gets it, and pays ``RESERVED_ONE_IN`` times the cost of a job
    that goes before more urgent ones; it does so as soon as it has any credit, and must earn back what it then owes
    before the next. It saves up nothing while nobody waits in it, and owes nothing for what it got when nobody more
    urgent waited. So over any time in which a band has waiters it gets its share, less the cost of one job that it
    owed at the start and a fraction of one while others have their turn. Costs are the predicted ones, in tokens;
    credits are whole numbers, so that looking ahead comes to exactly the same answers.
    """

    __slots__ = ("_credits", "is_even")

    def __init__(self, credits: Sequence[int] = (0,) * len(BANDS)) -> None:
        self._credits = list(credits)
        self.is_even = not any(credits)
        """Whether no band owes or has saved anything; then, without waiters, there is nothing to ``charge``."""

    def __repr__(self) -> str:
        return f"<BandShares: {', '.join(f'{credit:+}' for credit in self._credits)}>"

    def copy(self) -> "BandShares":
        """Return the same credits, to look ahead with."""
        return BandShares(self._credits)

    def first(self, waiting: Sequence[int]) -> int:
        """Return the band to serve next, given how many wait in each; at least one must."""
        best = 0
        while not waiting[best]:
            best += 1
        most = 0
        for band in range(best + 1, len(waiting)):
            if waiting[band] and self._credits[band] > most:
                best, most = band, self._credits[band]
        return best

    def charge(self, served: int, cost: int, waiting: Sequence[int]) -> None:
        """Note that a job of band ``served`` starts; ``waiting`` is without it."""
        credits = self._credits
        self.is_even = True
        before = waiting[0]
        for band in range(1, len(credits)):
            waits = waiting[band]
            credit = credits[band]
            if band == served:
                paid = credit - RESERVED_ONE_IN * cost
                if before or paid > 0:
                    credit = paid
                elif credit > 0:
                    credit = 0
            credit += cost
            if credit > 0 and not waits:
                credit = 0
            if credit:
                self.is_even = False
            credits[band] = credit
            before = before or waits
