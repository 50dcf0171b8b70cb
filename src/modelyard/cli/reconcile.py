"""``modelyard reconcile``: do journals, ledger, engines, Stripe and a provider's invoice agree."""

from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import WHEN
from modelyard.cli.output import Item, clean, dollars, moment, remark, show_json
from modelyard.clock import SystemClock
from modelyard.metering.reconcile.invoices import InvoiceError, InvoiceLine, read_invoice

_DATA = "data: "


@click.command(
    "reconcile",
    epilog="\b\nExample:\n  modelyard reconcile\n"
    "  modelyard reconcile --since 2026-11-01 --until 2026-12-01 --invoice provider-november.csv\n"
    "  modelyard reconcile --json || page-finance\n"
    "  modelyard reconcile --billed modelyard-ten-3f-modelyard_cost-1793491200-0",
    short_help="Say whether the books balance.",
)
@click.option("--since", type=WHEN, metavar="WHEN", default="24h", show_default=True, help="2h, 30d, or 2026-11-01.")
@click.option("--until", type=WHEN, metavar="WHEN", help="The same, UTC. [default: now]")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="Allowed share.")
@click.option(
    "--invoice",
    "file",
    type=click.File("r", encoding="utf-8-sig"),
    help="A provider's CSV: model, tokens, day, cost.",
)
@click.option(
    "--billed",
    "billed",
    multiple=True,
    metavar="IDENTIFIER",
    help="First note that this was billed by hand, which Stripe did not take; repeatable.",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@connected
@click.pass_context
def command(
    context: click.Context,
    *,
    platform: Platform,
    since: float,
    until: float | None,
    tolerance: float,
    file: TextIO | None,
    billed: tuple[str, ...],
    is_json: bool,
) -> None:
    """Compare journals, ledger, engines, Stripe and an invoice; exit code 1 where they differ."""
    _note_billed(platform, billed)
    asked: Item = {"since": since, "until": SystemClock.unix_s() if until is None else until, "tolerance": tolerance}
    if file is not None:
        asked["invoice"] = [msgspec.to_builtins(line) for line in _lines_of(file)]
    result: Item | None = None
    with platform.lines("POST", "/v1/reconciliation", asked) as lines:
        for line in lines:
            if not line.startswith(_DATA):
                continue
            event: Item = msgspec.json.decode(line.removeprefix(_DATA))
            if event["type"] == "checked" and not is_json:
                _show(event["check"], event["currency"])
            if event["type"] == "result":
                result = event["result"]
    if result is None:
        raise Failure("The platform stopped before it was done. See 'modelyard logs', and try again.")
    if is_json:
        show_json(result)
    elif result["balances"]:
        click.echo(f"The books balance, {moment(result['since'])} to {moment(result['until'])}.")
    if not result["balances"]:
        remark("The books do not balance.")
        context.exit(Exit.FAILURE)


def _note_billed(platform: Platform, identifiers: tuple[str, ...]) -> None:
    if identifiers:
        platform.post("/v1/exports/stripe/billed-by-hand", {"identifiers": list(identifiers)})
        remark(f"Noted as billed by hand: {', '.join(map(clean, identifiers))}.")


def _lines_of(file: TextIO) -> list[InvoiceLine]:
    try:
        return read_invoice(file)
    except (InvoiceError, UnicodeDecodeError) as error:
        raise Failure(f"Cannot read the invoice {Path(file.name).name}: {error}.", Exit.USAGE) from error


def _show(check: Item, currency: str) -> None:
    state = "differs" if check["found"] else "unknown" if check["problem"] else "agrees"
    click.echo(f"{check['name']}: {state} ({check['compared']} {check['unit']})")
    if check["problem"]:
        click.echo(f"  {clean(check['problem'])}")
    if check["found"]:
        amounts = f"{check['tokens']:+} tokens, {dollars(check['nanousd'], currency)}"
        click.echo(f"  {check['found']} differences: {amounts}")
    for difference in check["differences"]:
        _show_difference(difference)
    if check["found"] > len(check["differences"]):
        click.echo(f"  … and {check['found'] - len(check['differences'])} more")
    for note in check["notes"][:5]:
        remark(f"  {clean(note)}")


def _show_difference(difference: dict[str, Any]) -> None:
    click.echo(f"  {clean(difference['subject'])}: {clean(difference['what'])}")
    ids = difference["request_ids"]
    if ids and ids != [difference["subject"]]:
        click.echo(f"    requests: {', '.join(map(clean, ids))}")
