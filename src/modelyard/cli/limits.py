"""The options for limits, shared by keys and tenants, and limits as text."""

import functools
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import click

from modelyard.cli.output import Item, dollars

NANO_PER_USD = 1_000_000_000
_RATES = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "concurrency": "concurrency"}
_SHORT = {
    "requests_per_minute": "rpm",
    "tokens_per_minute": "tpm",
    "concurrency": "at once",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
    "accelerators": "accelerators",
}
_MONEY = {"nanousd_per_day": "day", "nanousd_per_month": "month"}


class Dollars(click.ParamType[int]):
    """Dollars, as whole nano-dollars: ``20``, ``0.5``."""

    name = "dollars"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return nano-dollars."""
        if isinstance(value, int):
            return value
        try:
            nanousd = Decimal(str(value).removeprefix("$")) * NANO_PER_USD
        except InvalidOperation:
            nanousd = Decimal(-1)
        if not nanousd.is_finite() or nanousd < 0 or nanousd != int(nanousd):
            self.fail(f"'{value}' is no amount; write dollars, as in 20 or 0.50.", param, ctx)
        return int(nanousd)


class ModelLimit(click.ParamType[tuple[str, Item]]):
    """Limits for one model: ``smol:rpm=10,tpm=5000,concurrency=2``."""

    name = "model limit"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Item]:
        """Return the model and its limits as the API takes them."""
        if isinstance(value, tuple):
            return value
        # A model's name may hold a colon, but nothing behind its last one looks like this.
        model, _, rates = str(value).rpartition(":")
        pairs = [re.fullmatch(r"(rpm|tpm|concurrency)=([1-9]\d*)", pair) for pair in rates.split(",")]
        if not model or not all(pairs):
            self.fail(f"'{value}' is no model limit; write NAME:rpm=10,tpm=5000,concurrency=2.", param, ctx)
        return model, {_RATES[pair[1]]: int(pair[2]) for pair in pairs if pair is not None}


_COUNT = click.IntRange(1)
_QUOTA = click.IntRange(0)
_OPTIONS = (
    click.option("--rpm", "requests_per_minute", type=_COUNT, help="Most requests per minute."),
    click.option("--tpm", "tokens_per_minute", type=_COUNT, help="Most tokens per minute."),
    click.option("--concurrency", type=_COUNT, help="Most requests at once."),
    click.option("--tokens-per-day", type=_QUOTA, help="Most tokens in a UTC day."),
    click.option("--tokens-per-month", type=_QUOTA, help="Most tokens in a UTC month."),
    click.option("--usd-per-day", "nanousd_per_day", type=Dollars(), help="Most dollars in a UTC day."),
    click.option("--usd-per-month", "nanousd_per_month", type=Dollars(), help="Most dollars in a UTC month."),
    click.option(
        "--model-limit",
        "model_limits",
        type=ModelLimit(),
        multiple=True,
        metavar="NAME:rpm=N,tpm=N,concurrency=N",
        help="Further limits for one model; repeatable.",
    ),
)
_NAMES = (*_RATES.values(), "tokens_per_day", "tokens_per_month", *_MONEY)


_TENANT_OPTIONS = (
    *_OPTIONS,
    click.option("--accelerators", type=_QUOTA, help="Most accelerators of its replicas; shares of one add up."),
)


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for limits to a command; it gets them as one body, ``limits``."""
    return _with_limits(command, _OPTIONS, _NAMES)


def tenant_limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for limits of a tenant, as ``limit_options`` does."""
    return _with_limits(command, _TENANT_OPTIONS, (*_NAMES, "accelerators"))


def _with_limits(
    command: Callable[..., Any], options: Sequence[Callable[..., Any]], names: Sequence[str]
) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(**given: Any) -> Any:
        limits = {name: value for name in names if (value := given.pop(name)) is not None}
        models: Sequence[tuple[str, Item]] = given.pop("model_limits")
        if models:
            limits["models"] = dict(models)
        return command(limits=limits, **given)

    for option in reversed(options):
        option(run)
    return run


def limits_text(limits: Item, spent: Item | None = None) -> str:
    """Return limits in one line of a listing, with the hard budgets that ``spent`` tells of."""
    currency = "USD" if spent is None else spent["currency"]
    parts = [f"{limits[name]} {short}" for name, short in _SHORT.items() if limits.get(name) is not None]
    parts += [
        f"{dollars(limits[name], currency)}/{period}" for name, period in _MONEY.items() if limits.get(name) is not None
    ]
    parts += [f"{model}: {limits_text(rates)}" for model, rates in limits.get("models", {}).items()]
    parts += [_budget_text(one, currency) for one in (spent or {}).get("budgets", ())]
    return ", ".join(parts) or "none"


def _budget_text(budget: Item, currency: str) -> str:
    whose = "tenant's budget" if budget["is_tenants"] else "budget"
    model = f" for {budget['model']}" if budget["model"] else ""
    return f"{whose}{model} {budget['spent']} of {budget['amount']} {currency}/month"


def spent_pairs(limits: Item, spent: Item | None) -> dict[str, object]:
    """Return what was spent of the day and the month, beside what may be."""
    if spent is None:
        return {}

    def of(used: object, limit: object) -> str:
        return f"{used} of {limit}" if limit is not None else str(used)

    currency = spent["currency"]

    def money(name: str) -> str | None:
        return dollars(limits[name], currency) if limits.get(name) is not None else None

    return {
        "Tokens today": of(spent["tokens_today"], limits.get("tokens_per_day")),
        "Tokens this month": of(spent["tokens_this_month"], limits.get("tokens_per_month")),
        "Cost today": of(dollars(spent["nanousd_today"], currency), money("nanousd_per_day")),
        "Cost this month": of(dollars(spent["nanousd_this_month"], currency), money("nanousd_per_month")),
    }
