"""``modelyard budgets``: amounts of a month that are told when they are reached, or never exceeded."""

from typing import Any

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, formats, listing, moment, owners, remark, show_json, show_list, show_pairs

_EXAMPLE = """\b
Example:
  modelyard budgets create 500 --email money@acme.example
  modelyard budgets create 20 --of-key a1b2c3d4 --hard
  modelyard budgets"""


@click.group("budgets", cls=NounGroup, epilog=_EXAMPLE, short_help="List, make and remove budgets.")
def command() -> None:
    """List, make and remove budgets; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard budgets list --json")
@connected
@listing
def list_budgets(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List budgets; months are UTC's."""
    budgets = platform.all("/v1/budgets", limit=PAGE)
    columns = {
        "ID": lambda one: one["id"],
        **owners(budgets, "tenant_id"),
        "NAME": lambda one: one["name"],
        "OF": _subject,
        "AMOUNT": lambda one: f"{one['amount']} {one['currency']}",
        "SPENT": lambda one: one["spent"],
        "TOLD AT": lambda one: ", ".join(f"{share} %" for share in one["thresholds"]),
        "HARD": lambda one: "yes" if one["is_hard"] else "no",
    }
    show_list(budgets, columns, is_json=is_json, is_quiet=is_quiet, empty="No budgets.")


@command.command("create", epilog="\b\nExample:\n  modelyard budgets create 500 --model chat --at 90 --at 100")
@click.argument("amount")
@click.option("--tenant", metavar="TENANT", help="Whose. [default: your own]")
@click.option("--of-key", metavar="ID", help="Only what this key spends.")
@click.option("--model", help="Only what this model costs.")
@click.option(
    "--at",
    "thresholds",
    type=click.IntRange(1, 1000),
    multiple=True,
    metavar="PERCENT",
    help="When to tell; may be given often. [default: 50, 80, 100]",
)
@click.option("--hard", "is_hard", is_flag=True, help="Refuse requests that could exceed it.")
@click.option("--email", "emails", multiple=True, metavar="ADDRESS", help="Whom to tell; may be given often.")
@click.option("--slack-url", metavar="URL", help="Gets messages as Slack's incoming webhooks take them.")
@click.option("--name", help="What it is called.")
@connected
@formats("Print only the budget's id.")
def create(*, platform: Platform, is_json: bool, is_quiet: bool, of_key: str | None, **given: Any) -> None:
    """Make a budget of AMOUNT a month."""
    body = {name: value for name, value in {**given, "key": of_key}.items() if value not in (None, ())}
    _show(platform.post("/v1/budgets", body), is_json=is_json, is_quiet=is_quiet)


@command.command("show", epilog="\b\nExample:\n  modelyard budgets show bud-3kf8x2ma")
@click.argument("budget_id")
@connected
@formats("Print only the budget's id.")
def show(budget_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a budget."""
    _show(platform.get(f"/v1/budgets/{segment(budget_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("rm", epilog="\b\nExample:\n  modelyard budgets rm bud-3kf8x2ma")
@click.argument("budget_id")
@connected
@formats("Print only the budget's id.")
def remove(budget_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Remove a budget."""
    _show(platform.delete(f"/v1/budgets/{segment(budget_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("events", epilog="\b\nExample:\n  modelyard budgets events")
@click.option("--tenant", metavar="TENANT", help="Whose.")
@connected
@listing
def events(*, platform: Platform, tenant: str | None, is_json: bool, is_quiet: bool) -> None:
    """Show what was told of budgets, credit and invoices, newest first, and whether it arrived."""
    columns = {
        "WHEN": lambda event: moment(event["created_at"]),
        "WHAT": lambda event: event["type"],
        "TENANT": lambda event: event["tenant_id"],
        "ABOUT": about,
        "TOLD": lambda event: "; ".join(f"{target} {state}" for target, state in event["notices"].items()),
    }
    found = platform.get("/v1/billing/events", limit=PAGE, tenant=tenant)["data"]
    show_list(found, columns, is_json=is_json, is_quiet=is_quiet, empty="Nothing was told.")


def _subject(budget: Item) -> str:
    parts = [f"{name} {budget[field]}" for name, field in (("key", "key_id"), ("model", "model")) if budget[field]]
    return " and ".join(parts) or "the tenant"


def about(event: Item) -> str:
    """Return what an event is about, in a few words."""
    data = event["data"]
    if "threshold_percent" in data:
        return f"{data['threshold_percent']} % of {data['name'] or data['budget_id']} in {data['month']}"
    if "left_nanousd" in data:
        from modelyard.policy.money import exact

        return f"{exact(data['left_nanousd'])} {data['currency']} are left"
    return str(data.get("number") or "")


def _show(budget: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(budget)
    elif is_quiet:
        print(budget["id"])
    else:
        show_pairs(
            {
                "ID": budget["id"],
                "Name": budget["name"],
                "Tenant": budget["tenant_id"],
                "Of": _subject(budget),
                "Amount": f"{budget['amount']} {budget['currency']} a month",
                "Spent": f"{budget['spent']} {budget['currency']} this month",
                "Told at": ", ".join(f"{share} %" for share in budget["thresholds"]),
                "Hard": "yes" if budget["is_hard"] else "no",
                "E-mail": ", ".join(budget["emails"]),
                "Slack": budget["slack_url"],
            }
        )
    if budget["note"]:
        remark(budget["note"])
