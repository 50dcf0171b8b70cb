"""What billing tells by mail it also tells webhooks, once: a budget's parts, its end, used up credit, invoices."""

from pathlib import Path

import msgspec
from tests.support.management import Management, management

from modelyard.config import Config
from modelyard.config.billing import SmtpConfig
from modelyard.domain.billing import Account, AuditEntry, BillingEvent
from modelyard.domain.tenants import Identity
from modelyard.domain.webhooks import Webhook


async def test_each_occasion_is_one_event(api: Management, manager: Identity) -> None:
    store = api.context.webhooks.store
    url = "https://hooks.example.com/"
    webhook = Webhook(id="wh_1", tenant_id=manager.tenant_id, url=url, types=("budget.*", "credit.*"), created_at=1.0)
    await store.add_webhook(webhook, most=9)
    budget = {"budget_id": "bud-1", "amount_nanousd": 5, "spent_nanousd": 5}
    stories = [
        ("budget.threshold", "b/50", {**budget, "threshold_percent": 50}),
        ("budget.threshold", "b/50", {**budget, "threshold_percent": 50}),
        ("budget.exceeded", "b/100", {**budget, "threshold_percent": 100}),
        ("credit.low", "l", {"tenant_id": manager.tenant_id}),
        ("credit.exhausted", "c", {"tenant_id": manager.tenant_id}),
        ("invoice.issued", "i", {"invoice_id": "inv-1"}),
    ]
    for at, (kind, once, data) in enumerate(stories):
        event = BillingEvent(f"evt-{at}", manager.tenant_id, kind, at, once, data)
        await api.context.billing.add_event(event, [])
    due = await store.due(now=99.0, limit=99, of_lane=99, of_tenant=99)
    assert [(one.event.type.value, msgspec.json.decode(one.event.data)["id"]) for one in due] == [
        ("budget.threshold", "bud-1"),
        ("budget.exceeded", "bud-1"),
        ("credit.low", manager.tenant_id),
        ("credit.exhausted", manager.tenant_id),
    ]


async def test_who_is_billed_is_told_by_mail_of_a_disabled_webhook_once_a_day(tmp_path: Path) -> None:
    """Its tenant may have no other webhook that could tell it."""
    config = Config()
    billing = msgspec.structs.replace(config.billing, smtp=SmtpConfig(host="mail.example.com", sender="a@example.com"))
    async with management(tmp_path, msgspec.structs.replace(config, billing=billing)) as api:
        tenants = [await api.tenant(name) for name in ("a", "b")]
        store, audit = api.context.billing, AuditEntry(1.0, "", "", "", "")
        await store.put_account(Account(tenants[0], email="owner@example.com"), audit, now=1.0)
        for tenant_id in (*tenants, *tenants):
            await api.context.billing_desk.tell_of_webhook(f"wh_{tenant_id}", tenant_id, "https://x", "it is gone")
        (notice,) = await store.due_notices(now=api.clock.unix_s(), limit=9)
        assert (notice.target, notice.event.type) == ("owner@example.com", "webhook.disabled")
        assert notice.event.data["reason"] == "it is gone"
        api.clock.advance(86_400)
        await api.context.billing_desk.tell_of_webhook(f"wh_{tenants[0]}", tenants[0], "https://x", "it is gone")
        assert len(await store.due_notices(now=api.clock.unix_s(), limit=9)) == 2
