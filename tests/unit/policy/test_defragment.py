"""The fewest moves that open room, each to a place that has room before anything has left."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clusters import ask, at, node, state

from modelyard.domain.nodes import Placement
from modelyard.policy.asks import Ask
from modelyard.policy.cluster import Cluster
from modelyard.policy.defragment import Move, Placed, cleared, moves, relieved, tidy
from modelyard.policy.packing import find


def put(cluster: Cluster, of: Ask, placement: Placement) -> Placed:
    cluster.take(placement)
    return Placed(placement, of)


def test_one_small_model_moves_so_that_a_whole_node_is_free() -> None:
    cluster = Cluster.of([node("a", 4), node("b", 2)])
    movable = {"r-1": put(cluster, ask(10), at("a", 2, memory=10)), "r-2": put(cluster, ask(10), at("b", 0, memory=10))}
    plan = moves(cluster, ask(60, 4), movable, most=2)
    assert plan is not None
    assert [(move.replica_id, move.to.node_id) for move in plan.moves] == [("r-1", "b")]
    assert plan.placement.parts[0].accelerators == (0, 1, 2, 3)
    assert plan.moves[0].reason == "moving it to b helps to open 4 x 60.0 GiB on a"


def test_the_smallest_that_frees_enough_of_a_shared_accelerator_moves() -> None:
    cluster = Cluster.of([node("a"), node("b")])
    movable = {
        "r-small": put(cluster, ask(10), at("a", 0, memory=10)),
        "r-right": put(cluster, ask(20), at("a", 0, memory=20)),
        "r-large": put(cluster, ask(25), at("a", 0, memory=25)),
        "r-other": put(cluster, ask(45), at("b", 0, memory=45)),
    }
    plan = moves(cluster, ask(45), movable, most=3)
    assert plan is not None
    assert [(move.replica_id, move.to.node_id) for move in plan.moves] == [("r-right", "b")]
    assert plan.placement == at("a", 0, memory=45)


def test_one_moves_to_another_accelerator_of_its_node_where_there_is_no_other_node() -> None:
    cluster = Cluster.of([node("a", 2)])
    movable = {f"r-{one}": put(cluster, ask(30), at("a", one, memory=30)) for one in range(2)}
    for pending in (ask(60), ask(80)):
        plan = moves(cluster, pending, movable, most=3)
        assert plan is not None
        ((move),) = plan.moves
        assert move.to.parts[0].accelerators == tuple({0, 1} - set(move.old.parts[0].accelerators))
        assert move.reason.startswith(f"moving it to accelerator {move.to.parts[0].accelerators[0]} there helps")
        assert plan.placement.parts[0].accelerators == move.old.parts[0].accelerators
    assert moves(cluster, ask(80, 2), movable, most=3) is None


def test_no_move_where_there_is_room() -> None:
    plan = moves(Cluster.of([node("a")]), ask(10), {}, most=3)
    assert plan is not None
    assert plan.moves == ()


def test_nothing_moves_where_more_moves_would_be_needed_than_may_be() -> None:
    cluster = Cluster.of([node("a", 2), node("b", 1)])
    movable = {f"r-{number}": put(cluster, ask(10), at("a", number, memory=10)) for number in range(2)}
    assert moves(cluster, ask(60, 2), movable, most=1) is None
    assert moves(cluster, ask(60, 2), movable, most=2) is not None


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    placed=st.lists(st.tuples(st.sampled_from([5, 20, 40, 60]), st.sampled_from([1, 1, 2])), max_size=12),
    gone=st.sets(st.integers(0, 11)),
    last=st.tuples(st.sampled_from([20, 50, 80]), st.sampled_from([1, 2, 4])),
)
def test_every_plan_can_be_carried_out_in_its_order(
    shapes: list[int], placed: list[tuple[int, int]], gone: set[int], last: tuple[int, int]
) -> None:
    cluster = Cluster.of([node(f"n{number}", count) for number, count in enumerate(shapes)])
    movable = {}
    for number, (memory, count) in enumerate(placed):
        if (found := find(ask(memory, count), cluster)) is not None:
            movable[f"r-{number}"] = put(cluster, ask(memory, count), found)
    for number in gone:
        if (left := movable.pop(f"r-{number}", None)) is not None:
            cluster.give_back(left.placement)
    before = state(cluster)
    pending = ask(*last)
    plan = moves(cluster, pending, movable, most=3)
    assert state(cluster) == before
    if plan is None:
        return
    assert len(plan.moves) <= 3
    for move in plan.moves:  # the new one starts while all old ones are there
        ask_of_it = movable[move.replica_id].ask
        for part in move.to.parts:
            for index in part.accelerators:
                assert (cluster.free_bytes(part.node_id, index) or 0) >= ask_of_it.memory_bytes
        cluster.take(move.to)
    for move in plan.moves:
        cluster.give_back(move.old)
    assert find(pending, cluster) == plan.placement


def shared(cluster: Cluster, memory: float, place: Placement, load: float = 0.0) -> Placed:
    cluster.take(place)
    return Placed(place, ask(memory), load)


def test_the_accelerator_with_the_least_on_it_becomes_empty() -> None:
    cluster = Cluster.of([node("a", 2), node("b", 2)])
    movable = {
        "r-1": shared(cluster, 40, at("a", 0, memory=40)),
        "r-2": shared(cluster, 30, at("b", 0, memory=30)),
        "r-3": shared(cluster, 10, at("b", 1, memory=10)),
    }
    found = cleared(cluster, movable, most=4)
    assert [(move.replica_id, move.old.node_id) for move in found] == [("r-3", "b")]
    assert found[0].to in (at("a", 0, memory=10), at("b", 0, memory=10)), "an empty one would win nothing"
    assert found[0].reason.endswith("helps to empty accelerator 1 of b")


def test_nothing_moves_to_where_there_would_be_too_much_to_do() -> None:
    cluster = Cluster.of([node("a", 2)])
    movable = {
        "r-1": shared(cluster, 40, at("a", 0, memory=40), 0.6),
        "r-2": shared(cluster, 10, at("a", 1, memory=10), 0.3),
    }
    assert cleared(cluster, movable, most=4) == ()
    assert len(cleared(cluster, movable, most=4, load_most=0.9)) == 1


def test_what_cannot_move_keeps_its_accelerator() -> None:
    cluster = Cluster.of([node("a", 2)])
    movable = {
        "r-1": shared(cluster, 10, at("a", 0, memory=10)),
        "r-2": shared(cluster, 40, at("a", 1, memory=40)),
    }
    cluster.take(at("a", 0, memory=5))
    cluster.take(at("a", 1, memory=5))
    assert cleared(cluster, movable, most=4) == ()


def test_who_asks_for_most_leaves_an_accelerator_that_has_too_much_to_do() -> None:
    cluster = Cluster.of([node("a", 2)])
    movable = {
        "r-1": shared(cluster, 10, at("a", 0, memory=10), 0.4),
        "r-2": shared(cluster, 10, at("a", 0, memory=10), 0.7),
    }
    move = relieved(cluster, movable)
    assert move is not None
    assert (move.replica_id, move.to) == ("r-2", at("a", 1, memory=10))


def test_one_that_has_too_much_to_do_alone_stays() -> None:
    cluster = Cluster.of([node("a", 2)])
    assert relieved(cluster, {"r-1": shared(cluster, 10, at("a", 0, memory=10), 1.5)}) is None


@settings(max_examples=100, deadline=None)
@given(
    placed=st.lists(st.tuples(st.sampled_from([5, 20, 40, 60]), st.floats(0, 1)), max_size=12),
    most=st.integers(1, 4),
)
def test_clearing_leaves_the_cluster_as_it_was_and_can_be_carried_out(
    placed: list[tuple[int, float]], most: int
) -> None:
    cluster = Cluster.of([node("a", 4), node("b", 2)])
    movable = {}
    for number, (memory, load) in enumerate(placed):
        if (found := find(ask(memory), cluster)) is not None:
            movable[f"r-{number}"] = shared(cluster, memory, found, load)
    before = state(cluster)
    found = cleared(cluster, movable, most=most)
    assert state(cluster) == before
    assert relieved(cluster, movable) is None or state(cluster) == before
    assert len(found) <= most
    for move in found:
        assert cluster.has_room(move.to), "while all that move are still there"
        cluster.take(move.to)
    for move in found:
        cluster.give_back(move.old)
    if found:
        assert len({move.old for move in found} & {move.to for move in found}) == 0
        part = found[0].old.parts[0]
        assert cluster.shares(part.node_id, part.accelerators[0]) == 0


def test_two_of_one_group_do_not_move_at_once() -> None:
    cluster = Cluster.of([node("a", 2), node("b", 2)])
    movable = {
        f"r-{number}": msgspec.structs.replace(put(cluster, ask(10), at("a", number, memory=10)), group=group)
        for number, group in enumerate(("one", "one"))
    }
    assert moves(cluster, ask(60, 2), movable | {}, most=2) is not None, "b is free"
    cluster.take(at("b", 0, memory=10))
    assert moves(cluster, ask(60, 2), movable, most=2) is None
    apart = {id: msgspec.structs.replace(one, group=id) for id, one in movable.items()}
    assert moves(cluster, ask(60, 2), apart, most=2) is not None


def test_what_does_not_move_counts_for_what_is_asked_of_an_accelerator() -> None:
    cluster = Cluster.of([node("a", 2)])
    cluster.take(at("a", 0, memory=40))
    movable = {"r-1": shared(cluster, 10, at("a", 1, memory=10), 0.3)}
    assert len(cleared(cluster, movable, most=4)) == 1
    assert cleared(cluster, movable, most=4, others={("a", 0): 0.6}) == ()
    crowded = {"r-2": shared(cluster, 10, at("a", 0, memory=10), 0.5)}
    assert relieved(cluster, crowded) is None
    assert relieved(cluster, crowded, others={("a", 0): 0.6}) is not None


def test_tidying_makes_no_more_moves_than_it_may_and_none_of_who_moves_already() -> None:
    for most in (0, 1, 2, 8):
        cluster = Cluster.of([node("a", 4)])
        movable = {
            f"r-{number}": shared(cluster, 10 + number, at("a", number, memory=10 + number)) for number in range(4)
        }
        begun: list[Move] = []

        def begin(move: Move, cluster: Cluster = cluster, begun: list[Move] = begun) -> None:
            cluster.take(move.to)
            begun.append(move)

        tidy(cluster, movable, begin, most=most)
        assert len(begun) <= most
        assert len({one.replica_id for one in begun}) == len(begun)
        assert movable.keys().isdisjoint(one.replica_id for one in begun)
        assert bool(begun) == bool(most)


def test_two_that_leave_one_accelerator_at_once_do_not_crowd_another_one_together() -> None:
    cluster = Cluster.of([node("a"), node("b"), node("c")])
    movable = {f"r-{one}": shared(cluster, 20, at("a", 0, memory=20), 0.7) for one in range(3)}
    found: list[Move] = []

    def begin(move: Move) -> None:
        found.append(move)
        cluster.take(move.to)

    tidy(cluster, movable, begin)
    assert sorted(move.to.node_id for move in found) == ["b", "c"]
