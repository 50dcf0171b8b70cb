"""One range of bytes of a representation (RFC 9110, section 14)."""

import re
from typing import NamedTuple

_ONE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)


class Span(NamedTuple):
    """``length`` bytes from ``start`` on."""

    start: int
    length: int


class UnsatisfiableError(Exception):
    """None of the bytes that were asked for are there."""


def span_of(header: str, size: int) -> Span | None:
    """Return what ``header`` asks for of ``size`` bytes; None is all of it.

    What is no range of bytes, or several, is ignored, as the RFC lets a server do.

    Raises:
        UnsatisfiableError: it begins behind the end.
    """
    found = _ONE.fullmatch(header.replace(" ", ""))
    if found is None or found[0].endswith("=-") or not size:
        return None
    if not found[1]:
        last = min(int(found[2]), size)
        if not last:
            raise UnsatisfiableError
        return Span(size - last, last)
    start = int(found[1])
    if found[2] and int(found[2]) < start:
        return None
    if start >= size:
        raise UnsatisfiableError
    end = min(int(found[2]), size - 1) if found[2] else size - 1
    return Span(start, end - start + 1)
