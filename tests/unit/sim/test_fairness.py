"""In the simulated world tenants share by tokens within the bound of VTC, which turns by request do not keep."""

import pytest
from bench.sim import fair


@pytest.mark.parametrize("seed", [1, 2])
def test_two_tenants_that_always_wait_are_never_further_apart_than_the_bound(seed: int) -> None:
    ours = fair.shares(None, seed)
    assert ours.apart <= ours.bound
    assert ours.long / ours.short == pytest.approx(1.0, abs=0.05)


def test_turns_by_request_give_ten_times_as_much_to_who_asks_for_ten_times_as_much() -> None:
    turns = fair.shares(fair.takes_turns, 1)
    assert turns.long / turns.short > 8
    assert turns.apart > 20 * turns.bound


@pytest.mark.parametrize("stream", [0.0, 1.0])
def test_a_flood_does_not_hold_up_who_asks_for_little(stream: float) -> None:
    before = fair.isolation(fair.Setting(kept_share_max=0.0, stream=stream), 1, seconds=80.0)
    ours = fair.isolation(fair.Setting(stream=stream), 1, seconds=80.0)
    assert before.beside.p50 > 5 * before.alone.p50
    assert ours.beside.p50 < 2 * ours.alone.p50
    assert ours.beside.p90 < 2 * ours.alone.p90
    assert ours.tokens_s > 0.93 * before.tokens_s
