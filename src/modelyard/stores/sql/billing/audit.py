"""Who changed what about money, written in the transaction of the change."""

import sqlalchemy as sa

from modelyard.domain.billing import AuditEntry
from modelyard.stores.sql import schema_billing as schema

_AUDIT = schema.billing_audit


def add(connection: sa.Connection, entry: AuditEntry) -> None:
    """Append."""
    values = {
        "at": entry.at,
        "api_key_id": entry.key_id,
        "tenant_id": entry.tenant_id,
        "action": entry.action,
        "subject": entry.subject,
        "before": entry.before,
        "after": entry.after,
    }
    connection.execute(sa.insert(_AUDIT).values(values))


def entries(connection: sa.Connection, limit: int, after: int, prefix: str) -> list[AuditEntry]:
    """Return the newest, newest first."""
    query = sa.select(_AUDIT).order_by(_AUDIT.c.sequence.desc()).limit(limit)
    if after:
        query = query.where(_AUDIT.c.sequence < after)
    if prefix:
        query = query.where(_AUDIT.c.action.startswith(prefix, autoescape=True))
    return [
        AuditEntry(row.at, row.api_key_id, row.tenant_id, row.action, row.subject, row.before, row.after, row.sequence)
        for row in connection.execute(query)
    ]
