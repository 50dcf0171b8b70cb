"""When a replica gets no requests because it failed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.policy.breaker import (
    BAD_IN_A_ROW_MAX,
    EJECTION_S_MAX,
    RELAPSE_S,
    SAMPLES_MIN,
    Failure,
    Health,
    State,
    Tolerance,
    ejection_s,
    failed,
    may_eject,
    reprieve,
)

TOLERANCE = Tolerance()
UNREACHABLE, SILENT, BAD = Failure.UNREACHABLE, Failure.SILENT, Failure.BAD_ANSWER
MISSING = Failure.MISSING


def fail(health: Health, kind: Failure, *others: Health, now_s: float = 100.0, reason: str = "it broke") -> bool:
    return failed(health, [health, *others], kind, reason, now_s=now_s, tolerance=TOLERANCE)


def ejected(kind: Failure, now_s: float = 100.0) -> Health:
    health = Health()
    health.eject(kind, "before", now_s=now_s)
    return health


def test_pause_doubles_to_half_a_minute() -> None:
    assert [ejection_s(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("kind", [UNREACHABLE, SILENT])
def test_first_lost_connection_or_timeout_ejects_at_once(kind: Failure) -> None:
    health = Health()
    assert fail(health, kind, Health())
    assert (health.state, health.is_closed, health.kind, health.reason) == (State.OPEN, False, kind, "it broke")
    assert (health.probe_due(100.9), health.probe_due(101.0)) == (False, True)


def test_death_that_fails_fifty_requests_is_one_failure() -> None:
    health = Health()
    assert [fail(health, UNREACHABLE, Health()) for _ in range(50)].count(True) == 1
    assert health.open_until_s == 101.0


@pytest.mark.parametrize(
    ("good", "bad", "is_ejected"),
    [(9, 1, False), (8, 2, True), (7, 2, False), (100, 11, False), (80, 9, True), (0, 4, False), (1, 4, False)],
)
def test_circuit_opens_only_above_the_share_and_with_enough_samples(good: int, bad: int, *, is_ejected: bool) -> None:
    health = Health()
    health.roll(100.0)
    for _ in range(bad - 1):
        fail(health, BAD)  # the last of its endpoint, and so not ejected yet
    for _ in range(good):
        health.succeeded()
    assert fail(health, BAD, Health()) is is_ejected
    assert health.error_share == pytest.approx(bad / (good + bad))
    assert (health.samples >= SAMPLES_MIN and health.error_share > TOLERANCE.error_share_max) is is_ejected


def test_bad_answers_in_a_row_eject_a_quiet_replica() -> None:
    health = Health()
    assert [fail(health, BAD, Health()) for _ in range(BAD_IN_A_ROW_MAX)] == [False] * 4 + [True]


def test_answers_leave_the_window_after_ten_seconds() -> None:
    health = Health()
    health.roll(100.0)
    health.good = 50
    for second in range(101, 110):
        health.roll(second)
        assert health.samples == 50
    health.roll(110)
    assert health.samples == 0
    health.good = 7
    health.roll(500.0)
    assert health.samples == 0


def test_good_answer_between_bad_ones_breaks_the_row() -> None:
    health = Health()
    for _ in range(BAD_IN_A_ROW_MAX - 1):
        assert not fail(health, BAD, Health())
    health.succeeded()
    assert not fail(health, BAD, Health(), now_s=200.0)


def test_only_a_good_probe_lets_requests_in_again() -> None:
    health = ejected(UNREACHABLE)
    assert health.probe_due(101.0)
    health.probe_began()
    assert (health.state, health.is_closed, health.probe_due(500.0)) == (State.HALF_OPEN, False, False)
    health.succeeded()
    assert not health.is_closed, "an old request's answer is not the probe's"
    health.probe_ended(is_good=True, now_s=101.5)
    assert (health.state, health.is_closed, health.kind, health.samples) == (State.CLOSED, True, None, 0)


def test_bad_probe_pauses_twice_as_long_and_a_dropped_one_is_repeated_at_once() -> None:
    health, now_s, pauses = ejected(SILENT), 100.0, []
    for _ in range(7):
        pauses.append(health.open_until_s - now_s)
        now_s = health.open_until_s
        health.probe_began()
        health.probe_dropped()
        assert health.probe_due(now_s)
        health.probe_began()
        health.probe_ended(is_good=False, now_s=now_s, kind=UNREACHABLE, reason="refused")
    assert pauses == [1, 2, 4, 8, 16, EJECTION_S_MAX, EJECTION_S_MAX]
    assert (health.kind, health.reason) == (UNREACHABLE, "refused")


def test_relapse_goes_on_doubling_and_a_good_while_forgives() -> None:
    health = ejected(UNREACHABLE, now_s=100.0)
    health.probe_began()
    health.probe_ended(is_good=True, now_s=101.0)
    fail(health, UNREACHABLE, now_s=102.0)
    assert health.open_until_s == 104.0
    health.probe_began()
    health.probe_ended(is_good=True, now_s=104.0)
    fail(health, UNREACHABLE, now_s=104.0 + RELAPSE_S + 1)
    assert health.open_until_s == 104.0 + RELAPSE_S + 2


def test_unreachable_one_that_still_answers_is_probed_at_once() -> None:
    lost, bad = ejected(UNREACHABLE), ejected(BAD)
    lost.succeeded()
    bad.succeeded()
    assert (lost.probe_due(100.0), bad.probe_due(100.0)) == (True, False)


@pytest.mark.parametrize(
    ("kind", "others", "share_max", "may"),
    [
        (UNREACHABLE, [], 0.5, True),
        (UNREACHABLE, [None], 0.0, True),
        (MISSING, [], 0.0, True),  # nothing to send to, either
        (BAD, [], 0.5, False),  # the last one
        (SILENT, [], 1.0, False),
        (BAD, [None], 0.5, True),
        (BAD, [UNREACHABLE], 0.5, False),  # the last one that answers
        (BAD, [None, None], 0.1, True),  # one is always allowed
        (BAD, [None, None], 0.0, False),  # unless the operator says none
        (BAD, [BAD, None], 0.5, False),  # two of three
        (BAD, [BAD, None, None], 0.5, True),  # two of four
        (BAD, [SILENT, BAD, None], 0.5, False),
        (BAD, [UNREACHABLE, MISSING, None], 0.5, True),  # the lost do not count
    ],
)
def test_how_many_may_be_ejected(kind: Failure, others: list[Failure | None], share_max: float, *, may: bool) -> None:
    health = Health()
    healths = [health, *(Health() if other is None else ejected(other) for other in others)]
    assert may_eject(health, healths, kind, share_max=share_max) is may


def test_one_that_answers_badly_comes_back_when_the_last_good_one_is_lost() -> None:
    bad, worse, silent, last = ejected(BAD), ejected(BAD), ejected(SILENT), Health()
    bad.good = 1
    worse._bad = 1
    assert fail(last, UNREACHABLE, silent, worse, bad)
    assert [health.is_closed for health in (last, bad, worse, silent)] == [False, True, False, False]
    assert reprieve([last, bad], now_s=101.0) is None


def test_probe_that_ends_after_its_replica_was_let_back_changes_nothing() -> None:
    bad, last = ejected(BAD), Health()
    bad.probe_began()
    fail(last, UNREACHABLE, bad)
    assert bad.is_closed
    bad.probe_ended(is_good=False, now_s=100.5)
    bad.probe_dropped()
    assert bad.is_closed, "the last that answers was ejected by its old probe"


def test_nobody_comes_back_when_all_are_unreachable() -> None:
    assert reprieve([ejected(UNREACHABLE), ejected(SILENT)], now_s=101.0) is None


def test_repr_tells_state_share_and_reason() -> None:
    health = Health()
    fail(health, UNREACHABLE, Health(), reason="connection refused")
    assert repr(health) == "<Health open: 100% of 1 bad, connection refused>"


class BreakerMachine(RuleBasedStateMachine):
    """Four replicas under any order of answers, failures, probes and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.healths = [Health() for _ in range(4)]
        self.probed: set[int] = set()

    which = st.integers(0, 3)

    @rule(step_s=st.sampled_from([0.1, 0.5, 1.0, 3.0, 40.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        for health in self.healths:
            health.roll(self.now_s)

    @rule(index=which, count=st.integers(1, 20))
    def answer(self, index: int, count: int) -> None:
        state = self.healths[index].state
        for _ in range(count):
            self.healths[index].succeeded()
        assert self.healths[index].state is state

    @rule(index=which, kind=st.sampled_from(Failure), count=st.integers(1, 6))
    def fails(self, index: int, kind: Failure, count: int) -> None:
        before = [health.is_closed for health in self.healths]
        for _ in range(count):
            failed(self.healths[index], self.healths, kind, "broke", now_s=self.now_s, tolerance=TOLERANCE)
        health = self.healths[index]
        if kind in {UNREACHABLE, MISSING} and before[index]:
            assert health.kind is kind
        elif any(before):
            assert any(other.is_closed for other in self.healths), "the last one that answers was ejected"

    @rule(index=which)
    def probe(self, index: int) -> None:
        if self.healths[index].probe_due(self.now_s):
            self.healths[index].probe_began()
            self.probed.add(index)

    @precondition(lambda self: self.probed)
    @rule(end=st.sampled_from(["good", "bad", "lost", "dropped"]), data=st.data())
    def probe_ends(self, end: str, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.probed)))
        self.probed.discard(index)
        health = self.healths[index]
        if end == "dropped":
            health.probe_dropped()
        else:
            kind = UNREACHABLE if end == "lost" else BAD
            was_half_open = health.state is State.HALF_OPEN
            health.probe_ended(is_good=end == "good", now_s=self.now_s, kind=kind, reason="probe")
            assert health.is_closed or end != "good" or not was_half_open

    @invariant()
    def closed_is_one_thing(self) -> None:
        for health in self.healths:
            assert health.is_closed is (health.state is State.CLOSED) is (health.kind is None)
            assert health.open_until_s - self.now_s <= EJECTION_S_MAX

    @invariant()
    def window_adds_up(self) -> None:
        for health in self.healths:
            assert health._good_sum == sum(health._goods) >= 0
            assert health._bad_sum == sum(health._bads) >= 0
            assert len(health._goods) == len(health._bads) == 9

    @invariant()
    def half_open_has_its_probe(self) -> None:
        for index, health in enumerate(self.healths):
            if health.state is State.HALF_OPEN:
                assert index in self.probed


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
