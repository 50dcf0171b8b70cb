"""A tenant's accelerators: shares add up, whole ones count whole, and the refusal has the numbers."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clusters import GIB, at, node

from modelyard.domain.nodes import Part, Placement
from modelyard.policy.accelerator_quota import refusal, share_of, sizes_of

SIZES = sizes_of([node("a", 8), node("b", 8)])


def test_four_quarters_are_one_accelerator() -> None:
    assert sum(share_of(at("a", 0, memory=20), SIZES) for _ in range(4)) == 1


def test_accelerators_that_are_had_whole_count_one_each_whatever_is_used_of_them() -> None:
    assert share_of(at("a", 0, 1, memory=10), SIZES) == 2
    over_nodes = Placement((Part("a", (0,), GIB), Part("b", (0,), GIB)))
    assert share_of(over_nodes, SIZES) == 2


def test_what_is_on_a_node_that_is_gone_counts_until_it_is_stopped() -> None:
    assert share_of(at("gone", 0, memory=20), SIZES) == 1


def test_the_limit_itself_may_be_reached_and_no_more() -> None:
    placed = [at("a", 0, memory=60)]
    assert refusal(1, placed, at("a", 1, memory=20), SIZES) == ""
    assert refusal(1, placed, at("a", 1, memory=40), SIZES) == (
        "its tenant may have 1 accelerators, has 0.75, and this one needs 0.50"
    )
    assert refusal(None, placed, at("a", *range(8), memory=80), SIZES) == ""
    assert refusal(0, [], at("a", 0, memory=1), SIZES) != ""


@settings(max_examples=100, deadline=None)
@given(
    limit=st.integers(0, 6), wanted=st.lists(st.tuples(st.integers(1, 80), st.sampled_from([1, 1, 2, 4])), max_size=20)
)
def test_whoever_asks_first_the_sum_never_passes_the_limit(limit: int, wanted: list[tuple[int, int]]) -> None:
    placed: list[Placement] = []
    for memory, count in wanted:
        new = at("a", *range(count), memory=memory)
        if not refusal(limit, placed, new, SIZES):
            placed.append(new)
    assert sum((share_of(one, SIZES) for one in placed), Fraction(0)) <= limit
