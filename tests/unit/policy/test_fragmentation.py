"""Fragmentation is what FGD's paper defines, worked out fast and remembered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.cluster import QUANTA
from modelyard.policy.fragmentation import STANDARD_MIX, Fragmentation, Mix, Typical, mix_of

KIND = "h100"


def defined(mix: Mix, quanta: tuple[int, ...]) -> float:
    """The definition, slowly: accelerators of QUANTA bytes, so that a quantum is a byte."""
    free = [(state >> 1, bool(state & 1)) for state in quanta]
    total = sum(typical.number for typical in mix)
    lost = 0.0
    for typical in mix:
        fits = not typical.kinds or KIND in typical.kinds
        usable = [one for one, empty in free if one >= typical.memory_bytes and (typical.count == 1 or empty)]
        can = fits and len(usable) >= typical.count
        lost += typical.number / total * (sum(one for one, _ in free) - (sum(usable) if can else 0))
    return lost / QUANTA


typicals = st.builds(
    Typical,
    memory_bytes=st.integers(1, QUANTA),
    count=st.sampled_from([1, 1, 2, 4]),
    kinds=st.sampled_from([frozenset(), frozenset({KIND}), frozenset({"l4"})]),
    number=st.floats(0.5, 100),
)


@settings(max_examples=100, deadline=None)
@given(
    mix=st.lists(typicals, min_size=1, max_size=6).map(tuple),
    slots=st.lists(st.tuples(st.integers(0, QUANTA), st.booleans()), min_size=1, max_size=8),
)
def test_it_is_the_papers_definition(mix: Mix, slots: list[tuple[int, bool]]) -> None:
    quanta = tuple(sorted(2 * free + empty for free, empty in slots))
    fragmentation = Fragmentation(mix)
    for _ in range(2):
        assert fragmentation.of(KIND, QUANTA, quanta) == pytest.approx(defined(mix, quanta))


def test_what_is_larger_than_an_accelerator_can_use_nothing_of_it() -> None:
    assert Fragmentation((Typical(QUANTA * 2),)).of(KIND, QUANTA, (2 * QUANTA + 1,)) == 1.0


def test_a_mix_is_in_the_same_order_however_it_was_counted() -> None:
    counts = {Typical(5): 2.0, Typical(3): 1.0, Typical(3, 2): 4.0, Typical(9): 0.0}
    mix = mix_of(counts)
    assert mix == mix_of(dict(reversed(counts.items())))
    assert [(one.memory_bytes, one.count, one.number) for one in mix] == [(3, 1, 1.0), (3, 2, 4.0), (5, 1, 2.0)]
    assert len(STANDARD_MIX) > 3
