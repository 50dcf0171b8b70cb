"""``modelyard usage``: tokens and cost from the ledger."""

import contextlib
import csv
import re
import sys
from pathlib import Path
from typing import Any

import click

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, clean, dollars, moment, remark, show_json, show_table
from modelyard.clock import SystemClock

_GROUPS = (
    "tenant", "key", "model", "endpoint", "version", "route", "status", "batch", "minute", "hour", "day", "month",
)  # fmt: skip
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_PARTS = ("reasoning_tokens", "audio_input_tokens", "audio_output_tokens")
_UNITS = ("seconds", "images", "characters", "searches", "pairs", "requests")
_FORMATS = ("csv", "json", "jsonl", "parquet")


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


class _Usage(click.Group):
    """Shows sums without a verb: ``usage --by key`` is ``usage show --by key``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put in the verb where there is none."""
        if not args or (args[0].startswith("-") and args[0] not in {"-h", "--help"}):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(
    "usage",
    cls=_Usage,
    epilog="\b\nExample:\n  modelyard usage\n  modelyard usage --by model,day --since 30d\n"
    "  modelyard usage export --since 2026-11-01 --format parquet -o november.parquet",
    short_help="Show tokens and cost, or export them.",
)
def command() -> None:
    """Show requests, tokens and cost from the ledger; without a verb as 'usage show', which has all options."""


def _spanned(function: Any) -> Any:
    for option in (
        click.option("--of-key", "key_id", metavar="ID", help="Only this key's."),
        click.option("--model", help="Only this model's."),
        click.option("--endpoint", metavar="ENDPOINT", help="Only this endpoint's, by its name or id."),
        click.option("--tenant", metavar="TENANT", help="Only this tenant's, by its name or id."),
        click.option("--batch/--no-batch", "is_batch", default=None, help="Only lines of batches, or only others."),
        click.option(
            "--tz", default="UTC", show_default=True, help="Time zone of days, months and dates, like Asia/Kolkata."
        ),
        click.option("--until", metavar="WHEN", help="The same. [default: now]"),
        click.option(
            "--since", metavar="WHEN", default="24h", show_default=True, help="2h, 30d, or a date like 2026-11-29."
        ),
    ):
        function = option(function)
    return function


@command.command(
    "show",
    epilog="\b\nExample:\n  modelyard usage show --by model,day --since 30d\n"
    "  modelyard usage --by month --since 2026-01-01 --tz Europe/Berlin\n"
    "  modelyard usage --by day --tenant acme --batch --since 30d\n"
    "  modelyard usage --by key --since 2026-11-01 --csv > november.csv",
)
@click.option("--by", "groups", type=Groups(), default="model", show_default=True, help=f"Any of {','.join(_GROUPS)}.")
@_spanned
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "is_csv", is_flag=True, help="Print CSV; cost in whole nano-dollars.")
@connected
def show(*, platform: Platform, is_json: bool, is_csv: bool, **given: Any) -> None:
    """Show requests, tokens and cost, summed from the ledger."""
    groups: tuple[str, ...] = given["groups"]
    report: Item = platform.get("/v1/usage", group_by=",".join(groups), **_span(given))
    if is_json:
        show_json(report)
        return
    rows: list[Item] = report["data"]
    if is_csv:
        _write_csv(rows, groups)
        return
    columns = [column for group in groups for column in ([group, "tenant_name"] if group == "tenant" else [group])]
    names = (column.upper().replace("TENANT_NAME", "NAME") for column in columns)
    headings = [*names, "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "COST"]
    total, currency = report["total"], report["currency"]
    lines = [[*(_label(row, column) for column in columns), *_cells(row, currency)] for row in rows]
    if groups and len(rows) > 1:
        lines.append(["total", *[" "] * (len(columns) - 1), *_cells(total, currency)])
    if rows:
        show_table(headings, lines)
    else:
        remark(f"No usage since {moment(report['since'])}.")
    if parts := _parts_of(total):
        remark(f"Of these, or beside them: {', '.join(parts)}.")
    if report["data_up_to"] < int(SystemClock.unix_s()) - 2:
        remark(f"Complete up to {moment(report['data_up_to'])}; newer requests are still being booked.")


def _write_csv(rows: list[Item], groups: tuple[str, ...]) -> None:
    """Write all figures; ids of tenants and versions have their names beside them."""
    names = [*groups, *_SUMS, "cost_nanousd", *_PARTS]
    labels = [f"{group}_name" for group in ("tenant", "version") if group in groups]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*names, *(f"units_{unit}" for unit in _UNITS), *labels])
    for row in rows:
        units = [row["units"].get(unit, 0) for unit in _UNITS]
        writer.writerow(
            [*(_inert(row[name]) for name in names), *units, *(_inert(row.get(name, "")) for name in labels)]
        )


