"""Guests on the replicas of a host: what they share, and what each has to itself."""

import gc
from collections.abc import Callable

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.job import Job
from modelyard.policy.replica_load import FULL_S
from modelyard.policy.seats import Seat, Seats

PRIORITY, STANDARD, BATCH = range(3)


class Waiter:
    """A request of one endpoint."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failed_on: list[ReplicaLoad] = []
        self.replica: ReplicaLoad | None = None
        self.verdict: Verdict | None = None

    def turned_away(self, verdict: Verdict) -> None:
        self.verdict = verdict


def seat(guest: str, replica: str, slots: int = 2, *, is_draining: bool = False, kv_tokens: int = 0) -> ReplicaRoute:
    return ReplicaRoute(f"{replica}/{guest}", "h", 1, "s", slots, is_draining, kv_tokens, f"{guest}@1", replica)


def own(replica: str, slots: int = 2, *, is_draining: bool = False, kv_tokens: int = 0) -> ReplicaRoute:
    return ReplicaRoute(replica, "h", 1, "s", slots, is_draining, kv_tokens)


class Host:
    """The dispatchers of a host and its guests, and who was served, in order."""

    def __init__(self) -> None:
        self.seats = Seats()
        self.served: list[str] = []
        self.all: dict[str, Dispatcher[Waiter]] = {}
        self.refuses: Callable[[Waiter], bool] = lambda waiter: False

    def table(self, **routes: list[ReplicaRoute]) -> None:
        for name, replicas in routes.items():
            if name not in self.all:
                self.all[name] = Dispatcher(
                    name, rules=DispatchRules(), deliver=self._deliver, chance=lambda: 0.0, seats=self.seats
                )
            self.all[name].update([(f"v-{name}", 100, 0, [(route, route.slots) for route in replicas])], now_s=0.0)
        if self.seats.news:
            self.seats.news = False
            for dispatcher in self.all.values():
                dispatcher.stand()

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        if self.refuses(waiter):
            return False
        waiter.replica = replica
        self.served.append(waiter.job.tenant_id)
        return True

    def arrive(self, name: str, *, tenant: str = "", band: int = STANDARD, tokens: int = 10) -> Waiter:
        waiter = Waiter(Job(tenant or name, band=band, prompt_tokens=tokens, output_tokens=0))
        got = self.all[name].arrive(waiter, now_s=1.0, deadline_s=99.0)
        if isinstance(got, ReplicaLoad):
            waiter.replica = got
        else:
            waiter.verdict = got
        return waiter

    def finish(self, name: str, waiter: Waiter) -> None:
        assert waiter.replica is not None
        self.all[name].finish(
            waiter.replica, waiter.job, now_s=2.0, prompt_tokens=waiter.job.prompt_tokens, output_tokens=0
        )
        waiter.replica = None

    def load(self, name: str) -> ReplicaLoad:
        (load,) = self.all[name].replicas
        return load


def test_the_slots_of_a_replica_are_one_for_its_host_and_all_guests() -> None:
    host = Host()
    host.table(base=[own("r")], a=[seat("a", "r")], b=[seat("b", "r")])
    first, second = host.arrive("base"), host.arrive("a")
    assert host.arrive("b").verdict is Verdict.WAIT
    assert host.arrive("base").verdict is Verdict.WAIT
    assert [(load.running, load.own) for load in map(host.load, ("base", "a", "b"))] == [(2, 1), (2, 1), (2, 0)]
    host.finish("base", first)
    host.finish("a", second)
    assert sorted(host.served) == ["b", "base"]


def test_it_makes_no_difference_which_endpoint_of_a_table_comes_first() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 1)])
    host.table(base=[own("r", 1)])
    running = host.arrive("a")
    assert host.arrive("base").verdict is Verdict.WAIT
    assert host.load("base").version_id == "v-base"
    assert (host.load("base").route.id, host.load("base").route.seat_of) == ("r", "")
    host.finish("a", running)
    assert host.served == ["base"]


def test_a_host_that_is_busy_when_its_first_guest_comes_shares_with_it() -> None:
    host = Host()
    host.table(base=[own("r", 1)])
    running = host.arrive("base")
    host.arrive("base")
    host.table(a=[seat("a", "r", 1)])
    guest = host.arrive("a")
    assert guest.verdict is Verdict.WAIT, "the only slot is taken"
    host.finish("base", running)
    assert host.served == ["base"], "it stood there first"
    host.arrive("base")
    host.all["base"].finish(host.load("base"), Job("base"), now_s=3.0)
    assert host.served == ["base", "a"], "the one that had the slot does not have it again while another waits"


def test_a_tenant_that_floods_its_guest_does_not_starve_another() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 1)], b=[seat("b", "r", 1)])
    running = host.arrive("a")
    waiting = [host.arrive("a") for _ in range(50)]
    other = [host.arrive("b") for _ in range(3)]
    for _ in range(6):
        name = running.job.tenant_id
        host.finish(name, running)
        running = next(waiter for waiter in (*waiting, *other) if waiter.replica is not None)
    assert host.served.count("b") == 3


def test_a_more_urgent_line_goes_first_and_batch_is_not_forgotten() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 1)], b=[seat("b", "r", 1)])
    running = host.arrive("a")
    waiting = [host.arrive("a", band=BATCH) for _ in range(5)] + [host.arrive("b") for _ in range(60)]
    for _ in range(45):
        host.finish(running.job.tenant_id, running)
        running = next(waiter for waiter in waiting if waiter.replica is not None)
    assert host.served[0] == "b"
    assert host.served.count("a") in range(2, 4), "one in twenty"


def test_a_guest_that_is_nowhere_resident_holds_nobody_up() -> None:
    host = Host()
    host.table(base=[own("r", 1)], a=[seat("a", "r", 1)], away=[])
    assert [host.arrive("away").verdict for _ in range(9)] == [Verdict.WAIT] * 9
    running = host.arrive("a")
    host.arrive("a")
    host.finish("a", running)
    assert host.served == ["a"]
    host.table(away=[seat("away", "r", 1)])
    assert host.served == ["a"], "the slot is taken"


def test_a_large_request_is_not_starved_of_memory_by_small_ones_of_another_guest() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 9, kv_tokens=1000)], b=[seat("b", "r", 9, kv_tokens=1000)])
    small = [host.arrive("a", tokens=400) for _ in range(2)]
    large = host.arrive("b", tokens=900)
    assert large.verdict is Verdict.WAIT
    assert host.arrive("a", tokens=10).verdict is Verdict.WAIT, "it would fit, but not before the one who waits"
    urgent = host.arrive("a", band=PRIORITY, tokens=10)
    assert urgent.replica is not None
    for waiter in (*small, urgent):
        host.finish("a", waiter)
    assert host.served[0] == "b"


def test_memory_that_was_kept_for_one_who_leaves_is_for_the_next() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 9, kv_tokens=1000)], b=[seat("b", "r", 9, kv_tokens=1000)])
    host.arrive("a", tokens=400)
    large = host.arrive("b", tokens=900)
    host.arrive("a", tokens=10)
    assert host.all["b"].leave(large, now_s=2.0)
    assert host.served == ["a"]


def test_a_slot_for_somebody_who_left_goes_to_another_guest() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 1)], b=[seat("b", "r", 1)])
    running = host.arrive("a")
    gone = host.arrive("a")
    host.arrive("b")
    host.refuses = lambda waiter: waiter is gone
    host.finish("a", running)
    assert host.served == ["b"]
    assert (host.load("a").own, host.load("b").own, host.load("b").running) == (0, 1, 1)


def test_a_replica_that_is_gone_is_gone_for_everybody() -> None:
    host = Host()
    host.table(base=[own("r")], a=[seat("a", "r"), seat("a", "q")], b=[seat("b", "r")])
    on_r, on_q = host.arrive("a"), host.arrive("a")
    assert on_r.replica is not None
    host.all["a"].failed(on_r.replica, Failure.UNREACHABLE, "connection lost", now_s=1.0)
    assert host.arrive("base").verdict is Verdict.WAIT
    assert host.arrive("b").verdict is Verdict.WAIT
    assert (host.load("base").failures, host.load("b").failures) == (1, 0), "it is told of the replica"
    moved = host.arrive("a")
    assert moved.replica is not None
    assert moved.replica is on_q.replica, "only the other replica is left"
    host.finish("a", on_r)
    (due,) = host.all["b"].probes_due(2.5)
    due.probe_began()
    assert host.all["base"].probes_due(2.5) == [], "one probe is enough"
    host.all["b"].probed(due, is_good=True, now_s=2.6)
    assert sorted(host.served) == ["b", "base"]


def test_what_a_guest_answers_badly_or_too_late_is_its_own_matter() -> None:
    host = Host()
    host.table(base=[own("r")], a=[seat("a", "r"), seat("a", "q")], b=[seat("b", "r")])
    for kind in (Failure.SILENT, Failure.BAD_ANSWER):
        bad = next(load for load in host.all["a"].replicas if load.route.seat_of == "r")
        for _ in range(5):
            host.all["a"].failed(bad, kind, "engine answered 500", now_s=1.0)
        assert not bad.health.is_closed
        assert host.load("base").health.is_closed
        chosen = host.arrive("a")
        assert chosen.replica is not None
        assert chosen.replica.route.seat_of == "q"
        other = host.arrive("b")
        assert other.replica is not None
        host.finish("a", chosen)
        host.finish("b", other)
        assert host.load("base").failures == 0
        host.all["a"].probed(bad, is_good=True, now_s=4.0)
        assert bad.health.is_closed


def test_what_the_host_answers_badly_counts_for_its_guests() -> None:
    host = Host()
    host.table(base=[own("r"), own("q")], a=[seat("a", "r")])
    bad = next(load for load in host.all["base"].replicas if load.route.id == "r")
    for _ in range(5):
        host.all["base"].failed(bad, Failure.BAD_ANSWER, "engine answered 500", now_s=1.0)
    assert host.arrive("a").verdict is Verdict.WAIT
    assert host.all["a"].probes_due(9.0) == [], "its host tries it"
    assert host.all["base"].probes_due(9.0) == [bad]
    bad.probe_began()
    host.all["base"].probed(bad, is_good=True, now_s=9.1)
    assert host.served == ["a"]


def test_a_guest_that_the_engine_does_not_have_costs_only_this_seat() -> None:
    host = Host()
    host.table(base=[own("r", 2)], a=[seat("a", "r", 2)])
    waiter = host.arrive("a")
    missing = waiter.replica
    assert missing is not None
    host.all["a"].failed(missing, Failure.MISSING, "no such model", now_s=1.0)
    assert host.all["a"].unseat(waiter, missing, now_s=1.0, deadline_s=60.0) is Verdict.WAIT
    assert host.all["a"].is_cold
    assert (missing.running, missing.failures, host.load("base").failures) == (0, 1, 0)
    assert host.arrive("base").replica is not None
    assert host.all["a"].probes_due(2.5) == [missing]
    missing.probe_began()
    host.all["a"].probed(missing, is_good=False, kind=Failure.MISSING, reason="no such model", now_s=2.6)
    assert (host.served, host.load("base").health.is_closed) == ([], True)
    assert host.all["a"].probes_due(9.0) == [missing]
    missing.probe_began()
    host.all["a"].probed(missing, is_good=True, now_s=9.0)
    assert (host.served, missing.failures, host.all["a"].is_cold) == (["a"], 0, False)


def test_a_request_whose_guest_is_missing_goes_to_another_seat_without_a_budget() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 99), seat("a", "q", 99)])
    waiters = [host.arrive("a") for _ in range(60)]
    on_r = [waiter for waiter in waiters if waiter.replica is not None and waiter.replica.route.seat_of == "r"]
    assert len(on_r) == 30
    for waiter in on_r:
        assert waiter.replica is not None
        host.all["a"].failed(waiter.replica, Failure.MISSING, "no such model", now_s=1.0)
        moved = host.all["a"].unseat(waiter, waiter.replica, now_s=1.0, deadline_s=60.0)
        assert isinstance(moved, ReplicaLoad)
        assert moved.route.seat_of == "q"


def test_a_table_that_changes_the_seat_has_it_tried_at_once() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 2)])
    missing = host.load("a")
    host.all["a"].failed(missing, Failure.MISSING, "no such model", now_s=1.0)
    assert not missing.probe_due(1.1)
    host.table(a=[seat("a", "r", 4)])
    assert missing.probe_due(1.1)


def test_a_seat_drains_alone_and_is_forgotten_when_its_last_request_ends() -> None:
    host = Host()
    host.table(base=[own("r", 2)], a=[seat("a", "r", 2)], b=[seat("b", "r", 2)])
    running, other = host.arrive("a"), host.arrive("b")
    host.table(a=[seat("a", "r", 2, is_draining=True)])
    assert host.arrive("a").verdict is Verdict.WAIT
    host.table(a=[])
    assert (host.load("a").is_gone, host.load("a").own) == (True, 1)
    host.finish("a", running)
    assert len(host.all["a"].replicas) == 0
    assert (host.load("base").running, host.load("b").own) == (1, 1)
    host.finish("b", other)
    assert host.load("base").running == 0


def test_a_host_that_gives_up_a_replica_with_guests_on_it_forgets_it() -> None:
    host = Host()
    host.table(base=[own("r", 2)], a=[seat("a", "r", 2)])
    running = host.arrive("a")
    host.table(base=[])
    assert len(host.all["base"].replicas) == 0, "none of its own requests is there"
    host.table(base=[own("r", 2)])
    assert host.load("base").running == 1, "but it is the same replica when it comes again"
    host.finish("a", running)
    assert host.load("base").running == 0


def test_an_engine_at_another_port_is_another_one() -> None:
    host = Host()
    host.table(base=[own("r", 1)], a=[seat("a", "r", 1)])
    host.arrive("a")
    there = ReplicaRoute("r", "h", 2, "s", 1)
    host.table(base=[there], a=[ReplicaRoute("r/a", "h", 2, "s", 1, seat_of="r")])
    assert host.load("base").running == 0
    assert host.arrive("base").replica is not None
    assert host.arrive("a").verdict is Verdict.WAIT


def test_what_an_engine_reports_is_taken_once_however_many_have_a_seat_there() -> None:
    host = Host()
    host.table(base=[own("r", 8)], a=[seat("a", "r", 8)], b=[seat("b", "r", 8)])
    running = host.arrive("a")
    told = ReplicaSnapshot("r", 0.1, 3, 1)
    host.finish("a", running)
    for dispatcher in host.all.values():
        dispatcher.observe({"r": told})
    assert {host.load(name).running_elsewhere for name in host.all} == {3}, "one of the four was ours a moment ago"


def test_two_guests_of_one_endpoint_do_not_count_each_others_prompts_as_cached() -> None:
    host = Host()
    host.table(a=[])
    old, new = seat("a1", "r"), seat("a2", "r")
    host.all["a"].update([("v1", 90, 0, [(old, 2)]), ("v2", 10, 0, [(new, 2)])], now_s=0.0)
    first, second = host.all["a"].replicas
    first.prefixes.add((1, 2, 3))
    assert (first.prefixes.matched((1, 2, 3)), second.prefixes.matched((1, 2, 3))) == (3, 0)
    assert isinstance(first, Seat)
    assert isinstance(second, Seat)
    assert first.base is second.base


def test_a_copy_on_a_seat_takes_a_slot_and_gives_it_to_whoever_waits() -> None:
    host = Host()
    host.table(base=[own("r", 1)], a=[own("x", 1)])
    host.all["a"].update([("v1", 100, 0, [(own("x", 1), 1)]), ("v2", 0, 100, [(seat("a2", "r", 1), 1)])], now_s=0.0)
    assert host.arrive("a").replica is not None
    ((shadow, copy),) = host.all["a"].shadows(Job("a"), now_s=1.0)
    assert host.arrive("base").verdict is Verdict.WAIT
    host.all["a"].drop_shadow(shadow, copy, now_s=2.0)
    assert host.served == ["base"]


def test_requests_on_an_engine_that_died_may_all_be_retried_whichever_endpoint_noticed() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 9), seat("a", "q", 9)], b=[seat("b", "r", 9), seat("b", "q", 9)])
    lost = {name: [host.arrive(name) for _ in range(18)] for name in "ab"}
    del lost["b"]
    on_r = [one for one in lost["a"] if one.replica is not None and one.replica.route.seat_of == "r"]
    other = next(load for load in host.all["b"].replicas if load.route.seat_of == "r")
    host.all["b"].failed(other, Failure.UNREACHABLE, "connection lost", now_s=1.0)
    assert on_r[0].replica is not None
    host.all["a"].failed(on_r[0].replica, Failure.UNREACHABLE, "connection lost", now_s=1.0)
    assert len(on_r) > host.all["a"].retries.reserve
    for waiter in on_r:
        assert waiter.replica is not None
        waiter.failed_on = [waiter.replica]
        verdict = host.all["a"].retry(waiter, now_s=1.0, deadline_s=9.0)
        assert verdict is not None, "the budget is spent though all were lost to one failure"


def test_a_guest_that_was_away_has_no_credit_for_it() -> None:
    host = Host()
    host.table(a=[seat("a", "r", 1)], b=[seat("b", "r", 1)], c=[seat("c", "r", 1)])
    host.finish("c", host.arrive("c"))
    waiting = [host.arrive(name) for _ in range(30) for name in "ab"]
    running = waiting[0]
    for step in range(40):
        if step == 20:
            waiting += [host.arrive("c") for _ in range(20)]
        host.finish(running.job.tenant_id, running)
        running = next(waiter for waiter in waiting if waiter.replica is not None)
    assert host.served[20:].count("c") in range(6, 9), "a third of the turns since it came"


def test_memory_that_was_kept_for_one_who_found_room_elsewhere_is_for_the_next() -> None:
    host = Host()
    on_r, on_q = ({"replica": name, "slots": 9, "kv_tokens": 1000} for name in "rq")
    host.table(a=[seat("a", **on_r)], b=[seat("b", **on_r), seat("b", **on_q)], c=[seat("c", **on_q)])  # type: ignore[arg-type]
    host.arrive("a", tokens=400)
    other = host.arrive("c", tokens=400)
    assert host.arrive("b", tokens=900).verdict is Verdict.WAIT
    assert host.arrive("a", tokens=10).verdict is Verdict.WAIT, "kept for the large one"
    host.finish("c", other)
    assert host.served == ["b", "a"]


def test_a_probe_by_a_seat_for_copies_serves_those_who_wait_for_its_replica() -> None:
    host = Host()
    host.table(base=[own("r", 1)], a=[own("x", 1)])
    host.all["a"].update([("v1", 100, 0, [(own("x", 1), 1)]), ("v2", 0, 100, [(seat("a2", "r", 1), 1)])], now_s=0.0)
    host.all["base"].failed(host.load("base"), Failure.UNREACHABLE, "connection lost", now_s=1.0)
    assert host.arrive("base").verdict is Verdict.WAIT
    (due,) = host.all["a"].probes_due(3.0)
    due.probe_began()
    host.all["a"].probed(due, is_good=True, now_s=3.1)
    assert host.served == ["base"]


def test_a_seat_on_a_dead_replica_is_no_place_to_retry() -> None:
    host = Host()
    host.table(base=[own("q")], a=[seat("a", "r"), seat("a", "q")])
    host.all["base"].failed(host.load("base"), Failure.UNREACHABLE, "connection lost", now_s=1.0)
    waiter = host.arrive("a")
    assert waiter.replica is not None
    waiter.failed_on = [waiter.replica]
    assert host.all["a"].retry(waiter, now_s=1.0, deadline_s=9.0) is None


def test_who_waits_is_served_by_a_replica_that_an_ejection_lets_back() -> None:
    host = Host()
    host.table(base=[own("r", 1), own("q", 1)], b=[seat("b", "q", 1)])
    base = host.all["base"]
    on_r, on_q = host.arrive("base"), host.arrive("base")
    assert on_q.replica is not None
    assert on_q.replica.occupancy is not None, "the one that is lost is the one that is shared"
    assert on_r.replica is not None
    for _ in range(5):
        base.failed(on_r.replica, Failure.BAD_ANSWER, "no", now_s=1.0)
    assert on_r.replica.ejected_until_s
    host.finish("base", on_r)
    waits = host.arrive("base")
    assert waits.verdict is Verdict.WAIT
    base.failed(on_q.replica, Failure.UNREACHABLE, "gone", now_s=1.0)
    host.finish("base", on_q)
    assert waits.replica is not None, "better one that answers badly than none"
    assert waits.replica.route.id == "r"


def test_a_shared_replica_that_said_it_is_full_is_tried_with_more_whoever_was_told() -> None:
    host = Host()
    host.table(base=[own("r", 2)], a=[seat("a", "r", 2)])
    told = host.arrive("a")
    assert told.replica is not None
    host.all["a"].put_back(told, told.replica, now_s=1.0, deadline_s=9.0)
    assert (host.load("base").slots, host.load("a").slots) == (0, 0)
    assert host.all["a"].leave(told, now_s=1.0)
    host.table(a=[])
    waits = host.arrive("base")
    assert waits.verdict is Verdict.WAIT
    host.all["base"].relieve(now_s=1.0 + FULL_S)
    assert waits.replica is host.load("base")
    host.all["base"].relieve(now_s=1.0 + 2 * FULL_S)
    assert host.load("base").slots == 2


def test_a_replica_is_forgotten_with_the_last_who_had_it() -> None:
    host = Host()
    host.table(base=[own("r")], a=[seat("a", "r")])
    gc.disable()
    try:
        host.table(base=[], a=[])
        assert repr(host.seats) == "<Seats: 0 replicas, some shared>", "whenever the collector comes by"
    finally:
        gc.enable()


def test_a_replica_that_comes_back_is_a_new_one_whoever_still_remembers_the_old() -> None:
    host = Host()
    host.table(base=[own("r")], a=[seat("a", "r")])
    remembered = host.load("base"), host.load("a")
    host.table(base=[], a=[])
    host.table(a=[seat("a", "r")], base=[own("r")])
    assert host.load("base") not in remembered
    assert isinstance(found := host.load("a"), Seat)
    assert found.base is host.load("base")


def test_nothing_is_kept_on_a_shared_replica_where_another_endpoint_would_take_it() -> None:
    host = Host()
    host.table(host=[own("r")], one=[seat("one", "r")], two=[seat("two", "r")])
    host.arrive("one", tenant="flood")
    other = host.arrive("one", tenant="other")
    host.finish("one", other)
    host.all["one"].headroom.kept[STANDARD] = 1
    assert host.arrive("one", tenant="flood").replica is not None
