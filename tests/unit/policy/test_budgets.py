"""Budgets: whose money counts for which of them, and when each threshold is reached."""

from modelyard.domain.billing import Budget
from modelyard.policy.budgets import lowest, once, reached, sums


def test_a_budget_counts_what_its_key_and_model_cost_and_one_without_them_all() -> None:
    spent = sums(
        [
            ("ten-a", "k1", "", 10),
            ("ten-a", "k2", "", 5),
            ("ten-b", "k3", "", 7),
            ("ten-a", "k1", "chat", 4),
            ("ten-a", "k1", "chat", 3),
            ("ten-a", "k2", "chat", 1),
        ]
    )
    assert spent == {
        ("ten-a", "", ""): 15,
        ("ten-a", "k1", ""): 10,
        ("ten-a", "k2", ""): 5,
        ("ten-b", "", ""): 7,
        ("ten-b", "k3", ""): 7,
        ("ten-a", "", "chat"): 8,
        ("ten-a", "k1", "chat"): 7,
        ("ten-a", "k2", "chat"): 1,
    }


def test_a_threshold_is_reached_at_its_very_percent_and_each_occasion_has_one_name() -> None:
    budget = Budget("bud-1", "ten-a", 1000, thresholds=(100, 50, 120))
    assert reached(budget, 499) == []
    assert reached(budget, 500) == [50]
    assert reached(budget, 1200) == [50, 100, 120]
    names = {once(budget, share, month) for share in (50, 100) for month in ("2026-11", "2026-12")}
    assert len(names) == 4


def test_the_strictest_limit_counts_and_none_is_none() -> None:
    assert lowest([None, 5, 3]) == 3
    assert lowest([None, 0]) == 0
    assert lowest([None]) is None
