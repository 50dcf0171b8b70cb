"""From a multipart form to a typed request: the fields that a route knows, checked, and the form with just those."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from modelyard import errors
from modelyard.gateway.openai.call import Incoming
from modelyard.gateway.openai.multipart import Form, Part, read_form, text_of
from modelyard.web.decoding import refusal

FILES_MAX = 16

R = TypeVar("R", bound=msgspec.Struct)


class FormRequest(msgspec.Struct):
    """A decoded form. ``fields`` has the fields' ``[]`` cut off; ``ignored`` are names that nobody knows."""

    form: Form
    files: dict[str, list[Part]]
    ignored: tuple[str, ...]

    def payload_for(self) -> Callable[[str], bytes]:
        """Return what makes the engine's form for the name that it has for the model."""

        def encoded(model: str) -> bytes:
            return self.with_field("model", model).encode()

        return encoded

    def with_field(self, name: str, value: str) -> Form:
        """Return the form with another value of a text field, or with that field."""
        kept = [part for part in self.form.parts if part.name != name]
        return Form(self.form.boundary, [Part(name, None, b"", memoryview(value.encode())), *kept])


def decode_form(incoming: Incoming, kind: type[R], files: dict[str, bool]) -> tuple[R, FormRequest]:
    """Return the fields as a ``kind`` and the form without what is unknown; ``files`` says which file must be there.

    Raises:
        ApiError: 400 naming the field that is wrong, missing or given twice.
    """
    form = read_form(incoming.body, incoming.header(b"content-type"))
    known = set(kind.__struct_fields__)
    texts: dict[str, str | list[str]] = {}
    found: dict[str, list[Part]] = {}
    kept: list[Part] = []
    ignored: list[str] = []
    for part in form.parts:
        name = part.name.removesuffix("[]")
        if name in files:
            _take_file(part, found.setdefault(name, []))
        elif name in known:
            if not _take_text(part, name, texts):
                continue
        else:
            ignored.append(name[:64])
            continue
        kept.append(part)
    for name, is_needed in files.items():
        if is_needed and name not in found:
            raise errors.missing_parameter(name)
    try:
        request = msgspec.convert(texts, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    return request, FormRequest(Form(form.boundary, kept), found, tuple(ignored))


def _take_file(part: Part, files: list[Part]) -> None:
    if part.file_name is None:
        raise errors.invalid_value(part.name, "it is no file", code="invalid_type")
    if len(files) >= (FILES_MAX if part.name.endswith("[]") else 1):
        raise errors.invalid_value(part.name, "it is given too often")
    if not part.content:
        raise errors.invalid_value(part.name, "it is empty")
    files.append(part)


def _take_text(part: Part, name: str, texts: dict[str, str | list[str]]) -> bool:
    """Take a text field; say whether it said anything."""
    text = text_of(part)
    if not text:
        return False
    if part.name.endswith("[]"):
        listed = texts.setdefault(name, [])
        if not isinstance(listed, list):
            raise errors.invalid_value(name, "it is given more than once")
        listed.append(text)
        return True
    if name in texts:
        raise errors.invalid_value(name, "it is given more than once")
    texts[name] = text
    return True
