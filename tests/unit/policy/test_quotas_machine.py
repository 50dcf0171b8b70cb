"""A gateway, its journal, the delivery and the ledger, in any order, killed at any time: a quota is never exceeded.

The model is the ledger's truth: what every request that was let through costs in the end, by the day of its arrival.
The gateway sees only sums that were taken some time ago, and what it did itself since it began.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelyard.domain.routing_table import Spent
from modelyard.domain.tenants import Limits
from modelyard.policy.quotas import Hold, QuotaBook
from modelyard.policy.utc import DAY_S, day_name, day_number, month_name

FIRST_DAY = day_number("2026-11-28")
LIMITS = Limits(tokens_per_day=200, tokens_per_month=500, nanousd_per_day=1900, nanousd_total=8000)
PRICE = 10


@dataclass
class Running:
    hold: Hold
    worst: int
    day: int


@dataclass
class World:
    """The journal as (segment, size, [(offset, day, tokens)]) and how far it is in the ledger."""

    segments: list[list[tuple[int, int, int]]] = field(default_factory=lambda: [[]])
    sizes: list[int] = field(default_factory=lambda: [0])
    delivered: tuple[int, int] = (0, 0)

    def write(self, day: int, tokens: int) -> None:
        self.sizes[-1] += 7
        self.segments[-1].append((self.sizes[-1], day, tokens))

    def end(self) -> tuple[int, int]:
        written = [number for number, size in enumerate(self.sizes) if size]
        return (written[-1], self.sizes[written[-1]]) if written else (0, 0)

    def all(self) -> list[tuple[tuple[int, int], int, int]]:
        return [((n, at), day, tokens) for n, records in enumerate(self.segments) for at, day, tokens in records]

    def spent(self, day: int, up_to: tuple[int, int]) -> tuple[int, int]:
        found = [(d, tokens) for place, d, tokens in self.all() if place <= up_to]
        of_month = sum(t for d, t in found if month_name(d) == month_name(day))
        return sum(t for d, t in found if d == day), of_month

    def ever(self, up_to: tuple[int, int]) -> int:
        return sum(tokens for place, _, tokens in self.all() if place <= up_to)


def named(place: tuple[int, int]) -> tuple[str, int]:
    return (f"{place[0]:010}.journal", place[1]) if place != (0, 0) else ("", 0)


class QuotaMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.now_s = FIRST_DAY * DAY_S + 80_000.0
        self.running: list[Running] = []
        self.news: list[tuple[list[Spent], dict[str, tuple[str, int]]]] = []
        self.seen_day = FIRST_DAY
        self.start_gateway()

    def start_gateway(self) -> None:
        self.book = QuotaBook(worker=0, workers=1)
        self.book.required = named(self.world.end())
        quota = self.book.quota("k", LIMITS, is_tenants=False)
        assert quota is not None
        self.quota = quota
        self.unplaced = False
        self.publish(ahead=0)
        self.hear(newest=True)

    @rule(worst=st.integers(1, 60))
    def arrive(self, worst: int) -> None:
        if self.book.refusal((self.quota,), worst, worst * PRICE, now_unix_s=self.now_s) is None:
            hold = self.book.hold((self.quota,), worst, worst * PRICE)
            self.running.append(Running(hold, worst, int(self.book.arrival(self.now_s) // DAY_S)))

    @rule(worst=st.integers(20, 60))
    def arrive_as_often_as_can_be(self, worst: int) -> None:
        for _ in range(6):
            self.arrive(worst)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 10**6), part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def finish(self, which: int, part: float) -> None:
        request = self.running.pop(which % len(self.running))
        tokens = int(request.worst * part)
        self.book.settle(request.hold, tokens, tokens * PRICE)
        self.world.write(request.day, tokens)
        self.unplaced = True

    @rule()
    def flush(self) -> None:
        self.book.placed(named(self.world.end()))
        self.unplaced = False

    @rule()
    def rotate(self) -> None:
        self.flush()
        self.world.segments.append([])
        self.world.sizes.append(0)

    @precondition(lambda self: self.running)
    @rule()
    def finish_all(self) -> None:
        while self.running:
            self.finish(0, 1.0)
        self.flush()

    @precondition(lambda self: not self.unplaced)  # what is not written cannot be delivered
    @rule(whole=st.booleans(), part=st.integers(0, 10**6))
    def deliver(self, whole: bool, part: int) -> None:
        places = [place for place, _, _ in self.world.all() if place > self.world.delivered]
        if places:
            self.world.delivered = places[-1] if whole else places[part % len(places)]

    @rule(ahead=st.integers(0, 3))
    def publish(self, ahead: int) -> None:
        """Take sums; they may already hold a little more than the position that goes with them."""
        self.seen_day = max(self.seen_day, int(self.now_s // DAY_S))
        places = [place for place, _, _ in self.world.all() if place > self.world.delivered]
        up_to = places[min(ahead, len(places)) - 1] if ahead and places and not self.unplaced else self.world.delivered
        day_tokens, month_tokens = self.world.spent(self.seen_day, up_to)
        row = Spent(
            "k", day_name(self.seen_day), month_name(self.seen_day),
            day_tokens, month_tokens, day_tokens * PRICE, month_tokens * PRICE, "gateway-0",
            self.world.ever(up_to) * PRICE,
        )  # fmt: skip
        self.news.append(([row], {"gateway-0": named(self.world.delivered)}))

    @precondition(lambda self: self.news)
    @rule(newest=st.booleans())
    def hear(self, newest: bool) -> None:
        """The feed drops what is out of date, and a reconnected controller may repeat itself."""
        self.book.advance(self.now_s)
        self.book.hear(*(self.news[-1] if newest else self.news[0]))

    @rule(part=st.sampled_from([0.0, 1.0]))
    def kill_gateway(self, part: float) -> None:
        """What ran is settled by its last mark when the gateway begins again, in a new segment."""
        self.world.segments.append([])
        self.world.sizes.append(0)
        for request in self.running:
            self.world.write(request.day, int(request.worst * part))
        self.running.clear()
        self.start_gateway()

    @rule(ahead=st.integers(0, 3))
    def tell(self, ahead: int) -> None:
        self.publish(ahead)
        self.hear(newest=True)

    @rule(hours=st.sampled_from([-25, -2, 1, 5, 25]))
    def jump(self, hours: int) -> None:
        self.now_s = max(FIRST_DAY * DAY_S, self.now_s + hours * 3600)

    @invariant()
    def no_quota_is_exceeded(self) -> None:
        days = {day for _, day, _ in self.world.all()} | {request.day for request in self.running}
        for day in days:
            running = [r for r in self.running if r.day == day]
            running_month = [r for r in self.running if month_name(r.day) == month_name(day)]
            of_day, of_month = self.world.spent(day, (10**9, 0))
            assert of_day + sum(r.worst for r in running) <= 200
            assert of_month + sum(r.worst for r in running_month) <= 500
            assert (of_day + sum(r.worst for r in running)) * PRICE <= 1900
        ever = self.world.ever((10**9, 0)) + sum(r.worst for r in self.running)
        assert ever * PRICE <= 8000, "no day and no month renews it"

    @rule()
    def tell_all(self) -> None:
        """With all delivered and heard, exactly what is used is used."""
        self.flush()
        self.world.delivered = self.world.end()
        self.publish(ahead=0)
        self.hear(newest=True)
        day = day_number(self.book.day)
        if day == self.seen_day:
            of_day, of_month = self.world.spent(day, self.world.delivered)
            assert self.quota.used[0] == of_day + sum(r.worst for r in self.running if r.day == day)
            assert self.quota.used[1] == of_month + sum(
                r.worst for r in self.running if month_name(r.day) == month_name(day)
            )
            ever = self.world.ever(self.world.delivered) + sum(r.worst for r in self.running)
            assert self.quota.used[4] == ever * PRICE


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(deadline=None, max_examples=60, stateful_step_count=60)
