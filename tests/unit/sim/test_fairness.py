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


def test_a_flood_does_not_hold_up_who_asks_for_little() -> None:
    found = fair.isolation(None, 1, seconds=40.0)
    assert found.beside_p99_s < 1.5
    assert found.flood_p99_s > 50 * found.beside_p99_s
