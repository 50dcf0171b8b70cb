"""``modelyard invoices``: what tenants owe, month by month."""

from typing import Any

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, formats, listing, moment, owners, show_json, show_list, show_pairs, show_table

_EXAMPLE = """\b
Example:
  modelyard invoices
  modelyard invoices draft acme 2026-11
  modelyard invoices issue inv-3kf8x2ma
  modelyard invoices export INV-000001 --as html > invoice.html"""


@click.group("invoices", cls=NounGroup, epilog=_EXAMPLE, short_help="List, show, issue and take back invoices.")
def command() -> None:
    """List, show, issue and take back invoices; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard invoices list --month 2026-11")
@click.option("--tenant", metavar="TENANT", help="Only this tenant's.")
@click.option("--month", metavar="YYYY-MM", help="Only of this month.")
@connected
@listing
def list_invoices(*, platform: Platform, is_json: bool, is_quiet: bool, **given: str | None) -> None:
    """List invoices and drafts, newest month first."""
    invoices = platform.all("/v1/invoices", limit=PAGE, **given)
    columns = {
        "ID": lambda one: one["id"],
        "NUMBER": lambda one: one["number"] or "draft",
        **owners(invoices, "tenant_id"),
        "MONTH": lambda one: one["month"],
        "TOTAL": lambda one: one["total"],
        "CREDITED": lambda one: one["credited"],
        "CURRENCY": lambda one: one["currency"],
        "DUE": lambda one: moment(one["due_at"])[:10],
    }
    show_list(invoices, columns, is_json=is_json, is_quiet=is_quiet, empty="No invoices; drafts come at month end.")


@command.command("show", epilog="\b\nExample:\n  modelyard invoices show INV-000001")
@click.argument("invoice")
@connected
@formats("Print only the invoice's id.")
def show(invoice: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show an invoice, by its id or number."""
    _show(platform.get(f"/v1/invoices/{segment(invoice)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("upcoming", epilog="\b\nExample:\n  modelyard invoices upcoming --tenant acme")
@click.option("--tenant", metavar="TENANT", help="Whose. [default: your own]")
@click.option("--month", metavar="YYYY-MM", help="Of which month. [default: the last one without an invoice]")
@connected
@formats("Print only the total.")
def upcoming(*, platform: Platform, is_json: bool, is_quiet: bool, **given: str | None) -> None:
    """Show what would be invoiced now."""
    found = platform.get("/v1/invoices/upcoming", **given)
    if is_quiet:
        print(found["total"])
    else:
        _show(found, is_json=is_json, is_quiet=False)


@command.command("draft", epilog="\b\nExample:\n  modelyard invoices draft acme 2026-11")
@click.argument("tenant")
@click.argument("month")
@connected
@formats("Print only the draft's id.")
def draft(*, platform: Platform, is_json: bool, is_quiet: bool, **given: str) -> None:
    """Draft TENANT's invoice of MONTH (YYYY-MM) now."""
    _show(platform.post("/v1/invoices", {**given}), is_json=is_json, is_quiet=is_quiet)


@command.command("issue", epilog="\b\nExample:\n  modelyard invoices issue inv-3kf8x2ma")
@click.argument("invoice")
@connected
@formats("Print only the invoice's number.")
def issue(invoice: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Number a draft and close it for good."""
    found = platform.post(f"/v1/invoices/{segment(invoice)}/issue", {})
    if is_quiet:
        print(found["number"])
    else:
        _show(found, is_json=is_json, is_quiet=False)


@command.command("export", epilog="\b\nExample:\n  modelyard invoices export INV-000001 --as csv > november.csv")
@click.argument("invoice")
@click.option(
    "--as",
    "kind",
    type=click.Choice(["csv", "html", "json"]),
    default="html",
    show_default=True,
    help="html is a page to print.",
)
@connected
def export(invoice: str, *, platform: Platform, kind: str) -> None:
    """Print an invoice as CSV, a page, or JSON."""
    print(platform.text(f"/v1/invoices/{segment(invoice)}", format=kind), end="")


@command.command("credit", epilog="\b\nExample:\n  modelyard invoices credit INV-000001 12.50 --reason outage")
@click.argument("invoice")
@click.argument("amount", required=False)
@click.option("--reason", required=True, help="Why.")
@connected
@formats("Print only the credit note's number.")
def credit(invoice: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Take back AMOUNT (with tax) of an issued invoice, or all that is left of it, by a credit note."""
    body = {name: value for name, value in given.items() if value is not None}
    note = platform.post(f"/v1/invoices/{segment(invoice)}/credit-notes", body)
    if is_json:
        show_json(note)
    elif is_quiet:
        print(note["number"])
    else:
        show_pairs(
            {
                "Number": note["number"],
                "Invoice": note["invoice_number"],
                "Total": f"{note['total']} {note['currency']}",
                "Tax in it": f"{note['tax']} {note['currency']}",
                "Reason": note["reason"],
            }
        )


def _show(invoice: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(invoice)
        return
    if is_quiet:
        print(invoice["id"])
        return
    currency, tax = invoice["currency"], invoice["tax"]
    about = {
        "ID": invoice["id"],
        "Number": invoice["number"] or "draft",
        "Tenant": invoice["tenant_id"],
        "Month": invoice["month"],
        "Billed to": invoice["buyer"]["name"],
        "Due": moment(invoice["due_at"])[:10] if invoice["due_at"] else "",
    }
    show_pairs(about)
    print()
    lines = [
        [one["month"] + (" late" if one["is_adjustment"] else ""), one["model"], one["unit"], one["quantity"],
         f"{one['price']} / {one['per']}", one["amount"]]
        for one in invoice["lines"]
    ]  # fmt: skip
    show_table(["MONTH", "MODEL", "UNIT", "QUANTITY", "PRICE", currency], lines)
    print()
    shown = "exempt" if tax["is_exempt"] else f"{tax['amount']}{' contained' if tax['is_inclusive'] else ''}"
    show_pairs(
        {
            "Subtotal": f"{invoice['subtotal']} {currency}",
            "Credit": f"-{invoice['credit']} {currency}" if invoice["credit"].strip("0.") else "",
            tax["name"] or "Tax": f"{shown} ({tax['percent']} %)",
            "Total": f"{invoice['total']} {currency}",
            "Credited": f"{invoice['credited']} {currency}" if invoice["credit_notes"] else "",
        }
    )
