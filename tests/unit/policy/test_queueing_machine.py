"""The waiting line against the same rules written down slowly: sorted lists, no heaps, nothing kept."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.queueing import WaitingLine

PLACES, BYTES_MAX = 11, 100
TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Who:
    """A waiter that equals only itself, and whose order is never asked."""


@dataclass
class Standing:
    """Somebody in the slow line."""

    who: Who
    job: Job
    number: int
    deadline_s: float


def cost(job: Job) -> int:
    return job.prompt_tokens + 2 * job.output_tokens


class SlowLine:
    """What the line should do."""

    def __init__(self) -> None:
        self.standing: list[Standing] = []
        self.counters = [dict.fromkeys(TENANTS, 0.0) for _ in range(3)]
        self.activations: list[dict[str, int]] = [{}, {}, {}]
        self.floors = [0.0, 0.0, 0.0]
        self.last = ["", "", ""]
        self.credits = [0, 0, 0]
        self.joined = 0

    def copy(self) -> "SlowLine":
        other = SlowLine()
        other.standing = list(self.standing)
        other.counters = [dict(counters) for counters in self.counters]
        other.activations = [dict(activations) for activations in self.activations]
        other.floors, other.last, other.credits = list(self.floors), list(self.last), list(self.credits)
        return other

    def of(self, band: int) -> list[Standing]:
        return [each for each in self.standing if each.job.band == band]

    def waits(self, band: int, tenant: str) -> bool:
        return any(each.job.tenant_id == tenant for each in self.of(band))

    def raise_floor(self, band: int) -> None:
        active = {each.job.tenant_id for each in self.of(band)}
        if active:
            seen = min(self.counters[band][tenant] for tenant in active)
        else:
            seen = self.counters[band].get(self.last[band], 0.0)
        self.floors[band] = max(self.floors[band], seen)

    def join(self, who: Who, job: Job, deadline_s: float) -> None:
        band, tenant = job.band, job.tenant_id
        self.joined += 1
        if not self.waits(band, tenant):
            self.raise_floor(band)
            self.counters[band][tenant] = max(self.counters[band][tenant], self.floors[band])
            self.activations[band][tenant] = self.joined
        self.standing.append(Standing(who, job, self.joined, deadline_s))

    def leave(self, who: Who) -> None:
        gone = next(each for each in self.standing if each.who is who)
        band, tenant = gone.job.band, gone.job.tenant_id
        if sum(each.job.tenant_id == tenant for each in self.of(band)) == 1:
            self.raise_floor(band)
        self.standing.remove(gone)

    def served(self, job: Job) -> None:
        band, tenant = job.band, job.tenant_id
        if not self.waits(band, tenant):
            self.counters[band][tenant] = max(self.counters[band][tenant], self.floors[band])
        self.counters[band][tenant] += cost(job) / job.weight
        self.last[band] = tenant
        if not self.of(band):
            self.floors[band] = self.counters[band][tenant]
        for less in (1, 2):
            if less == band:
                paid = self.credits[less] - 20 * cost(job)
                if any(each.job.band < less for each in self.standing):
                    self.credits[less] = paid
                else:
                    self.credits[less] = max(paid, min(0, self.credits[less]))
            self.credits[less] += cost(job)
            if not self.of(less):
                self.credits[less] = min(0, self.credits[less])

    def settled(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        band, tenant = job.band, job.tenant_id
        change = (prompt_tokens + 2 * output_tokens - cost(job)) / job.weight
        if change > 0 and not self.waits(band, tenant):
            self.counters[band][tenant] = max(self.counters[band][tenant], self.floors[band])
        self.counters[band][tenant] += change

    def first(self) -> Standing | None:
        if not self.standing:
            return None
        band = min(each.job.band for each in self.standing)
        owed = [less for less in range(band + 1, 3) if self.of(less) and self.credits[less] > 0]
        if owed:
            band = max(owed, key=lambda less: (self.credits[less], -less))
        return min(
            self.of(band),
            key=lambda each: (
                self.counters[band][each.job.tenant_id],
                self.activations[band][each.job.tenant_id],
                each.job.due_s,
                each.number,
            ),
        )

    def order(self) -> list[Standing]:
        ahead, order = self.copy(), []
        while (first := ahead.first()) is not None:
            ahead.leave(first.who)
            ahead.served(first.job)
            order.append(first)
        return order

    def is_full_for(self, job: Job) -> bool:
        def held(standing: list[Standing]) -> int:
            return sum(each.job.size_bytes for each in standing)

        full = len(self.standing) + 1 > PLACES or held(self.standing) + job.size_bytes > BYTES_MAX
        batch = self.of(2)
        return full or (
            job.band == 2 and (len(batch) + 1 > 6 or held(batch) + job.size_bytes > 50)  # half of the line
        )

    def displaced(self, job: Job) -> Standing | None:
        if not self.is_full_for(job):
            return None
        less = [each for each in self.standing if each.job.band > job.band]
        rest = self.copy()
        rest.standing = [each for each in self.standing if each.job.band <= job.band]
        if less and not rest.is_full_for(job):
            return max(less, key=lambda each: (each.job.band, each.number))
        return self.displaced_in_band(job)

    def displaced_in_band(self, job: Job) -> Standing | None:
        band = self.of(job.band)
        short = len(self.standing) + 1 > PLACES or (job.band == 2 and len(band) + 1 > 6)

        def held(tenant: str, without: Standing | None = None, *, more: int = 0) -> float:
            own = [each for each in band if each.job.tenant_id == tenant and each is not without]
            return ((len(own) if short else sum(each.job.size_bytes for each in own)) + more) / TENANTS[tenant]

        others = list(dict.fromkeys(each.job.tenant_id for each in band if each.job.tenant_id != job.tenant_id))
        if not others:
            return None
        others.sort(key=lambda tenant: self.activations[job.band][tenant])
        largest = max(others, key=held)
        youngest = max((each for each in band if each.job.tenant_id == largest), key=lambda each: each.number)
        rest = self.copy()
        rest.standing = [each for each in self.standing if each is not youngest]
        if rest.is_full_for(job):
            return None
        if held(largest, youngest) < held(job.tenant_id, more=1 if short else job.size_bytes):
            return None
        return youngest


JOBS = st.builds(
    lambda tenant, band, prompt, output, size, due: Job(
        tenant,
        weight=TENANTS[tenant],
        band=band,
        prompt_tokens=prompt,
        output_tokens=output,
        size_bytes=size,
        due_s=due,
    ),
    # Mostly one tenant of one band, so that its own jobs come to stand behind each other.
    st.sampled_from("aaabbc"),
    st.sampled_from([1, 1, 1, 1, 0, 2, 2]),
    st.integers(0, 60),
    st.integers(0, 20),
    st.sampled_from([0, 0, 0, 1, 30]),
    st.sampled_from([1.0, 2.0, NEVER_S, NEVER_S]),
)


class LineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line: WaitingLine[Who] = WaitingLine(PLACES, BYTES_MAX)
        self.slow = SlowLine()
        self.running: list[Job] = []
        self.now_s = 0.0

    @rule(jobs=st.lists(JOBS, min_size=1, max_size=4), patience_s=st.integers(1, 30))
    def arrive(self, jobs: list[Job], patience_s: int) -> None:
        for job in jobs:
            self.arrive_one(job, patience_s)

    def arrive_one(self, job: Job, patience_s: int) -> None:
        while self.line.is_full_for(job):
            assert self.slow.is_full_for(job)
            wanted = self.slow.displaced(job)
            got = self.line.make_room(job)
            assert got is (None if wanted is None else wanted.who)
            if got is None:
                return
            self.slow.leave(got)
            assert got not in self.line
        assert not self.slow.is_full_for(job)
        assert self.line.make_room(job) is None
        who = Who()
        self.line.join(who, job, deadline_s=self.now_s + patience_s)
        self.slow.join(who, job, self.now_s + patience_s)

    @rule(job=JOBS)
    def start_at_once(self, job: Job) -> None:
        """Also while others wait, as a retry may."""
        self.line.served(job)
        self.slow.served(job)
        self.running.append(job)

    @precondition(lambda self: self.slow.standing)
    @rule(times=st.integers(1, 6))
    def dispatch(self, times: int) -> None:
        for _ in range(times):
            wanted, got = self.slow.first(), self.line.first()
            assert got is (None if wanted is None else wanted.who)
            if wanted is None or got is None:
                return
            assert self.line.leave(got)
            self.slow.leave(got)
            self.line.served(wanted.job)
            self.slow.served(wanted.job)
            self.running.append(wanted.job)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(0, 60), output=st.integers(0, 40), has_failed=st.booleans())
    def settle(self, data: st.DataObject, prompt: int, output: int, has_failed: bool) -> None:
        job = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used = (0, 0) if has_failed else (prompt, output)
        self.line.settled(job, *used)
        self.slow.settled(job, *used)

    @precondition(lambda self: self.slow.standing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        who = self.slow.standing[data.draw(st.integers(0, len(self.slow.standing) - 1))].who
        assert self.line.leave(who)
        assert not self.line.leave(who)
        self.slow.leave(who)

    @rule(seconds=st.integers(0, 12))
    def time(self, seconds: int) -> None:
        self.now_s += seconds
        due = self.line.expired(self.now_s)
        assert due == [each.who for each in self.slow.standing if each.deadline_s <= self.now_s]
        for who in due:
            assert self.line.leave(who)
            self.slow.leave(who)
        assert self.line.expired(self.now_s) == []

    @invariant()
    def both_lines_agree(self) -> None:
        standing = self.slow.standing
        assert list(self.line) == [each.who for each in standing]
        assert len(self.line) == len(standing) == sum(self.line.depths)
        assert self.line.size_bytes == sum(each.job.size_bytes for each in standing) <= BYTES_MAX
        assert self.line.tokens_ahead(None) == sum(cost(each.job) for each in standing)
        first = self.slow.first()
        assert self.line.first() is (None if first is None else first.who)

    @invariant()
    def both_lines_count_alike(self) -> None:
        assert self.line._bands._credits == self.slow.credits
        for band, shares in enumerate(self.line._shares):
            floor = self.slow.floors[band]
            for tenant, counter in self.slow.counters[band].items():
                waits = self.slow.waits(band, tenant)
                seen = shares.counter(tenant)
                # Of somebody inactive, what is below the floor may be forgotten.
                assert (seen if waits else max(seen, floor)) == (counter if waits else max(counter, floor))

    @invariant()
    def looking_ahead_tells_the_order_of_service(self) -> None:
        order = self.slow.order()
        assert self.line.order() == [each.who for each in order]
        ahead = 0
        for position, each in enumerate(order):
            assert self.line.position(each.who) == position
            assert self.line.tokens_ahead(each.who) == ahead
            ahead += cost(each.job)


LineMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestLineMachine = LineMachine.TestCase
