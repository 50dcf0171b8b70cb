"""Accounts, credit, budgets and invoices over the API, and what happens about them without anybody asking."""

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.management import Management, management

from modelyard.config import Config
from modelyard.config.billing import BillingConfig, SmtpConfig
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.policy.utc import day_of, month_name
from modelyard.stores import JournalPosition

DOLLAR = Price(input=10**15)
"""A dollar a token."""
NOVEMBER = datetime(2026, 11, 20, tzinfo=UTC).timestamp()
SETTINGS = BillingConfig(
    currency="EUR", month_end="issue", grace_s=3600, seller_name="Yard Ltd", tax_name="VAT", tax_percent=20,
    smtp=SmtpConfig(host="mail.example", sender="yard@example.com"),
)  # fmt: skip


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path, Config(billing=SETTINGS)) as running:
        running.clock.start_s = NOVEMBER
        yield running


class Used:
    """Lets tenants use something."""

    count = 0

    @classmethod
    async def dollars(
        cls, api: Management, tenant: str, amount: int, *, key: str = "k", model: str = "chat", price: Price = DOLLAR
    ) -> None:
        cls.count += 1
        rid, at = f"req_{cls.count}", api.clock.unix_s()
        intent = Intent(rid, at, tenant, key, "ep", model, "v", "/", False, amount, amount, price)
        settle = Settle(rid, at, amount, 0, 0, UsageStatus.SUCCESS, 200, "", None, 1.0, "r", 1, False)
        await api.context.usage.apply([intent, settle], JournalPosition("gateway-0", "1.journal", cls.count))


async def ok(api: Management, who: Identity, method: str, path: str, body: Any = None) -> Any:
    answer = await api.call(who, method, path, body)
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


async def told(api: Management, who: Identity) -> list[tuple[str, Any]]:
    events = (await ok(api, who, "GET", "/v1/billing/events"))["data"]
    return [(one["type"], one["data"].get("threshold_percent", one["data"].get("number"))) for one in reversed(events)]


# --- accounts and credit ---


async def test_how_a_tenant_pays_is_changed_field_by_field(api: Management, admin: Identity, manager: Identity) -> None:
    path = "/v1/billing/accounts/acme"
    await ok(api, admin, "PUT", path, {"plan": "prepaid", "name": "ACME", "email": "m@acme.example"})
    found = await ok(api, admin, "PUT", path, {"address": "1 Main St\nTown"})
    assert (found["plan"], found["name"], found["address"], found["credit"]) == (
        "prepaid",
        "ACME",
        "1 Main St\nTown",
        "0",
    )
    assert await ok(api, manager, "GET", f"/v1/billing/accounts/{manager.tenant_id}") == found
    assert (await ok(api, admin, "PUT", path, {"email": None}))["email"] == ""
    assert (await api.call(manager, "PUT", path, {"plan": "free"})).status_code == 403
    assert (await api.call(manager, "GET", "/v1/billing/accounts/platform")).status_code == 404


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/billing/accounts/acme", {"email": "a@b\nBcc: c@d"}, "email"),
    ("/v1/billing/accounts/acme", {"email": "no address"}, "email"),
    ("/v1/billing/accounts/acme", {"name": "a\x1bb"}, "name"),
    ("/v1/billing/accounts/acme", {"plan": "gold"}, "plan"),
    ("/v1/credits", {"tenant": "acme", "amount": 0}, "amount"),
    ("/v1/credits", {"tenant": "acme", "amount": "-5"}, "amount"),
    ("/v1/credits", {"tenant": "acme", "amount": 5, "expires_at": "2026-11-01"}, "expires_at"),
    ("/v1/budgets", {"tenant": "acme", "amount": 0}, "amount"),
    ("/v1/budgets", {"tenant": "acme", "amount": 5, "thresholds": [0]}, "thresholds[0]"),
    ("/v1/budgets", {"tenant": "acme", "amount": 5, "emails": ["x"]}, "emails[0]"),
    ("/v1/budgets", {"tenant": "acme", "amount": 5, "model": "a/b/c d", "is_hard": True}, "model"),
    ("/v1/budgets", {"tenant": "acme", "amount": 5, "slack_url": "http://127.0.0.1/x"}, "slack_url"),
    ("/v1/budgets", {"tenant": "acme", "amount": 5, "slack_url": "https://10.0.0.1/x"}, "slack_url"),
    ("/v1/invoices", {"tenant": "acme", "month": "2026-13"}, "month"),
    ("/v1/invoices", {"tenant": "acme", "month": "2026-12"}, "month"),
]


