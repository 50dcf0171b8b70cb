"""Budgets: which thresholds were reached, and what a hard one leaves; pure."""

from modelyard.domain.billing import Budget

SHARES = (50, 80, 100)
"""Percents that are told unless others are asked for."""


def reached(budget: Budget, spent_nanousd: int) -> list[int]:
    """Return the thresholds that ``spent_nanousd`` reached, the lowest first."""
    return [share for share in sorted(budget.thresholds) if spent_nanousd * 100 >= budget.amount_nanousd * share]


def once(budget: Budget, share: int, month: str) -> str:
    """Return the name of the occasion: another amount makes it another one, a month too."""
    return f"budget/{budget.id}/{month}/{share}/{budget.amount_nanousd}"


def lowest(limits: list[int | None]) -> int | None:
    """Return the strictest of these limits; None is none."""
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None
