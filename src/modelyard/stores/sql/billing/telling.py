"""What billing has to tell, as events of the tenant: its webhooks get what mail and Slack get, in one transaction."""

import sqlalchemy as sa

from modelyard.domain.billing import BillingEvent
from modelyard.domain.events import EventType
from modelyard.stores.sql.events import append_for

_KINDS = {
    EventType.BUDGET_THRESHOLD: ("budget_id", "budget"),
    EventType.BUDGET_EXCEEDED: ("budget_id", "budget"),
    EventType.CREDIT_LOW: ("tenant_id", "credit"),
    EventType.CREDIT_EXHAUSTED: ("tenant_id", "credit"),
    EventType.INVOICE_ISSUED: ("invoice_id", "invoice"),
}


def tell_webhooks(connection: sa.Connection, event: BillingEvent) -> None:
    """Append ``event`` to the outbox; its occasion makes it one event however often it is told."""
    if event.type not in _KINDS:
        return
    kind = EventType(event.type)
    name, noun = _KINDS[kind]
    data = {"id": event.data[name], "object": noun, **event.data}
    append_for(connection, event.tenant_id, kind, data, now=float(event.at), key=event.once)