async def test_what_does_not_fit_is_refused_by_name(api: Management, admin: Identity, manager: Identity) -> None:
    for path, body, param in WRONG:
        answer = await api.call(admin, "PUT" if "accounts" in path else "POST", path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_credit_is_drawn_and_told_when_it_is_used_up(api: Management, admin: Identity, manager: Identity) -> None:
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"plan": "prepaid", "email": "m@acme.example"})
    await ok(api, admin, "POST", "/v1/credits", {"tenant": "acme", "amount": "7.5", "reason": "paid"})
    refreshed = len(api.refreshed)
    await Used.dollars(api, manager.tenant_id, 5)
    await api.context.billing_desk.round()
    found = await ok(api, manager, "GET", "/v1/credits")
    assert (found["left"], found["currency"], found["grants"][0]["drawn"]) == ("2.5", "EUR", "5")
    assert sorted(one["amount"] for one in found["entries"]) == ["-5", "7.5"]
    assert await told(api, manager) == []
    await Used.dollars(api, manager.tenant_id, 3)
    for _ in range(2):
        await api.context.billing_desk.round()
    assert await told(api, manager) == [("credit.exhausted", None)]
    (event,) = (await ok(api, manager, "GET", "/v1/billing/events"))["data"]
    assert event["notices"] == {"m@acme.example": "pending"}
    assert len(api.refreshed) > refreshed


# --- budgets ---


async def test_each_threshold_of_a_budget_is_told_once_a_month(
    api: Management, admin: Identity, manager: Identity
) -> None:
    tenant = manager.tenant_id
    for more in ({}, {"key": manager.key_id}, {"model": "chat"}):
        await ok(api, manager, "POST", "/v1/budgets", {"amount": 10, "emails": ["m@acme.example"], **more})
    await Used.dollars(api, tenant, 5, key="another", model="other")
    await api.context.billing_desk.round()
    assert await told(api, manager) == [("budget.threshold_reached", 50)]
    await Used.dollars(api, tenant, 8, key=manager.key_id)
    for _ in range(3):
        await api.context.billing_desk.round()
    shares = sorted(share for _, share in await told(api, manager))
    assert shares == [50, 50, 50, 80, 80, 80, 100], "the tenant all three, its key and the model 50 and 80"
    api.clock.advance(15 * 86_400)
    await Used.dollars(api, tenant, 5, key=manager.key_id)
    await api.context.billing_desk.tell_budgets()
    assert len(await told(api, manager)) == 10, "a new month tells anew"


async def test_a_budget_that_grows_is_told_by_its_new_amount(api: Management, manager: Identity) -> None:
    budget = await ok(api, manager, "POST", "/v1/budgets", {"amount": 10, "thresholds": [100]})
    await Used.dollars(api, manager.tenant_id, 10)
    await api.context.billing_desk.round()
    await ok(api, manager, "PUT", f"/v1/budgets/{budget['id']}", {"amount": 20, "thresholds": [100]})
    await api.context.billing_desk.round()
    assert len(await told(api, manager)) == 1
    await Used.dollars(api, manager.tenant_id, 10)
    await api.context.billing_desk.round()
    assert len(await told(api, manager)) == 2


