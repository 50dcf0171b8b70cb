"""Releases that answer what the others have no room for: stories, and a state machine over every order of events."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.routing_table import ReplicaRoute
from modelyard.domain.usage import Price
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.job import NEVER_S, Job
from modelyard.policy.pricing import cost, dearest
from modelyard.policy.progress import View, outlook
from modelyard.policy.reconcile import DrainReplica, Pace, ReplicaSeen, Situation, plan
from modelyard.policy.releases import SharesError, check_shares, with_release, without_release
from modelyard.policy.rollouts import carriers, settled, sizes
from modelyard.policy.stories import spill_text

OWN, FIRST, SECOND = "own", "first", "second"


class Waiter:
    """A request that can stand in line."""

    def __init__(self, fallback_s: float) -> None:
        self.job = Job("t")
        self.job.fallback_s = fallback_s
        self.failed_on: list[ReplicaLoad] = []
        self.verdict: Verdict | None = None

    def turned_away(self, verdict: Verdict) -> None:
        self.verdict = verdict


class Story:
    """A dispatcher, and what it delivered."""

    def __init__(self, own: int = 1, first: int = 1, second: int = 0, *, own_draining: bool = False) -> None:
        self.delivered: list[tuple[Waiter, ReplicaLoad]] = []
        self.dispatcher: Dispatcher[Waiter] = Dispatcher(
            "ep", rules=DispatchRules(places=50), deliver=self._deliver, chance=lambda: 0.0
        )
        self.table(own, first, second, own_draining=own_draining)

    def _deliver(self, waiter: Waiter, replica: ReplicaLoad) -> bool:
        self.delivered.append((waiter, replica))
        return True

    def table(self, own: int, first: int, second: int, *, own_draining: bool = False, now_s: float = 0.0) -> None:
        """Set the slots of each; 0: no replica."""

        def routes(name: str, slots: int) -> Sequence[tuple[ReplicaRoute, int]]:
            draining = own_draining and name == OWN
            return [(ReplicaRoute(name, "127.0.0.1", 1, "s", slots, draining), slots)] if slots else []

        releases = [(OWN, 100, 0, routes(OWN, own)), (SECOND, 0, 0, routes(SECOND, second))]
        releases.append((FIRST, 0, 0, routes(FIRST, first)))
        self.dispatcher.update(releases, now_s=now_s, fallbacks={FIRST: 1, SECOND: 2})

    def arrive(self, now_s: float = 0.0, *, fallback_s: float = 0.0) -> tuple[Waiter, str]:
        waiter = Waiter(fallback_s)
        found = self.dispatcher.arrive(waiter, now_s=now_s, deadline_s=now_s + 30)
        return waiter, found.route.id if isinstance(found, ReplicaLoad) else found.name

    def replica(self, name: str) -> ReplicaLoad:
        return next(one for one in self.dispatcher.replicas if one.route.id == name)


def test_weighted_releases_come_first_and_fallbacks_in_their_turn() -> None:
    story = Story(own=1, first=1, second=1)
    assert [story.arrive()[1] for _ in range(4)] == [OWN, FIRST, SECOND, "WAIT"]


def test_what_is_asked_is_remembered_with_its_reason() -> None:
    story = Story()
    own, _ = story.arrive()
    other, _ = story.arrive()
    assert own.job.spilled is None
    assert other.job.spilled == (1, 1, 0)
    assert spill_text(1, 1, 0) == "no room on the 1 replica of the releases with weight (1 full)"
    assert spill_text(3, 1, 1).endswith("(1 full, 1 left alone after failures, 1 without room for it)")
    assert spill_text(0, 0, 0) == "no replica of the releases with weight was there"


@pytest.mark.parametrize("own_draining", [True, False])
def test_a_sleeping_endpoint_is_answered_and_counts_as_asleep(own_draining: bool) -> None:
    story = Story(own=1 if own_draining else 0, own_draining=own_draining)
    assert story.dispatcher.is_asleep
    assert not story.dispatcher.is_cold
    assert story.dispatcher.is_cold_for(Waiter(NEVER_S).job)
    assert story.arrive()[1] == FIRST
    assert story.arrive()[1] == "WAIT"
    assert Story(own=0, first=0).dispatcher.is_cold


def test_a_failing_replica_is_left_for_the_fallback_and_the_other_way_round() -> None:
    story = Story(own=2, first=2)
    waiter, _ = story.arrive()
    waiter.failed_on.append(story.replica(OWN))
    verdict = story.dispatcher.retry(waiter, now_s=0.0, deadline_s=9.0)
    assert verdict is story.replica(FIRST)
    story.dispatcher.failed(story.replica(OWN), Failure.UNREACHABLE, "gone", now_s=0.0)
    other, name = story.arrive()
    assert name == FIRST
    assert other.job.spilled == (1, 0, 1)
    for _ in range(2):
        story.dispatcher.finish(story.replica(FIRST), other.job if _ else waiter.job, now_s=1.0)
    story.dispatcher.take_verdict(story.replica(OWN), is_good=True, now_s=2.0)
    back, name = story.arrive(3.0)
    assert name == OWN
    back.failed_on.append(story.replica(OWN))
    assert story.dispatcher.retry(back, now_s=3.0, deadline_s=9.0) is story.replica(FIRST)


def test_who_must_not_go_there_waits_for_its_own_and_holds_up_nobody() -> None:
    story = Story(own=1, first=1)
    holding, _ = story.arrive()
    bound, verdict = story.arrive(fallback_s=NEVER_S)
    assert verdict == "WAIT"
    assert story.arrive()[1] == FIRST, "a newcomer passes one who cannot take that slot"
    story.dispatcher.finish(story.replica(OWN), holding.job, now_s=1.0)
    assert [(waiter, replica.route.id) for waiter, replica in story.delivered] == [(bound, OWN)]


def test_a_slot_of_a_fallback_passes_who_must_not_have_it() -> None:
    story = Story(own=1, first=1)
    story.arrive()
    other, _ = story.arrive()
    story.arrive(fallback_s=NEVER_S)
    behind, verdict = story.arrive()
    assert verdict == "WAIT"
    story.dispatcher.finish(story.replica(FIRST), other.job, now_s=1.0)
    assert [waiter for waiter, _ in story.delivered] == [behind]


def test_a_request_waits_as_long_as_the_endpoint_says_before_it_spills() -> None:
    story = Story(own=1, first=1)
    holding, _ = story.arrive()
    patient, verdict = story.arrive(fallback_s=5.0)
    assert verdict == "WAIT"
    story.dispatcher.spill(now_s=4.9)
    assert story.delivered == []
    story.dispatcher.spill(now_s=5.0)
    assert [(waiter, replica.route.id) for waiter, replica in story.delivered] == [(patient, FIRST)]
    story.dispatcher.finish(story.replica(OWN), holding.job, now_s=6.0)
    assert story.arrive(6.0, fallback_s=11.0)[1] == OWN, "its own first, while there is room"


def test_a_long_line_is_no_reason_to_refuse_who_will_spill() -> None:
    story = Story(own=1, first=2)
    running, _ = story.arrive()
    for at in range(1, 6):  # each takes its own replica 20 seconds
        story.arrive(20.0 * (at - 1), fallback_s=NEVER_S)
        story.dispatcher.finish(story.replica(OWN), running.job, now_s=20.0 * at)
        running = story.delivered[-1][0]
    for _ in range(3):
        story.arrive(100.0, fallback_s=102.0)
    assert story.arrive(100.0, fallback_s=NEVER_S)[1] == "FULL", "the wait for its own is too long"
    assert story.arrive(100.0, fallback_s=102.0)[1] == "WAIT"
    story.delivered.clear()
    story.dispatcher.spill(now_s=102.0)
    assert [replica.route.id for _, replica in story.delivered] == [FIRST, FIRST]


class FallbackMachine(RuleBasedStateMachine):
    """Whatever happens: nobody is lost, no slot is given twice, and nobody goes where it must not."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.slots = {OWN: 1, FIRST: 1, SECOND: 1}
        self.story = Story(1, 1, 1)
        self.waiting: list[Waiter] = []
        self.running: list[tuple[Waiter, ReplicaLoad]] = []

    def take(self) -> None:
        for waiter, replica in self.story.delivered:
            assert waiter in self.waiting, "delivered who did not wait"
            self.waiting.remove(waiter)
            self.began(waiter, replica)
        self.story.delivered.clear()
        for waiter in [one for one in self.waiting if one.verdict is not None]:
            self.waiting.remove(waiter)

    def began(self, waiter: Waiter, replica: ReplicaLoad) -> None:
        if replica.route.id != OWN:
            assert waiter.job.fallback_s <= self.now_s, "it must not go there, or not yet"
            assert waiter.job.spilled is not None, "nobody could say why"
        self.running.append((waiter, replica))

    @rule(wait_s=st.sampled_from([0.0, 2.0, NEVER_S]))
    def arrive(self, wait_s: float) -> None:
        own = next((one for one in self.story.dispatcher.replicas if one.route.id == OWN and not one.is_draining), None)
        had_room = own is not None and own.running < own.slots and not self.waiting and own.health.is_closed
        waiter = Waiter(self.now_s + wait_s)
        found = self.story.dispatcher.arrive(waiter, now_s=self.now_s, deadline_s=self.now_s + 30)
        if isinstance(found, ReplicaLoad):
            assert not had_room or found is own, "those with weight come first"
            self.began(waiter, found)
        elif found is Verdict.WAIT:
            self.waiting.append(waiter)
        self.take()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        waiter, replica = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.story.dispatcher.finish(replica, waiter.job, now_s=self.now_s)
        self.take()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        waiter, replica = self.running[at]
        waiter.failed_on.append(replica)
        found = self.story.dispatcher.retry(waiter, now_s=self.now_s, deadline_s=self.now_s + 30)
        if found is None:
            waiter.failed_on.pop()
            return
        del self.running[at]
        if isinstance(found, ReplicaLoad):
            self.began(waiter, found)
        elif found is Verdict.WAIT:
            self.waiting.append(waiter)
        self.take()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.story.dispatcher.leave(waiter, now_s=self.now_s)
        self.take()

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def sweep(self, seconds: float) -> None:
        self.now_s += seconds
        for waiter in self.story.dispatcher.line.expired(self.now_s):
            self.waiting.remove(waiter)
        self.story.dispatcher.spill(now_s=self.now_s)
        self.take()
        free = [
            one
            for one in self.story.dispatcher.replicas
            if one.route.id != OWN and one.running < one.slots and not one.is_draining
        ]
        due = [waiter for waiter in self.waiting if waiter.job.fallback_s <= self.now_s]
        assert not (free and any(one not in waiter.failed_on for one in free for waiter in due)), (
            "it should have spilled"
        )

    @rule(own=st.integers(0, 2), first=st.integers(0, 2), second=st.integers(0, 2))
    def change(self, own: int, first: int, second: int) -> None:
        self.story.table(own, first, second, now_s=self.now_s)
        self.take()

    @invariant()
    def slots_are_kept(self) -> None:
        for replica in self.story.dispatcher.replicas:
            assert replica.running == sum(where is replica for _, where in self.running)
        assert len(self.story.dispatcher.line) == len(self.waiting)


