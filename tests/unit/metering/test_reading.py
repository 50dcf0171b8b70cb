"""What is exported is read again as it was, and what is no export is said with its line."""

from pathlib import Path

import msgspec
import pytest

from modelyard.domain.usage import EVERYTHING, Moment, Unit, UsageFilter, UsageRow, UsageStatus
from modelyard.metering.export import ROWS, Format, encoder_of, values_of_row
from modelyard.metering.reading import FileError, file_rows, stored_rows

ROW = UsageRow(
    "req-1", "ten-1", "key-1", "ep-1", "=chat", "ver-1", "rep-1", "/v1/chat/completions", True, 100, 32, 20, 77,
    UsageStatus.SUCCESS, 200, "", 250.5, 900.25, 1, False, 1_796_000_000.125, 1_796_000_001.5, units=1.5,
    unit=Unit.SECONDS, batch_id="batch-1",
)  # fmt: skip
OTHER = msgspec.structs.replace(
    ROW, request_id="req-2", model="plain", ttft_ms=None, status=UsageStatus.ERROR, is_stream=False, unit=Unit.NONE
)


def written(file: Path, format: Format) -> Path:
    encoder = encoder_of(format, ROWS)
    pieces = (encoder.begin(), encoder.rows([values_of_row(ROW), values_of_row(OTHER)]), encoder.end())
    file.write_bytes(b"".join(pieces))
    return file


@pytest.mark.parametrize("format", [Format.CSV, Format.JSONL])
def test_an_export_is_read_as_it_was_written(tmp_path: Path, format: Format) -> None:
    assert list(file_rows(written(tmp_path / "rows", format))) == [ROW, OTHER]


def test_lines_that_are_empty_and_columns_that_are_new_are_passed_over(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", Format.JSONL)
    file.write_text("\n" + file.read_text().replace("{", '{"colour":"red",', 1) + "\n")
    assert list(file_rows(file)) == [ROW, OTHER]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model,requests\nchat,5\n", "line 2: it has no request_id, tenant_id, key_id and endpoint_id. Write rows"),
        ('{"request_id": 5\n', "line 1: it has no request_id"),
        ("[\n{}]\n", "neither CSV nor JSON lines: export it with --format csv or jsonl"),
        ("PAR1xyz", "neither CSV nor JSON lines"),
        (b"\xff\xfe\x00", "neither CSV nor JSON lines"),
        (b"PAR1\x15\xff\x00", "neither CSV nor JSON lines: export it with --format csv or jsonl"),
    ],
)
def test_what_is_no_export_is_said(tmp_path: Path, text: str | bytes, why: str) -> None:
    file = tmp_path / "rows"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError, match=why):
        list(file_rows(file))


def test_a_cell_of_the_wrong_kind_is_named_with_its_line(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", Format.CSV)
    file.write_text(file.read_text().replace(",100,", ",many,"))
    with pytest.raises(FileError, match=r"line 2: Expected `int`, got `str` - at `\$.prompt_tokens`"):
        list(file_rows(file))
    with pytest.raises(FileError, match="No such file"):
        list(file_rows(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("cell", "instead", "why"),
    [
        (",100,32,", ",-100,32,", "line 2: prompt_tokens is -100; it is 0 or more"),
        (",900.25,", ",nan,", "line 2: latency_ms is nan"),
        (",250.5,", ",inf,", "line 2: ttft_ms is inf"),
        (",1796000000.125,", ",nan,", "line 2: created_at is no time"),
        (",1796000000.125,", ",1e300,", "line 2: created_at is no time"),
    ],
)
def test_what_no_ledger_has_is_refused_with_its_line(tmp_path: Path, cell: str, instead: str, why: str) -> None:
    file = written(tmp_path / "rows.csv", Format.CSV)
    text = file.read_text()
    assert cell in text
    file.write_text(text.replace(cell, instead, 1))
    with pytest.raises(FileError, match=why):
        list(file_rows(file))


def test_what_a_spreadsheet_puts_before_a_file_is_passed_over(tmp_path: Path) -> None:
    for format in (Format.CSV, Format.JSONL):
        file = written(tmp_path / "rows", format)
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert list(file_rows(file)) == [ROW, OTHER]


class Store:
    """A ledger that remembers for how long a time it was asked."""

    def __init__(self, rows: list[UsageRow]) -> None:
        self.rows = rows
        self.longest_s = 0.0

    async def rows_between(
        self, where: UsageFilter, *, since: float, until: float, after: Moment | None, limit: int
    ) -> list[UsageRow]:
        self.longest_s = max(self.longest_s, until - since)
        found = [
            row
            for row in self.rows
            if since <= row.created_at < until
            and (after is None or (row.created_at, row.request_id) > (after.at, after.request_id))
        ]
        return found[:limit]


@pytest.mark.parametrize("where", [EVERYTHING, UsageFilter(endpoint_ids=("ep-1",))])
async def test_every_row_of_a_time_is_read_once_in_order_and_a_few_are_not_looked_for_in_all_of_it(
    where: UsageFilter,
) -> None:
    # Some of them at the full hour, where one page or piece of time ends and the next begins; several at one moment.
    moments = [0.0, 3599.5, 3600.0, 3600.0, 3600.0, 7200.0, 9000.0, 20_000.0, 86_399.9]
    rows = [
        msgspec.structs.replace(ROW, request_id=f"req-{at}", created_at=1.8e9 + moment)
        for at, moment in enumerate(moments)
    ]
    store = Store(rows)
    spans = [(1.8e9, 1.8e9 + 9000), (1.8e9 + 9000, 1.8e9 + 86_400)]
    pages = [page async for page in stored_rows(store, where, spans, page=2)]  # type: ignore[arg-type]
    assert [row for page in pages for row in page] == rows
    assert max(map(len, pages)) == 2
    if where != EVERYTHING:
        assert store.longest_s <= 3600
