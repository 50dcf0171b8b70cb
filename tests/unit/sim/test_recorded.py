"""Rows of the ledger become arrivals: at the moments they came, as often as asked, beginning alike where they did."""

from itertools import pairwise

import pytest

from modelyard.domain.usage import LINE_REPEATED, UsageRow, UsageStatus
from modelyard.sim.recorded import (
    APART_S,
    BLOCKS_MAX,
    Asked,
    Stretch,
    Terms,
    asked_of,
    block_tokens_of,
    length_s,
    stretches,
    traffic,
)

T0 = 1_796_000_000.0


def asked(at_s: float, prompt: int = 160, cached: int = 0, key: str = "k1", **more: object) -> Asked:
    given = {"endpoint_id": "ep", "model": "m", "key_id": key, "tenant_id": "t1", "completion_tokens": 5, **more}
    return Asked(at_s=T0 + at_s, prompt_tokens=prompt, cached_tokens=cached, **given)  # type: ignore[arg-type]


def test_a_row_is_what_a_replay_needs_of_it() -> None:
    row = UsageRow(
        "req-1", "ten-1", "key-1", "ep-1", "chat", "ver-1", "rep-1", "/v1/chat/completions", True, 100, 120, 20, 77,
        UsageStatus.SUCCESS, 200, "", 250.0, 900.0, 1, False, T0, T0 + 1, batch_id="batch-1",
    )  # fmt: skip
    one = asked_of(row)
    assert (one.at_s, one.prompt_tokens, one.completion_tokens, one.cost_nanousd) == (T0, 100, 20, 77)
    assert (one.ttft_s, one.latency_s, one.is_ok, one.is_batch, one.is_charged) == (0.25, 0.9, True, True, True)
    assert one.cached_tokens == 100, "no more than there were"


def test_a_line_that_ran_again_is_not_charged_and_a_failure_did_not_end_well() -> None:
    row = UsageRow(
        "req-1", "ten-1", "key-1", "ep-1", "chat", "", "", "/v1/chat/completions", True, 0, 0, 0, 0,
        UsageStatus.ERROR, 500, LINE_REPEATED, None, 9.0, 1, True, T0, T0 + 1,
    )  # fmt: skip
    one = asked_of(row)
    assert (one.is_charged, one.is_ok, one.ttft_s, one.is_replayable) == (False, False, None, False)


def test_all_of_a_window_is_one_stretch_and_a_sample_a_part_of_each_hour() -> None:
    assert [(one.since, one.until) for one in stretches(T0, T0 + 9000)] == [(T0, T0 + 9000)]
    parts = stretches(T0, T0 + 7200, 0.75)
    assert [(one.since - T0, one.until - T0, one.begin_s) for one in parts] == [(0, 2700, 0), (3600, 6300, 2700)]
    assert length_s(parts) == 5400


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_parts_of_a_sample_lie_in_the_window_and_never_over_each_other(share: float) -> None:
    for hours in (0.3, 1, 2, 5.5, 24, 100, 168):
        parts = stretches(T0, T0 + hours * 3600, share)
        assert length_s(parts) == pytest.approx(share * hours * 3600)
        assert parts[0].since >= T0
        assert parts[-1].until <= T0 + hours * 3600 + 1e-6
        for one, after in pairwise(parts):
            assert after.since >= one.until - 1e-6
            assert after.begin_s == pytest.approx(one.begin_s + one.until - one.since)


def test_a_sample_has_its_share_of_what_comes_at_the_full_hour() -> None:
    begin = T0 - T0 % 3600
    for late_s in (0, 1800, 3540):
        moments = [begin + hour * 3600 + late_s + second for hour in range(168) for second in range(60)]
        parts = stretches(begin, begin + 168 * 3600, 0.1)
        seen = sum(any(one.since <= at < one.until for one in parts) for at in moments)
        assert seen == pytest.approx(0.1 * len(moments), rel=0.15)


def test_requests_come_when_they_came_with_what_their_tenants_are_due() -> None:
    rows = [asked(10), asked(3700, tenant_id="t2", is_batch=True)]
    came = traffic(
        rows,
        [Stretch(T0, T0 + 900, 0.0), Stretch(T0 + 3600, T0 + 4500, 900.0)],
        terms={"t1": Terms(weight=3.0, band=0)},
    )
    assert [one.at_s for one in came.arrivals] == [10, 1000]
    assert [(one.weight, one.band) for one in came.arrivals] == [(3.0, 0), (1.0, 2)]
    assert [(one.is_line, one.is_stream) for one in came.arrivals] == [(False, True), (True, False)]
    assert came.places == (0, 1)
    assert {one.session for one in came.arrivals} == {0}
    twice = traffic(rows, stretches(T0, T0 + 7200), is_sticky=True, factor=2.0).arrivals
    assert 0 not in {one.session for one in twice}
    assert len({one.session for one in twice}) == 2, "a caller and a second self, who is somebody else"


