"""Which requests take engines down."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from modelyard.policy.suspects import CRASHES_MAX, REFUSED_S, SETTLED_S, SUSPECTS_MAX, Suspects, fingerprint

DEADLY = fingerprint(b"deadly")
GOOD, OTHER, THIRD = (fingerprint(body) for body in (b"good", b"other", b"third"))


def crash(
    suspects: Suspects, start_id: str, waiting: tuple[int, ...], begun: tuple[int, ...] = (), *, now_s: float = 100.0
) -> None:
    """Report a crash as a gateway does: one broken connection after the other, each giving its slot back at once."""
    left, left_waiting = len(waiting) + len(begun), len(waiting)
    for print_ in begun:
        left -= 1
        suspects.lost(print_, start_id, others=left, others_waiting=left_waiting, has_begun=True, now_s=now_s)
    for print_ in waiting:
        left -= 1
        left_waiting -= 1
        suspects.lost(print_, start_id, others=left, others_waiting=left_waiting, has_begun=False, now_s=now_s)


def test_fingerprints_are_64_bits_and_differ() -> None:
    assert len({DEADLY, GOOD, OTHER, THIRD}) == 4
    assert all(0 <= print_ < 2**64 for print_ in (DEADLY, GOOD, OTHER, THIRD))
    assert fingerprint(b"deadly") == DEADLY


def test_nothing_is_known_at_first() -> None:
    suspects = Suspects()
    assert not suspects
    assert suspects.may_retry(DEADLY)
    assert not suspects.is_refused(DEADLY, 1.0)


def test_request_that_took_down_two_engines_alone_is_refused() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY,))
    assert suspects
    assert suspects.may_retry(DEADLY)
    assert not suspects.is_refused(DEADLY, 100.0)
    crash(suspects, "rep-2", (DEADLY,))
    assert not suspects.may_retry(DEADLY)
    assert suspects.is_refused(DEADLY, 100.0)
    assert suspects.is_refused(DEADLY, 100.0 + REFUSED_S - 1)
    assert not suspects.is_refused(DEADLY, 100.0 + REFUSED_S)


def test_two_losses_on_one_start_are_one_crash() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY,))
    crash(suspects, "rep-1", (DEADLY,))
    assert suspects.may_retry(DEADLY)
    assert not suspects.is_refused(DEADLY, 200.0)


def test_streams_that_had_begun_are_not_to_blame_beside_one_that_had_not() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY,), (GOOD, OTHER))
    crash(suspects, "rep-2", (DEADLY,), (GOOD, OTHER))
    assert suspects.is_refused(DEADLY, 100.0)
    assert not suspects.is_refused(GOOD, 200.0)
    assert not suspects.is_refused(OTHER, 200.0)


def test_whole_crowd_that_moved_together_is_not_condemned_but_not_tried_a_third_time() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (GOOD, DEADLY, OTHER))
    crash(suspects, "rep-2", (GOOD, DEADLY, OTHER))
    for print_ in (GOOD, DEADLY, OTHER):
        assert not suspects.may_retry(print_)
        assert not suspects.is_refused(print_, 200.0)


def test_the_only_one_of_both_crashes_is_condemned_once_all_are_reported() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (GOOD, DEADLY))
    suspects.lost(DEADLY, "rep-2", others=1, others_waiting=1, has_begun=False, now_s=110.0)
    assert not suspects.is_refused(DEADLY, 110.0), "the other one may be GOOD"
    assert suspects.is_refused(DEADLY, 110.0 + SETTLED_S)

    suspects = Suspects()
    crash(suspects, "rep-1", (GOOD, DEADLY))
    crash(suspects, "rep-2", (DEADLY, OTHER), now_s=110.0)
    assert suspects.is_refused(DEADLY, 110.0)
    assert not suspects.is_refused(GOOD, 110.0)
    assert not suspects.is_refused(OTHER, 110.0)


def test_long_stream_moved_from_one_dying_replica_to_the_next_has_one_crash_more() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (), (GOOD, OTHER))
    crash(suspects, "rep-2", (), (GOOD, THIRD))
    assert not suspects.may_retry(GOOD)
    assert not suspects.is_refused(GOOD, 200.0)
    crash(suspects, "rep-3", (DEADLY,), (GOOD,))
    assert suspects.is_refused(GOOD, 200.0)


def test_answer_exonerates_and_leaves_the_culprit() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (GOOD, DEADLY))
    crash(suspects, "rep-2", (GOOD, DEADLY))
    assert not suspects.is_refused(DEADLY, 100.0)
    suspects.answered(GOOD)
    assert suspects.may_retry(GOOD)
    assert suspects.is_refused(DEADLY, 100.0)
    suspects.answered(DEADLY)
    assert not suspects.is_refused(DEADLY, 100.0)
    assert not suspects, "nobody is left to suspect"


def test_last_report_of_a_crash_does_not_look_alone() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (GOOD, OTHER, DEADLY))
    crash(suspects, "rep-2", (GOOD, OTHER, DEADLY))
    suspects.answered(OTHER)
    assert not suspects.is_refused(DEADLY, 100.0)
    assert not suspects.is_refused(GOOD, 100.0)


def test_request_sent_to_an_engine_that_is_dead_already_was_not_alone() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY,))
    crash(suspects, "rep-1", (GOOD,))
    crash(suspects, "rep-2", (GOOD, DEADLY))
    assert not suspects.is_refused(GOOD, 200.0)

    suspects = Suspects()
    crash(suspects, "rep-1", (), (DEADLY,))
    crash(suspects, "rep-1", (), (GOOD,))
    crash(suspects, "rep-2", (), (GOOD, DEADLY))
    assert not suspects.is_refused(GOOD, 200.0)


def test_same_request_sent_many_times_is_one_suspect() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY, DEADLY, DEADLY))
    crash(suspects, "rep-2", (DEADLY, DEADLY))
    assert suspects.is_refused(DEADLY, 100.0)


def test_crash_is_forgotten_after_ten_minutes() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY,), now_s=100.0)
    suspects.forget_old(100.0 + REFUSED_S - 1)
    assert suspects
    suspects.forget_old(100.0 + REFUSED_S)
    assert not suspects
    crash(suspects, "rep-2", (DEADLY,), now_s=800.0)
    assert not suspects.is_refused(DEADLY, 900.0)
    crash(suspects, "rep-3", (DEADLY,), now_s=801.0)
    suspects.forget_old(801.0 + REFUSED_S)
    assert not suspects


def test_workers_share_what_is_refused_but_not_for_longer() -> None:
    one, two = Suspects(), Suspects()
    crash(one, "rep-1", (DEADLY,))
    crash(one, "rep-2", (DEADLY,), now_s=100.0)
    until_s = 100.0 + REFUSED_S
    assert one.export(150.0) == [(DEADLY, until_s)]
    for now_s in (150.0, 200.0, 250.0):
        two.merge(one.export(now_s), now_s)
        one.merge(two.export(now_s), now_s)
    assert two.is_refused(DEADLY, 250.0)
    assert not two.may_retry(DEADLY)
    assert one.export(250.0) == two.export(250.0) == [(DEADLY, until_s)], "what goes round lasts no longer"
    assert not two.is_refused(DEADLY, until_s)
    two.merge([(GOOD, 1e9), (OTHER, -1.0)], 0.0)
    assert two.export(0.0) == [(GOOD, REFUSED_S)]


def test_memory_is_bounded() -> None:
    suspects = Suspects()
    for number in range(3 * CRASHES_MAX):
        crash(suspects, f"rep-{number}", tuple(range(number * 40, number * 40 + 40)))
    assert repr(suspects) == f"<Suspects: {SUSPECTS_MAX} after {CRASHES_MAX} crashes, 0 refused>"
    suspects.merge(((print_, 5.0) for print_ in range(2 * SUSPECTS_MAX)), 0.0)
    assert len(suspects.export(0.0)) == SUSPECTS_MAX


def test_suspect_seen_again_outlives_those_seen_once() -> None:
    suspects = Suspects()
    crash(suspects, "rep-1", (DEADLY, *range(SUSPECTS_MAX - 1)))
    crash(suspects, "rep-2", (DEADLY, 0))
    crash(suspects, "rep-3", tuple(range(5000, 5000 + SUSPECTS_MAX // 2)))
    assert not suspects.may_retry(DEADLY)


def test_query_of_death_in_traffic_takes_two_engines_and_nobody_with_it() -> None:
    # The claim of F32: a fleet with other requests in flight loses at most two engines per sending of the request,
    # and once it is known nobody else is.
    random = Random(7)
    suspects, engines, now_s = Suspects(), 0, 0.0
    while not suspects.is_refused(DEADLY, now_s) and engines < 20:
        while suspects.may_retry(DEADLY):
            crowd = tuple(random.randrange(1, 10**6) for _ in range(random.randrange(4)))
            crash(suspects, f"rep-{engines}", (*crowd, DEADLY), now_s=now_s)
            engines += 1
            for print_ in crowd:
                assert suspects.may_retry(print_)
        now_s += SETTLED_S
    assert engines == 2


class SuspectsMachine(RuleBasedStateMachine):
    """One deadly request, which alone takes engines down, among innocent ones that get their answers in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.suspects = Suspects()
        self.now_s = 0.0
        self.starts = 0
        self.innocent: set[int] = set()

    @rule(crowd=st.sets(st.integers(1, 8), max_size=4), begun=st.sets(st.integers(11, 14), max_size=3))
    def deadly_request_comes(self, crowd: set[int], begun: set[int]) -> None:
        if self.suspects.is_refused(DEADLY, self.now_s):
            return
        if not self.suspects.may_retry(DEADLY):
            return
        self.starts += 1
        crash(self.suspects, f"rep-{self.starts}", (*crowd, DEADLY), tuple(begun), now_s=self.now_s)
        for print_ in crowd | begun:
            # Each is tried again elsewhere, and answered: it is no cause.
            assert not self.suspects.is_refused(print_, self.now_s + SETTLED_S)
            self.suspects.answered(print_)

    @rule(step_s=st.sampled_from([0.1, 1.0, 30.0, 700.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.suspects.forget_old(self.now_s)

    @rule()
    def two_deaths_are_enough(self) -> None:
        assert self.suspects.may_retry(DEADLY) or self.starts >= 2
        if not self.suspects.may_retry(DEADLY):
            assert self.suspects.is_refused(DEADLY, self.now_s + SETTLED_S)

    @rule(print_=st.integers(1, 14))
    def innocent_stays_free(self, print_: int) -> None:
        assert self.suspects.may_retry(print_)
        assert not self.suspects.is_refused(print_, self.now_s)


TestSuspects = SuspectsMachine.TestCase
TestSuspects.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
