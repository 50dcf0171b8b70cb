"""Reading a deployment's options strictly: each engine has one frozen struct of what it takes.

The texts are shown to the caller of ``deploy``, so they name the option and
say what would be right.
"""

import re
from typing import TypeVar

import msgspec

from modelyard.engines import Options

T = TypeVar("T", bound=msgspec.Struct)

_AT_FIELD = re.compile(r"(?P<why>.*?) - at `\$\.(?P<name>[^`]+)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")


def read_options(kind: type[T], options: Options, *, engine: str) -> T:
    """Return ``options`` as a ``kind``.

    Raises:
        ValueError: an unknown option or a value of the wrong type or range, naming it.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if unknown := _UNKNOWN.match(text):
            known = ", ".join(sorted(kind.__struct_fields__))
            raise ValueError(f"Unknown option '{unknown['name']}' for engine '{engine}'; it takes: {known}.") from error
        if wrong := _AT_FIELD.match(text):
            raise ValueError(f"Option '{wrong['name']}' of engine '{engine}': {wrong['why']}.") from error
        raise ValueError(f"Options of engine '{engine}': {text}.") from error