async def test_what_the_operator_set_only_the_operator_changes(
    api: Management, admin: Identity, manager: Identity
) -> None:
    theirs = await ok(api, admin, "POST", "/v1/budgets", {"tenant": "acme", "amount": 10, "is_hard": True})
    assert [one["id"] for one in (await ok(api, manager, "GET", "/v1/budgets"))["data"]] == [theirs["id"]]
    path = f"/v1/budgets/{theirs['id']}"
    for method, body in (("DELETE", None), ("PUT", {"amount": 10**6})):
        assert (await api.call(manager, method, path, body)).status_code == 409
    own = await ok(api, manager, "POST", "/v1/budgets", {"amount": 5, "key": manager.key_id, "is_hard": True})
    assert (await api.call(manager, "POST", "/v1/budgets", {"amount": 5, "key": admin.key_id})).status_code == 404
    assert (await api.call(manager, "POST", "/v1/budgets", {"amount": 5, "tenant": PLATFORM})).status_code == 404
    await ok(api, manager, "DELETE", f"/v1/budgets/{own['id']}")
    await ok(api, admin, "DELETE", path)
    assert (await ok(api, manager, "GET", "/v1/budgets"))["data"] == []


# --- invoices ---


async def test_a_month_is_invoiced_when_its_grace_is_over_and_once(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"name": "ACME", "email": "m@acme.example"})
    await api.tenant("free-one")
    await ok(api, admin, "PUT", "/v1/billing/accounts/free-one", {"plan": "free"})
    for tenant in (manager.tenant_id, "ten-free-one", PLATFORM):
        await Used.dollars(api, tenant, 100)
    december = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    api.clock.advance(december + 3599 - api.clock.unix_s())
    await api.context.billing_desk.end_months()
    assert (await ok(api, admin, "GET", "/v1/invoices"))["data"] == []
    api.clock.advance(2)
    for _ in range(2):
        await api.context.billing_desk.end_months()
    (invoice,) = (await ok(api, admin, "GET", "/v1/invoices"))["data"]
    assert (invoice["number"], invoice["month"], invoice["status"]) == ("INV-000001", "2026-11", "issued")
    assert (invoice["seller"]["name"], invoice["buyer"]["name"]) == ("Yard Ltd", "ACME")
    assert (invoice["subtotal"], invoice["tax"]["amount"], invoice["total"]) == ("100.00", "20.00", "120.00")
    assert invoice["due_at"] - invoice["issued_at"] == 14 * 86_400
    assert await told(api, manager) == [("invoice.issued", "INV-000001")]
    # What arrives late for November is an adjustment on December's.
    api.clock.start_s -= 86_400
    await Used.dollars(api, manager.tenant_id, 1)
    api.clock.start_s += 86_400
    await Used.dollars(api, manager.tenant_id, 2)
    upcoming = await ok(api, manager, "GET", "/v1/invoices/upcoming")
    assert [(one["month"], one["amount"], one["is_adjustment"]) for one in upcoming["lines"]] == [
        ("2026-11", "1.00", True),
        ("2026-12", "2.00", False),
    ]
    await api.context.billing_desk.end_months()
    assert (await ok(api, manager, "GET", "/v1/invoices/INV-000001")) == invoice
    assert len((await ok(api, admin, "GET", "/v1/invoices"))["data"]) == 1, "what came late waits for the next one"
    api.clock.advance(31 * 86_400)
    await api.context.billing_desk.end_months()
    (second, _) = (await ok(api, manager, "GET", "/v1/invoices"))["data"]
    assert (second["number"], second["month"], second["subtotal"]) == ("INV-000002", "2026-12", "3.00")


async def test_what_comes_late_is_invoiced_though_nothing_else_was_used(api: Management, manager: Identity) -> None:
    desk = api.context.billing_desk
    await Used.dollars(api, manager.tenant_id, 5)
    december = datetime(2026, 12, 3, tzinfo=UTC).timestamp()
    api.clock.advance(december - api.clock.unix_s())
    await desk.end_months()
    api.clock.start_s -= 5 * 86_400
    await Used.dollars(api, manager.tenant_id, 1)
    api.clock.start_s += 5 * 86_400
    for _ in range(2):
        await desk.end_months()
        api.clock.advance(31 * 86_400)
    await desk.end_months()
    invoices = (await ok(api, manager, "GET", "/v1/invoices"))["data"]
    assert [(one["month"], one["subtotal"]) for one in invoices] == [("2026-12", "1.00"), ("2026-11", "5.00")]


