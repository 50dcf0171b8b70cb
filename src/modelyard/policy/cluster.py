"""What is free where: the nodes and what is placed on them, as one packing round sees and changes it.

The accelerators of a node that have one kind and size are a *block*; what a
replica has of a node lies within one. Blocks in the same state share one
``BlockClass``, so that a decision looks at classes, not at thousands of nodes.
``take`` and ``give_back`` are each other's inverse and cost one block each.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement

CPU = "cpu"
MANY_CORES = 1 << 60
"""Where nobody counts them."""
QUANTA = 64
"""Fragmentation is counted in 64ths of an accelerator: finer parts would only make more states than anyone repeats."""


class Slot(NamedTuple):
    """An accelerator as the packer sees it: its island, bytes that are free, and whether nobody is on it."""

    island: int
    free: int
    is_empty: bool


class Shape(NamedTuple):
    """What blocks of one class have in common besides what is free."""

    kind: str
    memory_bytes: int
    pool: str
    is_spot: bool
    is_simulated: bool
    price_nanousd: int


@dataclass(slots=True, frozen=True, eq=False)
class BlockClass:
    """Blocks that differ in nothing a decision looks at; one object a state, so that it can be looked up by identity.

    ``quanta`` has a number for each accelerator, sorted: free 64ths, doubled, and 1 more where nobody is on it.
    ``cores`` are thousandths that are free on the node; where they are counted, ``beside`` are its other blocks, for
    whom what is placed here leaves fewer.
    """

    shape: Shape
    slots: tuple[Slot, ...]
    quanta: tuple[int, ...]
    cores: int = MANY_CORES
    beside: tuple[tuple[str, int, tuple[int, ...]], ...] = ()


@dataclass(slots=True, eq=False)
class Cores:
    """Thousandths of cores that are free on a node: its blocks have them together."""

    free: int


class Block:
    """A node's accelerators of one kind and memory, and what is taken of each."""

    __slots__ = (
        "capacity",
        "cores",
        "exclusive",
        "indices",
        "is_open",
        "islands",
        "klass",
        "node",
        "order",
        "shape",
        "shares",
        "taken",
    )

    def __init__(
        self, order: int, node: Node, accelerators: list[Accelerator], cores: "Cores", *, is_open: bool
    ) -> None:
        first = accelerators[0]
        self.order = order
        self.node = node
        self.shape = Shape(
            first.kind, first.memory_bytes, node.pool, node.is_spot, node.is_simulated, node.price_nanousd
        )
        self.is_open = is_open
        """Whether something may be placed there: the node is ready and not cordoned."""
        self.indices = [accelerator.index for accelerator in accelerators]
        self.islands = [accelerator.island for accelerator in accelerators]
        self.capacity = [accelerator.memory_bytes for accelerator in accelerators]
        """Bytes that are not in use by strangers."""
        self.taken = [0] * len(accelerators)
        self.shares = [0] * len(accelerators)
        """Parts that are on it, exclusive ones too."""
        self.exclusive = [0] * len(accelerators)
        self.cores = cores
        self.klass: BlockClass | None = None

    def slot(self, position: int) -> Slot:
        """Return what is free of one accelerator: nothing where one that needs it whole is on it."""
        free = 0 if self.exclusive[position] else max(0, self.capacity[position] - self.taken[position])
        return Slot(self.islands[position], free, self.shares[position] == 0)

    def slots(self) -> tuple[Slot, ...]:
        """Return what is free of each."""
        return tuple([self.slot(position) for position in range(len(self.indices))])


CORDONED = "cordoned"
"""Why a node takes nothing new, and what is there goes on."""


