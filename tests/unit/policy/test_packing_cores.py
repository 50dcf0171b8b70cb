"""Cores of a node are a second thing to have enough of, where they are counted."""

import msgspec
from tests.support.clusters import ask, at, node, state

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Part, Placement
from modelyard.policy.cluster import Cluster
from modelyard.policy.fragmentation import Fragmentation, Typical
from modelyard.policy.packing import NoRoom, find, place

GIB = 1024**3


def counted(node_id: str, cores: int, count: int = 1, *, has_processor: bool = False) -> NodeSeen:
    seen = node(node_id, count)
    accelerators = seen.node.accelerators
    if has_processor:
        accelerators += (Accelerator(count, "cpu", 256 * GIB, island=9),)
    changed = msgspec.structs.replace(seen.node, cores_milli=cores * 1000, accelerators=accelerators)
    return msgspec.structs.replace(seen, node=changed)


def test_where_cores_are_gone_nothing_goes_that_needs_some() -> None:
    cluster = Cluster.of([counted("a", 8), counted("b", 16)])
    first = find(ask(10, cores_milli=6000), cluster)
    assert first is not None
    cluster.take(first)
    assert first.parts[0].cores_milli == 6000
    second = find(ask(10, cores_milli=12_000), cluster)
    assert second is not None
    assert second.node_id == "b"
    cluster.take(second)
    refusal = place(ask(10, cores_milli=6000), cluster)
    assert isinstance(refusal, NoRoom)
    assert "6 cores" in place(ask(200, cores_milli=6000), cluster).reason
    assert find(ask(10), cluster) is not None, "who asks for none is not held up"


def test_given_back_cores_are_there_again() -> None:
    cluster = Cluster.of([counted("a", 8)])
    before = state(cluster)
    found = find(ask(10, cores_milli=8000), cluster)
    assert found is not None
    cluster.take(found)
    assert find(ask(10, cores_milli=1000), cluster) is None
    cluster.give_back(found)
    assert state(cluster) == before
    assert find(ask(10, cores_milli=8000), cluster) == found


def test_a_cluster_is_the_same_whether_placements_came_before_or_after() -> None:
    placed = Placement((Part("a", (0,), 10 * GIB, 5000),))
    cluster = Cluster.of([counted("a", 8)], [placed])
    assert find(ask(10, cores_milli=4000), cluster) is None
    assert find(ask(10, cores_milli=3000), cluster) is not None


def test_where_nobody_counts_cores_they_are_never_short() -> None:
    cluster = Cluster.of([node("a")])
    assert find(ask(10, cores_milli=10**9), cluster) is not None


def test_accelerators_of_a_node_without_cores_are_fragments() -> None:
    mix = (Typical(GIB, cores_milli=4000),)
    of = Fragmentation(mix).of
    free = (2 * 64 + 1,)
    assert of("h100", 80 * GIB, free, 8000) == 0
    assert of("h100", 80 * GIB, free, 3999) == 1


def test_what_needs_no_accelerator_goes_where_its_cores_strand_none() -> None:
    mix = (Typical(40 * GIB, cores_milli=8000, kinds=frozenset({"h100"})),)
    nodes = [counted("a", 10, has_processor=True), counted("b", 16, has_processor=True)]
    found = find(ask(1, kinds=["cpu"], cores_milli=6000), Cluster.of(nodes), mix)
    assert found is not None
    assert found.node_id == "b", "on a the h100 would be left without cores"


def test_room_is_judged_at_the_very_place() -> None:
    cluster = Cluster.of([counted("a", 8, count=2), node("b", 2)])
    here = Placement((Part("a", (0,), 40 * GIB, 6000),))
    assert cluster.has_room(here)
    cluster.take(at("a", 0, memory=50))
    assert not cluster.has_room(here), "no memory"
    there = Placement((Part("a", (1,), 40 * GIB, 6000),))
    assert cluster.has_room(there)
    cluster.take(there)
    assert not cluster.has_room(Placement((Part("a", (1,), 1 * GIB, 6000),))), "no cores"
    pair = at("b", 0, 1, memory=10)
    assert cluster.has_room(pair)
    cluster.take(at("b", 1, memory=10))
    assert not cluster.has_room(pair), "several are had whole"
    cluster.close("b", "it failed")
    assert not cluster.has_room(at("b", 0, memory=1))
    assert not cluster.has_room(at("gone", 0, memory=1))


def test_small_differences_do_not_scatter_what_is_placed() -> None:
    cluster = Cluster.of([NodeSeen(node=Node(f"n{at}", (Accelerator(0, "h100", 80 * GIB),))) for at in range(4)])
    mix = tuple(Typical(size * GIB, number=1.0) for size in (1, 78, 79, 80))
    assert find(ask(1), cluster, mix) == at("n0", 0, memory=1)
