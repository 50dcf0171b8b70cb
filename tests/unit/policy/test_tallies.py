"""What a gateway counts of a release: failures of ours and the engine's, never the caller's."""

import pytest

from modelyard.domain.signals import BOUNDS_S
from modelyard.policy.tallies import ReleaseTally
from modelyard.policy.windows import bucket_of


def ended(tally: ReleaseTally, status: int = 200, *, first_s: float | None = 0.1, tokens: int = 11) -> None:
    tally.ended(status, 1.1, first_s, 0.9, 5, tokens, 7.0)


@pytest.mark.parametrize(
    ("status", "errors"), [(200, 0), (400, 0), (404, 0), (429, 0), (499, 0), (500, 1), (502, 1), (503, 1), (504, 1)]
)
def test_only_what_is_not_the_callers_fault_is_an_error(status: int, errors: int) -> None:
    tally = ReleaseTally()
    ended(tally, status)
    assert (tally.requests, tally.errors) == (1, errors)


@pytest.mark.parametrize(("status", "counted"), [(200, 1), (504, 1), (502, 0), (499, 0), (400, 0)])
def test_a_latency_is_one_of_an_answer_or_of_a_time_out(status: int, counted: int) -> None:
    tally = ReleaseTally()
    ended(tally, status)
    assert sum(tally.latency) == counted


def test_each_duration_is_in_its_bucket_and_histograms_end_there() -> None:
    tally = ReleaseTally()
    ended(tally)
    counts = tally.counts("ep", "ver")
    assert counts.ttft == (0,) * bucket_of(0.1) + (1,)
    assert counts.latency == (0,) * bucket_of(1.1) + (1,)
    assert counts.itl == (0,) * bucket_of((1.1 - 0.1) / 10) + (1,)
    assert (counts.prompt_tokens, counts.completion_tokens, counts.service_s) == (5, 11, 0.9)


def test_an_answer_of_one_token_or_none_has_no_time_between_tokens() -> None:
    tally = ReleaseTally()
    ended(tally, tokens=1)
    ended(tally, first_s=None)
    assert tally.counts("ep", "ver").itl == ()


def test_a_duration_above_all_bounds_is_counted_last() -> None:
    tally = ReleaseTally()
    tally.ended(200, 10_000.0, None, 0.0, 0, 0, 1.0)
    assert len(tally.latency) == len(BOUNDS_S) + 1


def test_an_attempt_that_went_on_elsewhere_is_a_failure_of_the_release_it_left() -> None:
    tally = ReleaseTally()
    tally.moved(0.5, 3.0)
    counts = tally.counts("ep", "ver")
    assert (counts.requests, counts.errors, counts.service_s, counts.latency) == (1, 1, 0.5, ())


def test_counts_are_the_same_object_until_something_is_counted() -> None:
    tally = ReleaseTally()
    ended(tally)
    told = tally.counts("ep", "ver")
    assert tally.counts("ep", "ver") is told
    ended(tally)
    assert tally.counts("ep", "ver") is not told
