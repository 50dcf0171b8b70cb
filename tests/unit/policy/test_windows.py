"""Windows over growing totals: exact sums, and quantiles that are off by a bucket at most."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.signals import BOUNDS_S, ReleaseCounts, Window
from modelyard.policy.windows import NOTHING, Sums, bucket_of, increase, quantile, total, window_of

durations = st.floats(0.0, 1000.0)
samples = st.lists(durations, max_size=60)
histograms = st.lists(st.integers(0, 20), max_size=len(BOUNDS_S) + 1).map(tuple)
shares = st.floats(0.0, 1.0)


def counted(seconds: list[float]) -> tuple[int, ...]:
    counts = [0] * (len(BOUNDS_S) + 1)
    for one in seconds:
        counts[bucket_of(one)] += 1
    return tuple(counts)


def release(requests: int, **more: object) -> ReleaseCounts:
    return ReleaseCounts("ep", "ver", requests, **{"errors": 0, **more})  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(durations)
def test_a_duration_is_in_the_first_bucket_whose_bound_is_not_below_it(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert bucket == len(BOUNDS_S) or seconds <= BOUNDS_S[bucket]
    assert bucket == 0 or seconds > BOUNDS_S[bucket - 1]


@pytest.mark.parametrize("index", range(len(BOUNDS_S)))
def test_a_bound_itself_is_in_its_own_bucket_and_the_next_float_in_the_next(index: int) -> None:
    assert bucket_of(BOUNDS_S[index]) == index
    assert bucket_of(math.nextafter(BOUNDS_S[index], math.inf)) == index + 1


@settings(max_examples=100, deadline=None)
@given(histograms, shares, shares)
def test_a_larger_share_never_has_a_smaller_quantile(counts: tuple[int, ...], one: float, other: float) -> None:
    low, high = quantile(counts, min(one, other)), quantile(counts, max(one, other))
    assert (low is None) == (high is None) == (sum(counts) == 0)
    assert low is None or high is None or low <= high


@settings(max_examples=100, deadline=None)
@given(st.lists(durations, min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_lies_within_the_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    true = sorted(seconds)[max(0, math.ceil(share * len(seconds) - 1e-9) - 1)]
    bucket = bucket_of(true)
    found = quantile(counted(seconds), share)
    assert found is not None
    low = BOUNDS_S[bucket - 1] if bucket else 0.0
    high = BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else BOUNDS_S[-1]
    # A share that falls between two of them may be told at the edge where their buckets meet.
    assert low - 1e-9 <= found <= high + 1e-9


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    bucket = bucket_of(1.0)
    counts = (0,) * bucket + (4,)
    low, high = BOUNDS_S[bucket - 1], BOUNDS_S[bucket]
    assert quantile(counts, 0.5) == pytest.approx((low + high) / 2)
    assert quantile(counts, 1.0) == high


def test_what_is_above_all_bounds_is_told_as_the_last_bound() -> None:
    assert quantile(counted([5000.0]), 0.5) == BOUNDS_S[-1]


@settings(max_examples=100, deadline=None)
@given(samples, samples)
def test_the_sum_of_two_gateways_is_what_one_would_have_counted(one: list[float], other: list[float]) -> None:
    parts = [Sums(len(each), 0, counted(each), service_s=1.0) for each in (one, other)]
    whole = total(parts)
    assert whole.ttft == counted(one + other)
    assert whole.requests == len(one) + len(other)
    assert whole.service_s == 2.0


@settings(max_examples=100, deadline=None)
@given(histograms, histograms)
def test_an_increase_is_what_was_added_between_two_looks(before: tuple[int, ...], more: tuple[int, ...]) -> None:
    first = release(5, errors=1, ttft=before, prompt_tokens=7, service_s=1.5)
    after = total([Sums(ttft=before), Sums(ttft=more)]).ttft
    second = release(9, errors=2, ttft=after, prompt_tokens=17, service_s=2.0)
    found = increase(first, second)
    assert (found.requests, found.errors, found.prompt_tokens, found.service_s) == (4, 1, 10, 0.5)
    assert sum(found.ttft) == sum(more)
    assert found.ttft[: len(more)] == more


def test_counts_that_went_back_are_a_new_total() -> None:
    found = increase(release(100, ttft=(50, 50)), release(3, ttft=(3,)))
    assert (found.requests, found.ttft) == (3, (3,))


def test_nothing_at_all_has_no_quantiles_and_no_errors() -> None:
    window = window_of(NOTHING, 60.0)
    assert window == Window(seconds=60.0)
    assert window.error_share == 0.0
    assert total([]) == NOTHING
