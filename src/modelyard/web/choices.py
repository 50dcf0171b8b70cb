"""What may stand where one of a few words must: msgspec's complaints do not say it."""

from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_CHOICES_MAX = 12
"""More are no help in a line."""


def choices(kind: Any, path: str) -> tuple[str, ...]:
    """Return the words that the field at ``path`` of a struct may have; none where it is not plain which they are."""
    for step in path.replace("[...]", "").split("."):
        found = [one for one in _plain(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        if len(found) != 1:
            return ()
        types = {field.encode_name: field.type for field in msgspec.structs.fields(found[0])}
        if step not in types:
            return ()
        kind = types[step]
    return words_of(kind)


def words_of(kind: Any) -> tuple[str, ...]:
    """Return the words that a value of ``kind`` may have."""
    words: list[str] = []
    for one in _plain(kind):
        if get_origin(one) is Literal:
            words += map(str, get_args(one))
        elif isinstance(one, type) and issubclass(one, Enum):
            words += [str(member.value) for member in one]
    return tuple(words) if len(words) <= _CHOICES_MAX else ()


def _plain(kind: Any) -> list[Any]:
    """Return the types that a field may have, without notes on them."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [plain for one in get_args(kind) for plain in _plain(one)]
    return [kind]
