"""From a scenario's file to what is run: variants of a world of requests, or of a fleet.

A variant is the file with some of its keys changed. Everything that is wrong is found at once and named by its place,
as ``variant[0].hardware.gpu_type``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from modelyard.sim.scenario_body import FleetScenarioBody, ReleaseBody, RequestBody
from modelyard.web.gathering import gathered

VARIANTS_MAX = 32
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


def read(given: Mapping[str, Any]) -> Document:
    """Return what a decoded file says.

    Raises:
        ScenarioError: it has faults.
    """
    data = {name: value for name, value in given.items() if name != "variant"}
    level = data.get("level", "request")
    if level not in ("request", "fleet"):
        raise ScenarioError([Fault("level", f"'{level}' is neither 'request' (one endpoint) nor 'fleet' (many)")])
    kind: type[RequestBody] | type[FleetScenarioBody] = RequestBody if level == "request" else FleetScenarioBody
    listed = given.get("variant", [])
    faults = list(_faults_of_variants(listed))
    body, flaws = _body(kind, data)
    faults += flaws
    if faults:
        raise ScenarioError(faults)
    found: list[tuple[str, RequestBody | FleetScenarioBody]] = []
    places = []
    for place, variant in enumerate(listed):
        changes = {name: value for name, value in variant.items() if name != "name"}
        changed, flaws = _body(kind, merged(data, changes))
        faults += [Fault(f"variant[{place}].{flaw.param}", flaw.reason) for flaw in flaws]
        found.append((variant["name"], changed))
        places.append(f"variant[{place}].")
    if faults:
        raise ScenarioError(faults)
    return Document(body, tuple(found) or (("figures", body),), tuple(places) or ("",))


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


def _faults_of_variants(listed: Any) -> Iterator[Fault]:
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        yield Fault("variant", 'write [[variant]], a name and what is different: name = "twice", traffic.rate = 8')
        return
    if len(listed) > VARIANTS_MAX:
        yield Fault("variant", f"there are {len(listed)}; compare {VARIANTS_MAX} at most")
    names: set[str] = set()
    for place, one in enumerate(listed):
        name = one.get("name")
        if not isinstance(name, str) or not name:
            yield Fault(f"variant[{place}].name", "is required: what the table calls it")
        elif name in names:
            yield Fault(f"variant[{place}].name", f"'{name}' is another one's; give each its own")
        else:
            names.add(name)
        for key in _NO_CHANGE:
            if key in one:
                yield Fault(f"variant[{place}].{key}", "is the same for all variants; say it at the top of the file")


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
