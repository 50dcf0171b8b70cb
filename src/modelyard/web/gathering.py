"""All that is wrong with the shape of a body, at once.

msgspec stops at the first fault, and every round trip of somebody who is
deploying costs minutes. When its fast decoder refuses a body, this walks the
same types field by field: what fits is taken, what does not is named and
replaced by its default, so that the rest can be judged too.
"""

import difflib
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from modelyard.errors import ApiError
from modelyard.web.choices import words_of
from modelyard.web.decoding import Decoder, decode, refusal

T = TypeVar("T", bound=msgspec.Struct)

FLAWS_MAX = 50
_PARAM_LENGTH_MAX = 120
_NAME_LENGTH_MAX = 64
_EMPTY = {str: "", int: 0, float: 0.0, bool: False}


class Flaw(NamedTuple):
    """One field that does not fit; ``code`` is the error's when it is the only one."""

    param: str
    reason: str
    code: str


def gather(decoder: Decoder[T], type: type[T], body: bytes) -> tuple[T, list[Flaw]]:
    """Return the body with defaults in the place of what does not fit, and all that does not.

    Raises:
        ApiError: 400, it is no JSON object at all.
    """
    try:
        return decoder.decode(body), []
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        value = _anything.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # It cannot be read to its end, so there is one fault: what stopped the first look, or this.
        return decode(decoder, body), []
    if not isinstance(value, dict):
        raise ApiError(400, code="invalid_type", message="Invalid request body: expected object.")
    return gathered(type, value)


def gathered(type: type[T], value: dict[str, Any]) -> tuple[T, list[Flaw]]:
    """Return the same of what is decoded already."""
    flaws: list[Flaw] = []
    found = _struct(type, value, "", flaws)
    return found, flaws[:FLAWS_MAX]


_anything = msgspec.json.Decoder()


def _struct(type: type[T], value: dict[str, Any], path: str, flaws: list[Flaw]) -> T:
    fields = {field.encode_name: field for field in msgspec.structs.fields(type)}
    for name in value.keys() - fields.keys():
        close = difflib.get_close_matches(name, list(fields), n=1)
        hint = f"did you mean '{close[0]}'?" if close else "check its spelling in /docs"
        flaws.append(Flaw(_join(path, name), f"this field does not exist here; {hint}", "unsupported_parameter"))
    kept: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in value:
            if field.required:
                flaws.append(Flaw(_join(path, name), "is required", "missing_required_parameter"))
                kept[field.name] = _EMPTY.get(_bare(field.type))
            continue
        count = len(flaws)
        converted = _value(field.type, value[name], _join(path, name), flaws)
        if len(flaws) == count or converted is not None:
            kept[field.name] = converted
        elif field.required:
            kept[field.name] = _EMPTY.get(_bare(field.type))
    flaws.sort(key=lambda flaw: flaw.param)
    return type(**kept)


def _value(type: Any, value: Any, path: str, flaws: list[Flaw]) -> Any:
    """Return ``value`` as ``type``; what does not fit becomes a flaw, and None or what is left of it."""
    bare = _bare(type)
    if isinstance(value, dict) and isinstance(bare, _StructMeta):
        return _struct(bare, value, path, flaws)
    if isinstance(value, dict) and get_origin(bare) is dict:
        items = {name: _value(get_args(bare)[1], one, _join(path, name), flaws) for name, one in value.items()}
        return {name: one for name, one in items.items() if one is not None}
    if isinstance(value, list) and get_origin(bare) is list:
        found = [_value(get_args(bare)[0], one, f"{path}[{at}]", flaws) for at, one in enumerate(value)]
        return [one for one in found if one is not None]
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        told = refusal(error)
        reason = told.message.partition(": ")[2].rstrip(".") or told.message
        if reason.startswith("invalid enum value") and (words := words_of(type)):
            reason = f"{reason}; use one of {', '.join(words)}"
        flaws.append(Flaw(path, reason, str(told.code)))
        return None


_StructMeta = type(msgspec.Struct)


def _bare(type: Any) -> Any:
    """Return the struct, mapping or list that a type is besides None and unset, or the plain type."""
    if get_origin(type) is Annotated:
        return _bare(get_args(type)[0])
    if (parts := get_args(type)) and get_origin(type) not in (list, dict, tuple):
        inner = [_bare(part) for part in parts if part not in (None, None.__class__, msgspec.UnsetType)]
        return inner[0] if len(inner) == 1 else type
    return type


def _join(path: str, name: str) -> str:
    name = name[:_NAME_LENGTH_MAX]
    return (f"{path}.{name}" if path else name)[:_PARAM_LENGTH_MAX]
