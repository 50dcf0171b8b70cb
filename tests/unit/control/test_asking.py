"""What is asked of a packer for one replica."""

from types import SimpleNamespace
from typing import Any, cast

from tests.support.towns import endpoint, node, replica, version

from modelyard.control.asking import ask_of
from modelyard.control.supplies import Offer
from modelyard.domain.fleet import Replica
from modelyard.domain.nodes import Part, Placement
from modelyard.policy.cluster import Cluster
from modelyard.policy.packing import find

GIB = 1024**3
OFFER = Offer(
    version("one"),
    cast("Any", SimpleNamespace(needs_artifact=False, is_remote=False)),
    cast("Any", SimpleNamespace(memory_bytes=10 * GIB)),
)
ONE = endpoint("one")


def failed_on(name: str) -> Replica:
    failed = replica(ONE)
    return Replica(
        failed.id, failed.endpoint_id, failed.version_id, 0, 0, failed.state, 0.0,
        placement=Placement((Part(name, (0,), 10 * GIB),)),
    )  # fmt: skip


def test_nodes_where_others_of_its_model_share_come_last() -> None:
    cluster = Cluster.of([node("a"), node("b")])
    place = find(ask_of(ONE, OFFER, frozenset(), crowded=frozenset({"a"})), cluster)
    assert place is not None
    assert place.node_id == "b"


def test_a_crowded_node_is_better_than_one_where_it_failed() -> None:
    cluster = Cluster.of([node("a"), node("b")])
    cluster.take(Placement((Part("b", (0,), 10 * GIB),)))
    for bad, other in (("a", "b"), ("b", "a")):
        ask = ask_of(ONE, OFFER, frozenset(), failed=[failed_on(bad)], crowded=frozenset({other}))
        place = find(ask, cluster)
        assert place is not None
        assert place.node_id == other
