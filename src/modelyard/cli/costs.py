"""``modelyard costs``: what accelerators cost, who uses them, and what is wasted."""

from decimal import Decimal

import click

from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import WHEN
from modelyard.cli.output import Item, clean, dollars, remark, show_json, show_table


@click.command(
    "costs",
    epilog="\b\nExample:\n  modelyard costs\n  modelyard costs --by customer --since 30d\n"
    "  modelyard costs --since 2026-11-01 --until 2026-12-01\n  modelyard costs --by waste",
    short_help="Show what GPUs cost, and what is wasted.",
)
@click.option("--by", type=click.Choice(["model", "customer", "waste"]), default="model", show_default=True)
@click.option("--since", type=WHEN, metavar="WHEN", default="7d", show_default=True, help="2h, 30d, or 2026-11-01.")
@click.option("--until", type=WHEN, metavar="WHEN", help="The same, UTC. [default: now]")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@connected
def command(*, platform: Platform, by: str, since: float, until: float | None, is_json: bool) -> None:
    """Show accelerator hours, cost, revenue and margin of whole hours; waste with what to do about it."""
    span = {"since": f"{since:.0f}", "until": None if until is None else f"{until:.0f}"}
    report: Item = platform.get("/v1/organization/gpu-costs", **span)
    if is_json:
        show_json(report)
        return
    currency = report["currency"]
    if by == "model":
        _show_models(report["endpoints"], currency)
    elif by == "customer":
        _show_customers(report["customers"], currency)
    if by != "customer":
        _show_waste(report["waste"], currency)
        _show_free(report["free"], currency)
    remark(
        f"{report['accelerator_hours']:.1f} accelerator hours, {report['utilisation']:.0%} used: "
        + ", ".join(f"{name} {_total(report, name)}" for name in ("cost", "revenue", "margin", "waste"))
        + "."
    )


def _show_models(rows: list[Item], currency: str = "USD") -> None:
    show_table(
        ["MODEL", "ON", "HOURS", "IDLE", "USED", "COST", "REVENUE", "MARGIN", "PER 1M TOKENS"],
        [
            [
                row["model"],
                row["accelerator"],
                f"{row['accelerator_hours']:.1f}",
                f"{row['idle_accelerator_hours']:.1f}",
                f"{row['utilisation']:.0%}",
                *_money(row, currency),
            ]
            for row in rows
        ],
    )


def _show_customers(rows: list[Item], currency: str = "USD") -> None:
    show_table(
        ["CUSTOMER", "NAME", "MODEL", "HOURS", "TOKENS", "COST", "REVENUE", "MARGIN", "PER 1M TOKENS"],
        [
            [
                row["tenant_id"],
                row["tenant_name"],
                row["model"],
                f"{row['accelerator_hours']:.2f}",
                row["tokens"],
                *_money(row, currency),
            ]
            for row in rows
        ],
    )


def _show_waste(rows: list[Item], currency: str = "USD") -> None:
    for row in rows:
        click.echo(f"{dollars(row['nanousd'], currency)} on {clean(row['model'])}: {clean(row['why'])}")
        click.echo(f"  {clean(row['fix'])}")


def _show_free(rows: list[Item], currency: str = "USD") -> None:
    for row in rows:
        kind, pool = clean(row["accelerator"]), clean(row["pool"])
        where = "" if pool == "default" else f" in the pool {pool}"
        what = f"{row['free']:.1f} of {row['total']:.0f} {kind}{where} have no replica now"
        click.echo(f"{dollars(row['hourly_nanousd'], currency)} an hour: {what}")
        click.echo(f"  {clean(row['fix'])}")


def _money(row: Item, currency: str) -> list[object]:
    each = row["nanousd_per_million_tokens"]
    amounts = [row[f"{name}_nanousd"] for name in ("cost", "revenue", "margin")]
    return [*(dollars(one, currency) for one in amounts), "-" if each is None else dollars(each, currency)]


def _total(report: Item, name: str) -> str:
    return dollars(round(Decimal(report[f"{name}_usd"]) * 10**9), report["currency"])