TestFallbackMachine = FallbackMachine.TestCase
TestFallbackMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- sizes, shares, states ---------------------------------------------------------------


def endpoint(*more: Release, **fields: object) -> Endpoint:
    releases = (Release(OWN), *more) if more else (Release(OWN), Release(FIRST, 0, fallback=1))
    return Endpoint("ep", "t", "m", releases, Scaling(), 0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [0, 1, 7])
def test_a_fallback_has_one_replica_whatever_the_others_have(replicas: int) -> None:
    assert sizes(replicas, endpoint(), 0.0) == {OWN: replicas, FIRST: 1}
    assert sizes(0, endpoint(is_deleted=True), 0.0) == {OWN: 0, FIRST: 0}
    assert carriers(endpoint()) == {OWN}


def test_shares_and_fallbacks_do_not_mix() -> None:
    for release in (Release("x", 10, fallback=1), Release("x", 0, 10, 1), Release("x", 0, fallback=17)):
        with pytest.raises(SharesError) as refused:
            check_shares(release)
        assert refused.value.param == "fallback"
    releases = with_release((Release(OWN),), Release(FIRST, 0, fallback=1))
    assert [release.weight for release in releases] == [100, 0]
    with pytest.raises(SharesError, match="no other release has traffic"):
        without_release(releases, OWN)
    assert settled(endpoint()).releases == endpoint().releases


