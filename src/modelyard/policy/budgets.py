"""Budgets: which thresholds were reached, and what a hard one leaves; pure."""

from collections.abc import Iterable

from modelyard.domain.billing import Budget

SHARES = (50, 80, 100)
"""Percents that are told unless others are asked for."""
NOTICES_A_DAY = 200
"""Most e-mails and messages for one tenant. Who makes budgets names the receivers and a part of the text, and must not
make a mailer for strangers of the operator's mail server."""


def sums(spent: Iterable[tuple[str, str, str, int]]) -> dict[tuple[str, str, str], int]:
    """Return what was spent by tenant, key ("": all its keys) and model ("": all), from such rows of single keys.

    Of each key there is a row without a model, which is of all.
    """
    found: dict[tuple[str, str, str], int] = {}
    for tenant_id, key_id, model, nanousd in spent:
        for key in (key_id, ""):
            found[tenant_id, key, model] = found.get((tenant_id, key, model), 0) + nanousd
    return found


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
