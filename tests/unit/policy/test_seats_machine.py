"""A host and its guests under any order of events: no slot is used twice, leaks, or stays free while somebody waits."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.job import Job
from modelyard.policy.replica_load import FULL_S
from modelyard.policy.seats import Seat, Seats

NAMES = ("base", "a", "b")


class Waiter:
    """A request of the endpoint ``name``."""

    def __init__(self, number: int, name: str, job: Job) -> None:
        self.number = number
        self.name = name
        self.job = job
        self.failed_on: list[ReplicaLoad] = []
        self.is_out = False

    def __repr__(self) -> str:
        return f"<{self.number} for {self.name}>"

    def turned_away(self, verdict: Verdict) -> None:
        self.is_out = True


def base_of(load: ReplicaLoad) -> ReplicaLoad:
    return load.base if isinstance(load, Seat) else load


ROUTES = st.lists(
    st.tuples(st.sampled_from(["r", "q"]), st.sampled_from([False, False, False, True])),
    max_size=2,
    unique_by=lambda x: x[0],
)


class SeatsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.count = 0
        self.seats = Seats()
        self.running: dict[Waiter, ReplicaLoad] = {}
        self.copies: list[tuple[str, ReplicaLoad, Job]] = []
        self.waiting: set[Waiter] = set()
        self.vanished: set[Waiter] = set()
        self.all = {
            name: Dispatcher[Waiter](
                name,
                rules=DispatchRules(places=5),
                deliver=self._deliver,
                chance=lambda: 0.5,
                seats=self.seats,
            )
            for name in NAMES
        }
        self.table_of("base", [("r", False)], slots=1, kv_tokens=0)
        self.table_of("a", [("r", False)], slots=1, kv_tokens=0)
        self.table_of("b", [("r", False)], slots=1, kv_tokens=0)

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.waiting.discard(waiter)
        assert replica.running <= replica.slots, "more than its slots"
        assert not replica.is_draining
        if waiter in self.vanished:
            return False
        self.running[waiter] = replica
        return True

    def _took(self, waiter: Waiter, got: ReplicaLoad | Verdict | None) -> None:
        if isinstance(got, ReplicaLoad):
            assert got.running <= got.slots, "more than its slots"
            self.running[waiter] = got
        elif got is Verdict.WAIT and waiter not in self.running and not waiter.is_out and waiter not in self.vanished:
            self.waiting.add(waiter)

    def _one(self, data: st.DataObject, among: "set[Waiter] | dict[Waiter, ReplicaLoad]") -> Waiter:
        return data.draw(st.sampled_from(sorted(among, key=lambda waiter: waiter.number)))

    def table_of(self, name: str, replicas: list[tuple[str, bool]], *, slots: int, kv_tokens: int) -> None:
        routes = []
        for replica, is_draining in replicas:
            seat = (f"{replica}/{name}", f"{name}@1", replica) if name != "base" else (replica, "", "")
            route = ReplicaRoute(seat[0], "h", 1, "s", slots, is_draining, kv_tokens, seat[1], seat[2])
            routes.append((route, slots))
        weights = [(f"v{name}", 100, 0, routes[:1]), (f"w{name}", 0, 100, routes[1:])] if len(routes) > 1 else []
        # Two replicas are one release, or a release and one that gets copies.
        releases = weights if self.count % 3 == 0 and weights else [(f"v{name}", 100, 0, routes)]
        self.all[name].update(releases, now_s=self.now_s)
        if self.seats.news:
            self.seats.news = False
            for dispatcher in self.all.values():
                dispatcher.stand()

    @rule(
        routes=st.lists(ROUTES, min_size=3, max_size=3),
        slots=st.integers(1, 3),
        kv_tokens=st.sampled_from([0, 0, 100]),
        order=st.permutations(NAMES),
    )
    def table(self, routes: list[list[tuple[str, bool]]], slots: int, kv_tokens: int, order: list[str]) -> None:
        for name, of_name in zip(order, routes, strict=True):
            self.table_of(name, of_name, slots=slots, kv_tokens=kv_tokens)

    @rule(
        name=st.sampled_from(NAMES),
        band=st.integers(0, 2),
        tenant=st.sampled_from("xyz"),
        prompt=st.integers(1, 150),
        output=st.integers(1, 50),
        times=st.integers(1, 3),
    )
    def arrive(self, name: str, band: int, tenant: str, prompt: int, output: int, times: int) -> None:
        for _ in range(times):
            self.count += 1
            job = Job(tenant, band=band, prompt_tokens=prompt, output_tokens=output, output_max=output)
            waiter = Waiter(self.count, name, job)
            self._took(waiter, self.all[name].arrive(waiter, now_s=self.now_s, deadline_s=self.now_s + 9))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(0, 150), output=st.integers(0, 50))
    def finish(self, data: st.DataObject, prompt: int, output: int) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        self.all[waiter.name].finish(replica, waiter.job, now_s=self.now_s, prompt_tokens=prompt, output_tokens=output)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 90))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        waiter = self._one(data, self.running)
        self.all[waiter.name].began(self.running[waiter], waiter.job, now_s=self.now_s)
        self.all[waiter.name].grew(self.running[waiter], waiter.job, tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_known=st.booleans())
    def give_up(self, data: st.DataObject, is_known: bool) -> None:
        waiter = self._one(data, self.waiting)
        self.waiting.discard(waiter)
        if is_known:
            assert self.all[waiter.name].leave(waiter, now_s=self.now_s) is not waiter.is_out
        else:
            self.vanished.add(waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(list(Failure)[:3]), is_retried=st.booleans())
    def fails(self, data: st.DataObject, kind: Failure, is_retried: bool) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        dispatcher = self.all[waiter.name]
        dispatcher.failed(replica, kind, "broke", now_s=self.now_s)
        if is_retried:
            waiter.failed_on.append(replica)
            verdict = dispatcher.retry(waiter, now_s=self.now_s, deadline_s=self.now_s + 9)
            if verdict is not None:
                self._took(waiter, verdict)
                return
        dispatcher.finish(replica, waiter.job, now_s=self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def guest_is_missing(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        replica = self.running[waiter]
        if replica.route.seat_of:
            del self.running[waiter]
            dispatcher = self.all[waiter.name]
            dispatcher.failed(replica, Failure.MISSING, "no such model", now_s=self.now_s)
            self._took(waiter, dispatcher.unseat(waiter, replica, now_s=self.now_s, deadline_s=self.now_s + 9))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def engine_is_full(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        dispatcher = self.all[waiter.name]
        got = dispatcher.put_back(waiter, replica, now_s=self.now_s, deadline_s=self.now_s + 9)
        assert replica.slots <= replica.slots_given
        self._took(waiter, got)

    @rule()
    def relieve(self) -> None:
        self.now_s += FULL_S
        for name in NAMES:
            self.all[name].relieve(now_s=self.now_s)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(list(Failure)), is_good=st.booleans())
    def probe(self, name: str, kind: Failure, is_good: bool) -> None:
        self.now_s += 2
        for load in self.all[name].probes_due(self.now_s):
            load.probe_began()
            self.all[name].probed(load, is_good=is_good, kind=kind, reason="probe", now_s=self.now_s)

    @rule(name=st.sampled_from(NAMES))
    def copy(self, name: str) -> None:
        for load, job in self.all[name].shadows(Job("x", prompt_tokens=5), now_s=self.now_s):
            assert load.running <= load.slots
            self.copies.append((name, load, job))

    @precondition(lambda self: self.copies)
    @rule()
    def copy_ends(self) -> None:
        name, load, job = self.copies.pop(0)
        self.all[name].drop_shadow(load, job, now_s=self.now_s)

    def loads(self) -> list[ReplicaLoad]:
        return [*{load: None for one in self.all.values() for load in one.replicas}, *self.running.values()]

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        loads = [*self.running.values(), *(load for _, load, _ in self.copies)]
        own, total = Counter(map(id, loads)), Counter(id(base_of(load)) for load in loads)
        for load in self.loads():
            assert load.own == own[id(load)]
            assert load.running == total[id(base_of(load))]
            base = base_of(load)
            if not base.running:
                assert (base.pending_tokens, base.unanswered, base.kv.reserved) == (0, 0, 0)

    @invariant()
    def there_is_one_record_of_each_replica(self) -> None:
        bases: dict[str, set[int]] = {}
        for one in self.all.values():
            for load in one.replicas:
                bases.setdefault(load.replica_id, set()).add(id(base_of(load)))
        assert all(len(found) == 1 for found in bases.values()), bases

    @invariant()
    def nobody_waits_while_a_seat_of_theirs_is_free(self) -> None:
        for dispatcher in self.all.values():
            first = dispatcher.line.first()
            if first is None:
                continue
            avoid = dispatcher._avoided(first)
            assert dispatcher._find(first.job, self.now_s, avoid) is None
            for load in dispatcher._serving:
                is_free = load.running < load.slots and not load.is_draining and not load.ejected_until_s
                if is_free and load not in avoid:
                    assert load.kv.capacity, f"{first} could have {load}"
                if load.occupancy is not None and not load.is_draining and not load.is_missing:
                    assert dispatcher in load.occupancy.lines, "would never be woken"

    @invariant()
    def only_lines_that_wait_stand_before_a_replica(self) -> None:
        for load in self.loads():
            for line in load.occupancy.lines if load.occupancy is not None else ():
                assert isinstance(line, Dispatcher)
                assert line.line
                assert any(one.occupancy is load.occupancy for one in line._serving)

    @invariant()
    def whoever_waits_stands_in_line(self) -> None:
        for waiter in self.waiting:
            assert waiter in self.all[waiter.name].line or waiter.is_out

    def teardown(self) -> None:
        """Whatever happened, in the end everybody is served who can be."""
        for name in NAMES:
            self.table_of(
                name, [("r", False), ("q", False)] if self.count % 3 else [("r", False)], slots=2, kv_tokens=0
            )
        for _ in range(8):
            for name in NAMES:
                self.probe(name, Failure.UNREACHABLE, is_good=True)
            self.relieve()
        assert not any(load.full_until_s for load in self.loads()), "full for ever"
        while self.copies:
            self.copy_ends()
        while self.running:
            waiter, replica = self.running.popitem()
            self.all[waiter.name].finish(replica, waiter.job, now_s=self.now_s)
            self.nobody_waits_while_a_seat_of_theirs_is_free()
        assert not any(one.line for one in self.all.values()), "somebody waits for ever"
        self.every_slot_is_accounted_for()


SeatsMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestSeatsMachine = SeatsMachine.TestCase


@given(
    slots=st.integers(1, 4),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0])),
    costs=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=1, max_size=5),
    ends=st.lists(st.integers(0, 3), min_size=20, max_size=90),
    comes=st.sets(st.integers(0, 89), max_size=20),
)
@settings(deadline=None, max_examples=150)
def test_two_tenants_that_both_wait_get_the_same_service_but_for_one_request_of_each(
    slots: int,
    weights: tuple[float, float],
    costs: list[tuple[int, int]],
    ends: list[int],
    comes: set[int],
) -> None:
    """Whatever they ask, whoever ends when, and though a third comes and goes."""
    seats = Seats()
    started: list[tuple[str, Job, ReplicaLoad]] = []

    def deliver(waiter: Waiter, replica: ReplicaLoad) -> bool:
        started.append((waiter.name, waiter.job, replica))
        return True

    all_ = {
        name: Dispatcher[Waiter](name, rules=DispatchRules(), deliver=deliver, chance=lambda: 0.0, seats=seats)
        for name in "abc"
    }
    for name, dispatcher in all_.items():
        route = ReplicaRoute(f"r/{name}", "h", 1, "s", slots, seat_of="r")
        dispatcher.update([("v", 100, 0, [(route, slots)])], now_s=0.0)
    weight_of = {"a": weights[0], "b": weights[1], "c": 1.0}
    count = 0

    def arrive(name: str) -> None:
        nonlocal count
        count += 1
        cost = costs[count % len(costs)][name == "b"]
        job = Job(name, weight=weight_of[name], prompt_tokens=cost, output_tokens=0)
        waiter = Waiter(count, name, job)
        got = all_[name].arrive(waiter, now_s=0.0, deadline_s=1e9)
        if isinstance(got, ReplicaLoad):
            started.append((name, job, got))

    # One of them alone has filled the replica before the others come.
    for _ in range(slots):
        arrive("a")
    for _ in range(110):
        arrive("a")
        arrive("b")
    service = {"a": 0.0, "b": 0.0, "c": 0.0}
    seen = len(started)
    for step, end in enumerate(ends):
        if step in comes:
            arrive("c")
        name, job, replica = started.pop(end % len(started))
        seen -= 1
        all_[name].finish(replica, job, now_s=0.0, prompt_tokens=job.prompt_tokens, output_tokens=0)
        assert len(started) == slots, "a slot stayed free"
        for name, job, _ in started[seen:]:
            service[name] += job.prompt_tokens / job.weight
        seen = len(started)
        most = sum(max(cost[index] for cost in costs) / weights[index] for index in (0, 1))
        assert abs(service["a"] - service["b"]) <= most + 1e-6