def _label(row: Item, group: str) -> object:
    """Return what a group is called: a version by its name, where that is known."""
    return row.get("version_name", row[group]) if group == "version" else row.get(group)


@command.command(
    "export",
    epilog="\b\nExample:\n  modelyard usage export --since 2026-11-01 --until 2026-12-01 -o november.csv\n"
    "  modelyard usage export --by tenant,model,day --since 2026-01-01 --format parquet -o 2026.parquet",
    short_help="Write rows or sums of the ledger to a file.",
)
@click.option("--by", "groups", type=Groups(), help="Sums by any of these, instead of a row for each request.")
@_spanned
@click.option("--format", type=click.Choice(_FORMATS), help="[default: by the end of the file's name, else csv]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File. [default: standard output]"
)
@connected
def export(*, platform: Platform, format: str | None, output: Path | None, **given: Any) -> None:
    """Write the ledger's rows, or sums of them, as CSV, JSON, JSON lines or Parquet.

    The file is there when it is whole. What is exported adds up to what 'usage' and the bill say.
    """
    format = format or _format_of(output)
    if output is None and format == "parquet" and sys.stdout.isatty():
        raise click.UsageError("Parquet is no text: give a file with -o, or send the output somewhere.")
    groups: tuple[str, ...] | None = given["groups"]
    asked = {"of": "requests" if groups is None else "sums", "group_by": ",".join(groups or ()) or None}
    pieces = platform.pieces("/v1/usage/export", format=format, **asked, **_span(given))
    if output is None:
        with pieces as stream:
            for piece in stream:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        return
    size = _save(pieces, output)
    remark(f"Wrote {size:,} bytes to {output}.")


def _format_of(output: Path | None) -> str:
    """Return the format that a file's name says; a name that says another is refused, before anything is asked for."""
    named = output.suffix.removeprefix(".").lower() if output is not None else ""
    if named and named not in _FORMATS:
        known = ", ".join(f".{one}" for one in _FORMATS)
        raise click.UsageError(f"'.{named}' is none of {known}: name the file so, or say which it is with --format.")
    return named or "csv"


def _save(pieces: contextlib.AbstractContextManager[Any], output: Path) -> int:
    """Write a file, which gets its name when it is whole; return its size."""
    draft, size = output.with_name(f".{output.name}.part"), 0
    try:
        with pieces as stream, draft.open("wb") as file:
            for piece in stream:
                size += file.write(piece)
        draft.replace(output)
    except OSError as error:
        raise Failure(f"Cannot write {output}: {error.strerror}.", Exit.FAILURE) from error
    finally:
        draft.unlink(missing_ok=True)
    return size


def _span(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "since": _moment(given["since"]),
        "until": _moment(given["until"]) if given["until"] else None,
        "tz": given["tz"],
        "model": given["model"],
        "key": given["key_id"],
        "endpoint": given["endpoint"],
        "tenant": given["tenant"],
        "batch": None if given["is_batch"] is None else str(given["is_batch"]).lower(),
    }


def _parts_of(total: Item) -> list[str]:
    """Return what the table has no column for."""
    parts = [f"{total[name]:,} {name.replace('_', ' ')}" for name in _PARTS if total[name]]
    return parts + [f"{amount:,g} {unit}" for unit, amount in total["units"].items()]


def _cells(sums: Item, currency: str) -> list[object]:
    return [*(sums[name] for name in _SUMS), dollars(sums["cost_nanousd"], currency)]


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
