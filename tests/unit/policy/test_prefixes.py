"""Prefixes: chained hashes, and the index against a model that keeps a plain list."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.policy.prefixes import PrefixHolders, PrefixIndex, chain

texts = st.integers(0, 40).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def test_a_prompt_shorter_than_a_block_has_no_prefix() -> None:
    assert chain(b"x" * 1023, salt=1) == ()
    assert len(chain(b"x" * 1024, salt=1)) == 1


def test_only_whole_blocks_count_and_not_more_than_the_most() -> None:
    assert len(chain(b"x" * 35, salt=1, block_bytes=8)) == 4
    assert len(chain(b"x" * 80, salt=1, block_bytes=8, blocks_max=3)) == 3


@given(texts, texts, st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_two_prompts_share_exactly_the_blocks_of_their_common_beginning(one: bytes, other: bytes, common: int) -> None:
    other = one[:common] + other
    first, second = chain(one, salt=7, block_bytes=4), chain(other, salt=7, block_bytes=4)
    same = 0
    while same < min(len(first), len(second)) and one[: 4 * same + 4] == other[: 4 * same + 4]:
        same += 1
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


def test_a_block_stands_for_all_before_it() -> None:
    assert chain(b"aaaacccc", salt=1, block_bytes=4)[1] != chain(b"bbbbcccc", salt=1, block_bytes=4)[1]
    assert len(set(chain(b"aaaa" * 9, salt=1, block_bytes=4))) == 9


@given(texts, st.integers(0, 2**60), st.integers(0, 2**60))
@settings(deadline=None, max_examples=60)
def test_equal_prompts_of_two_tenants_have_no_block_in_common(text: bytes, one: int, other: int) -> None:
    shared = set(chain(text, salt=one, block_bytes=4)) & set(chain(text, salt=other, block_bytes=4))
    assert not shared or one == other


def test_a_tenants_prompt_is_not_found_in_what_another_sent() -> None:
    index = PrefixIndex(64)
    index.add(chain(b"a secret system prompt" * 400, salt=1))
    assert len(index) == 8
    assert index.matched(chain(b"a secret system prompt" * 400, salt=2)) == 0


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    index = PrefixIndex(4)
    index.add((1, 2, 3))
    index.add((11, 12))
    assert index.matched((1, 2, 3)) == 2
    assert index.matched((11, 12)) == 2


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    index = PrefixIndex(4)
    assert index.add((1, 2, 3, 4, 5, 6)) == 0
    assert index.matched((1, 2, 3, 4, 5, 6)) == 4


def test_asking_does_not_keep_a_block() -> None:
    index = PrefixIndex(2)
    index.add((1,))
    index.add((2,))
    index.matched((1,))
    index.add((3,))
    assert (index.matched((1,)), index.matched((2,)), index.matched((3,))) == (0, 1, 1)


def test_an_engine_that_began_anew_holds_nothing() -> None:
    index = PrefixIndex(8)
    index.add((1, 2))
    index.clear()
    assert len(index) == 0
    assert index.add((1, 2)) == 0
    assert index.add((1, 2, 3)) == 2


def _links(word: str) -> tuple[int, ...]:
    """Hash every beginning of ``word``, as ``chain`` does: a link stands for all before it."""
    return tuple(
        int.from_bytes(hashlib.blake2b(word[: size + 1].encode(), digest_size=7).digest()) for size in range(len(word))
    )


words = st.text("ab", max_size=9).map(_links)


class PrefixIndexMachine(RuleBasedStateMachine):
    """A list of blocks, the oldest first, walked from the front."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(17)
        self.order: list[int] = []

    def held(self, prefix: tuple[int, ...]) -> int:
        count = 0
        while count < len(prefix) and prefix[count] in self.order:
            count += 1
        return count

    @rule(prefix=words)
    def add(self, prefix: tuple[int, ...]) -> None:
        before = self.held(prefix)
        for link in reversed(prefix):
            if link in self.order:
                self.order.remove(link)
            self.order.append(link)
        if len(self.order) > 17:
            del self.order[: len(self.order) - 17 + 17 // 16]
        assert self.index.add(prefix) == before

    @rule(prefix=words)
    def ask(self, prefix: tuple[int, ...]) -> None:
        assert self.index.matched(prefix) == self.held(prefix)

    @precondition(lambda self: self.order)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.order.clear()

    @invariant()
    def it_holds_the_same_blocks_in_the_same_order_and_not_too_many(self) -> None:
        assert list(self.index._blocks) == self.order
        assert len(self.index) == len(self.order) <= 17

    @invariant()
    def whole_beginnings_are_held(self) -> None:
        blocks = set(self.order)
        for word in ("aaaaaaaaa", "ababababa", "bbbbbbbbb", "abbabbabb"):
            inside = [link in blocks for link in _links(word)]
            assert inside == sorted(inside, reverse=True)


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_holders_of_the_longest_part_come_first() -> None:
    holders: PrefixHolders[str] = PrefixHolders(100)
    holders.add((1, 2, 3, 4), "long")
    holders.add((1, 2), "short")
    holders.add((9,), "other")
    assert holders.find((1, 2, 3, 4, 5), at_most=8) == ["long", "short"]
    assert holders.find((1, 2, 3, 4, 5), at_most=1) == ["long"]
    assert holders.find((7,), at_most=8) == []
    assert holders.find((), at_most=8) == []


def test_the_next_turn_of_a_conversation_finds_where_the_last_went() -> None:
    holders: PrefixHolders[str] = PrefixHolders(1000)
    holders.add(tuple(range(37)), "here")
    for other in range(20):
        holders.add((*range(20), 100 + other), f"r{other}")
    assert holders.find(tuple(range(48)), at_most=8)[0] == "here"


def test_holders_that_left_are_forgotten() -> None:
    holders: PrefixHolders[str] = PrefixHolders(100)
    holders.add((1, 2), "stays")
    holders.add((1, 2), "goes")
    holders.add((5,), "goes")
    holders.keep({"stays"})
    assert holders.find((1, 2), at_most=8) == ["stays"]
    assert holders.find((5,), at_most=8) == []


def test_homes_stay_bounded_and_go_when_the_fleet_changes() -> None:
    holders: PrefixHolders[str] = PrefixHolders(10)
    for session in range(1, 26):
        holders.settle(session, "r")
        assert 1 <= len(holders.homes) <= 10
    holders.keep(["r"])
    assert not holders.homes


@pytest.mark.parametrize("length", [1, 2, 37, 512])
def test_holders_stay_bounded(length: int) -> None:
    holders: PrefixHolders[int] = PrefixHolders(50, holders_max=3)
    for number in range(500):
        holders.add(tuple(range(1000 * number, 1000 * number + length)), number % 9)
        holders.add((1, 2), number % 9)
    # A prompt notes at most ten blocks at once after the bound is looked at.
    assert len(holders) <= 50 + 2 * 11
    assert len(holders.find((1, 2), at_most=8)) == 3


def test_what_is_used_again_outlives_what_is_not() -> None:
    holders: PrefixHolders[str] = PrefixHolders(40)
    holders.add((5000,), "old")
    for number in range(200):
        holders.add((7000,), "kept")
        holders.add((number,), "x")
    assert holders.find((7000,), at_most=8) == ["kept"]
    assert holders.find((5000,), at_most=8) == []
