"""No term comes out negative, and what fits exactly is found."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.least_squares import non_negative


def normal_of(rows: list[list[float]], values: list[float]) -> tuple[list[list[float]], list[float]]:
    size = len(rows[0])
    matrix = [[sum(row[one] * row[two] for row in rows) for two in range(size)] for one in range(size)]
    return matrix, [sum(row[one] * value for row, value in zip(rows, values, strict=True)) for one in range(size)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_numbers_that_made_the_values_are_found(numbers: list[float], seed: int) -> None:
    chance = random.Random(seed)
    rows = [[chance.uniform(0.1, 1) * 10**place for place in range(len(numbers))] for _ in range(30)]
    values = [sum(term * number for term, number in zip(row, numbers, strict=True)) for row in rows]
    assert non_negative(*normal_of(rows, values)) == pytest.approx(numbers, rel=1e-3)


def test_what_would_be_negative_is_left_out() -> None:
    rows, values = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], [1.0, 0.9, 0.8]
    assert non_negative(*normal_of(rows, values)) == pytest.approx([0.9, 0.0])


def test_a_term_that_was_never_there_is_zero_and_twins_do_no_harm() -> None:
    rows = [[1.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 3.0], [1.0, 0.0, 5.0, 5.0]]
    found = non_negative(*normal_of(rows, [3.0, 4.0, 6.0]))
    assert found[1] == 0.0
    assert [found[0], found[2] + found[3]] == pytest.approx([1.0, 1.0])
    assert non_negative([[0.0]], [0.0]) == [0.0]
    # A week without it: what is left of its sums are the last bits of numbers.
    assert non_negative([[1.0, 3e-322], [3e-322, 5e-322]], [1.0, 5e-322]) == [1.0, 0.0]
