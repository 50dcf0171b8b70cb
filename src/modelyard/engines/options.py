"""Reading a deployment's options strictly: each engine has one frozen struct of what it takes.

The texts are shown to the caller of ``deploy``, so they name the option and
say what would be right. msgspec stops at the first fault; all are told here.
"""

import difflib
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from modelyard.engines import Options, OptionsError

T = TypeVar("T", bound=msgspec.Struct)

FAULTS_MAX = 50
_NAME_LENGTH_MAX = 64


def read_options(kind: type[T], options: Options, *, engine: str) -> T:
    """Return ``options`` as a ``kind``, whose fields all have a default.

    Raises:
        OptionsError: unknown options or values of the wrong type or range, naming each.
    """
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise OptionsError(engine, dict(islice(_faults(kind, options, engine), FAULTS_MAX))) from error


def _faults(kind: type[msgspec.Struct], options: Options, engine: str) -> Iterator[tuple[str, str]]:
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in options.items():
        if name not in types:
            yield (
                name[:_NAME_LENGTH_MAX],
                f"the engine '{engine}' has no such option; it takes {', '.join(sorted(types))}",
            )
            continue
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            yield name, _told(value, types[name], error)


def _told(value: object, type: Any, error: msgspec.ValidationError) -> str:
    """Return why ``value`` is not of ``type``, and what is, in words."""
    info = inspect.type_info(type)
    shown = f"'{value[:_NAME_LENGTH_MAX]}'" if isinstance(value, str) else str(value)
    if isinstance(value, bool):
        shown = shown.lower()
    if isinstance(info, inspect.LiteralType):
        words = [str(one) or "''" for one in info.values]
        close = difflib.get_close_matches(str(value), words, n=1)
        guess = f" (did you mean '{close[0]}'?)" if close else ""
        return f"{shown} is no value of it{guess}; it takes {', '.join(words[:-1])} or {words[-1]}"
    if isinstance(info, inspect.BoolType):
        return f"{shown} is neither true nor false"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        kind = "whole number" if isinstance(info, inspect.IntType) else "number"
        return f"{shown} is no {kind}{_bounds(info)}"
    if isinstance(info, inspect.StrType) and not info.pattern:
        most = f" of at most {info.max_length} characters" if info.max_length is not None else ""
        return f"{shown} is no text{most}"
    return str(error).replace("`", "")


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    """Return what a number may be: `` from 1 to 64``."""
    if info.ge is not None and info.le is not None:
        return f" from {info.ge:,} to {info.le:,}"
    words = {"of at least": info.ge, "above": info.gt, "of at most": info.le, "below": info.lt}
    told = [f"{word} {bound:,}" for word, bound in words.items() if bound is not None]
    return f" {' and '.join(told)}" if told else ""
