"""Ends of months and changes of plans over the API; budgets of single models; credit that is taken back."""

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.support.management import Management, management
from tests.unit.control_api.test_billing import NOVEMBER, SETTINGS, Used, ok, told

from modelyard.config import Config
from modelyard.domain.invoices import Invoice
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Price
from modelyard.policy.utc import day_of, month_name

DECEMBER = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path, Config(billing=SETTINGS)) as running:
        running.clock.start_s = NOVEMBER
        yield running


def go_to(api: Management, unix_s: float) -> None:
    api.clock.advance(unix_s - api.clock.unix_s())


# --- months and plans ---


async def test_a_tenant_that_becomes_free_is_still_invoiced_for_what_it_used_before(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await Used.dollars(api, manager.tenant_id, 7)
    api.clock.advance(60)
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"plan": "free"})
    api.clock.advance(60)
    await Used.dollars(api, manager.tenant_id, 100)
    assert (await ok(api, manager, "GET", "/v1/invoices/upcoming"))["subtotal"] == "7.00"
    go_to(api, DECEMBER + 7200)
    await api.context.billing_desk.end_months()
    (invoice,) = (await ok(api, admin, "GET", "/v1/invoices"))["data"]
    assert (invoice["number"], invoice["subtotal"]) == ("INV-000001", "7.00")


async def test_nobody_can_invoice_by_hand_what_nobody_owes(api: Management, admin: Identity, manager: Identity) -> None:
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"plan": "free"})
    for tenant in (manager.tenant_id, PLATFORM):
        await Used.dollars(api, tenant, 5)
        upcoming = await ok(api, admin, "GET", f"/v1/invoices/upcoming?tenant={tenant}")
        assert (upcoming["lines"], upcoming["total"]) == ([], "0.00")
        answer = await api.call(admin, "POST", "/v1/invoices", {"tenant": tenant, "month": "2026-11"})
        assert answer.status_code == 409


async def test_an_invoice_that_cannot_be_made_keeps_nobody_else_from_theirs(
    api: Management, admin: Identity, manager: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.tenant("globex")
    await Used.dollars(api, manager.tenant_id, 1)
    await Used.dollars(api, "ten-globex", 2)
    desk = api.context.billing_desk
    drafting = desk.draft

    async def draft(tenant_id: str, month: str) -> Invoice | None:
        if tenant_id == manager.tenant_id:
            raise RuntimeError("something about this tenant is wrong")
        return await drafting(tenant_id, month)

    monkeypatch.setattr(desk, "draft", draft)
    go_to(api, DECEMBER + 7200)
    await desk.end_months()
    assert [one["tenant_id"] for one in (await ok(api, admin, "GET", "/v1/invoices"))["data"]] == ["ten-globex"]


async def test_a_threshold_that_was_reached_at_the_end_of_a_month_is_told_though_it_is_delivered_later(
    api: Management, manager: Identity
) -> None:
    await ok(api, manager, "POST", "/v1/budgets", {"amount": 10, "thresholds": [50, 100]})
    go_to(api, DECEMBER - 1)
    await api.context.billing_desk.tell_budgets()
    at = api.clock.unix_s()
    go_to(api, DECEMBER + 30)
    api.clock.start_s -= 31
    assert api.clock.unix_s() == at
    await Used.dollars(api, manager.tenant_id, 6)
    api.clock.start_s += 31
    late = await ok(api, manager, "POST", "/v1/budgets", {"amount": 6, "thresholds": [100]})
    for _ in range(2):
        await api.context.billing_desk.tell_budgets()
    (event,) = (await ok(api, manager, "GET", "/v1/billing/events"))["data"]
    assert (event["data"]["month"], event["data"]["threshold_percent"]) == ("2026-11", 50)
    assert event["data"]["budget_id"] != late["id"], "who asks in December wants to know of December"


async def test_pages_of_invoices_and_credit_notes_go_on_after_the_last_one(
    api: Management, admin: Identity, manager: Identity
) -> None:
    for month in (11, 12):
        go_to(api, datetime(2026, month, 25, tzinfo=UTC).timestamp())
        await Used.dollars(api, manager.tenant_id, 5)
        draft = await ok(api, admin, "POST", "/v1/invoices", {"tenant": "acme", "month": f"2026-{month}"})
        await ok(api, admin, "POST", f"/v1/invoices/{draft['id']}/issue")
        await ok(api, admin, "POST", f"/v1/invoices/{draft['id']}/credit-notes", {"reason": "sorry", "amount": 1})
    first = await ok(api, manager, "GET", "/v1/invoices?limit=1")
    (newest,) = first["data"]
    assert (newest["number"], first["has_more"]) == ("INV-000002", True)
    for last in (newest["id"], newest["number"]):
        rest = await ok(api, manager, "GET", f"/v1/invoices?limit=1&after={last}")
        assert ([one["number"] for one in rest["data"]], rest["has_more"]) == (["INV-000001"], False)
    notes = await ok(api, manager, "GET", "/v1/credit-notes?limit=1")
    assert ([one["number"] for one in notes["data"]], notes["has_more"]) == (["CN-000001"], True)
    notes = await ok(api, manager, "GET", f"/v1/credit-notes?limit=1&after={notes['data'][0]['id']}")
    assert ([one["number"] for one in notes["data"]], notes["has_more"]) == (["CN-000002"], False)


# --- credit ---


async def test_prepaid_credit_is_told_when_little_is_left_and_when_nothing_is(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"plan": "prepaid", "email": "m@acme.example"})
    await ok(api, admin, "POST", "/v1/credits", {"tenant": "acme", "amount": 20})
    seen = []
    for amount in (17, 1, 1, 1):
        await Used.dollars(api, manager.tenant_id, amount)
        for _ in range(2):
            await api.context.billing_desk.book()
        seen.append([kind for kind, _ in await told(api, manager)])
    low = ["credit.low"]
    assert seen[:3] == [[], low, low]
    assert sorted(seen[3]) == ["credit.exhausted", "credit.low"]
    events = {one["type"]: one for one in (await ok(api, manager, "GET", "/v1/billing/events"))["data"]}
    assert events["credit.low"]["data"]["left_nanousd"] == 2 * 10**9
    assert events["credit.low"]["notices"] == {"m@acme.example": "pending"}


