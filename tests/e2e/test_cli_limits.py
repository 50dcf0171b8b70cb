"""Budgets and tenants from the command line, against a running platform."""

import json

import pytest
from tests.e2e.test_cli_commands import out, run
from tests.support.yard import Yard


@pytest.fixture(scope="module")
def served(yard: Yard) -> Yard:
    yard.deploy("sim")
    return yard


def test_a_budget_is_set_spent_shown_and_raised(served: Yard) -> None:
    made = json.loads(out(served, "keys", "create", "ci", "--tokens-per-day", "10", "--usd-per-month", "20", "--json"))
    assert made["limits"] == {"tokens_per_day": 10, "nanousd_per_month": 20_000_000_000}
    over = run(served, "run", "sim", "hello there", key=made["key"])
    assert over.returncode == 5
    assert "budget" in over.stderr or "quota" in over.stderr
    assert out(served, "keys", "limit", made["id"], "--tokens-per-day", "100000", "--quiet").strip() == made["id"]
    assert run(served, "run", "sim", "hello there", key=made["key"]).returncode == 0
    shown = out(served, "keys", "show", made["id"])
    assert "of 100000" in shown
    assert "100000 tokens/day" in out(served, "keys")
    assert json.loads(out(served, "keys", "limit", made["id"], "--json"))["limits"] == {}


def test_a_model_limit_bounds_that_model_alone(served: Yard) -> None:
    served.deploy("other")
    made = json.loads(out(served, "keys", "create", "ci", "--model-limit", "sim:rpm=1", "--json"))
    assert [run(served, "run", "sim", "hi", key=made["key"]).returncode for _ in range(2)] == [0, 5]
    assert run(served, "run", "other", "hi", key=made["key"]).returncode == 0


def test_a_tenant_lives_its_life(served: Yard) -> None:
    made = json.loads(
        out(served, "tenants", "create", "acme", "--plan", "priority", "--weight", "2.5", "--rpm", "600", "--json")
    )
    assert (made["plan"], made["weight"], made["limits"]) == ("priority", 2.5, {"requests_per_minute": 600})
    key = out(served, "keys", "create", "app", "--tenant", made["id"], "--quiet").strip()
    assert run(served, "models", key=key).returncode == 0
    assert "suspended" in out(served, "tenants", "suspend", made["id"])
    assert run(served, "models", key=key).returncode == 4
    out(served, "tenants", "resume", made["id"])
    changed = json.loads(out(served, "tenants", "set", made["id"], "--name", "Acme Ltd", "--plan", "batch", "--json"))
    assert (changed["name"], changed["plan"], changed["weight"]) == ("Acme Ltd", "batch", 2.5)
    out(served, "tenants", "limit", made["id"], "--usd-per-day", "0.5", "--accelerators", "3")
    assert "3 accelerators" in out(served, "tenants", "show", made["id"])
    assert "$0.50/day" in out(served, "tenants").replace("$0.5/day", "$0.50/day")
    assert "Acme Ltd" in out(served, "tenants", "show", made["id"])
    assert run(served, "tenants", "set", made["id"]).returncode == 2
    assert run(served, "tenants", key=key).returncode == 4
