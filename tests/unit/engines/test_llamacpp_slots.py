"""A slot's cache is read only by the adapter that it was computed for (llama.cpp's issue #26207)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from modelyard.engines.llamacpp.slots import BASE, Grant, Slots


def run(slots: Slots, owner: str, prompt: bytes = b"hello") -> Grant:
    grant = slots.take(owner, prompt)
    assert grant is not None
    slots.release(grant, has_run=True)
    return grant


def test_an_adapter_keeps_its_slot_and_reads_its_cache_while_others_run_elsewhere() -> None:
    slots = Slots(2)
    assert run(slots, BASE) == (0, False)
    assert run(slots, "a") == (1, False)
    assert run(slots, BASE) == (0, True)
    assert run(slots, "a") == (1, True)
    assert slots.takeovers == 0


def test_who_takes_a_slot_over_does_not_read_it_the_first_time() -> None:
    slots = Slots(1)
    assert run(slots, "a").may_read is False
    assert run(slots, BASE).may_read is False
    assert run(slots, BASE).may_read is True
    assert run(slots, "a").may_read is False
    assert slots.takeovers == 2


def test_the_slot_that_was_not_used_for_longest_is_taken_over() -> None:
    slots = Slots(3)
    for owner in ("a", "b", "c", "a"):
        run(slots, owner)
    assert run(slots, "d").slot == 1, "b's"


def test_of_its_own_slots_a_request_gets_the_one_whose_prompt_begins_alike() -> None:
    slots = Slots(4)
    held = [slots.take("a", prompt) for prompt in (b"first" * 50, b"second" * 50)]
    for grant in held:
        assert grant is not None
        slots.release(grant, has_run=True)
    assert run(slots, "a", b"first" * 60) == (0, True)
    assert run(slots, "a", b"second" * 60) == (1, True)
    assert run(slots, "a", b"quite another prompt") == (2, False), "an unused slot keeps the other two caches"


def test_a_second_request_at_the_same_time_gets_another_slot_and_a_third_none() -> None:
    slots = Slots(2)
    assert slots.take("a", b"x") == (0, False)
    assert slots.take("a", b"x") == (1, False)
    assert slots.take("a", b"x") is None
    assert slots.running == 2
    assert repr(slots) == "<Slots - busy, - busy>"


def test_a_takeover_whose_caller_left_before_it_ran_leaves_nobodys_cache() -> None:
    """llama.cpp may have kept the one's cache, or begun the other's."""
    slots = Slots(1)
    run(slots, "a")
    grant = slots.take(BASE, b"hello")
    assert grant is not None
    slots.release(grant, has_run=False)
    assert run(slots, "a").may_read is False


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_common_beginnings_are_counted_right(one: bytes, other: bytes) -> None:
    from modelyard.engines.llamacpp.slots import _common

    count = _common(one, other)
    assert one[:count] == other[:count]
    assert one[count : count + 1] != other[count : count + 1] or count == min(len(one), len(other))


class Llama(RuleBasedStateMachine):
    """llama.cpp as it is: a slot holds tokens without saying for whom they were computed."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.slots = Slots(count)
        self.count = count
        self.cached: list[set[str]] = [set() for _ in range(count)]
        self.running: dict[int, tuple[Grant, str]] = {}

    @rule(owner=st.sampled_from([BASE, "a", "b", "c", "d"]), prompt=st.sampled_from([b"p" * 40, b"q" * 40]))
    def arrive(self, owner: str, prompt: bytes) -> None:
        grant = self.slots.take(owner, prompt)
        assert (grant is None) == (len(self.running) == self.count)
        if grant is not None:
            assert grant.slot not in self.running
            if grant.may_read:
                assert self.cached[grant.slot] == {owner}, "it would read what was computed for another"
            self.running[grant.slot] = grant, owner

    @rule(data=st.data(), has_run=st.booleans(), began=st.booleans())
    def leave(self, data: st.DataObject, has_run: bool, began: bool) -> None:
        if self.running:
            slot = data.draw(st.sampled_from(sorted(self.running)))
            grant, owner = self.running.pop(slot)
            if has_run:
                self.cached[slot] = {owner}
            elif began:
                # Cut off in the middle: some of the old cache may be there beside some of the new.
                self.cached[slot] = self.cached[slot] | {owner}
            self.slots.release(grant, has_run=has_run)

    @invariant()
    def what_runs_is_counted(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots.running == len(self.running)


Llama.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLlama = Llama.TestCase


def test_giving_back_twice_is_our_fault_and_found() -> None:
    slots = Slots(1)
    grant = slots.take(BASE, b"")
    assert grant is not None
    slots.release(grant, has_run=True)
    with pytest.raises(AssertionError):
        slots.release(grant, has_run=True)
