"""A scenario, ready to run: its variants, its seeds, and one way to run either level."""

from collections.abc import Mapping
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
    body, faults = document.body, []
    first, number = body.seed, seeds or body.seeds
    found: list[Variant | FleetVariant] = []
    for (name, changed), place in zip(document.variants, document.places, strict=True):
        try:
            if isinstance(changed, RequestBody):
                found.append(worlds.variant_of(name, changed, folder))
            else:
                found.append(fleets.variant_of(name, changed))
        except ScenarioError as error:
            faults += [Fault(place + fault.param, fault.reason) for fault in error.faults]
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
