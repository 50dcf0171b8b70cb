"""``modelyard credits``: how tenants pay, and their credit."""

from typing import Any

import click

from modelyard.cli.http import Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, formats, moment, remark, show_json, show_pairs, show_table

_EXAMPLE = """\b
Example:
  modelyard credits account acme --plan prepaid
  modelyard credits add acme 50 --reason "paid by card" --expires 2027-11-30
  modelyard credits --tenant acme"""


@click.group("credits", cls=NounGroup, epilog=_EXAMPLE, short_help="Show and give credit; set how tenants pay.")
def command() -> None:
    """Show and give credit; set how tenants pay. Without a verb: the credit that is left."""


@command.command("list", epilog="\b\nExample:\n  modelyard credits list --tenant acme")
@click.option("--tenant", metavar="TENANT", help="Whose. [default: your own]")
@connected
@formats("Print only what is left.")
def show(*, platform: Platform, tenant: str | None, is_json: bool, is_quiet: bool) -> None:
    """Show what is left, from which grants in the order in which they are drawn, and what happened."""
    credit = platform.get("/v1/credits", tenant=tenant)
    if is_json:
        show_json(credit)
        return
    if is_quiet:
        print(credit["left"])
        return
    show_pairs({"Tenant": credit["tenant_id"], "Left": f"{credit['left']} {credit['currency']}"})
    if not credit["grants"]:
        remark("No credit was ever given: 'modelyard credits add TENANT AMOUNT'.")
        return
    print()
    rows = [
        [one["id"], one["amount"], one["drawn"], one["expired"], one["left"], moment(one["expires_at"]), one["reason"]]
        for one in credit["grants"]
    ]
    show_table(["GRANT", "AMOUNT", "DRAWN", "EXPIRED", "LEFT", "EXPIRES", "REASON"], rows)
    print()
    entries = [[moment(one["at"]), one["kind"], one["amount"], one["grant_id"]] for one in credit["entries"]]
    show_table(["WHEN", "WHAT", "AMOUNT", "GRANT"], entries)


@command.command("add", epilog="\b\nExample:\n  modelyard credits add acme 50 --expires 2027-11-30")
@click.argument("tenant")
@click.argument("amount")
@click.option("--expires", "expires_at", metavar="WHEN", help="A date or time, UTC. [default: never]")
@click.option("--reason", help="What it is for.")
@connected
@formats("Print only the grant's id.")
def add(*, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Give TENANT credit of AMOUNT, for what it uses from now on."""
    grant = platform.post("/v1/credits", {name: value for name, value in given.items() if value is not None})
    if is_json:
        show_json(grant)
    elif is_quiet:
        print(grant["id"])
    else:
        show_pairs(
            {
                "ID": grant["id"],
                "Tenant": grant["tenant_id"],
                "Amount": f"{grant['amount']} {grant['currency']}",
                "Expires": moment(grant["expires_at"]) if grant["expires_at"] else "never",
                "Reason": grant["reason"],
            }
        )


@command.command("revoke", epilog="\b\nExample:\n  modelyard credits revoke grant-3kf8x2ma")
@click.argument("grant")
@connected
@formats("Print only how much was taken back.")
def revoke(grant: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Take back what is left of GRANT; what was used stays paid by it."""
    ended = platform.delete(f"/v1/credits/{segment(grant)}")
    if is_json:
        show_json(ended)
    elif is_quiet:
        print(ended["expired"])
    else:
        left = f"{ended['expired']} of {ended['amount']} {ended['currency']}"
        show_pairs({"ID": ended["id"], "Tenant": ended["tenant_id"], "Taken back": left})


@command.command("account", epilog="\b\nExample:\n  modelyard credits account acme --plan pay_as_you_go")
@click.argument("tenant")
@click.option("--plan", type=click.Choice(["free", "pay_as_you_go", "prepaid"]), help="How it pays.")
@click.option("--name", help="Who is billed.")
@click.option("--address", help="Where; lines parted by line ends.")
@click.option("--email", metavar="ADDRESS", help="Where invoices are announced.")
@click.option("--tax-id", help="Its tax number.")
@click.option("--tax-exempt/--taxed", "is_tax_exempt", default=None, help="Whether it pays tax.")
@connected
@formats("Print only the plan.")
def account(tenant: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Show how TENANT pays; with options, change that and nothing else."""
    path = f"/v1/billing/accounts/{segment(tenant)}"
    changes = {name: value for name, value in given.items() if value is not None}
    found: Item = platform.put_json(path, changes) if changes else platform.get(path)
    if is_json:
        show_json(found)
    elif is_quiet:
        print(found["plan"])
    else:
        show_pairs(
            {
                "Tenant": found["tenant_id"],
                "Plan": found["plan"],
                "Credit": f"{found['credit']} {found['currency']}",
                "Name": found["name"],
                "Address": found["address"].replace("\n", ", "),
                "E-mail": found["email"],
                "Tax number": found["tax_id"],
                "Tax": "exempt" if found["is_tax_exempt"] else "as all",
            }
        )
