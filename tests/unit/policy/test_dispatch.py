"""The dispatcher: stories, and a state machine over every order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.breaker import EJECTION_S_MAX, ejection_s
from modelyard.policy.dispatch import Dispatcher, ReplicaLoad, Verdict
from modelyard.policy.routing import pick_release


class Story:
    """A dispatcher with a notebook of what was delivered to whom."""

    def __init__(self, *replicas: tuple[str, int], places: int = 3) -> None:
        self.delivered: list[tuple[str, ReplicaLoad]] = []
        self.gone: set[str] = set()
        self.dispatcher: Dispatcher[str] = Dispatcher("ep", places=places, deliver=self._deliver, chance=lambda: 0.0)
        self.table(*replicas)

    def _deliver(self, waiter: str, replica: ReplicaLoad) -> bool:
        if waiter in self.gone:
            return False
        self.delivered.append((waiter, replica))
        return True

    def table(self, *replicas: tuple[str, int], draining: frozenset[str] = frozenset(), now_s: float = 0.0) -> None:
        routes = [(ReplicaRoute(name, "127.0.0.1", 1, "s", slots, name in draining), slots) for name, slots in replicas]
        self.dispatcher.update([("v1", 100, routes)], now_s=now_s)

    def arrive(self, waiter: str, now_s: float = 0.0) -> ReplicaLoad | Verdict:
        return self.dispatcher.arrive(waiter, now_s=now_s, deadline_s=now_s + 30)


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
    story.dispatcher.finish(first, now_s=1.0)
    assert [w for w, _ in story.delivered] == ["2"]


def test_nobody_overtakes_those_who_wait() -> None:
    story = Story(("a", 1))
    first = start(story, "1")
    story.arrive("2")
    story.gone.add("2")
    story.dispatcher.finish(first, now_s=1.0)
    assert story.delivered == []
    assert start(story, "3").running == 1


def test_a_slot_for_someone_who_left_goes_to_the_next() -> None:
    story = Story(("a", 1))
    first = start(story, "1")
    story.arrive("2")
    story.arrive("3")
    story.gone.add("2")
    story.dispatcher.finish(first, now_s=1.0)
    assert [w for w, _ in story.delivered] == ["3"]
    assert first.running == 1


def test_a_client_that_leaves_the_line_frees_its_place() -> None:
    story = Story(("a", 1), places=1)
    start(story, "1")
    story.arrive("2")
    assert story.dispatcher.leave("2")
    assert not story.dispatcher.leave("2")
    assert story.arrive("3") is Verdict.WAIT


def test_one_failure_ejects_and_a_success_brings_back() -> None:
    story = Story(("a", 4), ("b", 4))
    bad = start(story, "1")
    story.dispatcher.failed(bad, "connection refused", now_s=0.0)
    assert {start(story, str(n)).route.id for n in range(2, 5)} == {"b"}
    story.dispatcher.succeeded(bad)
    assert start(story, "6").route.id == "a"


def test_a_replica_that_answers_badly_is_not_ejected_when_it_is_the_last() -> None:
    story = Story(("a", 4), ("b", 4))
    first = start(story, "1")
    story.dispatcher.failed(first, "engine answered 500", now_s=0.0, has_answered=True)
    other = start(story, "2")
    assert other is not first
    story.dispatcher.failed(other, "engine answered 500", now_s=0.0, has_answered=True)
    assert start(story, "3") is other
    story.dispatcher.failed(other, "connection lost", now_s=0.0)
    assert story.arrive("4") is Verdict.WAIT


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
    story.dispatcher.finish(first, now_s=1.0)
    assert len(story.dispatcher.replicas) == 0


def test_a_new_table_serves_those_who_waited_for_a_cold_endpoint() -> None:
    story = Story()
    assert story.arrive("1") is Verdict.WAIT
    story.table(("a", 1))
    assert [w for w, _ in story.delivered] == ["1"]


def test_a_retry_avoids_the_replicas_that_failed() -> None:
    story = Story(("a", 2), ("b", 2))
    first = start(story, "1")
    other = story.dispatcher.retry("1", failed_on=[first], now_s=0.0, deadline_s=9.0)
    assert isinstance(other, ReplicaLoad)
    assert other is not first
    assert (first.running, other.running) == (0, 1)
    assert story.dispatcher.retry("1", failed_on=[first, other], now_s=0.0, deadline_s=9.0) is None
    assert other.running == 1


def test_a_retry_waits_for_another_replica_that_is_full() -> None:
    story = Story(("a", 1), ("b", 1))
    first, second = start(story, "1"), start(story, "2")
    assert story.dispatcher.retry("1", failed_on=[first], now_s=0.0, deadline_s=9.0) is Verdict.WAIT
    story.dispatcher.failed(first, "lost", now_s=0.0)
    story.dispatcher.finish(second, now_s=0.0)
    assert story.delivered == [("1", second)]


def test_releases_get_their_share_of_traffic() -> None:
    picks = [pick_release([90, 10], point / 100) for point in range(100)]
    assert picks.count(0) == 90
    assert pick_release([0, 0], 0.5) == 0


def test_a_full_release_does_not_hold_back_requests_that_another_can_take() -> None:
    delivered: list[str] = []
    dispatcher: Dispatcher[str] = Dispatcher(
        "ep", places=9, deliver=lambda w, r: not delivered.append(w), chance=lambda: 0.0
    )
    routes = {name: [(ReplicaRoute(name, "127.0.0.1", 1, "s", 1), 1)] for name in "ab"}
    dispatcher.update([("v1", 90, routes["a"]), ("v2", 10, routes["b"])], now_s=0.0)
    chosen = [dispatcher.arrive(w, now_s=0.0, deadline_s=9.0) for w in "12"]
    assert [r.version_id for r in chosen if isinstance(r, ReplicaLoad)] == ["v1", "v2"]


class DispatchMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, departures, failures and tables keeps every slot and place accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.running: dict[int, ReplicaLoad] = {}
        self.waiting: set[int] = set()
        self.vanished: set[int] = set()
        self.count = 0
        self.dispatcher: Dispatcher[int] = Dispatcher("ep", places=4, deliver=self._deliver, chance=lambda: 0.5)

    def _deliver(self, waiter: int, replica: ReplicaLoad) -> bool:
        self.waiting.discard(waiter)
        if waiter in self.vanished:
            return False
        self.running[waiter] = replica
        return True

    @rule(slots=st.lists(st.integers(1, 3), max_size=3), drain=st.integers(0, 3))
    def table(self, slots: list[int], drain: int) -> None:
        routes = [(ReplicaRoute(f"r{n}", "127.0.0.1", 1, "s", s, n == drain), s) for n, s in enumerate(slots)]
        self.dispatcher.update([("v1", 100, routes)], now_s=self.now_s)

    @rule()
    def arrive(self) -> None:
        self.count += 1
        got = self.dispatcher.arrive(self.count, now_s=self.now_s, deadline_s=self.now_s + 5)
        if isinstance(got, ReplicaLoad):
            assert not self.waiting, "overtook"
            self.running[self.count] = got
        elif got is Verdict.WAIT:
            self.waiting.add(self.count)
        else:
            assert len(self.dispatcher.line) == 4

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.running)))
        self.dispatcher.finish(self.running.pop(waiter), now_s=self.now_s)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), silently=st.booleans())
    def leave(self, data: st.DataObject, silently: bool) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.waiting)))
        if silently:
            self.vanished.add(waiter)
        else:
            self.waiting.discard(waiter)
            assert self.dispatcher.leave(waiter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        replica = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.dispatcher.failed(replica, "lost", now_s=self.now_s)

    @rule(seconds=st.floats(0, 40))
    def time(self, seconds: float) -> None:
        self.now_s += seconds
        for waiter in self.dispatcher.line.expired(self.now_s):
            self.waiting.discard(waiter)
            self.dispatcher.leave(waiter)
        self.dispatcher.serve(now_s=self.now_s)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        assert self.dispatcher.running == len(self.running)
        for replica in {id(r): r for r in self.running.values()}.values():
            assert replica.running == sum(r is replica for r in self.running.values())

    @invariant()
    def the_line_holds_exactly_those_who_wait(self) -> None:
        assert set(self.dispatcher.line) == self.waiting

    @invariant()
    def nobody_waits_beside_a_free_replica(self) -> None:
        if self.waiting:
            free = [
                r for r in self.dispatcher.replicas
                if r.running < r.slots and not r.is_draining and r.ejected_until_s <= self.now_s
            ]  # fmt: skip
            assert not free


DispatchMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestDispatchMachine = DispatchMachine.TestCase
