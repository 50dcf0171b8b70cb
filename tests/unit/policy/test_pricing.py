"""A request's cost is exact, rounded once, and half to even."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.usage import Price
from modelyard.policy.pricing import UNITS_MAX, batch_price, cost, dearest, micro_units

counts = st.integers(0, 2**31 - 1)
nano = st.integers(0, 10**15)


@pytest.mark.parametrize(
    ("story", "price", "tokens", "nanousd"),
    [
        ("free", Price(), (100, 0, 100), 0),
        ("nothing used", Price(1, 1, 1), (0, 0, 0), 0),
        ("each kind at its own price", Price(1_000_000, 500_000, 3_000_000), (10, 4, 5), 6 + 2 + 15),
        ("more cached than sent counts as all cached", Price(9_000_000, 1_000_000, 0), (3, 50, 0), 3),
        ("half rounds down to even", Price(input=500_000), (1, 0, 0), 0),
        ("half rounds up to even", Price(input=500_000), (3, 0, 0), 2),
        ("less than half rounds down", Price(input=499_999), (1, 0, 0), 0),
        ("more than half rounds up", Price(input=500_001), (1, 0, 0), 1),
        ("rounded once, not by kind", Price(400_000, 400_000, 400_000), (2, 1, 1), 1),
    ],
)
def test_costs(story: str, price: Price, tokens: tuple[int, int, int], nanousd: int) -> None:
    assert cost(price, *tokens) == nanousd, story


@given(prices=st.tuples(nano, nano, nano), prompt=counts, cached=counts, completion=counts)
def test_cost_is_the_exact_fraction_rounded_half_to_even(
    prices: tuple[int, int, int], prompt: int, cached: int, completion: int
) -> None:
    cached = min(cached, prompt)
    exact = Fraction((prompt - cached) * prices[0] + cached * prices[1] + completion * prices[2], 1_000_000)
    found = cost(Price(*prices), prompt, cached, completion)
    assert found == round(exact)
    assert found < 2**63, "fits the ledger's column"


@given(price=st.builds(Price, nano, nano, nano), first=st.tuples(counts, counts, counts), more=counts)
def test_more_output_never_costs_less(price: Price, first: tuple[int, int, int], more: int) -> None:
    prompt, cached, completion = first
    assert cost(price, prompt, cached, completion + more) >= cost(price, prompt, cached, completion)


def test_units_are_added_to_tokens_and_all_is_rounded_once() -> None:
    price = Price(input=400_000, unit=400_000)
    assert cost(price, 1, 0, 0, 1_000_000) == 1, "0.4 and 0.4 are 0.8"
    assert cost(Price(unit=1_000_000), 0, 0, 0, 2_500_000) == 2, "half to even"
    assert cost(Price(unit=1_000_000), 0, 0, 0, 3_500_000) == 4


@pytest.mark.parametrize(
    ("units", "expected"),
    [(2.5, 2_500_000), (0.0, 0), (-1.0, 0), (math.nan, 0), (math.inf, int(UNITS_MAX) * 1_000_000), (1e-7, 0)],
)
def test_a_broken_number_of_units_is_nothing_or_the_most(units: float, expected: int) -> None:
    assert micro_units(units) == expected


def test_a_request_is_priced_where_anything_was_counted_and_not_where_it_failed_before() -> None:
    price = Price(input=1_000_000, request=700)
    assert cost(price, 10, 0, 0) == 710
    assert cost(price, 0, 0, 0, micro_units(0.5)) == 700
    assert cost(price, 0, 0, 0) == 0


parts = st.integers(0, 10**15)
prices = st.builds(Price, parts, parts, parts, parts, parts, st.none() | st.integers(0, 1_000_000))


@given(price=prices, factor=st.integers(0, 1_000_000), prompt=counts, cached=counts, completion=counts)
def test_a_batch_costs_its_share_to_the_nano_and_never_more(
    price: Price, factor: int, prompt: int, cached: int, completion: int
) -> None:
    cheaper = batch_price(price, factor)
    share = factor if price.batch_micro is None else price.batch_micro
    assert cheaper.batch_micro == share, "what it was made with can be read off it"
    for name in ("input", "cached_input", "output", "unit", "request"):
        exact = Fraction(getattr(price, name) * share, 1_000_000)
        assert getattr(cheaper, name) == round(exact)
    cached = min(cached, prompt)
    assert cost(cheaper, prompt, cached, completion) <= cost(price, prompt, cached, completion)


@given(one=prices, other=prices, prompt=counts, cached=counts, completion=counts)
def test_the_dearest_of_two_is_below_neither(
    one: Price, other: Price, prompt: int, cached: int, completion: int
) -> None:
    cached = min(cached, prompt)
    most = cost(dearest(one, other), prompt, cached, completion)
    assert most >= cost(one, prompt, cached, completion)
    assert most >= cost(other, prompt, cached, completion)
