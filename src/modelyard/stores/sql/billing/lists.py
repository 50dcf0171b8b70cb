"""Price entries in SQL."""

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import AuditEntry
from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Price
from modelyard.stores import AlreadyExistsError
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.billing import audit as audits
from modelyard.stores.sql.mapping import Values

_TABLE = schema.price_entries
_to_json = msgspec.json.Encoder().encode
_price = msgspec.json.Decoder(Price).decode


def entries(connection: sa.Connection) -> list[PriceEntry]:
    """Return all."""
    order = (_TABLE.c.tenant_id, _TABLE.c.model, _TABLE.c.version, _TABLE.c.effective_from)
    return [_entry(row) for row in connection.execute(sa.select(_TABLE).order_by(*order))]


def put(connection: sa.Connection, entry: PriceEntry, audit: AuditEntry, now: float) -> PriceEntry | None:
    """Add, or replace what is to come; return that."""
    same = sa.and_(
        _TABLE.c.tenant_id == entry.tenant_id,
        _TABLE.c.model == entry.model,
        _TABLE.c.version == entry.version,
        _TABLE.c.effective_from == entry.effective_from,
    )
    row = connection.execute(sa.select(_TABLE).where(same)).first()
    before = _entry(row) if row is not None else None
    if before is not None:
        if before.effective_from <= now:
            raise AlreadyExistsError(f"a price for this began at {before.effective_from}")
        connection.execute(sa.delete(_TABLE).where(_TABLE.c.price_id == before.id))
    connection.execute(sa.insert(_TABLE).values(_values(entry)))
    audits.add(connection, _told(audit, before, entry))
    return before


def end(connection: sa.Connection, price_id: str, audit: AuditEntry, now: float) -> PriceEntry | None:
    """End an entry, or forget it."""
    row = connection.execute(sa.select(_TABLE).where(_TABLE.c.price_id == price_id).with_for_update()).first()
    if row is None:
        return None
    before = _entry(row)
    if before.effective_from > now:
        after = None
        connection.execute(sa.delete(_TABLE).where(_TABLE.c.price_id == price_id))
    elif before.effective_until is None or before.effective_until > now:
        after = msgspec.structs.replace(before, effective_until=max(int(now), before.effective_from))
        change = sa.update(_TABLE).where(_TABLE.c.price_id == price_id)
        connection.execute(change.values(effective_until=after.effective_until))
    else:
        return None
    audits.add(connection, _told(audit, before, after))
    return before


def _told(audit: AuditEntry, before: PriceEntry | None, after: PriceEntry | None) -> AuditEntry:
    return msgspec.structs.replace(
        audit,
        subject=(after or before).id if (after or before) else audit.subject,  # type: ignore[union-attr]  # one is there
        before=_to_json(before).decode() if before else "",
        after=_to_json(after).decode() if after else "",
    )


def _values(entry: PriceEntry) -> Values:
    return {
        "price_id": entry.id,
        "tenant_id": entry.tenant_id,
        "model": entry.model,
        "version": entry.version,
        "effective_from": entry.effective_from,
        "effective_until": entry.effective_until,
        "price": _to_json(entry.price).decode(),
        "created_at": entry.created_at,
        "created_by": entry.created_by,
    }


def _entry(row: sa.Row[tuple[object, ...]]) -> PriceEntry:
    values = row._mapping
    return PriceEntry(
        id=values["price_id"],
        model=values["model"],
        price=_price(values["price"]),
        effective_from=values["effective_from"],
        effective_until=values["effective_until"],
        tenant_id=values["tenant_id"],
        version=values["version"],
        created_at=values["created_at"],
        created_by=values["created_by"],
    )
