"""Ten thousand endpoints on thousands of accelerators, by ticks, with the production's policies (ADR 0041).

``simulate`` runs one scenario. It needs numpy, which the core of Modelyard does not: ``pip install 'modelyard[sim]'``.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.rates import Client

if TYPE_CHECKING:
    from modelyard.sim.fleet.tally import Outcome
    from modelyard.sim.fleet.world import Sizer

__all__ = ["Scenario", "simulate"]


def simulate(
    scenario: Scenario,
    clients: Sequence[Client],
    chance: random.Random,
    *,
    sizer: "Sizer | None" = None,
    watch: Callable[[float], None] | None = None,
) -> "Outcome":
    """Run ``scenario`` with the traffic of ``clients``; the same ``chance`` gives the same outcome.

    Raises:
        ImportError: numpy is not installed.
        ValueError: no client covers enough days.
    """
    try:
        from modelyard.sim.fleet.population import populate
        from modelyard.sim.fleet.prewarm import for_world
        from modelyard.sim.fleet.world import World
    except ImportError as error:
        raise ImportError("the fleet simulator needs numpy: pip install 'modelyard[sim]'") from error
    seeds = [chance.getrandbits(63) for _ in range(3)]
    population = populate(scenario, clients, random.Random(seeds[0]))
    world = World(scenario, population, random.Random(seeds[1]), sizer=sizer)
    if scenario.measures.prewarm and scenario.measures.scale_to_zero:
        world.prewarm = for_world(world, random.Random(seeds[2]))
    return world.run(watch)
