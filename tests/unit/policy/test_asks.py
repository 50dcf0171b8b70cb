"""Where replicas of one model would only slow one another down."""

from modelyard.domain.nodes import Accelerator, Node, Part, Placement
from modelyard.policy.asks import Ask, crowded
from modelyard.policy.cluster import Cluster, NodeSeen
from modelyard.policy.packing import find

NODES = {name: Node(name, (Accelerator(0, "l4", 24), Accelerator(1, "l4", 24))) for name in ("a", "b")}


def on(node: str, memory: int, *accelerators: int) -> Placement:
    return Placement((Part(node, accelerators or (0,), memory),))


def test_those_that_share_an_accelerator_crowd_their_node() -> None:
    assert crowded([on("a", 12), on("b", 13)], NODES) == {"a"}


def test_what_has_accelerators_to_itself_meets_nobody() -> None:
    assert crowded([on("a", 6, 0, 1), Placement(), on("gone", 1)], NODES) == frozenset()


def test_the_next_of_a_model_goes_to_another_node_while_there_is_one() -> None:
    cluster = Cluster.of(NodeSeen(node=node) for node in NODES.values())
    placed = []
    for _ in range(3):
        place = find(Ask(memory_bytes=6, avoid=crowded(placed, NODES)), cluster)
        assert place is not None
        cluster.take(place)
        placed.append(place)
    assert [one.node_id for one in placed[:2]] in (["a", "b"], ["b", "a"])
    assert placed[2].node_id in NODES, "where all are crowded it goes somewhere still"
