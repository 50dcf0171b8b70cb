"""Rows of the ledger for whoever looks at them again: from the store, page by page, or from an exported file.

``export.py`` writes what is read here.
"""

import csv
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import IO, Any

import msgspec

from modelyard.domain.usage import EVERYTHING, Moment, UsageFilter, UsageRow
from modelyard.stores import UsageStore

PAGE = 5000
"""Rows that are read at a time: each page is a transaction of some milliseconds, so that nobody waits for all of it."""
PIECE_S = 3600.0
_FIELDS = frozenset(UsageRow.__struct_fields__)
_NEEDED = tuple(field.name for field in msgspec.structs.fields(UsageRow) if field.required and field.name != "ttft_ms")
_INERT = ("'=", "'+", "'-", "'@", "'\t", "'\r")
_SNIFFED = 64
_NEITHER = "neither CSV nor JSON lines: export it with --format csv or jsonl"
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanousd", "units", "latency_ms", "ttft_ms")
_YEAR_9999_S = 253_370_764_800.0


class FileError(ValueError):
    """A file that is no export of the ledger's rows; says where and why."""


async def stored_rows(
    store: UsageStore, where: UsageFilter, spans: Iterable[tuple[float, float]], *, page: int = PAGE
) -> AsyncIterator[list[UsageRow]]:
    """Yield the rows that arrived in ``spans`` (unix seconds, in order), oldest first, a page at a time."""
    # Few rows are looked for among all of a time: not of more than an hour at once.
    for since, until in _pieces(spans, inf if where == EVERYTHING else PIECE_S):
        after: Moment | None = None
        while True:
            rows = await store.rows_between(where, since=since, until=until, after=after, limit=page)
            if rows:
                yield rows
            if len(rows) < page:
                break
            after = Moment(rows[-1].created_at, rows[-1].request_id)


def _pieces(spans: Iterable[tuple[float, float]], piece_s: float) -> Iterator[tuple[float, float]]:
    for since, until in spans:
        begin = since
        while begin < until:
            end = min(begin + piece_s, until)
            yield begin, end
            begin = end


def file_rows(file: Path) -> Iterator[UsageRow]:
    """Yield the rows of a file that ``modelyard usage export`` wrote: CSV, or JSON lines.

    Raises:
        FileError: it cannot be read, or is none.
    """
    try:
        with file.open("r", encoding="utf-8-sig", newline="") as lines:
            start = lines.read(_SNIFFED).lstrip()
            lines.seek(0)
            read = _json_rows if start[:1] == "{" else _csv_rows
            if start[:1] == "[" or start[:4] == "PAR1":
                raise FileError(f"{file} is {_NEITHER}.")
            for number, given in read(lines):
                yield _row_of(given, file, number)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is {_NEITHER}"
        raise FileError(f"Cannot read {file}: {reason}.") from error


def _csv_rows(lines: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    for cells in reader:
        yield (
            reader.line_num,
            {name: _plain(cell) for name, cell in cells.items() if name in _FIELDS and isinstance(cell, str)},
        )


def _plain(cell: str) -> str:
    """Return a cell without the apostrophe that keeps spreadsheets from computing it."""
    return cell[1:] if cell.startswith(_INERT) else cell


def _json_rows(lines: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, {name: value for name, value in decode(line).items() if name in _FIELDS}
            except msgspec.DecodeError:
                yield number, {}


def _row_of(given: dict[str, Any], file: Path, line: int) -> UsageRow:
    if given.get("ttft_ms") == "":
        given["ttft_ms"] = None
    given.setdefault("ttft_ms", None)
    if missing := list(islice((name for name in _NEEDED if name not in given), 4)):
        raise FileError(
            f"{file}, line {line}: it has no {_listed(missing)}. Write rows, not sums: modelyard usage export -o FILE."
        )
    try:
        row = msgspec.convert(given, UsageRow, strict=False)
    except msgspec.ValidationError as error:
        raise FileError(f"{file}, line {line}: {error}.") from error
    # The ledger never has these, but whoever edits a file may.
    if not 0 <= row.created_at < _YEAR_9999_S:
        raise FileError(f"{file}, line {line}: created_at is no time in unix seconds.")
    for name in _COUNTS:
        value = getattr(row, name)
        if value is not None and not 0 <= value < inf:
            raise FileError(f"{file}, line {line}: {name} is {value}; it is 0 or more.")
    return row


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
