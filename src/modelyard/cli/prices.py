"""``modelyard prices``: what models cost, for whom, from when to when."""

from typing import Any

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, formats, listing, moment, remark, show_json, show_list, show_pairs, show_table

_AMOUNTS = ("input", "cached_input", "output", "unit", "request")
_EXAMPLE = """\b
Example:
  modelyard prices
  modelyard prices set chat --input 0.15 --output 0.60
  modelyard prices set chat --tenant acme --input 0.10 --output 0.40 --from 2027-01-01
  modelyard prices why chat --tenant acme"""


@click.group("prices", cls=NounGroup, epilog=_EXAMPLE, short_help="Show, set and end prices of models.")
def command() -> None:
    """Show, set and end prices of models; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard prices list --model chat")
@click.option("--model", help="Only this model's.")
@click.option("--tenant", metavar="TENANT", help="Those for all and for this tenant.")
@connected
@listing
def list_prices(*, platform: Platform, model: str | None, tenant: str | None, is_json: bool, is_quiet: bool) -> None:
    """List stored and configured prices."""
    prices = platform.all("/v1/prices", limit=PAGE, model=model, tenant=tenant)
    columns = {
        "ID": lambda price: price["id"],
        "MODEL": _subject,
        "TENANT": lambda price: price["tenant_id"] or "all",
        "INPUT": lambda price: price["input"],
        "CACHED": lambda price: price["cached_input"],
        "OUTPUT": lambda price: price["output"],
        "OTHER": _other,
        "FROM": lambda price: moment(price["effective_from"]) if price["effective_from"] else "ever",
        "UNTIL": lambda price: moment(price["effective_until"]) if price["effective_until"] else "-",
        "NOW": lambda price: "yes" if price["is_in_force"] else "no",
    }
    show_list(prices, columns, is_json=is_json, is_quiet=is_quiet, empty="No prices: all use is metered and free.")


@command.command("set", epilog="\b\nExample:\n  modelyard prices set chat@v2 --input 0.20 --output 0.80")
@click.argument("model")
@click.option("--tenant", metavar="TENANT", help="Only for this tenant.")
@click.option("--input", "input", metavar="AMOUNT", help="A million prompt tokens.")
@click.option("--cached-input", metavar="AMOUNT", help="A million of them from the cache. [default: as --input]")
@click.option("--output", metavar="AMOUNT", help="A million generated tokens, reasoning too.")
@click.option("--unit", metavar="AMOUNT", help="A second, picture, character or search.")
@click.option("--request", metavar="AMOUNT", help="One request.")
@click.option("--batch-factor", metavar="SHARE", help="What lines of batches pay of it. [default: batch.price_factor]")
@click.option("--from", "effective_from", metavar="WHEN", help="A date or time, UTC. [default: now]")
@click.option("--until", "effective_until", metavar="WHEN", help="The same. [default: for ever]")
@connected
@formats("Print only the price's id.")
def put(*, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Set a price of MODEL (an endpoint's name, NAME@VERSION, or '*' for all others).

    What is left out is free, and may only be left out where it was free until then: say 0 to make it free.
    """
    # A price is set whole: a factor alone would make the model free.
    if not any(given[name] for name in _AMOUNTS):
        raise click.UsageError("Give at least one of --input, --output, --unit and --request")
    body = {name: value for name, value in given.items() if value is not None}
    _show(platform.put_json("/v1/prices", body), is_json=is_json, is_quiet=is_quiet)


@command.command("end", epilog="\b\nExample:\n  modelyard prices end price-3kf8x2ma")
@click.argument("price_id")
@connected
@formats("Print only the price's id.")
def end(price_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """End a price now, or forget one that is to come; what was used stays billed."""
    _show(platform.delete(f"/v1/prices/{segment(price_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("why", epilog="\b\nExample:\n  modelyard prices why chat --tenant acme --at 2027-01-01")
@click.argument("model")
@click.option("--version", help="What this version answers.")
@click.option("--tenant", metavar="TENANT", help="For this tenant.")
@click.option("--at", metavar="WHEN", help="A date or time, UTC. [default: now]")
@connected
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def why(*, platform: Platform, is_json: bool, **given: str | None) -> None:
    """Say which price a request for MODEL is billed by, and which others it goes before."""
    found = platform.get("/v1/prices/applying", **given)
    if is_json:
        show_json(found)
    elif found["price"] is None:
        remark("No price applies: use is metered and free.")
    else:
        rows = [[_subject(one), one["tenant_id"] or "all", *_money(one), one["id"]] for one in _all(found)]
        show_table(["MODEL", "TENANT", "INPUT", "CACHED", "OUTPUT", "OTHER", "ID"], rows)
        remark("The first one applies; each goes before all below it.")


@command.command("history", epilog="\b\nExample:\n  modelyard prices history")
@connected
@listing
def history(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show who set and ended which price, newest first."""
    columns = {
        "WHEN": lambda change: moment(change["at"]),
        "KEY": lambda change: change["key_id"],
        "WHAT": lambda change: change["action"],
        "MODEL": lambda change: (change["after"] or change["before"])["model"],
        "PRICE": lambda change: change["subject"],
    }
    changes = platform.all("/v1/prices/history", limit=PAGE)
    show_list(changes, columns, is_json=is_json, is_quiet=is_quiet, empty="No price was ever set.")


def _all(found: Item) -> list[Item]:
    return [found["price"], *found["others"]]


def _money(price: Item) -> list[str]:
    return [price["input"], price["cached_input"], price["output"], _other(price)]


def _subject(price: Item) -> str:
    return f"{price['model']}@{price['version']}" if price["version"] else str(price["model"])


def _other(price: Item) -> str:
    parts = [f"{price[name]} a {name}" for name in ("unit", "request") if price[name] != "0"]
    if price["batch_factor"] is not None:
        parts.append(f"batches {price['batch_factor']}")
    return ", ".join(parts)


def _show(price: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(price)
    elif is_quiet:
        print(price["id"])
    else:
        currency = price["currency"]
        show_pairs(
            {
                "ID": price["id"],
                "Model": _subject(price),
                "Tenant": price["tenant_id"] or "all",
                "Input": f"{price['input']} {currency} a million tokens",
                "Cached": f"{price['cached_input']} {currency} a million tokens",
                "Output": f"{price['output']} {currency} a million tokens",
                "Other": _other(price),
                "From": moment(price["effective_from"]),
                "Until": moment(price["effective_until"]) if price["effective_until"] else "",
            }
        )
