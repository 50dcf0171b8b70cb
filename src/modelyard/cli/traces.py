"""Files of arrivals: when requests came, one a line."""

import csv
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from modelyard.cli.exits import Exit, Failure

LINES_MAX = 20_000_000
_COLUMNS = ("timestamp", "time", "created_at", "at")


def read_arrivals(file: Path) -> list[float]:
    """Return unix seconds (or seconds from any moment), in order.

    Takes plain numbers (seconds), JSON lines with ``timestamp`` in milliseconds (as Mooncake's), and CSV with a column
    ``timestamp`` of ISO times or seconds (as Azure's).

    Raises:
        Failure: it cannot be read, or has no times.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            moments = sorted(_moments(lines, file))
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"Cannot read {file}: {error}.", Exit.USAGE) from error
    if not moments:
        raise Failure(f"{file} has no arrivals: give a time a line, JSON lines or CSV with 'timestamp'.", Exit.USAGE)
    return moments


def _moments(lines: Iterator[str], file: Path) -> Iterator[float]:
    column: int | None = None
    for number, line in enumerate(lines, 1):
        if number > LINES_MAX:
            raise Failure(f"{file} has more than {LINES_MAX:,} lines; replay a part of it.", Exit.USAGE)
        if not (text := line.strip()):
            continue
        if column is None and number == 1 and (column := _column(text)) is not None:
            continue
        try:
            at_s = _moment(text, column)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Failure(f"{file}, line {number}: '{text[:60]}' has no time ({error}).", Exit.USAGE) from error
        yield at_s


def _column(text: str) -> int | None:
    """Return which column of a heading has the time; None when the line is no heading."""
    names = [name.strip().lower() for name in next(csv.reader([text]))]
    return next((names.index(name) for name in _COLUMNS if name in names), None)


def _moment(text: str, column: int | None) -> float:
    if text.startswith("{"):
        at_s = float(json.loads(text)["timestamp"]) / 1000
    else:
        cell = next(csv.reader([text]))[column or 0]
        at_s = _seconds(cell)
    if not math.isfinite(at_s):
        raise ValueError("not a finite number")
    return at_s


def _seconds(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        # Azure writes seven digits of a second, one more than Python reads.
        at = datetime.fromisoformat(cell.strip()[:26] if "." in cell else cell.strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
