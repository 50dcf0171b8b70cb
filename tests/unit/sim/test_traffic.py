"""Made-up requests come as often as asked for, in the pattern that was named, and conversations grow."""

from itertools import pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from modelyard.domain.lengths import lengths_of
from modelyard.sim.requests import Arrival
from modelyard.sim.traffic import HASH_TOKENS, Pattern, Traffic, requests_of


def made(seed: int = 1, **changes: object) -> list[Arrival]:
    return requests_of(Traffic(**{"rate": 2.0, "seconds": 4000.0, **changes}), Random(seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", list(Pattern))
def test_requests_come_in_order_at_the_rate_that_was_asked_for(pattern: Pattern) -> None:
    found = made(pattern=pattern, period_s=4000.0, think_s=2.0, burstiness=2.0)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert len(found) / 4000 == pytest.approx(2.0, rel=0.1)
    assert found == made(pattern=pattern, period_s=4000.0, think_s=2.0, burstiness=2.0)
    assert found != made(2, pattern=pattern, period_s=4000.0, think_s=2.0, burstiness=2.0) or pattern == "constant"


@pytest.mark.parametrize(("pattern", "variation"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 4.0)])
def test_gaps_vary_as_their_pattern_says(pattern: str, variation: float) -> None:
    moments = [one.at_s for one in made(pattern=Pattern(pattern), seconds=40_000.0)]
    gaps = [later - before for before, later in pairwise(moments)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_a_day_begins_at_its_quietest_and_is_busiest_in_the_middle() -> None:
    found = made(pattern=Pattern.DIURNAL, period_s=4000.0, peak=1.8)
    by_quarter = [sum(quarter * 1000 <= one.at_s < (quarter + 1) * 1000 for one in found) for quarter in range(4)]
    assert min(by_quarter[1:3]) > 2 * max(by_quarter[0], by_quarter[3])


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    lengths = {"input_tokens": lengths_of("300"), "output_tokens": lengths_of("200")}
    found = made(pattern=Pattern.SESSIONS, rate=0.01, turns=6.0, shared_prefix_tokens=512, shared_prefixes=2, **lengths)
    by_own: dict[int, list[Arrival]] = {}
    for one in found:
        by_own.setdefault(one.blocks[2], []).append(one)
    longest = max(by_own.values(), key=len)
    assert len(longest) >= 3, "nobody spoke for long: this shows little"
    for before, after in pairwise(longest):
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert after.prompt_tokens == before.prompt_tokens + 200 + 300
        assert len(after.blocks) == after.prompt_tokens // HASH_TOKENS
        assert after.at_s > before.at_s
    assert len({one.blocks[:2] for one in found}) == 2, "system prompts are shared by conversations"


def test_prompts_of_two_tenants_have_nothing_in_common() -> None:
    chance = Random(1)
    found = [requests_of(Traffic(seconds=60.0, shared_prefix_tokens=512), chance) for _ in range(2)]
    first, second = ({block for one in group for block in one.blocks} for group in found)
    assert first
    assert not first & second


@pytest.mark.parametrize("pattern", ["poisson", "bursty", "diurnal"])
def test_who_changes_lengths_keeps_when_requests_come_and_all_other_lengths(pattern: str) -> None:
    first = made(pattern=Pattern(pattern), shared_prefix_tokens=512, shared_prefixes=3)
    other = made(
        pattern=Pattern(pattern), shared_prefix_tokens=512, shared_prefixes=3, output_tokens=lengths_of("uniform:5:9")
    )
    assert [(one.at_s, one.prompt_tokens, one.blocks) for one in first] == [
        (one.at_s, one.prompt_tokens, one.blocks) for one in other
    ]


def test_a_conversation_ends_where_no_model_has_the_context_for_it() -> None:
    found = made(pattern=Pattern.SESSIONS, rate=0.5, turns=20.0, input_tokens=lengths_of("300000"))
    assert 600_000 < max(one.prompt_tokens for one in found) <= 1_300_000


def test_prompts_that_begin_alike_share_what_says_so() -> None:
    found = made(seconds=500.0, shared_prefix_tokens=1_000_000, shared_prefixes=2)
    assert len({one.blocks for one in found}) == 2
    assert len({id(one.blocks) for one in found}) == 2, "thousands of numbers for each request fill the memory"
