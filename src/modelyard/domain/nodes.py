"""Where replicas run: nodes, their accelerators, and what part of them a replica has."""

import msgspec


class Accelerator(msgspec.Struct, frozen=True):
    """A device of a node; a CPU counts as one. ``island``: devices of one number reach each other fastest (NVLink)."""

    index: int
    kind: str
    """``cpu``, ``l4``, ``a100``, ``h100``, ``h200``, … in lower case."""
    memory_bytes: int
    island: int = 0


class Node(msgspec.Struct, frozen=True):
    """A machine. Prices are nano-dollars of one accelerator for an hour; ``cache_bytes`` bounds its weight cache."""

    id: str
    accelerators: tuple[Accelerator, ...]
    pool: str = "default"
    is_spot: bool = False
    """It may be taken away within two minutes: for batches, and for what others can replace."""
    is_cordoned: bool = False
    """Nothing new is placed there."""
    price_nanousd: int = 0
    cache_bytes: int = 0
    """0: no limit of its own."""
    cores_milli: int = 0
    """Thousandths of its cores that replicas may have; 0: nobody counts them."""
    is_simulated: bool = False


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica has of one node: the same ``memory_bytes`` of each of ``accelerators`` (by index), and cores."""

    node_id: str
    accelerators: tuple[int, ...]
    memory_bytes: int
    cores_milli: int = 0


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a replica runs; the first part leads. Empty: it was started before there were placements."""

    parts: tuple[Part, ...] = ()

    @property
    def node_id(self) -> str:
        """The node that the replica's own process runs on, "" where none is known."""
        return self.parts[0].node_id if self.parts else ""

    @property
    def accelerators(self) -> int:
        """How many it has, over all nodes."""
        return sum(len(part.accelerators) for part in self.parts)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The node and index of each of them."""
        return [(part.node_id, index) for part in self.parts for index in part.accelerators]

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else may be on its accelerators: one model over several runs in step, and waits for each."""
        return self.accelerators > 1


class NodeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its fleet sees it now. ``cached``: digests of the artifacts in its weight cache."""

    node: Node
    cached: frozenset[str] = frozenset()
    cache_used_bytes: int = 0
    is_ready: bool = True
    reason: str = ""
    """Why it is not ready, or what the fleet could not find out."""
    used_bytes: dict[int, int] = {}
    """Measured memory in use by accelerator, whoever uses it; what is not there was not measured."""
