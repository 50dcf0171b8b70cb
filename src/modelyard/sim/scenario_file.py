"""From a scenario's file to what is run: variants of a world of requests, or of a fleet.

A variant is the file with some of its keys changed. Everything that is wrong is found at once and named by its place,
as ``variant[0].hardware.gpu_type``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from modelyard.sim.scenario_body import TABLES_MAX, FleetScenarioBody, ReleaseBody, RequestBody
from modelyard.web.gathering import gathered

VARIANTS_MAX = 32
NAME_LENGTH_MAX = 60
"""Of a variant: it heads a column."""
_TITLE_LENGTH_MAX = 200
_NO_CHANGE = ("seed", "seeds", "level", "title")
"""The same for all variants, or they would not be compared."""
B = TypeVar("B", bound=msgspec.Struct)


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a parameter: what is allowed, and the fix."""

    param: str
    reason: str


class ScenarioError(ValueError):
    """A scenario that cannot be run, with all its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(f"{fault.param}: {fault.reason}" for fault in faults))
        self.faults = tuple(faults)


class Document(msgspec.Struct, frozen=True):
    """A file that was read: its body, and the body of each variant by name."""

    body: RequestBody | FleetScenarioBody
    variants: tuple[tuple[str, RequestBody | FleetScenarioBody], ...]
    places: tuple[str, ...]
    """Where each variant stands, like ``variant[0].``; "" for the file itself."""
    faults: tuple[Fault, ...] = ()
    """What is wrong with their shape. Bodies have defaults there, so that the rest can be judged as well."""


def read(given: Mapping[str, Any]) -> Document:
    """Return what a decoded file says.

    Raises:
        ScenarioError: its level is none, or its variants are no tables: nothing else can be judged.
    """
    data = {name: value for name, value in given.items() if name != "variant"}
    level = data.get("level", "request")
    if level not in ("request", "fleet"):
        raise ScenarioError([Fault("level", f"'{level}' is neither 'request' (one endpoint) nor 'fleet' (many)")])
    kind: type[RequestBody] | type[FleetScenarioBody] = RequestBody if level == "request" else FleetScenarioBody
    listed = given.get("variant", [])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        told = 'write [[variant]], a name and what is different: name = "twice", traffic.rate = 8'
        raise ScenarioError([Fault("variant", told)])
    faults = list(_faults_of_variants(listed))
    body, flaws = _body(kind, data)
    faults += flaws
    known = set(flaws)
    found: list[tuple[str, RequestBody | FleetScenarioBody]] = []
    for place, variant in enumerate(listed[:VARIANTS_MAX]):
        changes = {name: value for name, value in variant.items() if name not in ("name", *_NO_CHANGE)}
        changed, flaws = _body(kind, merged(data, changes))
        faults += [Fault(f"variant[{place}].{flaw.param}", flaw.reason) for flaw in flaws if flaw not in known]
        found.append((str(variant.get("name", "")), changed))
    places = tuple(f"variant[{place}]." for place in range(len(found)))
    return Document(body, tuple(found) or (("figures", body),), places or ("",), tuple(faults))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: tables key by key, in each element where ``base`` has a list of tables."""
    found = dict(base)
    for name, value in changes.items():
        before = found.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            found[name] = merged(before, value)
        elif isinstance(value, Mapping) and isinstance(before, list) and before:
            found[name] = [merged(one, value) if isinstance(one, Mapping) else one for one in before]
        else:
            found[name] = value
    return found


def _faults_of_variants(listed: Sequence[Mapping[str, Any]]) -> Iterator[Fault]:
    if len(listed) > VARIANTS_MAX:
        yield Fault("variant", f"there are {len(listed)}; compare {VARIANTS_MAX} at most")
    names: set[str] = set()
    for place, one in enumerate(listed):
        name = one.get("name")
        if not isinstance(name, str) or not name:
            yield Fault(f"variant[{place}].name", "is required: what the table calls it")
        elif not _is_line(name, NAME_LENGTH_MAX):
            yield Fault(f"variant[{place}].name", f"must be one line of {NAME_LENGTH_MAX} letters at most")
        elif name in names:
            yield Fault(f"variant[{place}].name", f"'{name}' is another one's; give each its own")
        else:
            names.add(name)
        for key in _NO_CHANGE:
            if key in one:
                yield Fault(f"variant[{place}].{key}", "is the same for all variants; say it at the top of the file")


def _is_line(text: str, most: int) -> bool:
    return len(text) <= most and text.isprintable()


def _body(kind: type[B], data: Mapping[str, Any]) -> tuple[B, list[Fault]]:
    """Return a body, and what is wrong with its keys and values."""
    shaped = dict(data)
    if isinstance(shaped.get("traffic"), dict) and kind is RequestBody:
        shaped["traffic"] = [shaped["traffic"]]
    base = {name: value for name, value in shaped.items() if name in ("model", "precision", "hardware", "engine")}
    releases = shaped.get("releases")
    own: list[Fault] = []
    if isinstance(releases, list) and all(isinstance(one, dict) for one in releases):
        for place, one in enumerate(releases):
            _, flaws = gathered(ReleaseBody, one)
            own += _named(flaws, f"releases[{place}].")
        shaped["releases"] = [merged(base, one) for one in releases]
    body, flaws = gathered(kind, shaped)
    for name in ("traffic", "releases", "nodes"):
        if isinstance(shaped.get(name), list) and (number := len(shaped[name])) > TABLES_MAX:
            own.append(Fault(name, f"there are {number}; write {TABLES_MAX} at most"))
    if isinstance(title := shaped.get("title"), str) and not _is_line(title, _TITLE_LENGTH_MAX):
        own.append(Fault("title", f"must be one line of {_TITLE_LENGTH_MAX} letters at most"))
    # What a release has from the file itself is told once.
    told = [flaw for flaw in _named(flaws, "") if not flaw.param.startswith("releases[")]
    return body, [_as_written(flaw, data) for flaw in (*told, *own)]


def _named(flaws: Sequence[Any], before: str) -> list[Fault]:
    see = "see docs/how-to/simulate.md for all there are"
    return [Fault(before + flaw.param, flaw.reason.replace("check its spelling in /docs", see)) for flaw in flaws]


def _as_written(fault: Fault, data: Mapping[str, Any]) -> Fault:
    """Return a fault as the file has it: one table of traffic is no list."""
    if isinstance(data.get("traffic"), dict):
        return Fault(fault.param.replace("traffic[0].", "traffic."), fault.reason)
    return fault
