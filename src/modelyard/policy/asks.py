"""What is asked of a packer, and what it answers when nothing fits."""

from collections.abc import Iterable, Mapping

import msgspec

from modelyard.domain.endpoints import Tier
from modelyard.domain.nodes import Node, Placement
from modelyard.policy.cluster import Shape


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica needs: ``count`` accelerators with ``memory_bytes`` of each.

    Memory is divided already: weights of 140 GiB over 4 accelerators ask for 35 GiB of each, and what it needs beside.
    """

    memory_bytes: int
    count: int = 1
    kinds: frozenset[str] = frozenset()
    """Kinds of accelerator that its engine runs on; empty: any."""
    nodes_max: int = 1
    """Nodes that it may be divided over (pipeline parallel), the same number of accelerators on each."""
    digest: str = ""
    """Its artifact, for nodes that have it in their weight cache."""
    pool: str = "default"
    may_use_spot: bool = False
    """For batches, and for what others can replace: a spot node may go within two minutes."""
    may_be_simulated: bool = False
    """Its engine loads no weights, so it may run on accelerators that are only declared."""
    cores_milli: int = 0
    """Thousandths of cores on each of its nodes, where the nodes' are counted."""
    is_beside: bool = False
    """Only where somebody is already: it must not take an accelerator that is empty."""
    avoid: frozenset[str] = frozenset()
    """Nodes that come last: it failed there, or a brother of it runs there."""
    tenant_id: str = ""
    tier: Tier | None = None


class Weights(msgspec.Struct, frozen=True):
    """What a place's properties count, in accelerators that are lost for typical asks; prices are configuration."""

    fragmentation: float = 1.0
    """Accelerators that typical asks could not use any more; 0 to pack by the others alone."""
    islands: float = 1.0
    """Each island beyond the first."""
    cached: float = 0.1
    """The weights are there."""
    price: float = 0.1
    """An accelerator of the highest price of the cluster; less for a share of it, or a lower price."""
    spot: float = 0.05
    """Being spot, for what may use it: it is cheaper, and leaves the others to those who may not."""
    avoid: float = 100.0
    opened: float = 0.0
    """An accelerator that was empty, for what may share one: above 0 where empty ones are given back or cost less."""


STANDARD = Weights()


class NoRoom(msgspec.Struct, frozen=True):
    """Nothing fits, why, and what would help."""

    reason: str
    needed_bytes: int
    """Of each accelerator."""
    largest_free_bytes: int = 0
    """The most that is free on an accelerator that the ask may be on."""
    largest_free_node: str = ""
    helps: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The reason with what would help."""
        return "; ".join((self.reason, *self.helps))


def refused(ask: Ask, shape: Shape) -> str:
    """Return why ``ask`` may not be on accelerators of ``shape`` whatever is free there, "" where it may."""
    if ask.kinds and shape.kind not in ask.kinds:
        return f"of kind {shape.kind}"
    if shape.pool != ask.pool:
        return f"in pool {shape.pool}"
    if shape.is_spot and not ask.may_use_spot:
        return "spot"
    if shape.is_simulated and not ask.may_be_simulated:
        return "simulated"
    return "" if ask.memory_bytes <= shape.memory_bytes else "too small"


def crowded(placements: Iterable[Placement], nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the nodes where such replicas share accelerators: two of one model on one are no faster than one.

    What holds more than half of an accelerator cannot meet its like there.
    """
    found = set()
    for placement in placements:
        if placement.is_exclusive or not placement.parts:
            continue
        (part,) = placement.parts
        node = nodes.get(part.node_id)
        sizes = [one.memory_bytes for one in node.accelerators if one.index in part.accelerators] if node else []
        if any(2 * part.memory_bytes <= size for size in sizes):
            found.add(part.node_id)
    return frozenset(found)


def gib(size_bytes: int) -> str:
    """Return a size as people read it: ``18.8``."""
    return f"{size_bytes / 1024**3:.1f}"
