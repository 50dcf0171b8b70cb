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
    is_simulated: bool = False


class Part(msgspec.Struct, frozen=True):
    """What a replica has of one node: the same ``memory_bytes`` of each of ``accelerators`` (by index)."""

    node_id: str
    accelerators: tuple[int, ...]
    memory_bytes: int


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a replica runs; the first part leads. Empty: it was started before there were placements."""

    parts: tuple[Part, ...] = ()

    @property
    def node_id(self) -> str:
        """The node that the replica's own process runs on, "" where none is known."""
        return self.parts[0].node_id if self.parts else ""
