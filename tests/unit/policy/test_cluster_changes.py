"""Nodes of a cluster that go and come back while it is in use."""

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster
from modelyard.policy.packing import find, place

NODES = [NodeSeen(node=Node(name, (Accelerator(0, "l4", 24),))) for name in ("a", "b")]
ASK = Ask(memory_bytes=10)


def test_nothing_is_placed_on_a_closed_node_and_what_is_there_stays_counted() -> None:
    cluster = Cluster.of(NODES, [Placement((Part("a", (0,), 10),))])
    cluster.close("a", "it failed")
    first = find(ASK, cluster)
    assert first is not None
    assert first.node_id == "b"
    cluster.close("b", "it failed too")
    assert find(ASK, cluster) is None
    assert "it failed" in place(ASK, cluster).text  # type: ignore[union-attr]
    cluster.open("a")
    again = find(Ask(memory_bytes=14), cluster)
    assert again is not None
    assert again.node_id == "a"
    assert find(Ask(memory_bytes=15), cluster) is None, "ten of its twenty-four are taken"


def test_closing_and_opening_leaves_a_cluster_as_it_was() -> None:
    cluster, other = Cluster.of(NODES), Cluster.of(NODES)
    taken = Placement((Part("a", (0,), 6),))
    cluster.close("a", "maintenance")
    cluster.take(taken)
    cluster.open("a")
    other.take(taken)
    for memory in (1, 18, 19, 24):
        assert find(Ask(memory_bytes=memory), cluster) == find(Ask(memory_bytes=memory), other)
    cluster.close("a", "again")
    cluster.close("a", "and again")
    cluster.give_back(taken)
    cluster.open("a")
    assert find(Ask(memory_bytes=24), cluster) == find(Ask(memory_bytes=24), Cluster.of(NODES))