@dataclass(slots=True)
class Cluster:
    """All blocks, and the open ones by class. Owned by the round that built it; every change goes through it."""

    blocks: list[Block] = field(default_factory=list)
    closed: dict[str, str] = field(default_factory=dict)
    """Nodes that take nothing, with the reason."""
    cached: dict[str, frozenset[str]] = field(default_factory=dict)
    """Ids of the nodes that have an artifact in their weight cache, by its digest."""
    classes: dict[BlockClass, set[int]] = field(default_factory=dict)
    """Open blocks by class, as positions in ``blocks``."""
    price_max: int = 0
    scores: dict[object, object] = field(default_factory=dict)
    """What the packer worked out for a class, by what was asked: most of it holds for the next decision."""
    _known: dict[tuple[object, ...], BlockClass] = field(default_factory=dict)
    _where: dict[tuple[str, int], tuple[Block, int]] = field(default_factory=dict)
    _of_node: dict[str, list[Block]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, nodes: Iterable[NodeSeen], placements: Iterable[Placement] = (), left: Iterable[tuple[Placement, int]] = ()
    ) -> "Cluster":
        """Return the cluster of ``nodes`` with ``placements`` on it; parts on nodes that are gone count nowhere.

        ``left`` is what ``leave`` would be told.
        """
        cluster = cls()
        placed = list(placements)
        seen = list(nodes)
        for node in seen:
            cluster._add(node)
        for placement in placed:
            for block, positions, part in cluster._parts(placement):
                _take(block, positions, part, is_exclusive=placement.is_exclusive, sign=1)
            cluster._take_cores(placement, 1)
        for placement, bytes_each in left:
            for block, positions, _ in cluster._parts(placement):
                for position in positions:
                    block.taken[position] += bytes_each
        for node in seen:
            cluster._measure(node)
        for block in cluster.blocks:
            cluster._sort_in(block)
        return cluster

    def take(self, placement: Placement) -> None:
        """Count what ``placement`` has as taken."""
        self._change(placement, 1)

    def give_back(self, placement: Placement) -> None:
        """Undo ``take``."""
        self._change(placement, -1)

    def leave(self, placement: Placement, bytes_each: int) -> None:
        """Count ``bytes_each`` of each accelerator as taken by one that sleeps there, and holds up nobody."""
        self._leave(placement, bytes_each)

    def clear(self, placement: Placement, bytes_each: int) -> None:
        """Undo ``leave``."""
        self._leave(placement, -bytes_each)

    def close(self, node_id: str, reason: str) -> None:
        """Place nothing more on a node; what is there stays counted."""
        self.closed[node_id] = reason
        for block in self.blocks_of(node_id):
            block.is_open = False
            self._sort_out(block)

    def open(self, node_id: str) -> None:
        """Undo ``close``."""
        self.closed.pop(node_id, None)
        for block in self.blocks_of(node_id):
            block.is_open = True
            self._sort_in(block)

    def blocks_of(self, node_id: str) -> list[Block]:
        """Return the blocks of a node."""
        return self._of_node.get(node_id, [])

    def free_bytes(self, node_id: str, index: int) -> int | None:
        """Return the free bytes of an accelerator, None where there is no such one."""
        found = self._where.get((node_id, index))
        return None if found is None else found[0].slot(found[1]).free

    def shares(self, node_id: str, index: int) -> int:
        """Return how many are on an accelerator."""
        block, position = self._where[node_id, index]
        return block.shares[position]

    def has_room(self, placement: Placement) -> bool:
        """Say whether ``placement`` could be taken now, at that very place; a cordon is no matter to who is there."""
        parts = self._parts(placement)
        if sum(len(positions) for _, positions, _ in parts) < placement.accelerators:
            return False  # a node is gone
        if any(part.cores_milli > block.cores.free for block, _, part in parts):
            return False
        slots = [(block.slot(at), part) for block, positions, part in parts for at in positions]
        is_ready = all(self.closed.get(part.node_id, CORDONED) == CORDONED for part in placement.parts)
        return (
            is_ready
            and len(slots) == placement.accelerators
            and all(
                slot.free >= part.memory_bytes and (slot.is_empty or not placement.is_exclusive) for slot, part in slots
            )
        )

    def _add(self, seen: NodeSeen) -> None:
        node = seen.node
        if reason := _closed_because(seen):
            self.closed[node.id] = reason
        for digest in seen.cached:
            self.cached[digest] = self.cached.get(digest, frozenset()) | {node.id}
        self.price_max = max(self.price_max, node.price_nanousd)
        alike: dict[tuple[str, int], list[Accelerator]] = {}
        for accelerator in node.accelerators:
            alike.setdefault((accelerator.kind, accelerator.memory_bytes), []).append(accelerator)
        cores = Cores(node.cores_milli or MANY_CORES)
        for accelerators in alike.values():
            block = Block(len(self.blocks), node, accelerators, cores, is_open=not reason)
            self.blocks.append(block)
            self._of_node.setdefault(node.id, []).append(block)
            for position, index in enumerate(block.indices):
                self._where[node.id, index] = (block, position)

    def _measure(self, seen: NodeSeen) -> None:
        """Take off what strangers use of accelerators. Memory of a CPU comes and goes with caches: it is not judged."""
        for index, used in seen.used_bytes.items():
            block, position = self._where.get((seen.node.id, index), (None, 0))
            if block is not None and block.shape.kind != CPU:
                strangers = max(0, used - block.taken[position])
                block.capacity[position] = max(0, block.capacity[position] - strangers)

    def _parts(self, placement: Placement) -> list[tuple[Block, list[int], Part]]:
        found: dict[int, tuple[Block, list[int], Part]] = {}
        for part in placement.parts:
            for index in part.accelerators:
                block, position = self._where.get((part.node_id, index), (None, 0))
                if block is not None:
                    found.setdefault(block.order, (block, [], part))[1].append(position)
        return list(found.values())

    def _change(self, placement: Placement, sign: int) -> None:
        for block, positions, part in self._parts(placement):
            _take(block, positions, part, is_exclusive=placement.is_exclusive, sign=sign)
            if not self._counts(block):
                self._sort_in(block)
        for node_id in self._take_cores(placement, sign):
            for block in self._of_node[node_id]:
                self._sort_in(block)

    def _leave(self, placement: Placement, bytes_each: int) -> None:
        for block, positions, _ in self._parts(placement):
            for position in positions:
                block.taken[position] += bytes_each
            self._sort_in(block)

    def _take_cores(self, placement: Placement, sign: int) -> list[str]:
        """Take or give back the cores of each part; return the nodes where they are counted."""
        counted = []
        for part in placement.parts:
            blocks = self._of_node.get(part.node_id)
            if blocks and self._counts(blocks[0]):
                blocks[0].cores.free -= sign * part.cores_milli
                counted.append(part.node_id)
        return counted

    @staticmethod
    def _counts(block: Block) -> bool:
        return block.node.cores_milli > 0

    def _sort_in(self, block: Block) -> None:
        """Put an open block into the class of its state."""
        if not block.is_open:
            return
        # Sorted: nothing tells accelerators of one island apart but what is free, so fewer classes say the same.
        slots = tuple(sorted(block.slots()))
        cores = max(block.cores.free, 0)
        beside = tuple(
            (other.shape.kind, other.shape.memory_bytes, _quanta(other))
            for other in (self._of_node[block.node.id] if self._counts(block) else ())
            if other is not block
        )
        klass = self._known.get((block.shape, slots, cores, beside))
        if klass is None:
            klass = self._known[block.shape, slots, cores, beside] = BlockClass(
                block.shape, slots, _quanta(block), cores, beside
            )
        if block.klass is klass:
            return
        self._sort_out(block)
        block.klass = klass
        self.classes.setdefault(klass, set()).add(block.order)

    def _sort_out(self, block: Block) -> None:
        """Take a block out of its class."""
        if block.klass is None:
            return
        members = self.classes[block.klass]
        members.discard(block.order)
        if not members:
            del self.classes[block.klass]
        block.klass = None


def _quanta(block: Block) -> tuple[int, ...]:
    return tuple(sorted(quantum(slot, block.shape.memory_bytes) for slot in block.slots()))


def quantum(slot: Slot, memory_bytes: int) -> int:
    """Return an accelerator's state as one small number; what is free is rounded down."""
    return 2 * (slot.free * QUANTA // max(memory_bytes, 1)) + slot.is_empty


def _closed_because(seen: NodeSeen) -> str:
    if not seen.is_ready:
        return seen.reason or "not ready"
    return CORDONED if seen.node.is_cordoned else ""


def _take(block: Block, positions: list[int], part: Part, *, is_exclusive: bool, sign: int) -> None:
    for position, times in Counter(positions).items():
        block.taken[position] += sign * times * part.memory_bytes
        block.shares[position] += sign * times
        block.exclusive[position] += sign * times * is_exclusive
        assert block.shares[position] >= 0, "given back more often than taken"
