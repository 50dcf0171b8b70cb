"""The dispatcher: stories, and a state machine over every order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.domain.routing_table import ReplicaRoute, ReplicaSnapshot
from modelyard.policy.breaker import EJECTION_S_MAX, Failure, ejection_s
from modelyard.policy.dispatch import LOOK_AHEAD, Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.job import Job
from modelyard.policy.replica_load import FULL_S
from modelyard.policy.routing import pick_release

PRIORITY, STANDARD, BATCH = range(3)


class Waiter:
    """A request that can stand in line."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.job = job
        self.is_displaced = False
        self.failed_on: list[ReplicaLoad] = []

    def turned_away(self, verdict: Verdict) -> None:
        assert verdict in (Verdict.FULL, Verdict.NEVER)
        self.is_displaced = True


class Story:
    """A dispatcher with a notebook of what was delivered to whom."""

    def __init__(self, *replicas: tuple[str, int], places: int = 3, kv_tokens: int = 0) -> None:
        self.delivered: list[tuple[str, ReplicaLoad]] = []
        self.gone: set[str] = set()
        self.waiters: dict[str, Waiter] = {}
        self.kv_tokens = kv_tokens
        self.prefixes: dict[str, tuple[int, ...]] = {}
        self.dispatcher: Dispatcher[Waiter] = Dispatcher(
            "ep", rules=DispatchRules(places=places), deliver=self._deliver, chance=lambda: 0.0
        )
        self.table(*replicas)

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        if waiter.name in self.gone:
            return False
        self.delivered.append((waiter.name, replica))
        return True

    def table(self, *replicas: tuple[str, int], draining: frozenset[str] = frozenset(), now_s: float = 0.0) -> None:
        routes = [
            (ReplicaRoute(name, "127.0.0.1", 1, "s", slots, name in draining, self.kv_tokens), slots)
            for name, slots in replicas
        ]
        self.dispatcher.update([("v1", 100, 0, routes)], now_s=now_s)

    def arrive(
        self, name: str, now_s: float = 0.0, *, band: int = STANDARD, prompt: int = 1, output: int = 1
    ) -> ReplicaLoad | Verdict:
        job = Job("t", band=band, prompt_tokens=prompt, output_tokens=output, output_max=output)
        job.prefix = self.prefixes.get(name, ())
        self.waiters[name] = Waiter(name, job)
        return self.dispatcher.arrive(self.waiters[name], now_s=now_s, deadline_s=now_s + 30)

    def finish(self, name: str, replica: ReplicaLoad, now_s: float = 1.0) -> None:
        self.dispatcher.finish(replica, self.waiters[name].job, now_s=now_s)

    def retry(self, name: str, failed_on: list[ReplicaLoad]) -> ReplicaLoad | Verdict | None:
        self.waiters[name].failed_on = failed_on
        return self.dispatcher.retry(self.waiters[name], now_s=0.0, deadline_s=9.0)


def start(story: Story, waiter: str) -> ReplicaLoad:
    replica = story.arrive(waiter)
    assert isinstance(replica, ReplicaLoad)
    return replica


def test_equal_replicas_take_turns() -> None:
    story = Story(("a", 4), ("b", 4))
    assert [start(story, str(n)).route.id for n in range(4)] == ["a", "b", "a", "b"]


def test_the_emptier_replica_relative_to_its_slots_is_chosen() -> None:
    story = Story(("small", 2), ("large", 8))
    chosen = [start(story, str(n)).route.id for n in range(10)]
    assert chosen.count("small") == 2
    assert chosen.count("large") == 8


def test_a_full_line_refuses_and_a_freed_slot_serves_in_order() -> None:
    story = Story(("a", 1), places=2)
    first = start(story, "1")
    assert [story.arrive(w) for w in "234"] == [Verdict.WAIT, Verdict.WAIT, Verdict.FULL]
    story.finish("1", first, 1.0)
    assert [w for w, _ in story.delivered] == ["2"]


