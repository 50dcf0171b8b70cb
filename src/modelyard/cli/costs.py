"""``modelyard costs``: what accelerators cost, who uses them, and what is wasted."""

import click

from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, clean, dollars, remark, show_json, show_table
from modelyard.clock import SystemClock


@click.command(
    "costs",
    epilog="\b\nExample:\n  modelyard costs\n  modelyard costs --by customer --since 30d\n  modelyard costs --by waste",
    short_help="Show what GPUs cost, and what is wasted.",
)
@click.option("--by", type=click.Choice(["model", "customer", "waste"]), default="model", show_default=True)
@click.option("--since", type=DURATION, default="7d", show_default=True, help="So long ago.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@connected
def command(*, platform: Platform, by: str, since: float, is_json: bool) -> None:
    """Show accelerator hours, cost, revenue and margin of whole hours; waste with what to do about it."""
    report: Item = platform.get("/v1/organization/gpu-costs", since=f"{SystemClock.unix_s() - since:.0f}")
    if is_json:
        show_json(report)
        return
    if by == "model":
        _show_models(report["endpoints"])
    elif by == "customer":
        _show_customers(report["customers"])
    if by != "customer":
        _show_waste(report["waste"])
        _show_free(report["free"])
    remark(
        f"{report['accelerator_hours']:.1f} accelerator hours, {report['utilisation']:.0%} used: "
        f"cost ${report['cost_usd']}, revenue ${report['revenue_usd']}, margin ${report['margin_usd']}, "
        f"waste ${report['waste_usd']}."
    )


def _show_models(rows: list[Item]) -> None:
    show_table(
        ["MODEL", "ON", "HOURS", "IDLE", "USED", "COST", "REVENUE", "MARGIN", "PER 1M TOKENS"],
        [
            [
                row["model"],
                row["accelerator"],
                f"{row['accelerator_hours']:.1f}",
                f"{row['idle_accelerator_hours']:.1f}",
                f"{row['utilisation']:.0%}",
                *_money(row),
            ]
            for row in rows
        ],
    )


def _show_customers(rows: list[Item]) -> None:
    show_table(
        ["CUSTOMER", "MODEL", "HOURS", "TOKENS", "COST", "REVENUE", "MARGIN", "PER 1M TOKENS"],
        [
            [row["tenant_id"], row["model"], f"{row['accelerator_hours']:.2f}", row["tokens"], *_money(row)]
            for row in rows
        ],
    )


def _show_waste(rows: list[Item]) -> None:
    for row in rows:
        click.echo(f"{dollars(row['nanousd'])} on {clean(row['model'])}: {clean(row['why'])}")
        click.echo(f"  {clean(row['fix'])}")


def _show_free(rows: list[Item]) -> None:
    for row in rows:
        kind, pool = clean(row["accelerator"]), clean(row["pool"])
        where = "" if pool == "default" else f" in the pool {pool}"
        what = f"{row['free']:.1f} of {row['total']:.0f} {kind}{where} have no replica now"
        click.echo(f"{dollars(row['hourly_nanousd'])} an hour: {what}")
        click.echo(f"  {clean(row['fix'])}")


def _money(row: Item) -> list[object]:
    each = row["nanousd_per_million_tokens"]
    return [
        dollars(row["cost_nanousd"]),
        dollars(row["revenue_nanousd"]),
        dollars(row["margin_nanousd"]),
        "-" if each is None else dollars(each),
    ]
