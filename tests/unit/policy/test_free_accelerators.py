"""What is paid for and has no replica: taken and free shares are all that there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.nodes import Accelerator, Node, Part, Placement
from modelyard.policy.free_accelerators import free_accelerators
from modelyard.policy.gpu_costs import shares

USD = 1_000_000_000
GIB = 1024**3


def node(id: str, *, count: int = 2, kind: str = "h100", price: int = 4 * USD, pool: str = "default") -> Node:
    accelerators = tuple(Accelerator(index, kind, 80 * GIB) for index in range(count))
    return Node(id, accelerators, price_nanousd=price, pool=pool)


def on(id: str, *indices: int, gib: int = 40) -> Placement:
    return Placement((Part(id, indices, gib * GIB),))


def told(nodes: list[Node], placements: list[Placement]) -> list[tuple[str, str, float, float, int]]:
    found = free_accelerators(nodes, placements, {"l4": USD})
    return [(one.accelerator, one.pool, one.total, one.free, one.hourly_nanousd) for one in found]


def test_what_no_replica_has_is_told_by_kind_and_pool_the_dearest_first() -> None:
    nodes = [node("a"), node("b", kind="l4", price=0), node("c", pool="spot"), node("d", kind="cpu", price=0)]
    assert told(nodes, [on("a", 0), on("c", 0, 1)]) == [
        ("h100", "default", 2, 1.5, 6 * USD),
        ("l4", "default", 2, 2.0, 2 * USD),
    ]


@pytest.mark.parametrize("placement", [on("a", 0, 1, gib=1), on("a", 0, gib=500), Placement()])
def test_one_over_several_has_all_of_each_and_none_has_more_than_there_is(placement: Placement) -> None:
    (free,) = free_accelerators([node("a", count=3)], [placement], {})
    _, taken, _ = shares(placement, {"a": node("a", count=3)}, {})
    assert free.free == pytest.approx(3 - taken)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=16))
def test_taken_and_free_are_all_that_there_is(placed: list[tuple[int, int]]) -> None:
    nodes, room, placements = {"a": node("a", count=4)}, dict.fromkeys(range(4), 80), []
    for index, gib in placed:
        if gib <= room[index]:
            room[index] -= gib
            placements.append(on("a", index, gib=gib))
    taken = sum(shares(one, nodes, {})[1] for one in placements)
    free = sum(one.free for one in free_accelerators(nodes.values(), placements, {}))
    assert taken + free == pytest.approx(4) or (free == 0 and taken > 4 - 0.05)
