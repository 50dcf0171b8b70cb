"""The waiting line: stories of bands, tenants, bounds and predictions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.job import Job
from modelyard.policy.queueing import WAIT_MAX_S, DrainRate, WaitingLine

PRIORITY, STANDARD, BATCH = range(3)


def job(tenant: str = "t", band: int = STANDARD, cost: int = 100, *, size: int = 0, due_s: float = 1e9) -> Job:
    return Job(tenant, band=band, prompt_tokens=cost, output_tokens=0, size_bytes=size, due_s=due_s)


def line_of(*jobs: Job, places: int = 100, bytes_max: int = 1 << 30) -> WaitingLine[int]:
    """Waiters are numbered in order of arrival."""
    line: WaitingLine[int] = WaitingLine(places, bytes_max)
    for number, each in enumerate(jobs):
        line.join(number, each, deadline_s=1000.0 + number)
    return line


def serve(line: WaitingLine[int]) -> int:
    waiter = line.first()
    assert waiter is not None
    served = line.waiters[waiter].job
    assert line.leave(waiter)
    line.served(served)
    return waiter


def drain(line: WaitingLine[int]) -> list[int]:
    return [serve(line) for _ in range(len(line))]


def test_one_tenant_is_served_first_come_first_served() -> None:
    assert drain(line_of(*[job() for _ in range(20)])) == list(range(20))


def test_earlier_due_jobs_of_a_tenant_go_first_and_ties_go_by_arrival() -> None:
    assert drain(line_of(job(due_s=9), job(due_s=3), job(due_s=9), job(due_s=3), job())) == [1, 3, 0, 2, 4]


def test_due_time_does_not_help_against_other_tenants() -> None:
    line = line_of(job("a"), job("b", due_s=0), job("b", due_s=0))
    assert drain(line) == [0, 1, 2]


def test_urgent_bands_go_first() -> None:
    line = line_of(job(band=BATCH), job(band=STANDARD), job(band=PRIORITY))
    assert line.first() == 2
    assert line.depths == (1, 1, 1)


def test_band_has_nothing_saved_when_it_comes_back_after_its_line_was_empty() -> None:
    line = line_of(job(band=STANDARD), job(band=STANDARD))
    serve(line)
    serve(line)
    line.served(job(band=STANDARD))  # at once, since nobody waits
    line.join(10, job(band=STANDARD), deadline_s=1e9)
    line.join(11, job(band=PRIORITY), deadline_s=1e9)
    assert line.order() == [11, 10]
    assert serve(line) == 11


def test_batch_is_not_starved_by_paying_requests() -> None:
    line = line_of(*[job(band=PRIORITY) for _ in range(60)], *[job(band=BATCH) for _ in range(10)])
    order = drain(line)
    batch = [place for place, waiter in enumerate(order) if waiter >= 60]
    assert batch[:3] == [1, 21, 41], "one token in twenty"


def test_flood_of_one_tenant_does_not_delay_another() -> None:
    line = line_of(*[job("flood") for _ in range(90)], job("light"), job("light"))
    line.served(job("flood"))
    assert drain(line)[:4] == [90, 0, 91, 1]


def test_requests_that_never_wait_count_too() -> None:
    line = line_of()
    line.join(0, job("light"), deadline_s=1)
    for _ in range(3):
        line.served(job("heavy"))
    line.join(1, job("heavy"), deadline_s=1)
    line.join(2, job("light"), deadline_s=1)
    line.join(3, job("light"), deadline_s=1)
    assert drain(line) == [0, 2, 3, 1]


def test_refund_lets_a_tenant_go_first_again() -> None:
    line = line_of(job("a"), job("a"), job("b"), job("b"))
    failed = job("a", cost=500)
    line.served(failed)
    assert line.order() == [2, 3, 0, 1]
    line.settled(failed, 0, 0)
    assert line.order() == [0, 2, 1, 3]
    assert line.first() == 0


def test_line_is_full_by_count_and_by_bytes() -> None:
    line = line_of(job(size=60), job(size=30), places=3, bytes_max=100)
    assert not line.is_full_for(job(size=10))
    assert line.is_full_for(job(size=11))
    line.join(2, job(), deadline_s=1)
    assert line.is_full_for(job())
    assert line.size_bytes == 90


def test_batch_fills_half_of_the_line_at_most() -> None:
    line = line_of(job(band=BATCH), job(band=BATCH), places=4, bytes_max=100)
    assert line.is_full_for(job(band=BATCH))
    assert not line.is_full_for(job(band=STANDARD))
    line = line_of(job(band=BATCH, size=40), places=4, bytes_max=100)
    assert line.is_full_for(job(band=BATCH, size=11))
    assert not line.is_full_for(job(band=BATCH, size=10))
    assert not line.is_full_for(job(band=PRIORITY, size=60))


def test_single_place_may_be_taken_by_batch() -> None:
    assert not line_of(places=1).is_full_for(job(band=BATCH))
    assert line_of(places=0).is_full_for(job(band=PRIORITY))


def test_urgent_job_displaces_the_youngest_of_the_least_urgent_band() -> None:
    line = line_of(job(band=BATCH), job(band=BATCH), job(band=STANDARD), job(band=STANDARD), places=4)
    assert line.make_room(job(band=BATCH)) is None
    assert line.make_room(job(band=PRIORITY)) == 1
    assert line.make_room(job(band=PRIORITY)) is None, "there is room now"
    line.join(9, job(band=PRIORITY), deadline_s=1)
    assert line.make_room(job(band=STANDARD)) == 0
    line.join(10, job(band=STANDARD), deadline_s=1)
    assert line.make_room(job(band=STANDARD)) is None
    assert line.make_room(job(band=PRIORITY)) == 10
    assert list(line) == [2, 3, 9]


def test_nobody_is_displaced_where_it_would_not_help() -> None:
    line = line_of(job(band=PRIORITY, size=70), job(band=BATCH, size=10), job(band=BATCH, size=10), bytes_max=100)
    assert line.make_room(job(band=PRIORITY, size=40)) is None
    assert len(line) == 3
    wanted = job(band=PRIORITY, size=30)
    assert [line.make_room(wanted), line.make_room(wanted), line.make_room(wanted)] == [2, 1, None]
    assert not line.is_full_for(wanted)


def test_full_line_of_the_same_band_displaces_nobody() -> None:
    line = line_of(job(), job(), places=2)
    assert line.make_room(job()) is None
    assert len(line) == 2


def test_flood_does_not_keep_others_from_waiting() -> None:
    line = line_of(*[job("flood") for _ in range(6)], places=6)
    for number in (10, 11, 12):
        assert line.make_room(job("light")) == 15 - number
        line.join(number, job("light"), deadline_s=1)
    assert line.make_room(job("light")) is None, "both hold three"
    assert line.make_room(job("flood")) is None
    assert line.make_room(job("third")) == 2
    assert list(line) == [0, 1, 10, 11, 12]


def test_places_are_shared_by_weight() -> None:
    heavy = [Job("gold", weight=3.0) for _ in range(6)]
    line = line_of(*heavy, job("iron"), job("iron"), places=8)
    assert line.make_room(job("iron")) is None, "a third of gold's weight, a third of its places"
    assert line.make_room(job("third")) == 5


def test_largest_holder_is_found_by_weight() -> None:
    line = line_of(*[Job("gold", weight=4.0) for _ in range(4)], *[job("iron") for _ in range(3)], places=7)
    assert line.make_room(job("third")) == 6


def test_batch_shares_its_half_by_what_is_short_there() -> None:
    line = line_of(job("many", BATCH), job("many", BATCH), job("large", BATCH, size=50), places=6, bytes_max=100)
    assert line.make_room(job("third", BATCH)) == 1, "places are short, not bytes"
    line = line_of(job("large", BATCH, size=30), job("large", BATCH, size=15), bytes_max=100)
    assert line.make_room(job("third", BATCH, size=25)) is None, "still not within half of the bytes"
    assert line.make_room(job("third", BATCH, size=20)) == 1


def test_nobody_is_displaced_for_what_was_given_back_or_is_too_little() -> None:
    line = line_of(job("large", size=50), job("large", size=40), bytes_max=100)
    line.leave(1)
    line.join(2, job("small", size=45), deadline_s=1)
    assert line.make_room(job("third", size=10)) is None, "large has only one left, and would have none"
    line = line_of(job("large", size=50), job("small", size=30), job("large", size=10), bytes_max=100)
    assert line.make_room(job("third", size=25)) is None, "the youngest holds too little"
    assert line.make_room(job("third", size=20)) == 2


def test_bytes_are_shared_where_they_are_short() -> None:
    line = line_of(job("large", size=50), job("large", size=40), job("small", size=5), job("small"), bytes_max=100)
    assert line.make_room(job("small", size=10)) == 1
    assert line.make_room(job("small", size=60)) is None, "the one left does not hold more than it wants"
    assert line.make_room(job("small", size=40)) is None


def test_leaving_twice_is_told() -> None:
    line = line_of(job(), job())
    assert line.leave(0)
    assert not line.leave(0)
    assert 0 not in line
    assert 1 in line
    assert list(line) == [1]
    assert not line.is_empty
    assert line.leave(1)
    assert line.is_empty
    assert line.first() is None


def test_thousand_leave_at_once_from_anywhere() -> None:
    line = line_of(*[job(f"t{n % 7}", n % 3) for n in range(1000)], places=2000)
    for waiter in range(999, 0, -1):
        assert line.leave(waiter)
    assert (drain(line), line.size_bytes, line.tokens_ahead(None), line.depths) == ([0], 0, 0, (0, 0, 0))


def test_those_who_left_from_the_middle_are_not_first_later() -> None:
    line = line_of(*[job() for _ in range(5)])
    for waiter in (1, 2, 0):
        line.leave(waiter)
    assert drain(line) == [3, 4]


def test_those_who_left_do_not_fill_the_memory() -> None:
    line = line_of(job())
    for number in range(1, 5000):
        line.join(number, job(due_s=1e9 + number), deadline_s=1)
        line.leave(number)
    assert len(line._owns[STANDARD]["t"].heap) < 20


def test_expired_are_told_until_they_leave() -> None:
    line = line_of(job(), job(), job())
    line.join(3, job(), deadline_s=5.0)
    assert line.expired(4.9) == []
    assert line.expired(5.0) == [3]
    assert line.expired(5.0) == [3]
    assert line.leave(3)
    assert line.expired(999.0) == []
    assert line.expired(1001.0) == [0, 1]
    line.join(4, job(), deadline_s=6.0)
    assert line.expired(7.0) == [4]


def test_position_and_work_ahead_follow_the_order_of_service() -> None:
    line = line_of(job("a", cost=10), job("a", cost=20), job("b", cost=30), job("a", PRIORITY, cost=40))
    # Batch and standard earn with the first: the standard band's turn comes, as it would anyway.
    assert line.order() == [3, 0, 2, 1]
    assert [line.position(waiter) for waiter in range(4)] == [1, 3, 2, 0]
    assert [line.tokens_ahead(waiter) for waiter in range(4)] == [40, 80, 50, 0]
    assert line.tokens_ahead(None) == 100
    with pytest.raises(KeyError):
        line.position(7)


def test_newcomer_waits_behind_its_own_and_more_urgent_work_only() -> None:
    line = line_of(*[job("flood") for _ in range(50)], job("light", BATCH, 30))
    assert line.tokens_before(job("flood")) == 5030
    assert line.tokens_before(job("light")) <= 200
    assert line.tokens_before(job("light", PRIORITY)) == 0
    assert line.tokens_before(job("light", BATCH)) == 5030


def test_repr_tells_the_state() -> None:
    assert repr(line_of(job(), job(band=BATCH), places=7)) == "<WaitingLine 2/7: 1 standard, 1 batch>"
    assert repr(line_of(places=7)) == "<WaitingLine 0/7>"


JOBS = st.builds(
    job,
    st.sampled_from("abcd"),
    st.integers(0, 2),
    st.integers(1, 100),
)


@settings(deadline=None, max_examples=60)
@given(before=st.lists(JOBS, max_size=30), jobs=st.lists(JOBS, max_size=60), newcomer=JOBS)
def test_estimate_for_a_newcomer_is_off_by_one_job_of_each_tenant_and_band(
    before: list[Job], jobs: list[Job], newcomer: Job
) -> None:
    line = line_of(*before)
    drain(line)
    for number, each in enumerate(jobs):
        line.join(number, each, deadline_s=1)
    estimate = line.tokens_before(newcomer)
    line.join(-1, newcomer, deadline_s=1)
    assert abs(line.tokens_ahead(-1) - estimate) <= 100 * (4 + 3)


@settings(deadline=None, max_examples=60)
@given(counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9)), newcomer=st.sampled_from("abcde"))
def test_estimate_for_a_newcomer_is_not_too_low_where_jobs_are_alike(counts: dict[str, int], newcomer: str) -> None:
    line = line_of(*[job(tenant) for tenant, count in counts.items() for _ in range(count)])
    estimate = line.tokens_before(job(newcomer))
    line.join(-1, job(newcomer), deadline_s=1)
    assert line.tokens_ahead(-1) <= estimate


@settings(deadline=None, max_examples=60)
@given(rate=st.floats(0.05, 2000.0), seconds=st.floats(1.0, 300.0), ahead=st.integers(0, 500), idle=st.floats(0, 1e4))
def test_predicted_wait_at_a_constant_rate_is_within_a_fifth(
    rate: float, seconds: float, ahead: int, idle: float
) -> None:
    drained = DrainRate()
    drained.resume(0.0)
    departures = min(3000, max(5, int(rate * seconds)))
    for number in range(1, departures + 1):
        drained.note(number / rate)
    end = departures / rate
    drained.resume(end + idle)  # nobody waited meanwhile
    for number in (1, 2, 3):
        drained.note(end + idle + number / rate)
    wait_s = drained.wait_s(ahead)
    if end >= 1.0:
        assert wait_s is not None
    if wait_s is not None:
        assert wait_s == pytest.approx(min(WAIT_MAX_S, (ahead + 1) / rate), rel=0.2)


def test_wait_is_unknown_at_the_start() -> None:
    drained = DrainRate()
    assert drained.wait_s(3) is None
    drained.resume(10.0)
    for _ in range(8):
        drained.note(10.0)
    assert drained.wait_s(3) is None, "a burst at one moment has no rate"
    drained.note(11.0)
    assert drained.wait_s(3) == pytest.approx(4 / 9, rel=0.1)


def test_first_note_without_resume_only_starts_the_clock() -> None:
    drained = DrainRate()
    for number in range(6):
        drained.note(100.0 + 2 * number)
    assert drained.wait_s(0) == pytest.approx(2.0, rel=0.1)


def test_wait_follows_a_change_of_the_rate() -> None:
    drained = DrainRate(window_s=30.0)
    drained.resume(0.0)
    for number in range(1, 101):
        drained.note(number * 1.0)
    for number in range(1, 1001):
        drained.note(100.0 + number * 0.1)
    assert drained.wait_s(9) == pytest.approx(1.0, rel=0.1)


def test_line_that_has_stopped_is_noticed() -> None:
    drained = DrainRate()
    drained.resume(0.0)
    for number in range(1, 101):
        drained.note(number * 0.1)
    waits = [drained.wait_s(10, now_s=10.0 + gap) for gap in (0.0, 30.0, 120.0, 1e6)]
    assert all(wait is not None for wait in waits)
    assert waits[0] == pytest.approx(1.1, rel=0.1)
    assert waits == sorted(waits, key=lambda wait: wait or 0.0)
    assert waits[2] is not None
    assert waits[2] > 5 * 1.1
    assert max(wait or 0.0 for wait in waits) <= WAIT_MAX_S


def test_amounts_may_be_tokens() -> None:
    drained = DrainRate()
    drained.resume(0.0)
    for number in range(1, 301):
        drained.note(number * 0.5, 250.0)
    assert drained.wait_s(5000) == pytest.approx(10.5, rel=0.05)