def test_nobody_overtakes_those_who_wait() -> None:
    story = Story(("a", 1))
    first = start(story, "1")
    story.arrive("2")
    story.gone.add("2")
    story.finish("1", first, 1.0)
    assert story.delivered == []
    assert start(story, "3").running == 1


def test_a_slot_for_someone_who_left_goes_to_the_next() -> None:
    story = Story(("a", 1))
    first = start(story, "1")
    story.arrive("2")
    story.arrive("3")
    story.gone.add("2")
    story.finish("1", first, 1.0)
    assert [w for w, _ in story.delivered] == ["3"]
    assert first.running == 1


def test_a_client_that_leaves_the_line_frees_its_place() -> None:
    story = Story(("a", 1), places=1)
    start(story, "1")
    story.arrive("2")
    assert story.dispatcher.leave(story.waiters["2"], now_s=0.0)
    assert not story.dispatcher.leave(story.waiters["2"], now_s=0.0)
    assert story.arrive("3") is Verdict.WAIT


def test_a_lost_connection_ejects_until_a_probe_succeeds() -> None:
    story = Story(("a", 4), ("b", 4))
    bad = start(story, "1")
    story.dispatcher.failed(bad, Failure.UNREACHABLE, "connection refused", now_s=0.0)
    assert {start(story, str(n)).route.id for n in range(2, 5)} == {"b"}
    assert story.dispatcher.probes_due(0.5) == []
    assert story.dispatcher.probes_due(1.5) == [bad]
    bad.health.probe_began()
    assert start(story, "6").route.id == "b", "a half-open replica takes nothing but its probe"
    assert story.dispatcher.probes_due(1.6) == []
    story.dispatcher.probed(bad, is_good=True, reason="", now_s=1.7)
    assert start(story, "7").route.id == "a"


def test_a_good_probe_serves_those_who_wait() -> None:
    story = Story(("a", 1))
    first = start(story, "1")
    story.dispatcher.failed(first, Failure.UNREACHABLE, "lost", now_s=0.0)
    story.finish("1", first)
    assert story.arrive("2") is Verdict.WAIT
    first.health.probe_began()
    story.dispatcher.probed(first, is_good=False, reason="lost", now_s=2.0)
    assert story.delivered == []
    first.health.probe_began()
    story.dispatcher.probed(first, is_good=True, reason="", now_s=9.0)
    assert story.delivered == [("2", first)]


def test_a_replica_that_answers_badly_is_not_ejected_when_it_is_the_last() -> None:
    story = Story(("a", 8), ("b", 8))
    first = start(story, "1")
    other = start(story, "2")
    for _ in range(5):
        story.dispatcher.failed(first, Failure.BAD_ANSWER, "engine answered 500", now_s=0.0)
    assert start(story, "3") is other
    for _ in range(5):
        story.dispatcher.failed(other, Failure.BAD_ANSWER, "engine answered 500", now_s=0.0)
    assert start(story, "4") is other
    story.dispatcher.failed(other, Failure.UNREACHABLE, "connection lost", now_s=0.0)
    assert start(story, "5") is first, "one that answers badly is better than none"


def test_ejection_grows_to_a_bound() -> None:
    pauses = [ejection_s(n) for n in range(1, 12)]
    assert pauses[0] == 1.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == EJECTION_S_MAX


def test_a_draining_replica_gets_nothing_new_and_is_forgotten_when_empty() -> None:
    story = Story(("a", 2))
    first = start(story, "1")
    story.table(("a", 2), draining=frozenset({"a"}))
    assert story.arrive("2") is Verdict.WAIT
    assert story.dispatcher.is_cold
    story.table()
    assert len(story.dispatcher.replicas) == 1
    story.finish("1", first, 1.0)
    assert len(story.dispatcher.replicas) == 0


