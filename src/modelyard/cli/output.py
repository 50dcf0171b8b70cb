"""What commands print: tables for people, JSON for programs, ids for shells.

stdout carries data only; progress and remarks go to stderr. Text that came
from a model, an engine or a caller is cleaned of control characters before it
reaches a terminal.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import msgspec

from modelyard.clock import SystemClock

Item = dict[str, Any]
"""One JSON object of the management API."""

_UNSAFE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Terminal escapes, control characters, and the marks that turn the direction of text."""


def clean(text: str) -> str:
    """Return ``text`` without terminal escapes and control characters; tabs and line ends stay."""
    return _UNSAFE.sub("", text)


def formats(quiet: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--json`` and ``--quiet``; ``quiet`` says what the latter prints."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--quiet", "-q", "is_quiet", is_flag=True, help=quiet)(command)
        return click.option("--json", "is_json", is_flag=True, help="Print JSON.")(command)

    return add


listing = formats("Print only ids, one a line.")
"""``--json`` and ``--quiet``, as every command that lists something has."""


def show_json(value: Any) -> None:
    """Print one JSON document."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show_list(
    items: Sequence[Item],
    columns: dict[str, Callable[[Item], object]],
    *,
    is_json: bool,
    is_quiet: bool,
    empty: str,
    id_field: str = "id",
) -> None:
    """Print ``items`` as asked for; ``columns`` maps each heading to what it shows; ``empty`` says what to do next."""
    if is_json:
        show_json(list(items))
    elif is_quiet:
        for item in items:
            print(clean(str(item[id_field])))
    elif not items:
        remark(empty)
    else:
        show_table(list(columns), [[cell(item) for cell in columns.values()] for item in items])


def owners(items: Sequence[Item], *path: str) -> dict[str, Callable[[Item], object]]:
    """Return the column TENANT, where ``items`` belong to more than one; ``path`` leads to whose an item is.

    Where a caller sees no other's, an item may say nothing of it.
    """

    def owner(item: Item) -> object:
        found: object = item
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    return {"TENANT": owner} if len({owner(item) for item in items}) > 1 else {}


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns, two spaces apart; numbers to the right."""
    cells = [[clean(_text(cell)) for cell in row] for row in rows]
    columns = [[row[at] for row in cells if row[at] != "-"] for at in range(len(headings))]
    numeric = [bool(column) and all(map(_is_number, column)) for column in columns]
    widths = [max(len(row[at]) for row in [headings, *cells]) for at in range(len(headings))]
    for row in [headings, *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())


def show_pairs(pairs: dict[str, object]) -> None:
    """Print names and values, aligned; leaves out what is empty."""
    shown = {name: clean(_text(value)) for name, value in pairs.items() if value not in (None, "")}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{name.ljust(width)}  {value}")


def remark(line: str) -> None:
    """Say something that is not data: on stderr."""
    print(clean(line), file=sys.stderr, flush=True)


class ProgressLine:
    """One line on stderr that shows how far something is: rewritten on a terminal, else printed when it changes."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._last = ""

    def show(self, line: str) -> None:
        """Show ``line`` in place of the last one."""
        line = clean(line)
        if line == self._last:
            return
        if self.is_terminal:
            print(f"\r{line.ljust(len(self._last))}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._last = line

    def clear(self) -> None:
        """Leave a clean line behind."""
        if self.is_terminal and self._last:
            print(f"\r{' ' * len(self._last)}\r", end="", file=sys.stderr, flush=True)
        self._last = ""


def age(unix_s: float | None) -> str:
    """Return how long ago ``unix_s`` was: ``45s``, ``12m``, ``3h``, ``8d``."""
    if unix_s is None:
        return "-"
    seconds = max(0, int(SystemClock.unix_s() - unix_s))
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def moment(unix_s: float | None) -> str:
    """Return a date and time in UTC."""
    if unix_s is None:
        return "-"
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def dollars(nanousd: int, currency: str = "USD") -> str:
    """Return an exact amount of a currency: never rounded, at least two decimals."""
    whole, rest = divmod(abs(nanousd), 1_000_000_000)
    decimals = f"{rest:09d}".rstrip("0").ljust(2, "0")
    sign = "-" if nanousd < 0 else ""
    return f"{sign}${whole}.{decimals}" if currency == "USD" else f"{sign}{whole}.{decimals} {currency}"


def progress_text(progress: Item | None) -> str:
    """Return ``loading 42%, ~8 s`` for an endpoint's progress."""
    if not progress:
        return ""
    text = str(progress.get("stage", ""))
    if text == "ready":
        return text
    if (percent := progress.get("percent")) is not None:
        text += f" {percent}%"
    if (eta_s := progress.get("eta_s")) is not None:
        text += f", ~{max(1, round(eta_s))} s"
    if pace := progress.get("bytes_per_s"):
        text += f", {pace / 1e6:.1f} MB/s"
    if reason := progress.get("reason"):
        text += f" ({reason})"
    return text


def stage_text(endpoint: Item) -> str:
    """Return how far an endpoint is; of one that is stopped, why."""
    progress: Item = endpoint.get("progress") or {}
    if endpoint["status"] == "stopped" and (reason := progress.get("reason")):
        return str(reason)
    return progress_text(progress)


def _text(cell: object) -> str:
    if cell is None or cell == "":
        return "-"
    return str(cell)


def _is_number(cell: str) -> bool:
    amount, _, currency = cell.partition(" ")
    is_amount = not currency or (len(currency) == 3 and currency.isascii() and currency.isupper())
    return is_amount and amount.lstrip("-$").replace(".", "", 1).replace(",", "").isdigit()