def test_twice_the_traffic_is_each_caller_twice_moved_as_a_whole() -> None:
    rows = [asked(1000 + at, key=key) for at in range(0, 50, 5) for key in ("k1", "k2")]
    came = traffic(rows, stretches(T0, T0 + 7200), factor=2.0, seed=3)
    assert len(came.arrivals) == 40
    assert sorted(came.places) == sorted([*range(20), *range(20)])
    assert [one.at_s for one in came.arrivals] == sorted(one.at_s for one in came.arrivals)
    moved: dict[str, set[float]] = {"k1": set(), "k2": set()}
    for place, row in enumerate(rows):
        times = [one.at_s for one, its in zip(came.arrivals, came.places, strict=True) if its == place]
        apart = [at for at in times if at != row.at_s - T0]
        moved[row.key_id].add(round(apart[0] - (row.at_s - T0), 6))
    assert all(len(shifts) == 1 for shifts in moved.values()), "bursts and pauses of a caller stay"
    assert moved["k1"] != moved["k2"]
    assert all(abs(shift) <= APART_S for shifts in moved.values() for shift in shifts)


def test_half_of_the_traffic_leaves_half_out_and_the_same_half_each_time() -> None:
    rows = [asked(at) for at in range(1000)]
    once = traffic(rows, stretches(T0, T0 + 2000), factor=0.5, seed=1)
    assert 420 <= len(once.arrivals) <= 580
    assert once == traffic(rows, stretches(T0, T0 + 2000), factor=0.5, seed=1)
    assert once != traffic(rows, stretches(T0, T0 + 2000), factor=0.5, seed=2)


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_what_was_cached_begins_as_the_latest_of_the_same_key_that_is_long_enough() -> None:
    rows = [
        asked(0, 320),
        asked(1, 320, key="k2"),
        asked(2, 32),
        asked(3, 480, 160),
        asked(4, 640, 480),
        asked(5, 320, 320, key="k3"),
    ]
    blocks = [one.blocks for one in traffic(rows, stretches(T0, T0 + 10)).arrivals]
    assert shared(blocks[0], blocks[3]) == 10
    assert shared(blocks[3], blocks[4]) == 30
    assert shared(blocks[0], blocks[4]) == 10, "a beginning of a beginning"
    assert shared(blocks[5], blocks[4]) == 20, "of its tenant, where its key has none"
    assert blocks[1] == blocks[2] == (), "what nobody shares has no name"


def test_what_begins_like_an_answer_begins_like_its_prompt_and_a_stranger_like_nobody() -> None:
    rows = [asked(0, 320), asked(1, 480, 400), asked(2, 320, 320, key="k9", tenant_id="t9")]
    blocks = [one.blocks for one in traffic(rows, stretches(T0, T0 + 10)).arrivals]
    assert shared(blocks[0], blocks[1]) == 20
    assert len(blocks[2]) == 20
    first = traffic([asked(0, 320, 320)], stretches(T0, T0 + 10)).arrivals[0]
    assert first.blocks == (), "there is nothing before it to begin like"


def test_long_prompts_have_larger_blocks_so_that_all_have_room() -> None:
    assert block_tokens_of([asked(0, 500, 400)]) == 16
    long = [asked(0, 30_000, 24_000)] * 100_000
    tokens = block_tokens_of(long)
    assert tokens % 16 == 0
    assert tokens / 2 < 24_000 * len(long) / BLOCKS_MAX <= tokens
    rows = [asked(0, 1000), asked(1, 1000, 700)]
    came = traffic(rows, stretches(T0, T0 + 10), block_tokens=128).arrivals
    assert shared(came[0].blocks, came[1].blocks) == len(came[1].blocks) == 5


def test_a_copy_shares_beginnings_with_copies_only() -> None:
    rows = [asked(1000, 320), asked(1001, 320, 320)]
    came = traffic(rows, stretches(T0, T0 + 7200), factor=2.0)
    by_place = {
        place: {one.blocks for one, its in zip(came.arrivals, came.places, strict=True) if its == place}
        for place in (0, 1)
    }
    assert by_place[0] == by_place[1]
    assert len(by_place[0]) == 2
    own, copy = by_place[0]
    assert shared(own, copy) == 0


def test_a_request_outside_of_the_stretches_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="in order"):
        traffic([asked(-5)], stretches(T0, T0 + 10))
