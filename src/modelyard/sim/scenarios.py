"""A scenario, ready to run: its variants, its seeds, and one way to run either level."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelyard.sim import fleets, runs, worlds
from modelyard.sim.fleets import FleetVariant
from modelyard.sim.rates import Client
from modelyard.sim.results import Results
from modelyard.sim.runs import Progress, Variant
from modelyard.sim.scenario_body import FleetScenarioBody, RequestBody
from modelyard.sim.scenario_file import Fault, ScenarioError, read


class Scenario(msgspec.Struct, frozen=True):
    """What is run."""

    title: str
    seeds: tuple[int, ...]
    worlds: tuple[Variant, ...] = ()
    fleets: tuple[FleetVariant, ...] = ()
    clients: tuple[Client, ...] = ()
    """Whose rates drive a fleet."""

    @property
    def number(self) -> int:
        """How many runs it is."""
        return len(self.seeds) * (len(self.worlds) + len(self.fleets))


def scenario_of(given: Mapping[str, Any], folder: Path, *, seeds: int | None = None) -> Scenario:
    """Return the scenario of a decoded file; paths in it are meant from ``folder``.

    Raises:
        ScenarioError: it cannot be run.
    """
    document = read(given)
    body, faults = document.body, list(document.faults)
    first, number = body.seed, seeds or body.seeds
    found: list[Variant | FleetVariant] = []
    own: set[Fault] | None = None
    for (name, variant), place in zip(document.variants, document.places, strict=True):
        try:
            found.append(_variant(name, variant, folder, place))
        except ScenarioError as error:
            # What is wrong in the file itself is so in each variant, and told once.
            own = set(_faults(body, folder)) if own is None else own
            told = [one if one in own else Fault(place + one.param, one.reason) for one in error.faults]
            faults += [one for one in told if one not in faults and not _follows(one, document.faults)]
    if faults:
        raise ScenarioError(faults)
    clients = fleets.rates_of(body, folder) if isinstance(body, FleetScenarioBody) else ()
    return Scenario(
        title=body.title,
        seeds=tuple(range(first, first + number)),
        worlds=tuple(one for one in found if isinstance(one, Variant)),
        fleets=tuple(one for one in found if isinstance(one, FleetVariant)),
        clients=tuple(clients),
    )


def _variant(name: str, body: RequestBody | FleetScenarioBody, folder: Path, place: str) -> Variant | FleetVariant:
    if isinstance(body, RequestBody):
        return worlds.variant_of(name, body, folder, place=place)
    return fleets.variant_of(name, body)


def _faults(body: RequestBody | FleetScenarioBody, folder: Path) -> Sequence[Fault]:
    try:
        _variant("", body, folder, "")
    except ScenarioError as error:
        return error.faults
    return ()


def _follows(fault: Fault, shape: Sequence[Fault]) -> bool:
    """Say whether a fault may be one only because a default is in the place of what could not be read."""
    beside = ("engine", "model", "precision") if fault.param.endswith("hardware") else ()
    return any(one.param.startswith((fault.param, *beside)) for one in shape)


def run(scenario: Scenario, progress: Progress | None = None) -> Results:
    """Run all of it; equal scenarios give equal results.

    Raises:
        ScenarioError: a file of requests cannot be read.
        ImportError: numpy is not installed.
    """
    title = scenario.title
    if scenario.fleets:
        return fleets.run_all(scenario.fleets, scenario.clients, scenario.seeds, title=title, progress=progress)
    return runs.run_all(scenario.worlds, scenario.seeds, title=title, progress=progress)
