"""Multipart forms, read with the standard library's mail parser: another reading than the gateway's own."""

import email.policy
from email.parser import BytesParser
from typing import NamedTuple

from modelyard.engines.http import Request
from modelyard.engines.simulated.requests import Refused


class Form(NamedTuple):
    """A form: texts and files by their name."""

    texts: dict[str, str]
    files: dict[str, bytes]


def is_form(request: Request) -> bool:
    """Say whether the body is a form."""
    return request.headers.get("content-type", "").startswith("multipart/form-data")


def field_names(request: Request) -> list[str]:
    """Return the names of all fields."""
    form = read_form(request)
    return [*form.texts, *form.files]


def read_form(request: Request) -> Form:
    """Return the fields; of several with one name the last.

    Raises:
        Refused: the body is no form.
    """
    head = f"content-type: {request.headers.get('content-type', '')}\r\n\r\n".encode("latin-1")
    message = BytesParser(policy=email.policy.HTTP).parsebytes(head + request.body)
    if not message.is_multipart():
        raise Refused(400, "the body is no multipart form")
    form = Form({}, {})
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise Refused(400, "a part of the form has no name")
        if part.get_filename() is None:
            form.texts[name] = content.decode("utf-8", "replace")
        else:
            form.files[name] = content
    return form
