"""A share of the requests may be retries, and no more."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from modelyard.policy.retries import RESERVE, RetryBudget


def taken(budget: RetryBudget, now_s: float, tries: int = 1000) -> int:
    return sum(budget.take(now_s) for _ in range(tries))


@pytest.mark.parametrize(("requests", "allowed"), [(0, RESERVE), (10, RESERVE), (100, 10), (5000, 500)])
def test_a_tenth_of_the_requests_and_a_reserve_for_quiet_ones(requests: int, allowed: int) -> None:
    budget = RetryBudget(0.1)
    budget.roll(100.0)
    for _ in range(requests):
        budget.deposit()
    assert taken(budget, 100.5) == allowed
    assert repr(budget) == f"<RetryBudget: {allowed} of {allowed} retries used>"


def test_share_of_nothing_leaves_the_reserve_and_no_reserve_leaves_nothing() -> None:
    none = RetryBudget(0.0, reserve=0)
    none.deposit()
    assert not none.take(1.0)
    assert taken(RetryBudget(0.0), 1.0) == RESERVE


def test_idle_hour_after_a_busy_one_is_no_credit() -> None:
    budget = RetryBudget(0.1)
    for second in range(100, 200):
        budget.roll(second)
        budget.requests += 1000
    assert budget.allowed == 1000
    assert taken(budget, 3800.0) == RESERVE


def test_retries_come_back_after_ten_seconds() -> None:
    budget = RetryBudget(0.1)
    assert taken(budget, 100.0) == RESERVE
    assert taken(budget, 109.9) == 0
    assert taken(budget, 110.0) == RESERVE


def test_replica_that_is_lost_grants_retries_for_what_ran_on_it_once() -> None:
    budget = RetryBudget(0.1)
    budget.roll(100.0)
    budget.grant(64)
    assert taken(budget, 100.0) == 64 + RESERVE
    assert taken(budget, 105.0) == 0
    assert taken(budget, 110.0) == RESERVE


class RetryMachine(RuleBasedStateMachine):
    """Any traffic: no ten seconds in a row hold more retries than a share of their requests and the reserve."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = RetryBudget(0.1)
        self.now_s = 50.0
        self.requests: dict[int, int] = {}
        self.retries: dict[int, int] = {}

    @rule(step_s=st.sampled_from([0.0, 0.3, 1.0, 2.5, 9.0, 30.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.budget.roll(self.now_s)

    @rule(count=st.integers(1, 200))
    def requests_come(self, count: int) -> None:
        self.budget.roll(self.now_s)
        self.requests[int(self.now_s)] = self.requests.get(int(self.now_s), 0) + count
        for _ in range(count):
            self.budget.deposit()

    @rule(tries=st.integers(1, 50))
    def retries_come(self, tries: int) -> None:
        second = int(self.now_s)
        done = taken(self.budget, self.now_s, tries)
        self.retries[second] = self.retries.get(second, 0) + done
        requests = sum(self.requests.get(s, 0) for s in range(second - 9, second + 1))
        retries = sum(self.retries.get(s, 0) for s in range(second - 9, second + 1))
        # What was earned by requests that have left the window since is spent, and only blocks new ones.
        assert done == 0 or retries <= max(RESERVE, requests // 10)
        assert done == tries or retries >= max(RESERVE, requests // 10)


TestRetries = RetryMachine.TestCase
TestRetries.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