def test_a_new_table_serves_those_who_waited_for_a_cold_endpoint() -> None:
    story = Story()
    assert story.arrive("1") is Verdict.WAIT
    story.table(("a", 1))
    assert [w for w, _ in story.delivered] == ["1"]


def test_a_retry_avoids_the_replicas_that_failed() -> None:
    story = Story(("a", 2), ("b", 2))
    first = start(story, "1")
    other = story.retry("1", [first])
    assert isinstance(other, ReplicaLoad)
    assert other is not first
    assert (first.running, other.running) == (0, 1)
    assert story.retry("1", [first, other]) is None
    assert other.running == 1


def test_a_retry_waits_for_another_replica_that_is_full() -> None:
    story = Story(("a", 1), ("b", 1))
    first, second = start(story, "1"), start(story, "2")
    assert story.retry("1", [first]) is Verdict.WAIT
    story.dispatcher.failed(first, Failure.UNREACHABLE, "lost", now_s=0.0)
    story.finish("2", second, 0.0)
    assert story.delivered == [("1", second)]


def test_one_that_waits_for_another_replica_than_it_failed_on_holds_nobody_up() -> None:
    story = Story(("a", 1), ("b", 1), places=9)
    first, second = start(story, "1"), start(story, "2")
    assert story.retry("1", [first]) is Verdict.WAIT, "the other replica is busy"
    third = start(story, "3")
    assert third is first, "its slot is of no use to the one that waits"
    assert story.arrive("4") is Verdict.WAIT
    story.finish("3", third)
    assert story.delivered == [("4", first)]
    story.finish("2", second)
    assert story.delivered[1:] == [("1", second)]


def test_what_a_replica_has_no_room_for_waits_until_something_there_is_done() -> None:
    story = Story(("a", 3))
    first, _, third = start(story, "1"), start(story, "2"), start(story, "3")
    assert story.dispatcher.put_back(story.waiters["3"], third, now_s=0.0, deadline_s=9.0) is Verdict.WAIT
    assert story.arrive("4") is Verdict.WAIT, "two are all that it bears"
    assert first.health.is_closed
    assert story.dispatcher.retries.retries == 0
    story.finish("1", first, 0.1)
    assert [name for name, _ in story.delivered] == ["3"]


def test_a_replica_that_was_full_is_tried_with_more_as_time_goes() -> None:
    story = Story(("a", 8), places=9)
    replicas = [start(story, str(n)) for n in range(8)]
    for n in (7, 6, 5, 4, 3, 2, 1):
        story.dispatcher.put_back(story.waiters[str(n)], replicas[n], now_s=0.0, deadline_s=9.0)
    story.table(("a", 8))
    assert replicas[0].slots == 1, "a new table does not make it larger"
    for now_s, slots in ((FULL_S / 2, 1), (FULL_S, 2), (1.5 * FULL_S, 2), (2 * FULL_S, 3), (3 * FULL_S, 4)):
        story.dispatcher.relieve(now_s=now_s)
        assert (replicas[0].slots, replicas[0].running) == (slots, slots)
    for step in range(4, 9):
        story.dispatcher.relieve(now_s=step * FULL_S)
    assert (replicas[0].slots, story.dispatcher.has_full) == (8, False)


def test_a_replica_that_is_full_of_others_requests_is_tried_again_after_a_pause() -> None:
    story = Story(("a", 2))
    replica = start(story, "1")
    assert story.dispatcher.put_back(story.waiters["1"], replica, now_s=0.0, deadline_s=9.0) is Verdict.WAIT
    assert story.delivered == []
    story.dispatcher.relieve(now_s=FULL_S)
    assert story.delivered == [("1", replica)]


def test_another_replica_takes_what_one_has_no_room_for() -> None:
    story = Story(("a", 2), ("b", 2))
    first = start(story, "1")
    other = story.dispatcher.put_back(story.waiters["1"], first, now_s=0.0, deadline_s=9.0)
    assert isinstance(other, ReplicaLoad)
    assert other is not first


