"""Stories of placements: what shares, what is whole, which place wins, and what is said when nothing fits."""

import pytest
from tests.support.clusters import GIB, ask, at, node

from modelyard.domain.nodes import NodeSeen, Placement
from modelyard.policy.asks import Ask, NoRoom, Weights
from modelyard.policy.cluster import Cluster
from modelyard.policy.fragmentation import Typical
from modelyard.policy.packing import find, place


def placed(wanted: Ask, nodes: list[NodeSeen], *there: Placement) -> Placement:
    found = place(wanted, Cluster.of(nodes, there))
    assert isinstance(found, Placement), found
    return found


def refusal(wanted: Ask, nodes: list[NodeSeen], *there: Placement) -> NoRoom:
    found = place(wanted, Cluster.of(nodes, there))
    assert isinstance(found, NoRoom), found
    return found


def where(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.node_id, part.accelerators) for part in placement.parts]


def test_small_models_share_an_accelerator_until_it_is_full() -> None:
    cluster = Cluster.of([node("a", 2, memory=24)])
    seen = []
    for _ in range(4):
        found = find(ask(10), cluster)
        assert found is not None
        cluster.take(found)
        seen.append(found.parts[0].accelerators)
    assert sorted(seen) == [(0,), (0,), (1,), (1,)]
    assert find(ask(10), cluster) is None


def test_a_large_model_gets_accelerators_whole_that_nobody_else_is_on() -> None:
    there = at("a", 0, memory=1)
    assert where(placed(ask(60, 2), [node("a", 3)], there)) == [("a", (1, 2))]
    assert refusal(ask(60, 2), [node("a", 2)], there).reason == (
        "needs 2 whole accelerators with 60.0 GiB each on one node; the most that are free are 1, on a"
    )


def test_nobody_joins_an_accelerator_that_is_had_whole() -> None:
    assert refusal(ask(1), [node("a", 2)], at("a", 0, 1, memory=20)).largest_free_bytes == 0


def test_one_island_comes_before_two_halves() -> None:
    nodes = [node("a", 8, island=4)]
    assert where(placed(ask(60, 4), nodes, at("a", 1, memory=4))) == [("a", (4, 5, 6, 7))]


def test_the_island_that_just_has_enough_is_taken_first() -> None:
    nodes = [node("a", 8, island=4)]
    assert where(placed(ask(60, 2), nodes, at("a", 4, 5, memory=60))) == [("a", (6, 7))]


def test_two_islands_of_a_node_do_where_none_has_enough() -> None:
    nodes = [node("a", 8, island=4)]
    assert where(placed(ask(60, 4), nodes, at("a", 0, memory=1), at("a", 4, 5, memory=1))) == [("a", (1, 2, 3, 6))]


def test_a_node_with_a_whole_island_is_better_than_one_without() -> None:
    there = [at("a", 0, memory=1), at("a", 4, memory=1)]
    assert where(placed(ask(60, 4), [node("a", 8, island=4), node("b", 8, island=4)], *there)) == [("b", (0, 1, 2, 3))]


def test_several_nodes_only_where_one_is_not_enough_and_the_engine_can() -> None:
    nodes = [node("a", 4), node("b", 4)]
    assert where(placed(ask(60, 4, nodes_max=2), nodes)) == [("a", (0, 1, 2, 3))]
    assert where(placed(ask(60, 8, nodes_max=2), nodes)) == [("a", (0, 1, 2, 3)), ("b", (0, 1, 2, 3))]
    refused = refusal(ask(60, 8), nodes)
    assert "a and b together have room, if it may be divided over nodes" in refused.helps


def test_over_several_nodes_accelerators_are_whole_even_if_it_is_one_of_each() -> None:
    nodes = [node("a", 1), node("b", 1)]
    assert refusal(ask(20, 2, nodes_max=2), nodes, at("a", 0, memory=10)).reason.startswith("needs 2 whole")


def test_parts_over_nodes_have_one_kind() -> None:
    nodes = [node("a", 2), node("b", 2, kind="a100"), node("c", 2)]
    assert [part for part, _ in where(placed(ask(60, 4, nodes_max=2), nodes))] == ["a", "c"]


