"""Limits on the command line: amounts and model limits are read exactly, or refused with how to write them."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from modelyard.cli.limits import limit_options, limits_text, spent_pairs


def parsed(*arguments: str) -> Any:
    found: list[Any] = []

    @click.command()
    @limit_options
    def command(*, limits: dict[str, Any]) -> None:
        found.append(limits)

    result = CliRunner().invoke(command, arguments)
    return found[0] if result.exit_code == 0 else result.output


def test_every_option_is_a_limit_of_the_api() -> None:
    assert parsed(
        "--rpm", "1", "--tpm", "2", "--concurrency", "3", "--tokens-per-day", "0", "--tokens-per-month", "5",
        "--usd-per-day", "0.10", "--usd-per-month", "$20", "--model-limit", "smol:rpm=10,tpm=20",
        "--model-limit", "big-q4:concurrency=1",
    ) == {
        "requests_per_minute": 1, "tokens_per_minute": 2, "concurrency": 3, "tokens_per_day": 0,
        "tokens_per_month": 5, "nanousd_per_day": 100_000_000, "nanousd_per_month": 20_000_000_000,
        "models": {
            "smol": {"requests_per_minute": 10, "tokens_per_minute": 20}, "big-q4": {"concurrency": 1}
        },
    }  # fmt: skip
    assert parsed() == {}


@pytest.mark.parametrize("amount", ["-1", "abc", "nan", "inf", "0.0000000001", ""])
def test_a_bad_amount_is_refused(amount: str) -> None:
    assert "write dollars" in parsed("--usd-per-day", amount)


@pytest.mark.parametrize(
    "limit", ["smol", "smol:", ":rpm=1", "smol:rpm=0", "smol:rpm=-1", "smol:days=1", "smol:rpm=1,"]
)
def test_a_bad_model_limit_is_refused(limit: str) -> None:
    assert "NAME:rpm=10" in parsed("--model-limit", limit)


def test_limits_are_shown_in_one_line() -> None:
    limits = {"requests_per_minute": 60, "nanousd_per_month": 20_000_000_000, "tokens_per_day": 0}
    limits |= {"models": {"smol": {"concurrency": 1}}}  # type: ignore[dict-item]
    assert limits_text(limits) == "60 rpm, 0 tokens/day, $20.00/month, smol: 1 at once"
    assert limits_text({}) == "none"


def test_hard_budgets_are_limits_and_amounts_are_in_the_currency() -> None:
    budget = {"is_tenants": True, "model": "", "amount": "10", "spent": "7"}
    spent = {
        "tokens_today": 0, "tokens_this_month": 0, "nanousd_today": 5 * 10**8, "nanousd_this_month": 7 * 10**9,
        "currency": "EUR", "budgets": [budget, {**budget, "is_tenants": False, "model": "big"}],
    }  # fmt: skip
    assert limits_text({}, spent) == "tenant's budget 7 of 10 EUR/month, budget for big 7 of 10 EUR/month"
    pairs = spent_pairs({"nanousd_per_month": 20 * 10**9}, spent)
    assert (pairs["Cost today"], pairs["Cost this month"]) == ("0.50 EUR", "7.00 EUR of 20.00 EUR")