def test_a_shadow_is_no_replica_to_wait_for() -> None:
    story = Story(places=9)
    routes = {name: [(ReplicaRoute(name, "127.0.0.1", 1, "s", 1), 1)] for name in "ab"}
    story.dispatcher.update([("v1", 100, 0, routes["a"]), ("v2", 0, 50, routes["b"])], now_s=0.0)
    assert story.retry("1", [start(story, "1")]) is None, "only a copy could go elsewhere"
    story.dispatcher.update([("v1", 100, 0, []), ("v2", 0, 50, routes["b"])], now_s=0.0)
    assert story.dispatcher.is_cold, "nobody is there to answer"


def test_the_last_replica_that_answers_is_kept_whatever_a_shadow_does() -> None:
    story = Story(places=9)
    routes = {name: [(ReplicaRoute(name, "127.0.0.1", 1, "s", 1), 1)] for name in "ab"}
    story.dispatcher.update([("v1", 100, 0, routes["a"]), ("v2", 0, 50, routes["b"])], now_s=0.0)
    replica = start(story, "1")
    story.dispatcher.failed(replica, Failure.SILENT, "no token", now_s=0.0)
    assert replica.health.is_closed


def test_all_that_a_silent_replica_had_may_be_tried_elsewhere_once() -> None:
    story = Story(("a", 20), places=99)
    there = [start(story, f"{number}") for number in range(20)]
    routes = [(ReplicaRoute(name, "127.0.0.1", 1, "s", 20), 20) for name in "ab"]
    story.dispatcher.update([("v1", 100, 0, routes)], now_s=0.0)
    for replica in there:
        story.dispatcher.failed(replica, Failure.SILENT, "no token", now_s=0.0)
    moved = [story.retry(f"{number}", [replica]) for number, replica in enumerate(there)]
    assert all(isinstance(one, ReplicaLoad) and one.route.id == "b" for one in moved)
    assert story.dispatcher.retries.retries == 20
    assert not story.dispatcher.retries.has_left(0.5) or story.dispatcher.retries.allowed <= 20 + 5


def test_releases_get_their_share_of_traffic() -> None:
    picks = [pick_release([90, 10], point / 100) for point in range(100)]
    assert picks.count(0) == 90
    assert pick_release([0, 0], 0.5) == 0


def test_a_full_release_does_not_hold_back_requests_that_another_can_take() -> None:
    story = Story(places=9)
    routes = {name: [(ReplicaRoute(name, "127.0.0.1", 1, "s", 1), 1)] for name in "ab"}
    story.dispatcher.update([("v1", 90, 0, routes["a"]), ("v2", 10, 0, routes["b"])], now_s=0.0)
    chosen = [story.arrive(name) for name in "12"]
    assert [r.version_id for r in chosen if isinstance(r, ReplicaLoad)] == ["v1", "v2"]


def test_a_shadow_release_gets_copies_and_answers_nobody() -> None:
    story = Story(places=9)
    routes = {name: [(ReplicaRoute(name, "127.0.0.1", 1, "s", 1), 1)] for name in "ab"}
    story.dispatcher.update([("v1", 100, 0, routes["a"]), ("v2", 0, 50, routes["b"])], now_s=0.0)
    assert start(story, "1").route.id == "a"
    assert story.arrive("2") is Verdict.WAIT, "the shadow's slot is not for answers"
    [(shadow, copy)] = story.dispatcher.shadows(story.waiters["1"].job, now_s=0.0)
    assert (shadow.route.id, shadow.running) == ("b", 1)
    assert story.dispatcher.shadows(story.waiters["1"].job, now_s=0.0) == [], "no room, no copy"
    story.dispatcher.drop_shadow(shadow, copy, now_s=0.0)
    assert shadow.running == 0


