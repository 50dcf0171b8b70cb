"""Multipart forms (RFC 7578) that are read while they come: a file of half a gigabyte is never in memory.

The parsing is python-multipart's; here are its bounds, and its callbacks turned
into a list of what each piece of the body brought, so that whoever writes the
contents may wait for its disk between two of them.
"""

import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from modelyard import errors

PARTS_MAX = 16
HEADERS_MAX = 8
HEADER_BYTES_MAX = 4096

_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")

# It repeats bytes of the body in warnings; what is wrong with a form is its sender's business.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class PartHead(NamedTuple):
    """A part begins. ``file_name`` is None for what is no file; both are as they came."""

    name: str
    file_name: str | None


class PartData(NamedTuple):
    """Some bytes of the part that began last."""

    content: bytes


class PartEnd(NamedTuple):
    """The part that began last is whole."""


Happening = PartHead | PartData | PartEnd


class FormReader:
    """Reads one form; ``feed`` it the body, and at its end call ``close``."""

    def __init__(self, content_type: str) -> None:
        """Begin.

        Raises:
            ApiError: 400, this is no form.
        """
        self._happened: list[Happening] = []
        self._parts = 0
        self._is_whole = False
        self._name = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._head_ends,
                "on_part_data": self._data,
                "on_part_end": lambda: self._happened.append(PartEnd()),
                "on_end": self._ends,
            },
            max_header_count=HEADERS_MAX,
            max_header_size=HEADER_BYTES_MAX,
        )

    def feed(self, piece: bytes) -> Iterable[Happening]:
        """Return what ``piece`` brought.

        Raises:
            ApiError: 400, this is no valid form.
        """
        if piece and not self._is_whole:  # what stands behind the last boundary means nothing
            try:
                self._parser.write(piece)
            except MultipartParseError:
                raise _broken("a boundary or a header is malformed") from None
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Check that it was whole.

        Raises:
            ApiError: 400, it was not.
        """
        if not self._is_whole:
            raise _broken("its last boundary is missing")

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise _broken(f"it has more than {PARTS_MAX} parts")
        self._headers = {}

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        name = self._name.lower()
        if name in self._headers:
            raise _broken("a part has the same header twice")
        self._headers[name], self._name, self._value = self._value, b"", b""

    def _head_ends(self) -> None:
        kind, parameters = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        if kind != b"form-data" or b"name" not in parameters:
            raise _broken("a part is no form-data with a name")
        file_name = parameters.get(b"filename")
        self._happened.append(PartHead(_text(parameters[b"name"]), None if file_name is None else _text(file_name)))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._happened.append(PartData(data[start:end]))

    def _ends(self) -> None:
        self._is_whole = True


def _boundary(content_type: str) -> bytes:
    kind, parameters = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise errors.bad_request("invalid_content_type", "This route takes multipart/form-data.")
    boundary = parameters.get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise errors.bad_request("invalid_content_type", "The content type multipart/form-data needs a boundary.")
    return boundary


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _broken("a name is no UTF-8") from None


def _broken(reason: str) -> errors.ApiError:
    return errors.bad_request("invalid_form", f"The body is no valid multipart form: {reason}.")
