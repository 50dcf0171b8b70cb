"""Ways to pack: ours, and those of the FGD paper, each on the same cluster."""

import random
from collections.abc import Callable, Iterator

from modelyard.domain.nodes import Part, Placement
from modelyard.policy.asks import Ask, refused
from modelyard.policy.cluster import Block, Cluster
from modelyard.policy.fragmentation import Mix
from modelyard.policy.packing import find

Packer = Callable[[Ask, Cluster], Placement | None]
_TRIES = 100
"""Nodes that chance looks at before it counts out those that have room."""

Place = tuple[Block, tuple[int, ...]]


def fgd(mix: Mix) -> Packer:
    """Ours: fragmentation gradient descent."""
    return lambda ask, cluster: find(ask, cluster, mix)


def chance(seed: int) -> Packer:
    """Any node that has room, and any accelerator of it."""
    dice = random.Random(seed)

    def pack(ask: Ask, cluster: Cluster) -> Placement | None:
        for _ in range(_TRIES):
            block = dice.choice(cluster.blocks)
            if places := list(_of_block(ask, block)):
                return _placement(ask, dice.choice(places))
        nodes: dict[int, list[Place]] = {}
        for place in _places(ask, cluster):
            nodes.setdefault(place[0].order, []).append(place)
        return _placement(ask, dice.choice(nodes[dice.choice(list(nodes))])) if nodes else None

    return pack


def by(rank: Callable[[Ask, Block, tuple[int, ...]], tuple[float, ...]]) -> Packer:
    """The place whose rank is least; of equals, the first node."""

    def pack(ask: Ask, cluster: Cluster) -> Placement | None:
        found = [(rank(ask, *place), place[0].order, place[1], place) for place in _places(ask, cluster)]
        return _placement(ask, min(found, key=lambda one: one[:3])[3]) if found else None

    return pack


def best_fit(ask: Ask, block: Block, positions: tuple[int, ...]) -> tuple[float, ...]:
    """The node with the least left, and of its accelerators the fullest."""
    return (sum(slot.free for slot in block.slots()), block.slot(positions[0]).free)


def spread(ask: Ask, block: Block, positions: tuple[int, ...]) -> tuple[float, ...]:
    """The node with the most left."""
    return (-sum(slot.free for slot in block.slots()), -block.slot(positions[0]).free)


def gpu_packing(ask: Ask, block: Block, positions: tuple[int, ...]) -> tuple[float, ...]:
    """Shared accelerators first, then empty ones of nodes in use, then empty nodes (MLaaS in the Wild)."""
    slots = block.slots()
    is_shared = not slots[positions[0]].is_empty
    is_in_use = any(not slot.is_empty for slot in slots)
    return (0 if is_shared else 1 if is_in_use else 2, slots[positions[0]].free, sum(slot.free for slot in slots))


def _places(ask: Ask, cluster: Cluster) -> Iterator[Place]:
    """Yield every place that fits, of nodes in the same state the first only."""
    for klass, members in cluster.classes.items():
        fits = sum(slot.free >= ask.memory_bytes and (ask.count == 1 or slot.is_empty) for slot in klass.slots)
        if fits >= ask.count:
            yield from _of_block(ask, cluster.blocks[min(members)])


def _of_block(ask: Ask, block: Block) -> Iterator[Place]:
    """Yield the places in one block: each accelerator that has room, or the first ones that are empty."""
    if refused(ask, block.shape) or ask.cores_milli > block.cores.free:
        return
    slots = block.slots()
    if ask.count == 1:
        yield from ((block, (at,)) for at, slot in enumerate(slots) if slot.free >= ask.memory_bytes)
        return
    empty = [at for at, slot in enumerate(slots) if slot.is_empty]
    if len(empty) >= ask.count:
        yield block, tuple(empty[: ask.count])


def _placement(ask: Ask, place: Place) -> Placement:
    block, positions = place
    return Placement(
        (Part(block.node.id, tuple(block.indices[at] for at in positions), ask.memory_bytes, ask.cores_milli),)
    )