def test_a_more_urgent_request_is_served_first_and_takes_the_place_of_a_less_urgent_one() -> None:
    story = Story(("a", 1), places=2)
    first = start(story, "1")
    assert story.arrive("batch", band=BATCH) is Verdict.WAIT
    assert story.arrive("standard") is Verdict.WAIT
    assert story.arrive("urgent", band=PRIORITY) is Verdict.WAIT
    assert story.waiters["batch"].is_displaced
    story.finish("1", first)
    assert [name for name, _ in story.delivered] == ["urgent"]


def test_one_that_steps_aside_gives_its_slot_to_the_first_in_line_and_stands_behind_it() -> None:
    story = Story(("a", 1), places=4)
    replica = story.arrive("line", band=BATCH)
    assert isinstance(replica, ReplicaLoad)
    assert story.arrive("another line", band=BATCH) is Verdict.WAIT
    assert story.arrive("now") is Verdict.WAIT
    verdict = story.dispatcher.step_aside(story.waiters["line"], replica, now_s=1.0, deadline_s=30.0)
    assert (verdict, story.delivered) == (Verdict.WAIT, [("now", replica)])
    story.finish("now", replica)
    story.finish("another line", replica)
    assert [name for name, _ in story.delivered] == ["now", "another line", "line"]


def test_a_replica_takes_what_its_memory_holds_and_no_more() -> None:
    story = Story(("a", 8), places=9, kv_tokens=1000)
    first = start(story, "idle")
    assert story.arrive("big", prompt=900, output=90) is Verdict.WAIT
    assert story.arrive("small", prompt=10, output=10) is Verdict.WAIT, "nobody overtakes within a band"
    assert isinstance(story.arrive("urgent", band=PRIORITY, prompt=100, output=100), ReplicaLoad)
    assert story.arrive("huge", prompt=2000) is Verdict.NEVER
    story.finish("idle", first)
    assert story.delivered == [], "the urgent one still holds its share"
    story.finish("urgent", first)
    assert [name for name, _ in story.delivered] == ["big"]


def test_a_freed_slot_goes_to_who_has_its_prompt_cached_there_but_passes_nobody_over_for_ever() -> None:
    story = Story(("a", 1), ("b", 1), places=99)
    story.prefixes = {"warm": (1, 2, 3)}
    warm = start(story, "warm")
    start(story, "other")
    story.prefixes = {"first": (7, 8), "again": (1, 2, 3, 4)}
    assert story.arrive("first") is Verdict.WAIT
    assert story.arrive("again") is Verdict.WAIT
    story.finish("warm", warm)
    assert [name for name, _ in story.delivered] == ["again"]
    holder = "again"
    for number in range(LOOK_AHEAD + 1):
        story.prefixes = {str(number): (1, 2, 3, 4, number)}
        story.arrive(str(number))
        story.finish(holder, warm)
        holder = story.delivered[-1][0]
        if holder == "first":
            break
    assert holder == "first"
    assert story.waiters["first"].job.passed == LOOK_AHEAD


def test_a_line_that_drains_too_slowly_refuses_at_once() -> None:
    story = Story(("a", 1), places=99)
    replica = start(story, "0")
    for number in range(1, 9):
        assert story.arrive(str(number)) is Verdict.WAIT
    for number in range(8):
        story.finish(str(number), replica, now_s=10.0 * (number + 1))
    story.arrive("next", now_s=80.0)
    story.arrive("after", now_s=80.0)
    story.arrive("third", now_s=80.0)
    assert story.arrive("late", now_s=80.0) is Verdict.FULL, "a place in line every 10 s, and 30 s of patience"
    wait_s = story.dispatcher.wait_s(now_s=80.0)
    assert wait_s is not None
    assert 20 <= wait_s <= 55


def test_what_an_engine_reports_beyond_our_own_counts_as_load_from_elsewhere() -> None:
    story = Story(("a", 4), ("b", 4))
    [one, two] = story.dispatcher.replicas
    assert start(story, "1") is one
    story.dispatcher.observe({"a": ReplicaSnapshot("a", 0.1, 1, 0), "b": ReplicaSnapshot("b", 0.1, 3, 1)})
    assert (one.running_elsewhere, two.running_elsewhere) == (0, 4)
    assert start(story, "2") is one


