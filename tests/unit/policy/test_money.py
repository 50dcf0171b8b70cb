"""Money: rounded once, half to even; what is allotted adds up; nothing is ever a float."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.policy.money import allotted, decimal, digits, divided, exact, minor, nano_per_minor, shown

CURRENCIES = ["USD", "JPY", "KWD"]


@pytest.mark.parametrize(
    ("nano", "cents"),
    [(0, 0), (4_999_999, 0), (5_000_000, 0), (5_000_001, 1), (15_000_000, 2), (25_000_000, 2), (10**18, 10**11)],
)
def test_half_a_cent_goes_to_the_even_one(nano: int, cents: int) -> None:
    assert minor(nano, "USD") == cents


def test_currencies_have_their_own_minor_units() -> None:
    assert [digits(one) for one in CURRENCIES] == [2, 0, 3]
    assert [nano_per_minor(one) for one in CURRENCIES] == [10_000_000, 10**9, 1_000_000]
    assert [decimal(-1234, one) for one in CURRENCIES] == ["-12.34", "-1234", "-1.234"]
    assert decimal(5, "USD") == "0.05"


def test_exact_amounts_have_all_their_digits_and_no_more() -> None:
    assert [exact(one) for one in (0, 1, -1, 10**9, 1_230_000_000)] == ["0", "0.000000001", "-0.000000001", "1", "1.23"]


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**12))
def test_a_quotient_is_the_nearest_whole_number(amount: int, divisor: int) -> None:
    assert divided(amount, divisor) == round(Fraction(amount, divisor))


@given(st.lists(st.integers(0, 10**15), max_size=30), st.sampled_from(CURRENCIES))
def test_what_is_allotted_adds_up_and_no_part_is_off_by_a_whole_unit(nanos: list[int], currency: str) -> None:
    total = minor(sum(nanos), currency)
    parts = allotted(nanos, total, currency)
    assert sum(parts) == total
    size = nano_per_minor(currency)
    assert all(abs(part * size - nano) < size for part, nano in zip(parts, nanos, strict=True))


@pytest.mark.parametrize(
    ("nano", "currency", "text"),
    [
        (10_700_000, "USD", "$0.0107"),
        (-20_000_000, "USD", "-$0.02"),
        (16_200_000, "EUR", "0.0162 EUR"),
        (0, "JPY", "0 JPY"),
    ],
)
def test_amounts_are_shown_in_their_currency(nano: int, currency: str, text: str) -> None:
    assert shown(nano, currency) == text
