"""What is made once however often it is asked for; credit notes as documents; what is refused in words."""

import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.management import Management, management
from tests.unit.control_api.test_billing import DOLLAR, NOVEMBER, SETTINGS, Used, ok

from modelyard.config import Config
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.usage import Intent, JournalRecord, Settle, UsageStatus
from modelyard.policy.pricing import batch_price
from modelyard.stores import JournalPosition


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path, Config(billing=SETTINGS)) as running:
        running.clock.start_s = NOVEMBER
        yield running


async def keyed(api: Management, who: Identity, path: str, body: Any, *keys: str) -> httpx2.Response:
    async with api.client(who) as client:
        return await client.post(path, json=body, headers=[("idempotency-key", key) for key in keys])


@pytest.fixture
async def invoice(api: Management, admin: Identity, manager: Identity) -> dict[str, Any]:
    await Used.dollars(api, manager.tenant_id, 100)
    draft = await ok(api, admin, "POST", "/v1/invoices", {"tenant": manager.tenant_id, "month": "2026-11"})
    found: dict[str, Any] = await ok(api, admin, "POST", f"/v1/invoices/{draft['id']}/issue")
    return found


# --- once ---


async def test_credit_is_given_once_for_an_idempotency_key(api: Management, admin: Identity, manager: Identity) -> None:
    body = {"tenant": manager.tenant_id, "amount": "50", "reason": "paid by card"}
    first = await keyed(api, admin, "/v1/credits", body, "order-1")
    again = await keyed(api, admin, "/v1/credits", body, "order-1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json(), "a retry gave it twice"
    reused = await keyed(api, admin, "/v1/credits", {**body, "amount": "51"}, "order-1")
    assert (reused.status_code, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
    await keyed(api, admin, "/v1/credits", body, "order-2")
    await ok(api, admin, "POST", "/v1/credits", body)
    other, _ = await api.key(admin.tenant_id, Scope.ADMIN)
    await keyed(api, other, "/v1/credits", body, "order-1")
    assert (await ok(api, manager, "GET", "/v1/credits"))["left"] == "200", "each key of the API has its own"
    await ok(api, admin, "DELETE", f"/v1/credits/{first.json()['id']}")
    assert (await keyed(api, admin, "/v1/credits", body, "order-1")).json()["left"] == "0", "it is taken back, not lost"


async def test_a_part_is_taken_back_and_a_budget_made_once(
    api: Management, admin: Identity, manager: Identity, invoice: dict[str, Any]
) -> None:
    paths = [f"/v1/invoices/{invoice[name]}/credit-notes" for name in ("id", "number")]
    body = {"reason": "outage", "amount": "12"}
    notes = [await keyed(api, admin, path, body, "k") for path in paths]
    assert [note.json()["number"] for note in notes] == ["CN-000001", "CN-000001"]
    assert (await keyed(api, admin, paths[0], {"reason": "outage"}, "k")).status_code == 400
    assert (await ok(api, manager, "GET", f"/v1/invoices/{invoice['id']}"))["credited"] == "12.00"
    made = [await keyed(api, manager, "/v1/budgets", {"amount": 5}, "k") for _ in range(2)]
    assert made[0].json()["id"] == made[1].json()["id"]
    assert len((await ok(api, manager, "GET", "/v1/budgets"))["data"]) == 1
    assert (await keyed(api, manager, "/v1/budgets", {"amount": 6}, "k")).status_code == 400


@pytest.mark.parametrize("keys", [("",), ("k" * 256,), ("a", "b")])
async def test_what_is_no_idempotency_key_is_refused(
    api: Management, admin: Identity, manager: Identity, keys: tuple[str, ...]
) -> None:
    answer = await keyed(api, admin, "/v1/credits", {"tenant": manager.tenant_id, "amount": 1}, *keys)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


# --- credit notes ---


async def test_a_credit_note_is_a_document_of_its_own(
    api: Management, admin: Identity, manager: Identity, invoice: dict[str, Any]
) -> None:
    evil = "<script>alert(1)</script>"
    note = await ok(
        api, admin, "POST", f"/v1/invoices/{invoice['number']}/credit-notes", {"reason": evil, "amount": "12"}
    )
    for reference in (note["id"], "CN-000001"):
        assert await ok(api, manager, "GET", f"/v1/credit-notes/{reference}") == note
    page = await api.call(manager, "GET", "/v1/credit-notes/CN-000001?format=html")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert evil not in page.text
    for told in ("Credit note CN-000001", "INV-000001", "Yard Ltd", "12.00", "2.00"):
        assert told in page.text
    table = await api.call(manager, "GET", "/v1/credit-notes/CN-000001?format=csv")
    _, row = csv.reader(io.StringIO(table.text))
    assert (row[:3], row[4:]) == (["CN-000001", "INV-000001", "2026-11"], [evil, "2.00", "12.00", "EUR"])
    listed = await ok(api, manager, "GET", "/v1/credit-notes?invoice=INV-000001")
    assert listed["data"] == [note]
    stranger, _ = await api.key(await api.tenant("stranger"), Scope.MANAGE)
    assert (await api.call(stranger, "GET", "/v1/credit-notes/CN-000001")).status_code == 404
    assert (await api.call(stranger, "GET", "/v1/credit-notes?invoice=INV-000001")).status_code == 404


async def test_what_batches_used_has_lines_of_its_own(api: Management, admin: Identity, manager: Identity) -> None:
    at = api.clock.unix_s()
    half = batch_price(DOLLAR, 1_000_000)
    records: list[JournalRecord] = []
    for number, line in enumerate(("", "batch_x/1", "")):
        intent = Intent(f"req_b{number}", at, manager.tenant_id, "k", "ep", "chat", "v", "/", False, 1, 1,
                        half if line else DOLLAR, line, 0)  # fmt: skip
        records += [
            intent,
            Settle(intent.request_id, at, 10, 0, 0, UsageStatus.SUCCESS, 200, "", None, 1, "r", 1, False),
        ]
    await api.context.usage.apply(records, JournalPosition("gateway-0", "1.journal", 99))
    draft = await ok(api, admin, "POST", "/v1/invoices", {"tenant": manager.tenant_id, "month": "2026-11"})
    lines = [(one["is_batch"], one["quantity"], one["amount"]) for one in draft["lines"]]
    assert lines == [(False, "20", "20.00"), (True, "10", "10.00")], "nobody could tell one from the other"
    path = f"/v1/invoices/{draft['id']}"
    table = await api.call(manager, "GET", f"{path}?format=csv")
    assert [row[1] for row in csv.reader(io.StringIO(table.text))][1:3] == ["usage", "batch"]
    page = (await api.call(manager, "GET", f"{path}?format=html")).text
    assert page.count("input tokens (batch)") == 1


# --- in words ---


async def test_an_issued_invoice_says_its_number_when_it_is_issued_again(
    api: Management, admin: Identity, invoice: dict[str, Any]
) -> None:
    answer = await api.call(admin, "POST", f"/v1/invoices/{invoice['id']}/issue")
    assert (answer.status_code, "It is INV-000001 already" in answer.json()["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("POST", "/v1/invoices", {"tenant": "acme", "month": "2026-13"}, "it must be a month, like 2026-11"),
        ("GET", "/v1/invoices?month=abc", None, "it must be a month, like 2026-11"),
        ("GET", "/v1/invoices/upcoming?month=11", None, "it must be a month, like 2026-11"),
        ("POST", "/v1/budgets", {"amount": 1, "emails": ["nobody"]}, "it must be an e-mail address"),
        ("PUT", "/v1/billing/accounts/acme", {"email": "a b@c"}, "it must be an e-mail address"),
    ],
)
async def test_what_has_another_form_is_refused_in_words(
    api: Management, admin: Identity, manager: Identity, method: str, path: str, body: Any, words: str
) -> None:
    answer = await api.call(admin, method, path, body)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert "regex" not in answer.text
