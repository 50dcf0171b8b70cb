"""What samples come to: figures with known answers, and what is doubted."""

import statistics
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.loadtest.client import Sample
from modelyard.loadtest.driver import Level, Measured
from modelyard.loadtest.statistics import figures_of, interval, is_enough, percentile, spread_of


def sample(due_s: float, first_s: float, gaps_s: list[float], *, tokens: int | None = None, error: str = "") -> Sample:
    last_s = due_s + first_s + sum(gaps_s)
    output = len(gaps_s) + 1 if tokens is None else tokens
    return Sample(
        due_s, due_s, due_s + first_s, last_s, array("d", gaps_s), 10, output, is_counted=True, error=error
    )  # fmt: skip


def measured(
    samples: list[Sample], *, ended_s: float = 10.0, issued_s: float = 10.0, level: Level | None = None
) -> Measured:
    return Measured(level or Level(concurrency=2), samples, begun_s=0.0, issued_s=issued_s, ended_s=ended_s, cpu_s=1.0)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(cuts[percent - 1], abs=1e-6)
    assert (percentile(ordered, 0), percentile(ordered, 100)) == (ordered[0], ordered[-1])


def test_the_interval_of_a_median_is_that_of_the_order_of_the_samples() -> None:
    # Of 100 samples the 40th to the 60th, by the binomial distribution.
    assert interval([float(number) for number in range(1, 101)], 50) == (41.0, 61.0)
    assert interval([7.0], 99) == (7.0, 7.0)


def test_a_percentile_takes_five_samples_beyond_it() -> None:
    assert (is_enough(500, 99), is_enough(499, 99), is_enough(10, 50), is_enough(9, 50)) == (True, False, True, False)


def test_figures_have_the_names_and_the_values_of_vllm_bench() -> None:
    found = figures_of(measured([sample(0, 0.5, [0.1, 0.1]), sample(1, 1.5, [0.2, 0.4])]))
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (
        2,
        0,
        20,
        6,
    )
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.2, 0.6, 2.6)
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["p99_ttft_ms"]) == (1000, 1000, 1490)
    assert (found["mean_itl_ms"], found["samples_itl"]) == (200, 4)
    assert (found["mean_tpot_ms"], found["mean_e2el_ms"]) == (200, 1400)
    assert found["client"]["cpu_share"] == 0.1


def test_several_tokens_in_a_piece_count_for_tpot_and_not_for_itl() -> None:
    found = figures_of(measured([sample(0, 0.5, [0.4], tokens=9)]))
    assert (found["mean_itl_ms"], found["mean_tpot_ms"]) == (400, 50)


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = Sample(1.0, 3.0, 3.5, 3.5, array("d"), 1, 1, is_counted=True)
    found = figures_of(measured([late], level=Level(rate=1.0)))
    assert found["mean_ttft_ms"] == 2500
    assert any("sent late" in warning for warning in found["warnings"])


def test_the_steady_part_ends_with_the_last_request_and_counts_the_part_of_an_answer_that_was_there() -> None:
    samples = [sample(0, 1.0, [1.0] * 3), sample(6, 1.0, [1.0] * 3)]  # the second: tokens at 7, 8, 9, 10
    found = figures_of(measured(samples, issued_s=8.5, ended_s=10.0))
    assert found["steady"] == {
        "duration": 8.5,
        "request_throughput": round(1 / 8.5, 4),
        "output_throughput": round(6 / 8.5, 4),
    }
    tail = figures_of(measured(samples, issued_s=1.0, ended_s=10.0))
    assert tail["steady"] is None
    assert any("its tail" in warning for warning in tail["warnings"])


def test_failures_are_told_apart_and_have_no_latency() -> None:
    failed = Sample(0.0, 0.0, last_s=9.0, gaps_s=array("d"), error="HTTP 429 rate_limit_exceeded", detail="too many")
    found = figures_of(measured([failed, failed, sample(0, 0.5, [0.1])]))
    assert found["errors"] == {"HTTP 429 rate_limit_exceeded": 2}
    assert found["error_details"] == {"HTTP 429 rate_limit_exceeded": "too many"}
    assert found["mean_e2el_ms"] == 600
    none = figures_of(measured([failed]))
    assert none["warnings"] == ["no request succeeded; see the errors"]


def test_a_client_that_is_the_bottleneck_says_so() -> None:
    busy = measured([sample(0, 0.5, [0.1])] * 600)
    assert figures_of(busy)["warnings"] == []
    busy.lags_s = [0.0105] * 100  # an idle process beside others: no bottleneck
    assert figures_of(busy)["warnings"] == []
    busy.cpu_s = 9.0
    assert "bottleneck (CPU 90% of a core" in figures_of(busy)["warnings"][0]
    busy.cpu_s, busy.lags_s = 1.0, [0.05] * 100
    assert "woke up to 50 ms late" in figures_of(busy)["warnings"][0]


def test_too_few_samples_are_told_with_how_many_it_takes() -> None:
    found = figures_of(measured([sample(0, 0.5, [0.1])] * 60))
    assert found["warnings"] == ["60 requests are too few samples for p95, p99 (p95 takes 100); measure longer"]


def test_without_samples_there_are_no_figures() -> None:
    assert spread_of("ttft", []) == {}
