"""What ``modelyard budgets events`` says of each kind of event."""

from typing import Any

import pytest

from modelyard.cli.budgets import about


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"threshold_percent": 80, "name": "", "budget_id": "bud-1", "month": "2026-11"}, "80 % of bud-1 in 2026-11"),
        ({"number": "INV-000001"}, "INV-000001"),
        ({"tenant_id": "ten-a", "currency": "EUR"}, ""),
        ({"tenant_id": "ten-a", "currency": "EUR", "left_nanousd": 1_500_000_000}, "1.5 EUR are left"),
    ],
)
def test_an_event_is_told_in_a_word(data: dict[str, Any], said: str) -> None:
    assert about({"data": data}) == said
