"""From bytes to typed requests, and from msgspec's complaints to ours.

Every JSON body of the platform goes through ``decode``: strict (no ``"1"``
for 1, no NaN), bounded in depth, and with an error that names the parameter
by its path. Starlette is not imported here, because the gateway uses this
module and does without it.
"""

import re
from collections.abc import Hashable
from functools import cache
from typing import Any, Protocol, TypeVar, get_origin
from urllib.parse import parse_qsl

import msgspec

from modelyard.errors import ApiError, invalid_json, invalid_value, missing_parameter, unsupported_parameter
from modelyard.web.choices import choices

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

QUERY_FIELDS_MAX = 64

_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_EMPTY = {"Expected `array` of length >= 1": "empty_array"}
_PARAM_LENGTH_MAX = 120


_PATTERNS: dict[str, str] = {}
"""What is to be said of texts that do not have a form, by its regular expression: nobody else can read that."""


def pattern(regex: str, words: str) -> str:
    """Return ``regex`` for a ``msgspec.Meta``; a text that it does not match is refused with ``words``."""
    _PATTERNS[regex] = words
    return regex


class Decoder(Protocol[T_co]):
    """What ``msgspec.json.Decoder`` and its likes offer."""

    def decode(self, data: bytes, /) -> T_co:
        """Return the value, or raise."""
        ...


def decode(decoder: Decoder[T], body: bytes) -> T:
    """Return the decoded body.

    Raises:
        ApiError: 400, with the path of the bad parameter where there is one.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise refusal(error, getattr(decoder, "type", None)) from None
    except RecursionError:
        raise invalid_json("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        # UnicodeDecodeError is a ValueError; its text may repeat the input, so it is cut.
        raise invalid_json(_short(str(error).removeprefix("JSON is malformed: "))) from None


def refusal(error: msgspec.ValidationError, wanted: Any = None) -> ApiError:
    """Return the 400 for ``error``, with the code that fits its kind; ``wanted`` is the type that was decoded."""
    param, reason = _split(error)
    if reason.startswith("Invalid enum value") and (known := choices(wanted, param)):
        reason = f"{_short(reason, 60)}; use one of {', '.join(known)}"
    field = _FIELD.match(reason)
    if field is not None and field[1] == "missing required":
        return missing_parameter(param)
    if field is not None:
        return unsupported_parameter(param, "this field does not exist here; check its spelling in /docs")
    for regex, words in _PATTERNS.items():
        if reason.endswith(f"matching regex {regex!r}"):
            reason = words
    text = _short(reason.replace("`", ""))
    text = text[:1].lower() + text[1:]
    code = "invalid_type" if ", got " in text else _EMPTY.get(reason, "invalid_value")
    if not param:
        return ApiError(400, code=code, message=f"Invalid request body: {text}.")
    return invalid_value(param, text, code=code)


def decode_query(type: type[T], query: bytes) -> T:
    """Return the query string as a struct; numbers and booleans are read from their text.

    A field that is a tuple may be given several times, as ``name`` or ``name[]`` (OpenAI's SDKs), or with commas.

    Raises:
        ApiError: 400 for an unknown, repeated or bad parameter.
    """
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX
        )
    except ValueError:
        raise invalid_value("query", "it is no valid query string") from None
    struct: Any = type
    lists = _lists_of(struct)
    found: dict[str, str | list[str]] = {}
    for name, value in pairs:
        if "\0" in value:
            # Nothing that is asked for has one, and Postgres refuses texts that do.
            raise invalid_value(name[:_PARAM_LENGTH_MAX], "it has a NUL character")
        if (plain := name.removesuffix("[]")) in lists:
            values = found.setdefault(plain, [])
            assert isinstance(values, list), "only lists are kept under the names of lists"
            values += [part for part in value.split(",") if part]
        elif name in found:
            raise invalid_value(name[:_PARAM_LENGTH_MAX], "it is given more than once")
        else:
            found[name] = value
    try:
        return msgspec.convert(found, type, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error, type) from None


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    text = str(error)
    place = _PLACE.search(text)
    path = ""
    if place is not None:
        # "[...]" is msgspec's way to say "some value of this mapping".
        path = place[1].removesuffix("[...]").removeprefix(".")
        text = text[: place.start()]
    field = _FIELD.match(text)
    if field is not None:
        path = f"{path}.{field[2]}" if path else field[2]
    return path[:_PARAM_LENGTH_MAX], text


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + "…"


@cache
def _lists_of(kind: Hashable) -> frozenset[str]:
    """Return the names of a struct's fields that are tuples."""
    assert isinstance(kind, type), "a struct's class"
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if _is_tuple(field.type))


def _is_tuple(kind: Any) -> bool:
    return get_origin(getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind) is tuple
