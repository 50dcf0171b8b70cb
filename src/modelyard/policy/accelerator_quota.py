"""How many accelerators a tenant may have at once (``Limits.accelerators``).

A replica that has an accelerator whole counts 1 for each; one that shares it
counts its share of the memory, so that four quarter models are one accelerator
whoever's they are. A CPU counts as one accelerator, too.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction

from modelyard.domain.nodes import NodeSeen, Placement

Sizes = Mapping[tuple[str, int], int]
"""Memory of each accelerator by node and index."""


def sizes_of(nodes: Iterable[NodeSeen]) -> dict[tuple[str, int], int]:
    """Return the memory of every accelerator."""
    return {(seen.node.id, one.index): one.memory_bytes for seen in nodes for one in seen.node.accelerators}


def share_of(placement: Placement, sizes: Sizes) -> Fraction:
    """Return how many accelerators ``placement`` counts as; one on a node that is gone counts whole."""
    if placement.is_exclusive:
        return Fraction(placement.accelerators)
    total = Fraction(0)
    for part in placement.parts:
        for index in part.accelerators:
            size = sizes.get((part.node_id, index), 0)
            total += Fraction(min(part.memory_bytes, size), size) if size else Fraction(1)
    return total


def refusal(limit: int | None, placed: Iterable[Placement], new: Placement, sizes: Sizes) -> str:
    """Return why a tenant may not have ``new`` beside what it has ``placed``, "" where it may."""
    if limit is None:
        return ""
    used = sum((share_of(placement, sizes) for placement in placed), Fraction(0))
    more = share_of(new, sizes)
    if used + more <= limit:
        return ""
    return f"its tenant may have {limit} accelerators, has {float(used):.2f}, and this one needs {float(more):.2f}"
