"""What billing has to tell, as events of the tenant: its webhooks get what mail and Slack get, in one transaction."""

import sqlalchemy as sa

from modelyard.domain.billing import BillingEvent
from modelyard.domain.events import EventType
from modelyard.stores.sql.events import append_for

_KINDS = {
    "budget.threshold_reached": (EventType.BUDGET_THRESHOLD, "budget_id", "budget"),
    "credit.low": (EventType.CREDIT_LOW, "tenant_id", "credit"),
    "credit.exhausted": (EventType.CREDIT_EXHAUSTED, "tenant_id", "credit"),
    "invoice.issued": (EventType.INVOICE_ISSUED, "invoice_id", "invoice"),
}


def tell_webhooks(connection: sa.Connection, event: BillingEvent) -> None:
    """Append ``event`` to the outbox; its occasion makes it one event however often it is told."""
    if event.type not in _KINDS:
        return
    kind, name, noun = _KINDS[event.type]
    if kind is EventType.BUDGET_THRESHOLD and int(event.data["threshold_percent"] or 0) >= 100:
        kind = EventType.BUDGET_EXCEEDED
    data = {"id": event.data[name], "object": noun, **event.data}
    append_for(connection, event.tenant_id, kind, data, now=float(event.at), key=event.once)
