"""Forms that are read in pieces: what comes out does not depend on where they were cut, and nothing is believed."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.files import BOUNDARY, CONTENT_TYPE, form, pieces_of

from modelyard.errors import ApiError
from modelyard.web.forms import HEADER_BYTES_MAX, HEADERS_MAX, PARTS_MAX, FormReader, PartData, PartEnd, PartHead

Part = tuple[str, str | None, bytes]


def parts_of(body: bytes, *, size: int = 1 << 20, content_type: str = CONTENT_TYPE) -> list[Part]:
    """Return name, file name and content of each part of a whole form."""
    reader = FormReader(content_type)
    found: list[Part] = []
    head, content = PartHead("", None), b""
    for piece in pieces_of(body, size):
        for happening in reader.feed(piece):
            match happening:
                case PartHead():
                    head, content = happening, b""
                case PartData(data):
                    content += data
                case PartEnd():
                    found.append((head.name, head.file_name, content))
    reader.close()
    return found


TRICKY = b"\r\n--a-boundar\r\n\r\n--a-boundary-x--a-boundary\n--\r--\r\n--a"
"""Content that begins to look like the boundary, again and again."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 64, 1000])
def test_parts_come_out_whole_however_the_body_is_cut(size: int) -> None:
    body = form(("purpose", "batch"), ("file", TRICKY, "x.jsonl"), ("empty", b"", "no bytes"))
    expected = [("purpose", None, b"batch"), ("file", "x.jsonl", TRICKY), ("empty", "no bytes", b"")]
    assert parts_of(body, size=size) == expected


@settings(max_examples=100, deadline=None)
@given(
    contents=st.lists(st.binary(max_size=300) | st.sampled_from([TRICKY, b"\r\n", b"-", b"\r\n-"]), max_size=4),
    size=st.integers(1, 50),
)
def test_any_content_comes_back(contents: list[bytes], size: int) -> None:
    mark = f"\r\n--{BOUNDARY}".encode()
    contents = [content for content in contents if mark not in b"\r\n" + content]
    if contents:
        body = form(*[(f"f{at}", content, "x") for at, content in enumerate(contents)])
        assert [content for _, _, content in parts_of(body, size=size)] == contents


def test_names_are_unicode_and_may_hold_quotes() -> None:
    assert parts_of(form(("file", b"x", 'größe \\"a\\".jsonl'))) == [("file", 'größe "a".jsonl', b"x")]


def test_what_stands_behind_the_last_boundary_means_nothing() -> None:
    assert parts_of(form(("a", "b")) + b"epilogue\r\n--a-boundary\r\n") == [("a", None, b"b")]


def test_quoted_boundaries_and_parameters_are_read() -> None:
    kind = f'Multipart/Form-Data; charset=utf-8; boundary="{BOUNDARY}"'
    assert parts_of(form(("a", "b")), content_type=kind) == [("a", None, b"b")]


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=a",
     "multipart/form-data; boundary=" + "x" * 71, 'multipart/form-data; boundary="a\x01b"',
     "multipart/form-data; boundary=ü"],
)  # fmt: skip
def test_what_is_no_form_is_refused_by_its_type(content_type: str) -> None:
    with pytest.raises(ApiError) as refused:
        FormReader(content_type)
    assert (refused.value.status, refused.value.code) == (400, "invalid_content_type")


def part(head: str, content: str = "x") -> bytes:
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n{content}\r\n--{BOUNDARY}--\r\n".encode("latin-1")


NAMED = 'Content-Disposition: form-data; name="a"'
BROKEN = {
    "no boundary": b"hello",
    "empty": b"",
    "another boundary": form(("a", "b")).replace(BOUNDARY.encode(), b"other"),
    "cut in the head": form(("a", "b"))[:40],
    "cut in the content": form(("a", "b" * 100))[:100],
    "cut before its end": form(("a", "b"))[:-6],
    "no name": part("Content-Disposition: form-data"),
    "no disposition": part("Content-Type: text/plain"),
    "another disposition": part('Content-Disposition: attachment; name="a"'),
    "a header without a colon": part(NAMED + "\r\nnonsense"),
    "a header with a bad name": part(NAMED + "\r\nb\x00d: x"),
    "the same header twice": part(NAMED + "\r\n" + NAMED),
    "too many headers": part("\r\n".join([NAMED, *(f"X-{at}: y" for at in range(HEADERS_MAX))])),
    "too long a header": part(NAMED + "\r\nX: " + "y" * (HEADER_BYTES_MAX + 1)),
    "too long a header name": part(NAMED + "\r\n" + "y" * (HEADER_BYTES_MAX + 1) + ": x"),
    "too many parts": form(*[("a", "b")] * (PARTS_MAX + 1)),
    "a name that is no text": part('Content-Disposition: form-data; name="\xff"'),
}


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_form_is_told_as_that(body: bytes, size: int) -> None:
    with pytest.raises(ApiError) as refused:
        parts_of(body, size=size)
    assert (refused.value.status, refused.value.code) == (400, "invalid_form")
    assert len(refused.value.message) < 200


@settings(max_examples=200, deadline=None)
@given(
    junk=st.binary(max_size=400),
    place=st.integers(0, 200),
    size=st.integers(1, 100),
)
def test_garbage_is_read_or_refused_and_nothing_else(junk: bytes, place: int, size: int) -> None:
    whole = form(("purpose", "batch"), ("file", TRICKY, "x"))
    with suppress(ApiError):
        parts_of(whole[:place] + junk + whole[place:], size=size)
