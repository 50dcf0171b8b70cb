"""What billing tells by mail it also tells webhooks, once: a budget's parts, its end, used up credit, invoices."""

import msgspec
from tests.support.management import Management

from modelyard.domain.billing import BillingEvent
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
