"""``modelyard invoices``: what tenants owe, month by month."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from modelyard.cli.exits import Exit, Refused
from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import (
    Item,
    formats,
    listing,
    moment,
    owners,
    remark,
    show_json,
    show_list,
    show_pairs,
    show_table,
)
from modelyard.clock import SystemClock

T = TypeVar("T")

_EXAMPLE = """\b
Example:
  modelyard invoices
  modelyard invoices draft acme 2026-11
  modelyard invoices issue inv-3kf8x2ma
  modelyard invoices export INV-000001 --as html > invoice.html
  modelyard invoices credit INV-000001 12.50 --reason outage
  modelyard invoices show CN-000001"""


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
@formats("Print only its id.")
def show(invoice: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show an invoice or a credit note, by its id or number."""
    found = _either(platform.get, invoice)
    show_it = _show_note if found["object"] == "credit_note" else _show
    show_it(found, is_json=is_json, is_quiet=is_quiet)


@command.command("notes", epilog="\b\nExample:\n  modelyard invoices notes --invoice INV-000001")
@click.option("--tenant", metavar="TENANT", help="Only this tenant's.")
@click.option("--invoice", metavar="INVOICE", help="Only of this invoice.")
@connected
@listing
def notes(*, platform: Platform, is_json: bool, is_quiet: bool, **given: str | None) -> None:
    """List credit notes, oldest first."""
    found = platform.all("/v1/credit-notes", limit=PAGE, **given)
    columns = {
        "ID": lambda one: one["id"],
        "NUMBER": lambda one: one["number"],
        **owners(found, "tenant_id"),
        "INVOICE": lambda one: one["invoice_number"],
        "ISSUED": lambda one: moment(one["issued_at"])[:10],
        "TOTAL": lambda one: one["total"],
        "CURRENCY": lambda one: one["currency"],
        "REASON": lambda one: one["reason"],
    }
    show_list(found, columns, is_json=is_json, is_quiet=is_quiet, empty="No credit notes.")


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
    made = platform.post("/v1/invoices", {**given})
    _show(made, is_json=is_json, is_quiet=is_quiet)
    _warn_of_running(made)


@command.command("issue", epilog="\b\nExample:\n  modelyard invoices issue inv-3kf8x2ma")
@click.argument("invoice")
@connected
@formats("Print only the invoice's number.")
def issue(invoice: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Number a draft and close it for good.

    What is used in its month afterwards comes late, on the next invoice: issue it when the month is over.
    """
    if sys.stdin.isatty() and _warn_of_running(platform.get(f"/v1/invoices/{segment(invoice)}")):
        click.confirm("Issue it all the same?", abort=True, err=True)
    found = platform.post(f"/v1/invoices/{segment(invoice)}/issue", {})
    if is_quiet:
        print(found["number"])
    else:
        _show(found, is_json=is_json, is_quiet=False)
    if not sys.stdin.isatty():
        _warn_of_running(found)


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
    """Print an invoice or a credit note as CSV, a page, or JSON."""
    print(_either(partial(platform.text, format=kind), invoice), end="")


@command.command("credit", epilog="\b\nExample:\n  modelyard invoices credit INV-000001 12.50 --reason outage")
@click.argument("invoice")
@click.argument("amount", required=False)
@click.option("--all", "is_all", is_flag=True, help="Take back all that is left.")
@click.option("--reason", required=True, help="Why.")
@connected
@formats("Print only the credit note's number.")
def credit(invoice: str, *, platform: Platform, is_all: bool, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Take back AMOUNT (with tax) of an issued invoice, or --all that is left of it, by a credit note."""
    if is_all == (given["amount"] is not None):
        raise click.UsageError("Give an amount, or --all to take back what is left of the invoice")
    body = {name: value for name, value in given.items() if value is not None}
    note = platform.post(f"/v1/invoices/{segment(invoice)}/credit-notes", body)
    if is_quiet:
        print(note["number"])
    else:
        _show_note(note, is_json=is_json, is_quiet=False)


def _either(ask: Callable[[str], T], reference: str) -> T:
    """Return what ``ask`` does of an invoice or, where there is none, of a credit note of this id or number."""
    try:
        return ask(f"/v1/invoices/{segment(reference)}")
    except Refused as of_invoice:
        if of_invoice.exit_code is not Exit.NOT_FOUND:
            raise
        try:
            return ask(f"/v1/credit-notes/{segment(reference)}")
        except Refused as error:
            raise (of_invoice if error.exit_code is Exit.NOT_FOUND else error) from None


def _warn_of_running(invoice: Item) -> bool:
    """Say that an invoice is of a month that is not over; return whether it is."""
    is_running = bool(invoice["month"] >= moment(SystemClock.unix_s())[:7])
    if is_running:
        remark(f"{invoice['month']} is not over: what is used in it after this comes late, on the next invoice.")
    return is_running


def _show_note(note: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(note)
    elif is_quiet:
        print(note["id"])
    else:
        show_pairs(
            {
                "ID": note["id"],
                "Number": note["number"],
                "Tenant": note["tenant_id"],
                "Invoice": note["invoice_number"],
                "Issued": moment(note["issued_at"])[:10],
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
        [one["month"] + (" late" if one["is_adjustment"] else ""), one["model"],
         one["unit"] + (" (batch)" if one["is_batch"] else ""), one["quantity"],
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
