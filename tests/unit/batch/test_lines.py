"""Lines are found where they are, whatever ends them, and one that is too long is not kept."""

import io

import pytest

from modelyard.batch import lines
from modelyard.batch.lines import lines_of


def texts(data: bytes, longest: int = 1_000_000) -> list[tuple[int, bytes | None]]:
    return [(line.number, line.text) for line in lines_of(io.BytesIO(data), longest=longest)]


@pytest.mark.parametrize(
    ("story", "data", "expected"),
    [
        ("plain", b"a\nb\n", [(1, b"a"), (2, b"b")]),
        ("no end of the last line", b"a\nb", [(1, b"a"), (2, b"b")]),
        ("carriage returns", b"a\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        ("a byte order mark", b"\xef\xbb\xbfa\nb", [(1, b"a"), (2, b"b")]),
        ("blank lines count and say nothing", b"\n  \na\n\t\r\n\nb\n\n", [(3, b"a"), (6, b"b")]),
        ("nothing", b"", []),
        ("nothing but a mark", b"\xef\xbb\xbf", []),
    ],
)
def test_lines_are_read_whatever_ends_them(story: str, data: bytes, expected: list[object]) -> None:
    assert texts(data) == expected, story


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1024])
def test_where_blocks_end_changes_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block)
    data = b"\xef\xbb\xbffirst\r\n\n" + b"x" * 40 + b"\nlast"
    found = list(lines_of(io.BytesIO(data), longest=20))
    assert [(line.number, line.text) for line in found] == [(1, b"first"), (3, None), (4, b"last")]
    assert [data[line.offset : line.offset + line.size] for line in found] == [
        b"\xef\xbb\xbffirst\r\n",
        b"x" * 40 + b"\n",
        b"last",
    ]


def test_a_range_has_the_lines_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 4)
    data = b"one\ntwo\nthree\nfour\n"
    whole = list(lines_of(io.BytesIO(data), longest=100))
    middle = list(lines_of(io.BytesIO(data), start=whole[1].offset, length=10, longest=100))
    assert [(line.text, line.offset) for line in middle] == [(b"two", 4), (b"three", 8)]


def test_a_line_without_end_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1000)

    class Endless(io.RawIOBase):
        read_bytes = 0

        def seek(self, *_: int) -> int:
            return 0

        def read(self, size: int = -1) -> bytes:
            self.read_bytes += size
            return b"y" * size if self.read_bytes < 50_000_000 else b""

    (line,) = lines_of(Endless(), longest=10_000)  # type: ignore[arg-type]  # it reads
    assert (line.text, line.size > 49_000_000) == (None, True)
