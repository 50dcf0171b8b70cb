"""Reading a deployment's options strictly: each engine has one frozen struct of what it takes.

The texts are shown to the caller of ``deploy``, so they name the option and
say what would be right. msgspec stops at the first fault; all are told here.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import msgspec

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
            yield name, str(error)
