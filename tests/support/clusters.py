"""Nodes and asks for the packer's tests, small enough to write out."""

from collections.abc import Sequence

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster

GIB = 1024**3


def node(
    node_id: str,
    count: int = 1,
    *,
    kind: str = "h100",
    memory: int = 80,
    island: int | None = None,
    cached: Sequence[str] = (),
    used: dict[int, int] | None = None,
    is_ready: bool = True,
    reason: str = "",
    pool: str = "default",
    is_spot: bool = False,
    is_cordoned: bool = False,
    is_simulated: bool = False,
    price: float = 0.0,
) -> NodeSeen:
    """Return a node of ``count`` accelerators with ``memory`` GiB each, in islands of ``island``."""
    size = island or count
    accelerators = tuple(Accelerator(index, kind, memory * GIB, index // size) for index in range(count))
    return NodeSeen(
        node=Node(
            id=node_id,
            accelerators=accelerators,
            pool=pool,
            is_spot=is_spot,
            is_cordoned=is_cordoned,
            is_simulated=is_simulated,
            price_nanousd=int(price * 1e9),
        ),
        cached=frozenset(cached),
        used_bytes={index: size * GIB for index, size in (used or {}).items()},
        is_ready=is_ready,
        reason=reason,
    )


def ask(memory: float, count: int = 1, **more: object) -> Ask:
    """Return an ask for ``memory`` GiB of each of ``count`` accelerators."""
    kinds = frozenset(more.pop("kinds", ()))  # type: ignore[call-overload]
    return Ask(memory_bytes=int(memory * GIB), count=count, kinds=kinds, **more)  # type: ignore[arg-type]


def at(node_id: str, *accelerators: int, memory: float) -> Placement:
    """Return a placement in one part."""
    return Placement((Part(node_id, accelerators, int(memory * GIB)),))


def state(cluster: Cluster) -> list[object]:
    """Return all that tells one state of a cluster from another."""
    blocks = [
        (block.slots(), tuple(block.taken), tuple(block.shares), tuple(block.exclusive)) for block in cluster.blocks
    ]
    classes = sorted((klass.shape, klass.slots, sorted(members)) for klass, members in cluster.classes.items())
    return [blocks, classes]
