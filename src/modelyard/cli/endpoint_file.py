"""An endpoint in a file, TOML or JSON: everything a deployment has, read strictly, all faults with their lines."""

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.cli.autoscale import AUTO
from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.output import Item

if TYPE_CHECKING:
    import msgspec

FILE_BYTES_MAX = 1024 * 1024
NAMES = {"name": "model_name", "artifact": "model_artifact", "engine": "framework"}
"""What a file calls otherwise than the API does; the API's own names are taken too."""

_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_TABLE = re.compile(rf"\s*\[(\[)?\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]")
_ENTRY = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")
_PARAM = re.compile(r"(?:^|(?<=[.;] ))([^\s:;]+): ")


class FaultyFile(Failure):
    """A file with fields that are none or of the wrong type; ``order`` is what it says, ``lines`` where."""

    def __init__(self, message: str, order: Item, lines: Mapping[str, int]) -> None:
        super().__init__(message, Exit.USAGE)
        self.order = order
        self.lines = lines


def read_endpoint_file(file: Path) -> tuple[Item, dict[str, int]]:
    """Return what a file says in the API's names, and the line of each key by its path, like ``hardware.gpu_count``.

    A path in ``artifact`` is meant from the file's own folder.

    Raises:
        Failure: it cannot be read, or (a ``FaultyFile``) has faults; all of them are told at once.
    """
    text = _read(file)
    given, lines = _parse(file, text)
    named: Item = {}
    for name, value in given.items():
        if NAMES.get(name, name) in named:
            names = " and ".join(f"'{one}'" for one in given if NAMES.get(one, one) == NAMES.get(name, name))
            raise Failure(f"{file}: {names} are the same; keep one.", Exit.USAGE)
        named[NAMES.get(name, name)] = value
        lines.setdefault(NAMES.get(name, name), lines.get(name, 0))
    faults = _faults(named)
    autoscale = named.get("autoscale")
    if isinstance(autoscale, dict) and autoscale.get("tier") == AUTO:
        # TOML has no null.
        named["autoscale"] = {**autoscale, "tier": None}
    if artifact := named.get("model_artifact"):
        named["model_artifact"] = _from(file.parent, str(artifact))
    if faults:
        message = f"{file}: {listed(faults, lines)} See docs/how-to/deploy-a-model.md."
        raise FaultyFile(message, named, lines)
    return named, lines


def with_lines(
    error: Refused, file: Path, lines: Mapping[str, int], *, untold: Collection[str] = frozenset()
) -> Refused:
    """Return the platform's refusal with the line of each parameter that it names, in the order of the file.

    What it says of the parameters ``untold`` is left out.
    """
    what, found = _faults_in(error.message, lines)
    faults = [fault for fault in found if fault[0] not in untold]
    message = f"{file}: {what}{listed(faults, lines) if faults else ''}"
    return Refused(message, status=error.status, code=error.code, request_id=error.request_id)


def lines_of_toml(text: str) -> dict[str, int]:
    """Return the line of each key and table by its dotted path; tables of one array are ``name[0]``, ``name[1]``."""
    lines: dict[str, int] = {}
    table = ""
    arrays: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _placed(_path(match[2]), arrays, is_array=bool(match[1]))
            lines.setdefault(table, number)
        elif match := _ENTRY.match(line):
            path = _path(match[1])
            lines.setdefault(f"{table}.{path}" if table else path, number)
    return lines


def _placed(path: str, arrays: dict[str, int], *, is_array: bool) -> str:
    """Return a table's path with the places of the arrays that it is in, of which it may begin the next."""
    found = ""
    steps = path.split(".")
    for at, step in enumerate(steps):
        found = f"{found}.{step}" if found else step
        if is_array and at == len(steps) - 1:
            arrays[found] = arrays.get(found, -1) + 1
        if found in arrays:
            found = f"{found}[{arrays[found]}]"
    return found


