"""The scenarios that are compared: each measure on top of the ones before, and the fleet without parts of it."""

import msgspec

from modelyard.domain.endpoints import SOURCE, IdleTime
from modelyard.sim.fleet.scenario import NODES, Measures, Nodes, Scenario, Traffic

NOTHING = Measures(
    scale_to_zero=False, pooling=False, packing=False, quantised=False, continuous=False, backfill=False, prewarm=False
)
"""One dedicated replica an endpoint, weights in 16 bits, batches that start and end together."""
SOURCES = msgspec.structs.replace(SOURCE, batch_scales=False)
"""The source's numbers; what is shipped instead is what ``bench.fleet.search`` found, and a scenario's default."""
SLEEPY = msgspec.structs.replace(Scenario().rules, idle=IdleTime.FIXED)
"""As shipped, for engines that sleep: who is back at once need not weigh when to stay awake."""
DENSE = {"sleeping": True, "consolidating": True, "warm_pools": True}
"""What makes a fleet denser, on top of all others."""
STEPS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("one dedicated replica each, 16 bits, batches of 8 that end together", {}),
    ("+ scale to zero, pre-warmed", {"scale_to_zero": True, "prewarm": True}),
    ("+ adapters pooled on their bases", {"pooling": True}),
    ("+ small models packed", {"packing": True}),
    ("+ quantised", {"quantised": True}),
    ("+ continuous batching", {"continuous": True}),
    ("+ batches on idle replicas", {"backfill": True}),
)
DENSER: tuple[tuple[str, dict[str, bool]], ...] = (
    ("+ engines sleep beside their weights, by turns", {"sleeping": True}),
    ("+ replicas move together", {"consolidating": True}),
    ("+ warm pools of stock models", {"warm_pools": True}),
)
"""What came after the search: each on top of the ones before, with its settings."""


def scaled(endpoints: int, hours: float, **changes: object) -> Scenario:
    """Return the standard scenario with fewer endpoints: nodes and bases in proportion."""
    share = endpoints / Traffic().endpoints
    traffic = Traffic(endpoints=endpoints, bases=max(4, round(Traffic().bases * share)))
    return Scenario(nodes=nodes(share), traffic=traffic, hours=hours, **changes)


def nodes(share: float) -> tuple[Nodes, ...]:
    """Return ``share`` of the standard nodes."""
    return tuple(msgspec.structs.replace(one, count=max(4, round(one.count * share))) for one in NODES)


def steps(endpoints: int, hours: float) -> list[tuple[str, Scenario]]:
    """Return the scenarios by name, each with one measure more, and nodes enough for the first as well."""
    measures, found = NOTHING, []
    for name, more in STEPS:
        measures = msgspec.structs.replace(measures, **more)
        one = scaled(endpoints, hours, measures=measures, rules=SOURCES)
        found.append((name, msgspec.structs.replace(one, nodes=nodes(8 * endpoints / Traffic().endpoints))))
    found.append(
        ("+ settings that the search found, as shipped", msgspec.structs.replace(found[-1][1], rules=Scenario().rules))
    )
    for name, more in DENSER:
        measures = msgspec.structs.replace(measures, **more)
        found.append((name, msgspec.structs.replace(found[-1][1], measures=measures, rules=SLEEPY)))
    return found


def best(endpoints: int, hours: float) -> Scenario:
    """Return the standard scenario with all measures, and the settings of the search."""
    return scaled(endpoints, hours, measures=Measures(**DENSE), rules=SLEEPY)