def test_what_ran_here_when_the_engine_was_asked_is_not_from_elsewhere_though_it_is_told_later() -> None:
    story = Story(("a", 4))
    (one,) = story.dispatcher.replicas
    replica = start(story, "1")
    story.finish("1", replica)
    story.dispatcher.observe({"a": ReplicaSnapshot("a", 0.1, 0, 0)})
    story.dispatcher.observe({"a": ReplicaSnapshot("a", 0.9, 1, 0)})
    assert one.running_elsewhere == 0
    story.dispatcher.observe({"a": ReplicaSnapshot("a", 0.1, 1, 0)})
    assert one.running_elsewhere == 1


def test_retries_are_a_share_of_requests() -> None:
    story = Story(("a", 99), ("b", 99))
    took = 0
    for number in range(40):
        replica = start(story, str(number))
        if isinstance(story.retry(str(number), [replica]), ReplicaLoad):
            took += 1
    assert took == story.dispatcher.retries.reserve


class DispatchMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, departures, failures and tables keeps every slot, token and place accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.running: dict[Waiter, ReplicaLoad] = {}
        self.waiting: set[Waiter] = set()
        self.vanished: set[Waiter] = set()
        self.count = 0
        self.dispatcher: Dispatcher[Waiter] = Dispatcher(
            "ep", rules=DispatchRules(places=4), deliver=self._deliver, chance=lambda: 0.5
        )

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.waiting.discard(waiter)
        if waiter in self.vanished:
            return False
        self.running[waiter] = replica
        return True

    def _one(self, data: st.DataObject, among: set[Waiter] | dict[Waiter, ReplicaLoad]) -> Waiter:
        return data.draw(st.sampled_from(sorted(among, key=lambda waiter: int(waiter.name))))

    @rule(slots=st.lists(st.integers(1, 3), max_size=3), drain=st.integers(0, 3), kv_tokens=st.sampled_from([0, 100]))
    def table(self, slots: list[int], drain: int, kv_tokens: int) -> None:
        routes = [
            (ReplicaRoute(f"r{n}", "127.0.0.1", 1, "s", s, n == drain, kv_tokens), s) for n, s in enumerate(slots)
        ]
        self.dispatcher.update([("v1", 100, 0, routes)], now_s=self.now_s)

    @rule(band=st.integers(0, 2), tenant=st.sampled_from("ab"), prompt=st.integers(1, 150), output=st.integers(1, 50))
    def arrive(self, band: int, tenant: str, prompt: int, output: int) -> None:
        self.count += 1
        job = Job(tenant, band=band, prompt_tokens=prompt, output_tokens=output, output_max=output)
        waiter = Waiter(str(self.count), job)
        got = self.dispatcher.arrive(waiter, now_s=self.now_s, deadline_s=self.now_s + 5)
        if isinstance(got, ReplicaLoad):
            # One that failed where the newcomer goes may be passed: that slot is of no use to it.
            ahead = [other for other in self.waiting if not other.is_displaced and not other.failed_on]
            assert all(other.job.band > band for other in ahead), "overtook"
            self.running[waiter] = got
        elif got is Verdict.WAIT:
            self.waiting.add(waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 90))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        waiter = self._one(data, self.running)
        self.dispatcher.began(self.running[waiter], waiter.job, now_s=self.now_s)
        self.dispatcher.grew(self.running[waiter], waiter.job, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        self.dispatcher.finish(
            self.running.pop(waiter), waiter.job, now_s=self.now_s, prompt_tokens=waiter.job.prompt_tokens
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), silently=st.booleans())
    def leave(self, data: st.DataObject, silently: bool) -> None:
        waiter = self._one(data, self.waiting)
        if silently:
            self.vanished.add(waiter)
        else:
            self.waiting.discard(waiter)
            assert self.dispatcher.leave(waiter, now_s=self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(Failure))
    def fail(self, data: st.DataObject, kind: Failure) -> None:
        self.dispatcher.failed(self.running[self._one(data, self.running)], kind, "lost", now_s=self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        waiter.failed_on.append(replica)
        got = self.dispatcher.retry(waiter, now_s=self.now_s, deadline_s=self.now_s + 5)
        if got is None:
            self.running[waiter] = replica
        elif isinstance(got, ReplicaLoad):
            self.running[waiter] = got
        elif got is Verdict.WAIT and waiter not in self.running:
            self.waiting.add(waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        got = self.dispatcher.put_back(waiter, replica, now_s=self.now_s, deadline_s=self.now_s + 5)
        if isinstance(got, ReplicaLoad):
            assert got is not replica, "it has just said that it is full"
            self.running[waiter] = got
        elif got is Verdict.WAIT and waiter not in self.running:
            self.waiting.add(waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step_aside(self, data: st.DataObject) -> None:
        waiter = self._one(data, self.running)
        replica = self.running.pop(waiter)
        got = self.dispatcher.step_aside(waiter, replica, now_s=self.now_s, deadline_s=self.now_s + 5)
        if isinstance(got, ReplicaLoad):
            self.running[waiter] = got
        elif got is Verdict.WAIT and waiter not in self.running:
            self.waiting.add(waiter)

    @rule(seconds=st.floats(0, 40), is_good=st.booleans())
    def time(self, seconds: float, is_good: bool) -> None:
        self.now_s += seconds
        for waiter in self.dispatcher.line.expired(self.now_s):
            self.waiting.discard(waiter)
            self.dispatcher.leave(waiter, now_s=self.now_s)
        for replica in self.dispatcher.probes_due(self.now_s):
            replica.health.probe_began()
            self.dispatcher.probed(replica, is_good=is_good, reason="probe", now_s=self.now_s)
        self.dispatcher.relieve(now_s=self.now_s)

    @invariant()
    def every_slot_and_token_is_accounted_for(self) -> None:
        assert self.dispatcher.running == len(self.running)
        for replica in {id(r): r for r in self.running.values()}.values():
            jobs = [waiter.job for waiter, other in self.running.items() if other is replica]
            assert replica.running == len(jobs)
            assert replica.pending_tokens == sum(job.pending_tokens for job in jobs)
            assert set(replica.kv.held) <= set(jobs)
        for replica in self.dispatcher.replicas:
            assert replica.running or not replica.kv.held

    @invariant()
    def the_line_holds_exactly_those_who_wait(self) -> None:
        self.waiting -= {waiter for waiter in self.waiting if waiter.is_displaced}
        assert set(self.dispatcher.line) == self.waiting

    @invariant()
    def the_next_does_not_wait_beside_a_replica_that_could_take_it(self) -> None:
        if (first := self.dispatcher.line.first()) is not None:
            assert not [
                r for r in self.dispatcher.replicas
                if r.running < r.slots and not r.is_draining and r.health.is_closed and r.kv.fits(first.job, 0.97)
                and r not in first.failed_on
            ]  # fmt: skip


DispatchMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestDispatchMachine = DispatchMachine.TestCase


def test_the_first_answers_of_a_replica_count_and_those_after_a_quiet_time_too() -> None:
    story = Story(("a", 4))
    story.table(("a", 4), ("b", 4), now_s=5000.0)
    sick = next(replica for replica in story.dispatcher.replicas if replica.route.id == "b")
    for _ in range(30):
        story.dispatcher.succeeded(sick)
    assert story.dispatcher.probes_due(5000.2) == []
    assert sick.health.samples == 30
    story.dispatcher.wake(9000.0)
    assert sick.health.samples == 0, "that was long ago"
    for _ in range(30):
        story.dispatcher.succeeded(sick)
    story.dispatcher.probes_due(9000.2)
    assert sick.health.samples == 30