def lines_of_json(text: str) -> dict[str, int]:
    """Return the line of each key by its dotted path; arrays count as their key."""
    lines: dict[str, int] = {}
    around: list[str] = []
    key, number = "", 1
    for match in re.finditer(r'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]\n]', text):
        found = match[0]
        if match[2] is not None:
            key = match[1]
            lines.setdefault(".".join(filter(None, [*around, key])), number)
        elif found in ("{", "["):
            around.append(key)
            key = ""
        elif found in ("}", "]") and around:
            around.pop()
        number += found.count("\n")
    return lines


def _read(file: Path) -> str:
    try:
        with file.open("rb") as reader:
            content = reader.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise Failure(f"{file} is larger than {FILE_BYTES_MAX} bytes; an endpoint is a few lines.", Exit.USAGE)
        return content.decode("utf-8")
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}. Check the path.", Exit.NOT_FOUND) from error
    except UnicodeDecodeError as error:
        raise Failure(f"{file} is not UTF-8.", Exit.USAGE) from error


def _parse(file: Path, text: str) -> tuple[Item, dict[str, int]]:
    is_json = file.suffix.lower() == ".json"
    try:
        given: Any = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        raise Failure(f"{file} is not valid {'JSON' if is_json else 'TOML'}: {reason}.", Exit.USAGE) from error
    if not isinstance(given, dict):
        raise Failure(f'{file} holds no object; write {{"name": …}}.', Exit.USAGE)
    return given, lines_of_json(text) if is_json else lines_of_toml(text)


def _faults(named: Item) -> list[tuple[str, str]]:
    # The server's own types: what is refused here is what it would refuse. They load much, so only now.
    from modelyard.control.api.deploy_spec import DeployRequest
    from modelyard.web.gathering import gathered

    request: type[msgspec.Struct] = DeployRequest
    _, flaws = gathered(request, named)
    return [(flaw.param, flaw.reason) for flaw in flaws]


def _faults_in(message: str, lines: Mapping[str, int]) -> tuple[str, list[tuple[str, str]]]:
    """Return a refusal's first sentence, and each parameter that it names with the reason."""
    from modelyard.control.api.deploy_spec import DeployRequest

    # A reason may hold "; available: ", so only what can be a parameter begins a new one.
    names = {*DeployRequest.__struct_fields__, *(key.partition(".")[0] for key in lines)}
    found = [match for match in _PARAM.finditer(message) if re.split(r"[.\[]", match[1])[0] in names]
    ends = [match.start() for match in found[1:]] + [len(message)]
    faults = [
        (match[1], message[match.end() : end].removesuffix("; ")) for match, end in zip(found, ends, strict=False)
    ]
    return message[: found[0].start()] if found else message, faults


def listed(faults: list[tuple[str, str]], lines: Mapping[str, int]) -> str:
    """Return ``line 7, name: why; …`` in the order of the lines; what the file lacks comes last."""
    ours = {theirs: mine for mine, theirs in NAMES.items()}
    placed = sorted(
        ((_line_of(param, lines), ours.get(param, param), reason.rstrip(".")) for param, reason in faults),
        key=lambda one: one[0] or math.inf,
    )
    told = "; ".join(f"line {line}, {name}: {why}" if line else f"{name}: {why}" for line, name, why in placed)
    return told if told.endswith("?") else f"{told}."


def _line_of(param: str, lines: Mapping[str, int]) -> int:
    """Return the line of the nearest key that the file has, 0 where it has none."""
    for path in (param, re.sub(r"\[\d+\]", "", param)):
        steps = path.split(".")
        while steps:
            if line := lines.get(".".join(steps)):
                return line
            steps.pop()
    return 0


def _path(dotted: str) -> str:
    return ".".join(part.strip("\"'") for part in re.findall(_KEY, dotted))


def _from(folder: Path, artifact: str) -> str:
    """Return a path of this machine as an absolute one; anything with a scheme stays."""
    if re.match(r"[a-z][a-z0-9+.-]*:", artifact):
        return artifact
    return str((folder / Path(artifact).expanduser()).absolute())
