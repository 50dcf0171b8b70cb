"""Leases: with news late or lost and either side killed or hung, never more than the limit; and they follow demand."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelyard.domain.leases import LeaseReport, Leases
from modelyard.domain.tenants import Rates
from modelyard.policy.leases import LeaseDesk, LeaseHolder, divided

LIMITS = {"a": Rates(requests_per_minute=10), "b": Rates(requests_per_minute=7)}


@dataclass
class Gateway:
    holder: LeaseHolder
    is_connected: bool = True
    outbox: list[Leases] = field(default_factory=list)
    wishes: tuple[int, int] = (0, 0)


class Desks(RuleBasedStateMachine):
    @initialize(workers=st.integers(2, 3))
    def begin(self, workers: int) -> None:
        self.now_s = 100.0
        self.workers = workers
        self.gateways = [
            Gateway(LeaseHolder(worker, workers, began_s=self.now_s), wishes=(0, 1)) for worker in range(workers)
        ]
        self.desk: LeaseDesk | None = None
        self.start_desk()

    def start_desk(self) -> None:
        self.desk = LeaseDesk(workers=self.workers, began_s=self.now_s)
        self.desk.limit(LIMITS)

    def report(self, which: int) -> None:
        gateway = self.gateways[which]
        if gateway.is_connected and self.desk is not None:
            a, b = gateway.wishes
            report = LeaseReport(which, gateway.holder.epoch, {"a": (a, 0, 0, 0), "b": (b, 0, 0, 0)})
            self.desk.hear(f"gateway-{which}", report)

    @rule(which=st.integers(0, 2), wishes=st.sampled_from([(0, 0), (9, 0), (0, 9), (9, 9), (1, 5)]))
    def want(self, which: int, wishes: tuple[int, int]) -> None:
        self.gateways[which % self.workers].wishes = wishes
        self.report(which % self.workers)

    @precondition(lambda self: self.desk is not None)
    @rule()
    def give(self) -> None:
        assert self.desk is not None
        for name, leases in self.desk.give(self.now_s).items():
            gateway = self.gateways[int(name[-1])]
            if gateway.is_connected:
                gateway.outbox.append(leases)

    @rule(which=st.integers(0, 2), skip=st.booleans())
    def deliver(self, which: int, skip: bool) -> None:
        """What is out of date may be dropped; what comes may be late."""
        gateway = self.gateways[which % self.workers]
        if gateway.outbox:
            if skip and len(gateway.outbox) > 1:
                gateway.outbox.pop(0)
            gateway.holder.take(gateway.outbox.pop(0))

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(rounds=st.integers(1, 12))
    def go_on(self, rounds: int) -> None:
        """As it is when all is well."""
        for _ in range(rounds):
            self.now_s += 0.25
            for which in range(self.workers):
                self.report(which)
            if self.desk is not None:
                self.give()
            for which in range(self.workers):
                while self.gateways[which].outbox:
                    self.deliver(which, skip=False)
            self.never_more_than_the_limit()

    @rule(which=st.integers(0, 2))
    def cut(self, which: int) -> None:
        gateway = self.gateways[which % self.workers]
        gateway.is_connected = False
        gateway.outbox.clear()
        if self.desk is not None:
            self.desk.lose(f"gateway-{which % self.workers}")

    @rule(which=st.integers(0, 2))
    def hang(self, which: int) -> None:
        """Nothing comes through, and the desk is not told."""
        self.gateways[which % self.workers].is_connected = False
        self.gateways[which % self.workers].outbox.clear()

    @rule(which=st.integers(0, 2))
    def connect(self, which: int) -> None:
        self.gateways[which % self.workers].is_connected = True

    @rule(which=st.integers(0, 2))
    def restart_gateway(self, which: int) -> None:
        worker = which % self.workers
        self.cut(worker)
        wishes = self.gateways[worker].wishes
        holder = LeaseHolder(worker, self.workers, began_s=self.now_s)
        self.gateways[worker] = Gateway(holder, wishes=wishes)

    @rule()
    def kill_desk(self) -> None:
        self.desk = None
        for gateway in self.gateways:
            gateway.outbox.clear()

    @precondition(lambda self: self.desk is None)
    @rule()
    def another_desk(self) -> None:
        self.start_desk()

    @invariant()
    def never_more_than_the_limit(self) -> None:
        for account, limits in LIMITS.items():
            assert limits.requests_per_minute is not None
            applied = [one.holder.share(account, limits, now_s=self.now_s)[0] or 0 for one in self.gateways]
            assert sum(applied) <= limits.requests_per_minute, (account, applied)


TestDesks = Desks.TestCase
TestDesks.settings = settings(deadline=None, max_examples=60, stateful_step_count=50)


def shares(
    limits: Rates, wishes: list[tuple[int, int, int, int]], *, present: int | None = None
) -> list[tuple[int, ...]]:
    """Return what each gateway applies of one limit after some rounds with these wishes."""
    workers, now_s = len(wishes), 0.0
    desk = LeaseDesk(workers=workers, began_s=0.0)
    desk.limit({"a": limits})
    holders = [LeaseHolder(worker, workers, began_s=0.0) for worker in range(workers)]
    for _ in range(20):
        now_s += 0.25
        for worker, holder in enumerate(holders[:present]):
            desk.hear(f"gateway-{worker}", LeaseReport(worker, holder.epoch, {"a": wishes[worker]}))
        for name, leases in desk.give(now_s).items():
            holders[int(name[-1])].take(leases)
    return [tuple(one or 0 for one in holder.share("a", limits, now_s=now_s)) for holder in holders]


def test_one_busy_gateway_gets_nearly_all_of_a_limit_and_the_others_enough_to_begin() -> None:
    limits = Rates(requests_per_minute=60, tokens_per_minute=6400, concurrency=8)
    assert shares(limits, [(30, 3000, 4, 0), (0, 0, 0, 0)]) == [(59, 6200, 7), (1, 200, 1)]


def test_a_limit_of_one_goes_where_it_is_wanted() -> None:
    assert shares(Rates(concurrency=1), [(0, 0, 0, 0), (0, 0, 3, 0)]) == [(0, 0, 0), (0, 0, 1)]


def test_requests_that_run_hold_their_places_until_they_end() -> None:
    limits = Rates(concurrency=8)
    assert sum(one[2] for one in shares(limits, [(0, 0, 0, 6), (0, 0, 9, 0)])) <= 8
    assert shares(limits, [(0, 0, 0, 6), (0, 0, 9, 0)])[1][2] <= 2 + 4
    assert shares(limits, [(0, 0, 0, 0), (0, 0, 9, 0)])[1][2] == 7


def test_equal_demand_divides_equally() -> None:
    assert shares(Rates(requests_per_minute=60), [(9, 0, 0, 0)] * 3) == [(20, 0, 0)] * 3


def test_the_part_of_a_worker_that_is_not_there_is_set_aside() -> None:
    assert [one[0] for one in shares(Rates(requests_per_minute=60), [(30, 0, 0, 0), (1, 0, 0, 0)], present=1)] == [
        30,
        30,
    ]


def test_nobody_asks_and_all_have_their_equal_part() -> None:
    assert [one[0] for one in shares(Rates(requests_per_minute=5), [(0, 0, 0, 0)] * 2)] == [3, 2]


@given(st.integers(0, 200), st.lists(st.floats(0, 1e9), min_size=1, max_size=6), st.integers(0, 2))
def test_shares_are_whole_and_sum_to_the_limit(limit: int, weights: list[float], kind: int) -> None:
    found = divided(limit, weights, kind)
    assert sum(found) == limit
    assert min(found) >= 0
