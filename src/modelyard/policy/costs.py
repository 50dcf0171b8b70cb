"""What a place costs: the price of its accelerators, and of one that is shared the part that is taken."""

from collections.abc import Iterable, Mapping

from modelyard.domain.nodes import Node, Placement


def hourly_nanousd(placement: Placement, nodes: Mapping[str, Node]) -> int:
    """Return the nano-dollars that a replica at ``placement`` costs in an hour; nodes that are gone cost nothing."""
    total = 0.0
    for part in placement.parts:
        node = nodes.get(part.node_id)
        for accelerator in node.accelerators if node else ():
            if node is not None and accelerator.index in part.accelerators:
                share = 1.0 if placement.is_exclusive else part.memory_bytes / max(accelerator.memory_bytes, 1)
                total += node.price_nanousd * min(share, 1.0)
    return round(total)


def total_hourly_nanousd(placements: Iterable[Placement], nodes: Mapping[str, Node]) -> int:
    """Return what all of ``placements`` cost in an hour."""
    return sum(hourly_nanousd(placement, nodes) for placement in placements)
