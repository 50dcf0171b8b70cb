"""``modelyard usage``: tokens and cost from the ledger."""

import csv
import re
import sys
from typing import Any

import click

from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, clean, dollars, moment, remark, show_json, show_table
from modelyard.clock import SystemClock

_GROUPS = ("tenant", "key", "model", "hour", "day", "status")
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class Groups(click.ParamType[tuple[str, ...]]):
    """Dimensions, with commas between them."""

    name = "groups"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the dimensions."""
        groups = tuple(group.strip() for group in str(value).split(",") if group.strip())
        for group in groups:
            if group not in _GROUPS:
                self.fail(f"'{group}' is none of {', '.join(_GROUPS)}.", param, ctx)
        return groups


@click.command(
    "usage",
    epilog="\b\nExample:\n  modelyard usage\n  modelyard usage --by model,day --since 30d\n"
    "  modelyard usage --by key --since 2026-11-01 --csv > november.csv",
    short_help="Show tokens and cost.",
)
@click.option("--by", "groups", type=Groups(), default="model", show_default=True, help=f"Any of {','.join(_GROUPS)}.")
@click.option("--since", metavar="WHEN", default="24h", show_default=True, help="2h, 30d, or a date like 2026-11-29.")
@click.option("--until", metavar="WHEN", help="The same. [default: now]")
@click.option("--model", help="Only this model's.")
@click.option("--of-key", "key_id", metavar="ID", help="Only this key's.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "is_csv", is_flag=True, help="Print CSV; cost in whole nano-dollars.")
@connected
def command(*, platform: Platform, is_json: bool, is_csv: bool, **given: Any) -> None:
    """Show requests, tokens and cost, summed from the ledger; times are UTC."""
    groups: tuple[str, ...] = given["groups"]
    report: Item = platform.get(
        "/v1/usage",
        group_by=",".join(groups),
        since=_moment(given["since"]),
        until=_moment(given["until"]) if given["until"] else None,
        model=given["model"],
        key=given["key_id"],
    )
    if is_json:
        show_json(report)
        return
    rows: list[Item] = report["data"]
    if is_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*groups, *_SUMS, "cost_nanousd"])
        writer.writerows([_inert(row[name]) for name in (*groups, *_SUMS, "cost_nanousd")] for row in rows)
        return
    headings = [*(group.upper() for group in groups), "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "COST"]
    total = report["total"]
    lines = [[*(row[group] for group in groups), *_cells(row)] for row in rows]
    if groups and len(rows) > 1:
        lines.append(["total", *[" "] * (len(groups) - 1), *_cells(total)])
    if rows:
        show_table(headings, lines)
    else:
        remark(f"No usage since {moment(report['since'])}.")
    if report["data_up_to"] < int(SystemClock.unix_s()) - 2:
        remark(f"Complete up to {moment(report['data_up_to'])}; newer requests are still being booked.")


def _cells(sums: Item) -> list[object]:
    return [*(sums[name] for name in _SUMS), dollars(sums["cost_nanousd"])]


def _moment(text: str) -> str:
    """Return what the API takes: a date as it is, a duration as that long ago."""
    if re.fullmatch(r"\d+(\.\d+)?[smhdw]", text):
        return f"{max(0.0, SystemClock.unix_s() - DURATION.convert(text, None, None)):.3f}"
    if not text[:1].isdigit():
        raise click.UsageError(f"'{text}' is no time; write 2h or 30d (so long ago), or a date like 2026-11-29.")
    return text


def _inert(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula."""
    text = clean(str(value))
    return "'" + text if text[:1] in {"=", "+", "-", "@", "\t"} else text
