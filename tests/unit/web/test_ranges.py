"""One range of bytes: what is asked for, what is ignored, what cannot be had."""

import pytest

from modelyard.web.ranges import Span, UnsatisfiableError, span_of


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=0-", Span(0, 100)),
        ("bytes=10-19", Span(10, 10)),
        ("bytes=90-1000", Span(90, 10)),
        ("bytes=99-", Span(99, 1)),
        ("bytes=-1", Span(99, 1)),
        ("bytes=-1000", Span(0, 100)),
        ("Bytes = 5 - 6", Span(5, 2)),
    ],
)
def test_a_range_is_found(header: str, expected: Span) -> None:
    assert span_of(header, 100) == expected


@pytest.mark.parametrize(
    "header", ["", "bytes=", "bytes=-", "bytes=5-4", "bytes=0-1,5-6", "lines=0-1", "bytes=a-b", "bytes=" + "9" * 30,
               "bytes=٣-٤", "bytes=0x1-0x2", "0-1"]
)  # fmt: skip
def test_what_is_no_single_range_is_ignored(header: str) -> None:
    assert span_of(header, 100) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=999999999999999999-"])
def test_what_lies_behind_the_end_cannot_be_had(header: str) -> None:
    with pytest.raises(UnsatisfiableError):
        span_of(header, 100)


def test_nothing_has_no_ranges() -> None:
    assert span_of("bytes=0-0", 0) is None
