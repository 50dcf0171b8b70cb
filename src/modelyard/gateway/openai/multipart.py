"""Multipart forms (RFC 7578), read just enough to know their fields and to write them again.

Everything is bounded, and what a form says about itself is not believed: the
engine gets a form that is written anew from the fields that we know, with file
contents as they came. Nested forms and transfer encodings do not exist here.
"""

import re
from typing import NamedTuple

from modelyard import errors

PARTS_MAX = 64
HEAD_BYTES_MAX = 4096
TEXT_BYTES_MAX = 64 * 1024

_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=?]{1,70}")
_TYPE = re.compile(rb"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]")


class Part(NamedTuple):
    """One field. ``file_name`` is None for a text field; ``content`` is a view on the body."""

    name: str
    file_name: str | None
    content_type: bytes
    content: memoryview


class Form(NamedTuple):
    """A form and the boundary that none of its contents holds."""

    boundary: bytes
    parts: list[Part]

    @property
    def content_type(self) -> bytes:
        """The header for ``encode``'s result."""
        return b'multipart/form-data; boundary="' + self.boundary + b'"'

    def encode(self) -> bytes:
        """Return the form as bytes; names and types are written anew, contents are as they came."""
        pieces: list[bytes | memoryview] = []
        for part in self.parts:
            pieces.append(b'--%b\r\ncontent-disposition: form-data; name="%b"' % (self.boundary, part.name.encode()))
            if part.file_name is not None:
                pieces.append(b'; filename="%b"\r\ncontent-type: %b' % (part.file_name.encode(), part.content_type))
            pieces += (b"\r\n\r\n", part.content, b"\r\n")
        pieces.append(b"--%b--\r\n" % self.boundary)
        return b"".join(pieces)


def read_form(body: bytes, content_type: bytes | None) -> Form:
    """Return the form in ``body``.

    Raises:
        ApiError: 400 for what is no whole form, or one with more or longer parts than any use needs.
    """
    boundary = _boundary(content_type or b"")
    mark = b"--" + boundary
    if not body.startswith(mark):
        raise _broken("it does not begin with its boundary")
    view = memoryview(body)
    parts: list[Part] = []
    at = len(mark)
    while not body.startswith(b"--", at):
        if len(parts) >= PARTS_MAX:
            raise _broken(f"it has more than {PARTS_MAX} parts")
        if not body.startswith(b"\r\n", at):
            raise _broken("a boundary does not end its line")
        head_end = body.find(b"\r\n\r\n", at, at + HEAD_BYTES_MAX)
        if head_end < 0:
            raise _broken("a part has no end of its header")
        start = head_end + 4
        end = body.find(b"\r\n" + mark, start - 2)
        if end < 0:
            raise _broken("its last boundary is missing")
        # An empty content shares its line end with the header's.
        parts.append(_part(body[at + 2 : head_end], view[start : max(start, end)]))
        at = end + 2 + len(mark)
    return Form(boundary, parts)


def text_of(part: Part) -> str:
    """Return the text of a field.

    Raises:
        ApiError: 400 for a file, for what is too long, and for what is no UTF-8.
    """
    if part.file_name is not None:
        raise errors.invalid_value(part.name, "it is a file, and a text is expected", code="invalid_type")
    if len(part.content) > TEXT_BYTES_MAX:
        raise errors.invalid_value(part.name, f"it is longer than {TEXT_BYTES_MAX} bytes")
    try:
        return str(part.content, "utf-8")
    except UnicodeDecodeError:
        raise errors.invalid_value(part.name, "it is no UTF-8 text") from None


def _boundary(content_type: bytes) -> bytes:
    kind, _, rest = content_type.partition(b";")
    if kind.strip().lower() != b"multipart/form-data":
        raise errors.bad_request("invalid_content_type", "This route takes multipart/form-data.")
    for parameter in rest.split(b";"):
        name, _, value = parameter.strip().partition(b"=")
        if name.lower() == b"boundary":
            found = value.removeprefix(b'"').removesuffix(b'"')
            if _BOUNDARY.fullmatch(found):
                return found
    raise errors.bad_request("invalid_content_type", "The content type multipart/form-data needs a boundary.")


def _part(head: bytes, content: memoryview) -> Part:
    disposition = kind = b""
    for line in head.split(b"\r\n"):
        name, sign, value = line.partition(b":")
        if not sign:
            raise _broken("a header of a part has no colon")
        lower = name.strip().lower()
        if lower == b"content-disposition":
            disposition = value.strip()
        elif lower == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
    parameters = _parameters(disposition)
    if "name" not in parameters:
        raise _broken("a part has no name")
    file_name = parameters.get("filename")
    return Part(
        name=parameters["name"],
        # Engines look at the ending; nothing else of a name is needed, and a path must not reach them.
        file_name=None
        if file_name is None
        else _NOT_PLAIN.sub("_", file_name.replace("\\", "/").rpartition("/")[2])[-80:],
        content_type=kind if _TYPE.fullmatch(kind) else b"application/octet-stream",
        content=content,
    )


def _parameters(disposition: bytes) -> dict[str, str]:
    """Return the quoted or plain parameters of ``form-data; name="x"; filename="y"``."""
    try:
        text = disposition.decode()
    except UnicodeDecodeError:
        raise _broken("a name is no UTF-8") from None
    kind, _, rest = text.partition(";")
    if kind.strip().lower() != "form-data":
        raise _broken("a part is no form-data")
    found: dict[str, str] = {}
    for match in re.finditer(r'\s*([A-Za-z*]{1,20})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;"\s]*))\s*(?:;|$)', rest):
        name = match[1].lower()
        if name in found:
            raise _broken(f"a part has two of '{name}'")
        found[name] = re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
    return found


def _broken(reason: str) -> errors.ApiError:
    return errors.bad_request("invalid_form", f"The body is no valid multipart form: {reason}.")