def test_the_share_goes_where_the_rest_is_of_most_use() -> None:
    # Typical asks are for half an accelerator: a quarter is better put where a quarter is left than into a half.
    mix = (Typical(40 * GIB),)
    cluster = Cluster.of([node("a", 2)], [at("a", 0, memory=40), at("a", 1, memory=60)])
    found = find(ask(20), cluster, mix)
    assert found is not None
    assert where(found) == [("a", (1,))]


def test_nodes_with_the_weights_are_preferred_among_equals() -> None:
    nodes = [node("a"), node("b", cached=["sha256:x"]), node("c")]
    assert where(placed(ask(10, digest="sha256:x"), nodes)) == [("b", (0,))]
    assert where(placed(ask(10, digest="sha256:y"), nodes)) == [("a", (0,))]


def test_a_node_to_avoid_comes_last_but_is_not_forbidden() -> None:
    assert where(placed(ask(10, avoid=frozenset({"a"})), [node("a"), node("b")])) == [("b", (0,))]
    assert where(placed(ask(10, avoid=frozenset({"a"})), [node("a")])) == [("a", (0,))]


def test_of_two_kinds_that_do_the_cheaper_is_taken() -> None:
    nodes = [node("a", price=4.0), node("b", kind="l4", memory=24, price=0.7)]
    cluster = Cluster.of(nodes)
    found = find(ask(10), cluster, weights=Weights(fragmentation=0))
    assert found is not None
    assert where(found) == [("b", (0,))]


def test_spot_is_for_those_who_may_and_they_are_sent_there_first() -> None:
    nodes = [node("a"), node("b", is_spot=True)]
    assert where(placed(ask(10, may_use_spot=True), nodes)) == [("b", (0,))]
    assert where(placed(ask(10), nodes)) == [("a", (0,))]
    refused = refusal(ask(10), [node("b", is_spot=True)])
    assert refused.helps == (
        "spot node b has room, for batches and for replicas beyond the first and the least number",
    )


def test_weights_never_go_to_accelerators_that_are_only_declared() -> None:
    nodes = [node("a", is_simulated=True)]
    assert isinstance(place(ask(10), Cluster.of(nodes)), NoRoom)
    assert where(placed(ask(10, may_be_simulated=True), nodes)) == [("a", (0,))]


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        (node("a", is_cordoned=True), "a has room but takes nothing: cordoned"),
        (
            node("a", is_ready=False, reason="no heartbeat for 40 s"),
            "a has room but takes nothing: no heartbeat for 40 s",
        ),
    ],
)
def test_nothing_is_placed_on_a_closed_node_and_the_reason_names_it(closed: NodeSeen, why: str) -> None:
    refused = refusal(ask(10), [closed])
    assert refused.helps == (why,)
    assert refused.reason == "needs 10.0 GiB of one accelerator; no node that it may be on has that"


def test_the_reason_has_what_is_needed_and_the_largest_that_is_free() -> None:
    nodes = [node("gpu-1", kind="l4", memory=24), node("gpu-3", kind="l4", memory=24)]
    there = [at("gpu-1", 0, memory=20), at("gpu-3", 0, memory=11.9)]
    refused = refusal(ask(18.8), nodes, *there)
    assert refused.reason == "needs 18.8 GiB on one node; largest free 12.1 on gpu-3"
    assert (refused.largest_free_node, refused.needed_bytes) == ("gpu-3", int(18.8 * GIB))


def test_what_helps_is_another_pool_or_another_kind() -> None:
    nodes = [node("a", pool="burst"), node("b", kind="a100", pool="default")]
    refused = refusal(ask(10, kinds=["h100"]), nodes)
    assert refused.helps == ("pool burst has room on a", "a100 has room on b")
    assert refused.text.endswith("a100 has room on b")


def test_memory_that_strangers_use_is_not_free() -> None:
    nodes = [node("a", used={0: 50})]
    assert refusal(ask(40), nodes).largest_free_bytes == 30 * GIB
    # Of what is measured, 40 GiB are our own replica's: strangers have 10.
    assert refusal(ask(40), nodes, at("a", 0, memory=40)).largest_free_bytes == 30 * GIB


def test_what_is_placed_on_a_node_that_is_gone_counts_nowhere() -> None:
    assert where(placed(ask(80), [node("a")], at("gone", 0, memory=80))) == [("a", (0,))]
