"""Prices that change by themselves, credit that ends, budgets that hold, and an invoice that is the ledger."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.test_cli_commands import out, run
from tests.support.waiting import eventually
from tests.support.yard import Reply, Yard

SETTINGS = {
    "gateway.workers": 2,
    "prices.*.input": 0,
    "prices.*.cached_input": 0,
    "prices.*.output": 0,
    "billing.month_end": "none",
}
DOLLAR = 10**9
CHAT: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def served(yard: Yard) -> Yard:
    yard.deploy("sim", shared=True)
    return yard


def chat(yard: Yard, key: str) -> Reply:
    return yard.call("POST", "/v1/chat/completions", CHAT, key=key)


def put(yard: Yard, path: str, body: dict[str, Any], *, method: str = "PUT") -> dict[str, Any]:
    reply = yard.call(method, path, body)
    assert reply.status in (200, 201), reply.body
    found: dict[str, Any] = reply.json()
    return found


def test_a_price_to_come_applies_on_the_second_while_no_controller_runs(served: Yard) -> None:
    put(served, "/v1/prices", {"model": "sim", "output": "1000000"})
    at = int(time.time()) + 7
    put(served, "/v1/prices", {"model": "sim", "output": "3", "request": "0.5", "effective_from": at})
    (control,) = served.plane_pids("control")
    served.signal(control, signal.SIGSTOP)
    try:
        asked: list[str] = []

        def is_over() -> bool:
            reply = chat(served, served.admin_key)
            assert reply.status == 200, reply.body
            asked.append(reply.headers["x-request-id"])
            return time.time() > at + 1

        eventually(is_over, 40, "the price has changed")
    finally:
        served.signal(control, signal.SIGCONT)
    rows = [served.row_of(request_id) for request_id in asked]
    old = [row for row in rows if row["created_at"] < at]
    new = [row for row in rows if row["created_at"] >= at]
    assert old
    assert new
    assert all(row["cost_nanousd"] == row["completion_tokens"] * DOLLAR for row in old)
    assert all(row["cost_nanousd"] == row["completion_tokens"] * 3000 + DOLLAR // 2 for row in new)
    # What was billed stays, whatever is set afterwards.
    put(served, "/v1/prices", {"model": "sim", "output": "1", "request": 0})
    assert [served.row_of(request_id)["cost_nanousd"] for request_id in asked] == [row["cost_nanousd"] for row in rows]


def test_prepaid_credit_is_never_overdrawn_by_many_at_once_and_new_credit_helps_at_once(served: Yard) -> None:
    key = served.new_tenant("ahead")
    put(served, "/v1/prices", {"model": "sim", "output": 0, "request": "1", "tenant": "ahead"})
    put(served, "/v1/billing/accounts/ahead", {"plan": "prepaid"})
    refused = chat(served, key)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    put(served, "/v1/credits", {"tenant": "ahead", "amount": 10}, method="POST")
    with ThreadPoolExecutor(40) as pool:
        statuses = [reply.status for reply in pool.map(lambda _: chat(served, key), range(40))]
    assert set(statuses) == {200, 429}
    assert 8 <= statuses.count(200) <= 10, "each worker has its half, and its rest may be too little for one more"

    def spent() -> int:
        tenant = "SELECT tenant_id FROM tenants WHERE name = 'ahead'"
        statement = f"SELECT sum(cost_nanousd) AS n FROM inference_requests WHERE customer_id = ({tenant})"
        return int(served.query(statement)[0]["n"] or 0)

    eventually(lambda: spent() == statuses.count(200) * DOLLAR, 30, "all of it is in the ledger")
    put(served, "/v1/credits", {"tenant": "ahead", "amount": 4}, method="POST")
    assert chat(served, key).status == 200

    def drawn() -> bool:
        credit = served.get("/v1/credits?tenant=ahead")
        left = sum(float(grant["left"]) for grant in credit["grants"])
        return left == 14 - statuses.count(200) - 1

    eventually(drawn, 40, "what was used is drawn")


def test_a_hard_budget_refuses_and_a_soft_one_is_told(served: Yard) -> None:
    key = served.new_tenant("bounded")
    put(served, "/v1/prices", {"model": "sim", "output": 0, "request": "1", "tenant": "bounded"})
    hard = put(served, "/v1/budgets", {"tenant": "bounded", "amount": 4, "is_hard": True}, method="POST")
    # Two workers divide it, so that each has room for two.
    statuses = [chat(served, key).status for _ in range(8)]
    assert 2 <= statuses.count(200) <= 4
    assert 429 in statuses

    def shares() -> list[int]:
        events = served.get("/v1/billing/events?tenant=bounded")["data"]
        return sorted(event["data"]["threshold_percent"] for event in events)

    eventually(lambda: 50 in shares(), 40, "half of it was told")
    assert served.call("DELETE", f"/v1/budgets/{hard['id']}").status == 200
    assert chat(served, key).status == 200


def test_all_of_little_credit_can_be_spent_though_workers_divide_it(served: Yard) -> None:
    """Whoever does what ``x-should-retry`` says spends it to the last dollar, and never one more."""
    key = served.new_tenant("thrifty")
    put(served, "/v1/prices", {"model": "sim", "output": 0, "request": "1", "tenant": "thrifty"})
    put(served, "/v1/billing/accounts/thrifty", {"plan": "prepaid"})
    put(served, "/v1/credits", {"tenant": "thrifty", "amount": 7}, method="POST")
    replies: list[Reply] = []

    def is_refused_for_good() -> bool:
        replies.append(chat(served, key))
        if replies[-1].headers.get("x-should-retry") == "true":
            assert replies[-1].headers["connection"] == "close"
        return replies[-1].status != 200 and replies[-1].headers["x-should-retry"] == "false"

    eventually(is_refused_for_good, 60, "all is spent")
    assert {reply.json()["error"]["code"] for reply in replies if reply.status != 200} == {"insufficient_quota"}
    # Seven are divided to three each, and one that nobody may have.
    assert [reply.status for reply in replies].count(200) == 6


def test_a_hard_budget_of_a_key_for_a_model_stops_that_key_at_that_model_alone(served: Yard) -> None:
    key = served.new_tenant("choosy")
    owner = served.query("SELECT tenant_id FROM tenants WHERE name = 'choosy'")[0]["tenant_id"]
    other = served.new_key(tenant_id=owner)
    served.deploy("sim2", shared=True)
    put(served, "/v1/prices", {"model": "*", "request": "1", "tenant": "choosy"})
    budget = {"tenant": "choosy", "amount": 2, "key": key[3:11], "model": "sim", "is_hard": True}
    put(served, "/v1/budgets", budget, method="POST")
    # Two workers divide it: one each.
    statuses = [chat(served, key).status for _ in range(12)]
    assert 1 <= statuses.count(200) <= 2
    refused = chat(served, key)
    while refused.status == 200 or refused.headers["x-should-retry"] == "true":
        refused = chat(served, key)
    assert "this key's budget for 'sim' of this month" in refused.json()["error"]["message"]
    assert served.call("POST", "/v1/chat/completions", {**CHAT, "model": "sim2"}, key=key).status == 200
    assert chat(served, other).status == 200


def test_the_command_line_leads_from_a_price_to_a_credit_note(served: Yard) -> None:
    key = served.new_tenant("payer")
    price = json.loads(
        out(served, "prices", "set", "sim", "--tenant", "payer", "--output", "0", "--request", "1.25", "--json")
    )
    assert (price["request"], price["currency"]) == ("1.25", "USD")
    assert "1.25 a request" in out(served, "prices", "why", "sim", "--tenant", "payer")
    assert "price.set" in out(served, "prices", "history")
    assert "free" not in out(served, "credits", "account", "payer", "--name", "Payer Ltd", "--plan", "pay_as_you_go")
    request_ids = [chat(served, key).headers["x-request-id"] for _ in range(4)]
    month = time.strftime("%Y-%m", time.gmtime(max(served.row_of(one)["created_at"] for one in request_ids)))
    out(served, "credits", "add", "payer", "2", "--reason", "welcome")
    assert "welcome" in out(served, "credits", "--tenant", "payer")
    mistaken = out(served, "credits", "add", "payer", "2000", "--quiet").strip()
    assert out(served, "credits", "revoke", mistaken, "--quiet").strip() == "2000"
    assert out(served, "invoices", "upcoming", "--tenant", "payer", "--quiet").strip() == "5.00"
    draft = out(served, "invoices", "draft", "payer", month, "--quiet").strip()
    number = out(served, "invoices", "issue", draft, "--quiet").strip()
    assert number == "INV-000001"
    shown = json.loads(out(served, "invoices", number, "--json"))
    assert (shown["subtotal"], shown["credit"], shown["buyer"]["name"]) == ("5.00", "0.00", "Payer Ltd"), (
        "credit pays for what is used after it was given"
    )
    ledger = sum(served.row_of(one)["cost_nanousd"] for one in request_ids)
    assert shown["exact"] == f"{ledger / DOLLAR:g}"
    assert "Payer Ltd" in out(served, "invoices", "export", number)
    assert out(served, "invoices", "credit", number, "1.25", "--reason", "sorry", "--quiet").strip() == "CN-000001"
    assert "1.25" in out(served, "invoices")
    assert "CN-000001" in out(served, "invoices", "notes", "--invoice", number)
    assert "sorry" in out(served, "invoices", "show", "CN-000001")
    assert "<h1>Credit note CN-000001</h1>" in out(served, "invoices", "export", "CN-000001")
    whole = run(served, "invoices", "credit", number, "--reason", "a slip")
    assert (whole.returncode, "--all" in whole.stderr) == (2, True), "it took back everything, unasked"
    made = out(served, "budgets", "create", "9", "--tenant", "payer", "--at", "90", "--quiet").strip()
    assert "90 %" in out(served, "budgets", made)
    out(served, "budgets", "rm", made)
    key_id = key.split("_")[1]
    of_key = json.loads(out(served, "budgets", "create", "9", "--tenant", "payer", "--of-key", key_id, "--json"))
    assert of_key["key_id"] == key_id
    out(served, "budgets", "rm", of_key["id"])
    hard = out(served, "budgets", "create", "9", "--tenant", "payer", "--model", "sim", "--hard", "--quiet").strip()
    assert "model sim" in out(served, "budgets", hard)
    out(served, "prices", "end", price["id"])
    assert "no" in out(served, "prices", "--tenant", "payer").split()
