"""Accelerators that are paid for and have no replica: the waste that no endpoint's costs show.

Replicas' hours add up to what replicas took. What nobody took is nobody's
hour; it is told as it is now, by the hour, since nodes come and go.
"""

from collections.abc import Iterable, Mapping

import msgspec

from modelyard.domain.nodes import Node, Placement
from modelyard.policy.gpu_costs import price_of

SHARE_MIN = 0.05
"""Less than that of one is what replicas leave over."""


class FreeAccelerators(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerators of one kind in one pool of nodes. ``hourly_nanousd`` is what the free ones cost in an hour."""

    accelerator: str
    pool: str
    total: float
    free: float
    hourly_nanousd: int
    fix: str


def free_accelerators(
    nodes: Iterable[Node], placements: Iterable[Placement], prices: Mapping[str, int]
) -> list[FreeAccelerators]:
    """Return what is free now, the dearest first; nothing of what costs nothing."""
    by_id = {node.id: node for node in nodes}
    taken = _taken(placements, by_id)
    sums: dict[tuple[str, str], tuple[int, float, float]] = {}
    for node in by_id.values():
        for accelerator in node.accelerators:
            free = max(0.0, 1.0 - taken.get((node.id, accelerator.index), 0.0))
            total, all_free, cost = sums.get((accelerator.kind, node.pool), (0, 0.0, 0.0))
            price = price_of(node, accelerator.kind, prices)
            sums[accelerator.kind, node.pool] = (total + 1, all_free + free, cost + free * price)
    found = [
        FreeAccelerators(
            accelerator=kind,
            pool=pool,
            total=total,
            free=free,
            hourly_nanousd=round(cost),
            fix="put something there, or let nodes go: modelyard nodes",
        )
        for (kind, pool), (total, free, cost) in sums.items()
        if free >= SHARE_MIN and round(cost)
    ]
    return sorted(found, key=lambda one: (-one.hourly_nanousd, one.accelerator, one.pool))


def _taken(placements: Iterable[Placement], nodes: Mapping[str, Node]) -> dict[tuple[str, int], float]:
    """Return the share that is taken of each accelerator, by node and index."""
    memory = {(id, one.index): one.memory_bytes for id, node in nodes.items() for one in node.accelerators}
    found: dict[tuple[str, int], float] = {}
    for placement in placements:
        for part in placement.parts:
            for index in part.accelerators:
                key = (part.node_id, index)
                share = 1.0 if placement.is_exclusive else part.memory_bytes / max(memory.get(key, 0), 1)
                found[key] = found.get(key, 0.0) + min(share, 1.0)
    return found
