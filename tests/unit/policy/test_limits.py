"""Rate limits: all or nothing, true waiting times, nothing lost or doubled."""

from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.tenants import Limits
from modelyard.policy.limits import Allowance, reserve, settle, share


def full(**limits: int) -> Allowance:
    return Allowance.full(Limits(**limits), now_s=0.0)


def take(*allowances: Allowance, tokens: int = 1, prompt: int = 1, now_s: float = 0.0):
    return reserve(allowances, needed_tokens=tokens, least_tokens=prompt, now_s=now_s)


def test_a_minute_of_requests_can_be_spent_at_once_and_then_one_at_a_time() -> None:
    key = full(requests_per_minute=60)
    assert all(take(key) is None for _ in range(60))
    refusal = take(key)
    assert refusal is not None
    assert refusal.kind == "requests"
    assert refusal.retry_after_s == 1.0
    assert take(key, now_s=0.99) is not None
    assert take(key, now_s=1.0) is None


def test_a_refusal_takes_nothing_from_anybody() -> None:
    key, tenant = full(requests_per_minute=10), full(tokens_per_minute=5)
    assert take(key, tenant, tokens=4) is None
    refusal = take(key, tenant, tokens=4)
    assert refusal is not None
    assert refusal.kind == "tokens"
    assert key.requests_left == 9
    assert (key.running, tenant.running) == (1, 1)


def test_what_was_not_used_comes_back() -> None:
    key = full(tokens_per_minute=100, concurrency=1)
    assert take(key, tokens=90) is None
    assert take(key, tokens=1) is not None
    settle([key], reserved_tokens=90, used_tokens=10)
    assert key.tokens_left == 90
    assert take(key, tokens=90) is None


def test_a_prompt_larger_than_the_whole_limit_never_fits() -> None:
    refusal = take(full(tokens_per_minute=100), tokens=200, prompt=101)
    assert refusal is not None
    assert refusal.retry_after_s is None


def test_an_output_cap_larger_than_the_whole_limit_passes_a_full_bucket() -> None:
    key = full(tokens_per_minute=100)
    assert take(key, tokens=4096, prompt=10) is None
    settle([key], reserved_tokens=4096, used_tokens=30)
    assert key.tokens_left == 70


def test_a_limit_of_zero_stops_a_key() -> None:
    refusal = take(full(requests_per_minute=0))
    assert refusal is not None
    assert refusal.retry_after_s == 60.0


def test_new_limits_keep_what_was_used() -> None:
    key = full(requests_per_minute=10)
    for _ in range(4):
        take(key)
    key.change(Limits(requests_per_minute=5), now_s=0.0)
    assert key.requests_left == 1
    assert key.running == 4


def test_a_first_limit_counts_nothing_from_before_it() -> None:
    key = full()
    for _ in range(1000):
        take(key, tokens=500)
        settle([key], reserved_tokens=500, used_tokens=100)
    key.change(Limits(requests_per_minute=60, tokens_per_minute=6000), now_s=0.0)
    assert (key.requests_left, key.tokens_left) == (60, 6000)
    assert take(key, tokens=500) is None


@given(st.integers(0, 1000), st.integers(1, 9))
def test_the_shares_of_all_workers_sum_to_the_limit(limit: int, workers: int) -> None:
    parts = [share(Limits(concurrency=limit), index=index, of=workers).concurrency or 0 for index in range(workers)]
    assert sum(parts) == limit
    assert max(parts) - min(parts) <= 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.floats(0, 5)), max_size=60))
def test_never_more_than_the_limit_and_its_refill(work: list[tuple[int, int, float]]) -> None:
    key = full(tokens_per_minute=120, requests_per_minute=30, concurrency=3)
    now_s, taken, used, running = 0.0, 0, 0, []
    for needed, actual, pause in work:
        now_s += pause
        if take(key, tokens=needed, prompt=1, now_s=now_s) is None:
            taken += 1
            running.append((needed, min(actual, needed)))
        elif running:
            reserved, spent = running.pop(0)
            settle([key], reserved_tokens=reserved, used_tokens=spent)
            used += spent
        assert key.running == len(running) <= 3
        assert taken <= 30 + now_s * 0.5 + 1e-6
        assert used <= 120 + now_s * 2 + 1e-6
        assert key.tokens_left <= 120


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.floats(0, 3)), max_size=30))
def test_shares_that_move_between_two_gateways_give_nothing_twice(moves: list[tuple[int, int, float]]) -> None:
    """Whatever moves where, together they let no more through than one limit and its refill."""
    one, other = full(requests_per_minute=30), full(requests_per_minute=30)
    now_s, passed = 0.0, 0
    for share_of_one, asks, pause in moves:
        now_s += pause
        for gateway, part in ((one, share_of_one), (other, 60 - share_of_one)):
            gateway.resize(Limits(requests_per_minute=part), now_s=now_s)
        passed += sum(take(gateway, now_s=now_s) is None for gateway in (one, other) for _ in range(asks))
        assert passed <= 60 + now_s + 1e-6
