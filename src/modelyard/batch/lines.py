"""Lines of a file that may be larger than memory: with their place, in order, the blank ones left out.

A byte order mark, CRLF and a last line without its end are as good as any.
What is longer than a line may be is told, and skipped without being kept.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK_BYTES = 1024 * 1024
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line with its number from 1 (blank ones count), its place, and what it says; None: it is too long."""

    number: int
    offset: int
    size: int
    """With its end."""
    text: bytes | None


def lines_of(file: BinaryIO, *, start: int = 0, length: int | None = None, longest: int) -> Iterator[Line]:
    """Yield the lines of ``length`` bytes (all) from ``start`` on; ``start`` must be where a line begins."""
    file.seek(start)
    left = length
    number, begin, rest, dropped = 0, start, b"", 0
    while True:
        block = file.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
        if not block:
            break
        left = None if left is None else left - len(block)
        *whole, rest_new = (rest + block).split(b"\n")
        for text in whole:
            number += 1
            size = dropped + len(text) + 1
            line = _line(number, begin, size, None if size > longest else text)
            if line is not None:
                yield line
            begin, dropped = begin + size, 0
        rest = rest_new
        if dropped + len(rest) > longest:
            dropped, rest = dropped + len(rest), b""
    if dropped or rest:
        size = dropped + len(rest)
        line = _line(number + 1, begin, size, None if size > longest else rest)
        if line is not None:
            yield line


def _line(number: int, offset: int, size: int, text: bytes | None) -> Line | None:
    """Return the line; None where it says nothing."""
    if text is None:
        return Line(number, offset, size, None)
    if offset == 0:
        text = text.removeprefix(BOM)
    text = text.strip(b" \t\r")
    return Line(number, offset, size, text) if text else None
