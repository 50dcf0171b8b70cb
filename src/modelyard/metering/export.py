"""The ledger as a file: CSV, JSON, JSON lines or Parquet, written piece by piece.

A ``Sheet`` names columns and their kinds; an encoder turns rows of such values
into bytes as they come, so that a year of rows needs the memory of one page.
Parquet needs the extra ``export`` (pyarrow); it is loaded when it is asked for.
"""

import csv
import importlib
import io
from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from modelyard.domain.usage import Unit, UsageBucket, UsageRow
from modelyard.metering.prices import usd

Row = tuple[Any, ...]


class Format(StrEnum):
    """What the file is."""

    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"
    PARQUET = "parquet"


MEDIA_TYPES = {
    Format.CSV: "text/csv; charset=utf-8",
    Format.JSON: "application/json",
    Format.JSONL: "application/x-ndjson",
    Format.PARQUET: "application/vnd.apache.parquet",
}


class Kind(Enum):
    """What a column holds; the values are Arrow's names of their types."""

    TEXT = "string"
    WHOLE = "int64"
    NUMBER = "float64"
    FLAG = "bool_"


class Column(NamedTuple):
    """One column."""

    name: str
    kind: Kind


Sheet = tuple[Column, ...]


class ExtraMissingError(Exception):
    """A package that this format needs is not installed."""


class Encoder(Protocol):
    """Writes one file."""

    def begin(self) -> bytes:
        """Return what comes before the first row."""
        ...

    def rows(self, rows: Sequence[Row]) -> bytes:
        """Return some rows."""
        ...

    def end(self) -> bytes:
        """Return what comes behind the last row."""
        ...


def encoder_of(format: Format, sheet: Sheet) -> Encoder:
    """Return the encoder of one file.

    Raises:
        ExtraMissingError: what it needs is not installed.
    """
    match format:
        case Format.CSV:
            return Csv(sheet)
        case Format.JSON:
            return Json(sheet)
        case Format.JSONL:
            return JsonLines(sheet)
        case Format.PARQUET:
            return Parquet(sheet)


_KINDS = {str: Kind.TEXT, int: Kind.WHOLE, float: Kind.NUMBER, bool: Kind.FLAG, float | None: Kind.NUMBER}


def _sheet_of_rows() -> Sheet:
    columns = [
        Column(field.name, _KINDS.get(field.type, Kind.TEXT))  # the others are enumerations of texts
        for field in msgspec.structs.fields(UsageRow)
    ]
    return (*columns, Column("cost_usd", Kind.TEXT))


ROWS: Sheet = _sheet_of_rows()
"""The ledger's rows: all that they have, times as unix seconds, and the cost once more as an exact decimal."""

_COUNTS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "audio_input_tokens",
    "audio_output_tokens",
    "cost_nanousd",
)
_UNITS = tuple(unit.value for unit in Unit if unit is not Unit.NONE)


def sheet_of_buckets(groups: Sequence[str]) -> Sheet:
    """Return the columns of sums by ``groups``; units have a column each."""
    return (
        *(Column(group, Kind.TEXT) for group in groups),
        *(Column(count, Kind.WHOLE) for count in _COUNTS),
        *(Column(f"units_{unit}", Kind.NUMBER) for unit in _UNITS),
        Column("cost_usd", Kind.TEXT),
    )


def values_of_row(row: UsageRow) -> Row:
    """Return the values of ``ROWS``."""
    return (*map(_plain, msgspec.structs.astuple(row)), usd(row.cost_nanousd))


def values_of_bucket(bucket: UsageBucket, groups: Sequence[str]) -> Row:
    """Return the values of ``sheet_of_buckets``."""
    counts = (getattr(bucket, count) for count in _COUNTS)
    units = (bucket.units.get(unit, 0.0) for unit in _UNITS)
    return (*(bucket.group[group] for group in groups), *counts, *units, usd(bucket.cost_nanousd))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


class Csv:
    """RFC 4180 with a line of names. Texts that a spreadsheet would take for formulas get an apostrophe before them."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet

    def begin(self) -> bytes:
        """Return the names."""
        return self.rows([tuple(column.name for column in self._sheet)])

    def rows(self, rows: Sequence[Row]) -> bytes:
        """Return a line each."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\r\n").writerows([_inert(value) for value in row] for row in rows)
        return out.getvalue().encode("utf-8", "replace")

    def end(self) -> bytes:
        """Return nothing."""
        return b""


def _inert(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"}:
        return "'" + value
    return value


class JsonLines:
    """An object a line."""

    def __init__(self, sheet: Sheet) -> None:
        self._names = [column.name for column in sheet]
        self._encode = msgspec.json.Encoder().encode_lines

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def rows(self, rows: Sequence[Row]) -> bytes:
        """Return a line each."""
        return self._encode([dict(zip(self._names, row, strict=True)) for row in rows])

    def end(self) -> bytes:
        """Return nothing."""
        return b""


class Json:
    """One array, an object a line."""

    def __init__(self, sheet: Sheet) -> None:
        self._lines = JsonLines(sheet)
        self._is_first = True

    def begin(self) -> bytes:
        """Open the array."""
        return b"["

    def rows(self, rows: Sequence[Row]) -> bytes:
        """Return an object each."""
        lines = self._lines.rows(rows).rstrip(b"\n").split(b"\n") if rows else []
        between = b"\n" if self._is_first else b",\n"
        self._is_first = self._is_first and not lines
        return between + b",\n".join(lines) if lines else b""

    def end(self) -> bytes:
        """Close the array."""
        return b"\n]\n"


class Parquet:
    """Columns, compressed, in groups of as many rows as come at a time."""

    def __init__(self, sheet: Sheet) -> None:
        try:
            # By name: the types of a package that need not be there are nobody's to check.
            arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ExtraMissingError("Parquet needs pyarrow: pip install 'modelyard[export]'") from None
        self._arrow = arrow
        self._schema = arrow.schema([(column.name, getattr(arrow, column.kind.value)()) for column in sheet])
        self._out = _Taken()
        self._writer = parquet.ParquetWriter(self._out, self._schema, compression="zstd")

    def begin(self) -> bytes:
        """Return the head."""
        return self._out.take()

    def rows(self, rows: Sequence[Row]) -> bytes:
        """Return a group of rows."""
        if rows:
            columns = [
                self._arrow.array(values, type=field.type)
                for values, field in zip(zip(*rows, strict=True), self._schema, strict=True)
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        return self._out.take()

    def end(self) -> bytes:
        """Return the table of contents."""
        self._writer.close()
        return self._out.take()


class _Taken(io.RawIOBase):
    """A file that is taken away while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._size += len(piece)
        return len(piece)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