async def test_credit_can_be_taken_back_as_far_as_it_was_not_used(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await ok(api, admin, "PUT", "/v1/billing/accounts/acme", {"plan": "prepaid"})
    grant = await ok(api, admin, "POST", "/v1/credits", {"tenant": "acme", "amount": 5000})
    await Used.dollars(api, manager.tenant_id, 3)
    path = f"/v1/credits/{grant['id']}"
    assert (await api.call(manager, "DELETE", path)).status_code == 403
    refreshed = len(api.refreshed)
    ended = await ok(api, admin, "DELETE", path)
    assert (ended["drawn"], ended["expired"], ended["left"]) == ("3", "4997", "0")
    assert len(api.refreshed) > refreshed, "gateways know when the answer is sent"
    assert (await ok(api, manager, "GET", "/v1/credits"))["left"] == "0"
    assert (await api.call(admin, "DELETE", path)).status_code == 409
    assert (await api.call(admin, "DELETE", "/v1/credits/grant-none")).status_code == 404
    (change, *_) = (await ok(api, admin, "GET", "/v1/billing/changes?action=credit."))["data"]
    assert (change["action"], change["before"]["drawn_nanousd"]) == ("credit.revoke", 3 * 10**9)


# --- budgets of a model ---


async def test_a_hard_budget_may_be_of_a_model_and_of_a_key(
    api: Management, admin: Identity, manager: Identity
) -> None:
    for more in ({"amount": 3}, {"amount": 2, "key": manager.key_id}):
        made = await ok(api, manager, "POST", "/v1/budgets", {"model": "chat", "is_hard": True, **more})
        assert (made["model"], made["is_hard"]) == ("chat", True)
    terms = await api.context.terms.current()
    tenant = next(one for one in await api.context.store.tenants() if one.id == manager.tenant_id)
    key = next(one for one in await api.context.store.keys() if one.id == manager.key_id)
    assert terms.of_tenant(tenant).model_budgets == {"chat": 3 * 10**9}
    assert terms.of_key(key).model_budgets == {"chat": 2 * 10**9}
    await Used.dollars(api, manager.tenant_id, 2, key="another", model="chat")
    await Used.dollars(api, manager.tenant_id, 50, key=manager.key_id, model="other")
    await api.context.billing_desk.tell_budgets()
    assert await told(api, manager) == [("budget.threshold_reached", 50)]


# --- files ---


async def test_the_rows_of_a_table_add_up_where_prices_contain_the_tax(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, tax_is_inclusive=True)
    async with management(tmp_path, Config(billing=settings)) as api:
        api.clock.start_s = NOVEMBER
        (admin, _), tenant = await api.key(PLATFORM, Scope.ADMIN), await api.tenant("acme")
        await Used.dollars(api, tenant, 6)
        month = month_name(day_of(api.clock.unix_s()))
        draft = await ok(api, admin, "POST", "/v1/invoices", {"tenant": "acme", "month": month})
        table = await api.call(admin, "GET", f"/v1/invoices/{draft['id']}?format=csv")
    rows = {row["kind"]: row["amount"] for row in csv.DictReader(io.StringIO(table.text))}
    assert rows == {
        "usage": "6.00",
        "subtotal": "6.00",
        "credit": "0.00",
        "tax contained": "1.00",
        "total": "6.00",
    }


async def test_what_was_spent_of_budgets_is_shown_with_them_and_with_whom_they_bound(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await Used.dollars(api, manager.tenant_id, 3, key=manager.key_id)
    await Used.dollars(api, manager.tenant_id, 4, key="other", model="big")
    wanted = [{"amount": 10, "is_hard": True}, {"amount": 9, "is_hard": True, "key": manager.key_id},
              {"amount": 8, "is_hard": True, "model": "big"}, {"amount": 7}]  # fmt: skip
    made = [await ok(api, manager, "POST", "/v1/budgets", one) for one in wanted]
    listed = (await ok(api, manager, "GET", "/v1/budgets"))["data"]
    assert [one["spent"] for one in made] == ["7", "3", "4", "7"]
    assert {one["id"]: one["spent"] for one in listed} == {one["id"]: one["spent"] for one in made}
    assert (await ok(api, manager, "GET", f"/v1/budgets/{made[2]['id']}"))["spent"] == "4"
    key = (await ok(api, manager, "GET", f"/v1/keys/{manager.key_id}"))["spent"]
    assert key["currency"] == "EUR"
    bounds = [(one["is_tenants"], one["model"], one["amount"], one["spent"]) for one in key["budgets"]]
    assert sorted(bounds) == [(False, "", "9", "3"), (True, "", "10", "7"), (True, "big", "8", "4")]
    tenant = (await ok(api, admin, "GET", f"/v1/tenants/{manager.tenant_id}"))["spent"]
    assert sorted(one["amount"] for one in tenant["budgets"]) == ["10", "8"]


async def test_mail_that_no_server_takes_is_said_beforehand_and_shown_as_unsent(tmp_path: Path) -> None:
    async with management(tmp_path, Config()) as api:
        manager, _ = await api.key(await api.tenant("acme"), Scope.MANAGE)
        made = await ok(api, manager, "POST", "/v1/budgets", {"amount": 1, "emails": ["a@acme.example"]})
        assert "no mail server" in made["note"]
        assert (await ok(api, manager, "POST", "/v1/budgets", {"amount": 9}))["note"] == ""
        await Used.dollars(api, manager.tenant_id, 1)
        await api.context.billing_desk.round()
        (event, *_) = (await ok(api, manager, "GET", "/v1/billing/events"))["data"]
        assert event["notices"] == {"a@acme.example": "failed: no mail server is configured ([billing.smtp])"}


async def test_until_it_is_invoiced_a_month_that_is_over_is_the_one_to_come(api: Management, manager: Identity) -> None:
    await Used.dollars(api, manager.tenant_id, 5)
    go_to(api, DECEMBER + 1800)
    await Used.dollars(api, manager.tenant_id, 2)
    path = "/v1/invoices/upcoming"
    november = await ok(api, manager, "GET", path)
    lines = [(one["month"], one["amount"], one["is_adjustment"]) for one in november["lines"]]
    assert (november["month"], lines) == ("2026-11", [("2026-11", "5.00", False)]), "it was shown as late"
    december = await ok(api, manager, "GET", f"{path}?month=2026-12")
    assert [(one["month"], one["amount"]) for one in december["lines"]] == [("2026-12", "2.00")]
    assert (await api.call(manager, "GET", f"{path}?month=2027-01")).status_code == 400
    await api.context.billing_desk.end_months()
    go_to(api, DECEMBER + 3601)
    await api.context.billing_desk.end_months()
    after = await ok(api, manager, "GET", path)
    assert (after["month"], after["subtotal"]) == ("2026-12", "2.00")


async def test_what_is_too_little_for_an_invoice_hides_nothing(api: Management, manager: Identity) -> None:
    cent = Price(input=10**12)  # a tenth of a cent a token
    await Used.dollars(api, manager.tenant_id, 1, price=cent)
    go_to(api, DECEMBER + 60)
    await Used.dollars(api, manager.tenant_id, 2)
    found = await ok(api, manager, "GET", "/v1/invoices/upcoming")
    assert (found["month"], found["exact"]) == ("2026-12", "2.001")
