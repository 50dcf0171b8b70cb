"""Configured dollars become exact whole nano-dollars."""

import math

import pytest

from modelyard.config.billing import PriceConfig
from modelyard.domain.usage import Price
from modelyard.errors import StartupError
from modelyard.metering.prices import UNIT_USD_MAX, USD_MAX, cost, micro_units, price_of


def test_a_price_is_exact_where_a_float_is_not() -> None:
    prices = {"smol": PriceConfig(input=0.15, cached_input=0.075, output=0.6)}
    assert price_of(prices, "smol") == Price(150_000_000, 75_000_000, 600_000_000)
    assert price_of({"smol": PriceConfig(input=0.1 + 0.2)}, "smol").input == 300_000_000


def test_a_model_without_a_price_takes_the_one_of_all_others_or_is_free() -> None:
    prices = {"*": PriceConfig(input=1), "smol": PriceConfig(input=2)}
    assert price_of(prices, "smol").input == 2_000_000_000
    assert price_of(prices, "other").input == 1_000_000_000
    assert price_of({}, "other") == Price(0, 0, 0)


def test_cached_tokens_cost_what_others_do_unless_said_otherwise() -> None:
    assert price_of({"a": PriceConfig(input=3)}, "a").cached_input == 3_000_000_000
    assert price_of({"a": PriceConfig(input=3, cached_input=0)}, "a").cached_input == 0


@pytest.mark.parametrize("usd", [math.inf, math.nan, -1.0, USD_MAX * 2.0])
def test_what_is_no_price_is_refused(usd: float) -> None:
    with pytest.raises(StartupError, match=r"prices\.a\.output"):
        price_of({"a": PriceConfig(output=usd)}, "a")


def test_a_unit_is_priced_by_itself_and_exact() -> None:
    price = price_of({"a": PriceConfig(unit=0.0001)}, "a")
    assert price == Price(unit=100_000 * 1_000_000)
    assert cost(price, 0, 0, 0, micro_units(2.5)) == 250_000
    with pytest.raises(StartupError, match=r"prices\.a\.unit"):
        price_of({"a": PriceConfig(unit=UNIT_USD_MAX * 2.0)}, "a")


@pytest.mark.parametrize("usd", [0.12345678901, 1e-10, 1.0000000001])
def test_a_price_with_more_digits_than_are_kept_is_refused_not_rounded(usd: float) -> None:
    with pytest.raises(StartupError, match="more than nine digits"):
        price_of({"smol": PriceConfig(input=usd)}, "smol")