def seen(version: str, state: ReplicaState = ReplicaState.READY) -> ReplicaSeen:
    record = Replica(f"r-{version}", "ep", version, 0, 0, state, state_since=0.0, started_at=0.0, ready_at=1.0)
    return ReplicaSeen(record=record, is_known=True, is_running=True)


@pytest.mark.parametrize("fallback_is_there", [True, False])
def test_an_endpoint_goes_to_sleep_whether_its_fallback_is_there_or_not(fallback_is_there: bool) -> None:
    replicas = [seen(OWN)] + [seen(FIRST)] * fallback_is_there
    situation = Situation(
        endpoint_id="ep",
        now_s=9.0,
        wanted={OWN: 0, FIRST: 1},
        replicas=replicas,
        size_reason="no request for 300 s",
        beside=frozenset({FIRST}),
    )
    drained = [action for action in plan(situation, Pace(1, 8, 30)) if isinstance(action, DrainReplica)]
    assert [(action.replica_id, action.reason) for action in drained] == [("r-own", "no request for 300 s")]


def test_the_state_of_an_endpoint_is_that_of_those_with_weight() -> None:
    replicas = [seen(FIRST).record]
    asleep = outlook(endpoint(), View(now_s=9.0, wanted=0, replicas=replicas, load_s=1.0, size_reason="quiet"))
    assert (asleep.status, asleep.progress.reason) == ("stopped", "asleep: quiet")
    loading = outlook(endpoint(), View(now_s=9.0, wanted=1, replicas=replicas, load_s=1.0, is_proven=True))
    assert loading.status == "scaling"


@pytest.mark.parametrize(("prompt", "cached", "output"), [(10, 0, 5), (1000, 900, 1), (0, 0, 7)])
def test_no_release_is_dearer_than_what_is_reserved(prompt: int, cached: int, output: int) -> None:
    prices = [Price(10, 5, 1), Price(1, 9, 100), Price(4, 4, 4, 4)]
    most = dearest(dearest(prices[0], prices[1]), prices[2])
    assert all(cost(price, prompt, cached, output, 3) <= cost(most, prompt, cached, output, 3) for price in prices)