async def test_drafts_are_made_anew_and_closed_by_hand(api: Management, admin: Identity, manager: Identity) -> None:
    wanted = {"tenant": "acme", "month": month_name(day_of(api.clock.unix_s()))}
    assert (await api.call(admin, "POST", "/v1/invoices", wanted)).status_code == 409
    await Used.dollars(api, manager.tenant_id, 3)
    draft = await ok(api, admin, "POST", "/v1/invoices", wanted)
    await Used.dollars(api, manager.tenant_id, 4)
    path = f"/v1/invoices/{draft['id']}"
    assert (await ok(api, manager, "GET", path))["subtotal"] == "7.00"
    back = {"reason": "outage", "amount": "1.20"}
    assert (await api.call(admin, "POST", f"{path}/credit-notes", back)).status_code == 409
    assert (await api.call(manager, "POST", f"{path}/issue")).status_code == 403
    issued = await ok(api, admin, "POST", f"{path}/issue")
    assert (issued["number"], issued["total_minor"]) == ("INV-000001", 840)
    assert (await api.call(admin, "POST", f"{path}/issue")).status_code == 409
    note = await ok(api, admin, "POST", f"{path}/credit-notes", back)
    assert (note["number"], note["invoice_number"], note["total"], note["tax"]) == (
        "CN-000001",
        "INV-000001",
        "1.20",
        "0.20",
    )
    for amount in ("7.21", "0.001", "0"):
        answer = await api.call(admin, "POST", f"{path}/credit-notes", {"reason": "more", "amount": amount})
        assert answer.json()["error"]["param"] == "amount"
    rest = await ok(api, admin, "POST", f"{path}/credit-notes", {"reason": "all"})
    assert (rest["total"], rest["tax"]) == ("7.20", "1.20")
    assert [one["number"] for one in (await ok(api, manager, "GET", "/v1/credit-notes"))["data"]] == [
        "CN-000001",
        "CN-000002",
    ]
    shown = await ok(api, manager, "GET", path)
    assert (shown["credited"], shown["credit_notes"], shown["total"]) == ("8.40", ["CN-000001", "CN-000002"], "8.40")
    actions = [one["action"] for one in (await ok(api, admin, "GET", "/v1/billing/changes?action=invoice."))["data"]]
    assert actions == ["invoice.credit", "invoice.credit", "invoice.issue"]


async def test_the_csv_adds_up_and_the_page_runs_nothing(api: Management, admin: Identity, manager: Identity) -> None:
    evil = "<script>alert(1)</script>"
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"name": evil, "address": "1 <b>Main</b> St"})
    for model in ("chat", "other"):
        await Used.dollars(api, manager.tenant_id, 3, model=model)
    month = month_name(day_of(api.clock.unix_s()))
    draft = await ok(api, admin, "POST", "/v1/invoices", {"tenant": "acme", "month": month})
    issued = await ok(api, admin, "POST", f"/v1/invoices/{draft['id']}/issue")
    table = await api.call(manager, "GET", f"/v1/invoices/{issued['number']}?format=csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert table.headers["content-type"].startswith("text/csv")
    assert [(row["kind"], row["model"], row["quantity"], row["amount"]) for row in rows] == [
        ("usage", "chat", "3", "3.00"),
        ("usage", "other", "3", "3.00"),
        ("subtotal", "", "", "6.00"),
        ("credit", "", "", "0.00"),
        ("tax", "", "", "1.20"),
        ("total", "", "", "7.20"),
    ]
    page = await api.call(manager, "GET", f"/v1/invoices/{issued['id']}?format=html")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src" not in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert evil not in page.text
    assert "&lt;script&gt;" in page.text
    assert "@media print" in page.text
    assert "INV-000001" in page.text
    stranger, _ = await api.key(await api.tenant("globex"), Scope.MANAGE)
    for path in (issued["id"], f"{issued['number']}?format=html", f"{issued['number']}?format=csv"):
        assert (await api.call(stranger, "GET", f"/v1/invoices/{path}")).status_code == 404
