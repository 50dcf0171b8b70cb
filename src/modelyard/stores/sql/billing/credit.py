"""Credit in SQL: grants, what is drawn of them, and what expires."""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import Account, BillingPlan, CreditEntry, CreditKind, Grant
from modelyard.policy import credit
from modelyard.policy.utc import day_of
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.billing import accounts, sums
from modelyard.stores.sql.database import insert
from modelyard.stores.sql.mapping import Values

_GRANTS = schema.credit_grants
_ENTRIES = schema.credit_entries


def put_account(connection: sa.Connection, wanted: Account, now: float) -> tuple[Account, Account]:
    """Replace how a tenant pays; return the account before and after."""
    before = _current(connection, wanted.tenant_id, now)
    was_free, is_free = (one.plan is BillingPlan.FREE for one in (before, wanted))
    since, until = before.free_since, before.free_until
    if is_free and not was_free:
        since, until = int(now), None
    elif was_free and not is_free:
        until = int(now)
    after = msgspec.structs.replace(
        wanted,
        accounted_nanousd=before.accounted_nanousd,
        applied_nanousd=before.applied_nanousd,
        free_since=since,
        free_until=until,
    )
    accounts.write(connection, after)
    return before, after


def apply(connection: sa.Connection, held: Account, nanousd: int) -> None:
    """Note that so much of the drawn credit is on an invoice now."""
    accounts.write(connection, msgspec.structs.replace(held, applied_nanousd=held.applied_nanousd + nanousd))


def unapplied(connection: sa.Connection, held: Account) -> int:
    """Return the credit that was drawn and is on no invoice."""
    query = sa.select(sa.func.sum(_GRANTS.c.drawn_nanousd)).where(_GRANTS.c.tenant_id == held.tenant_id)
    return int(connection.execute(query).scalar() or 0) - held.applied_nanousd


def grants(connection: sa.Connection, tenant_id: str | None) -> list[Grant]:
    """Return the grants (of a tenant), oldest first."""
    query = sa.select(_GRANTS).order_by(_GRANTS.c.granted_at, _GRANTS.c.grant_id)
    if tenant_id is not None:
        query = query.where(_GRANTS.c.tenant_id == tenant_id)
    return [_grant(row) for row in connection.execute(query)]


def add_grant(connection: sa.Connection, grant: Grant, now: float) -> None:
    """Add, after what was used before is booked."""
    accounts.write(connection, _current(connection, grant.tenant_id, now))
    connection.execute(sa.insert(_GRANTS).values({"grant_id": grant.id, **_values(grant)}))
    _enter(connection, grant.tenant_id, [credit.Move(grant.id, CreditKind.GRANT, grant.amount_nanousd)], now)


def end_grant(connection: sa.Connection, grant_id: str, now: float) -> tuple[Grant, Grant] | None:
    """Let what is left of a grant expire; return it before and after, None where nothing is left."""
    tenant_id = connection.execute(sa.select(_GRANTS.c.tenant_id).where(_GRANTS.c.grant_id == grant_id)).scalar()
    if tenant_id is None:
        return None
    held = _current(connection, tenant_id, now)
    accounts.write(connection, held)
    before = next(one for one in grants(connection, tenant_id) if one.id == grant_id)
    if not before.left_nanousd:
        return None
    ending = msgspec.structs.replace(before, expires_at=int(now))
    _booked(connection, held, [ending], held.accounted_nanousd, now)
    return before, next(one for one in grants(connection, tenant_id) if one.id == grant_id)


def entries(connection: sa.Connection, tenant_id: str, limit: int) -> list[CreditEntry]:
    """Return the newest lines, newest first."""
    query = (
        sa.select(_ENTRIES)
        .where(_ENTRIES.c.tenant_id == tenant_id)
        .order_by(_ENTRIES.c.at.desc(), _ENTRIES.c.kind.desc(), _ENTRIES.c.grant_id)
        .limit(limit)
    )
    return [
        CreditEntry(row.tenant_id, row.grant_id, CreditKind(row.kind), row.day, row.at, row.amount_nanousd)
        for row in connection.execute(query)
    ]


def book(connection: sa.Connection, now: float) -> list[str]:
    """Book all accounts; return the tenants whose credit changed."""
    used = sums.totals(connection, None)
    held: dict[str, list[Grant]] = {}
    for grant in grants(connection, None):
        held.setdefault(grant.tenant_id, []).append(grant)
    changed = []
    for one in accounts.every(connection, is_locked=True):
        total = used.get(one.tenant_id, 0)
        has_moved, after = _booked(connection, one, held.get(one.tenant_id, []), total, now)
        if after != one:
            accounts.write(connection, after)
        if has_moved:
            changed.append(one.tenant_id)
    return changed


def _current(connection: sa.Connection, tenant_id: str, now: float) -> Account:
    """Return a tenant's account with everything booked; one that is new begins with what was used so far."""
    held = accounts.stored(connection, tenant_id)
    total = sums.totals(connection, tenant_id).get(tenant_id, 0)
    if held is None:
        return Account(tenant_id, accounted_nanousd=total)
    return _booked(connection, held, grants(connection, tenant_id), total, now)[1]


def _booked(
    connection: sa.Connection, held: Account, given: Sequence[Grant], total: int, now: float
) -> tuple[bool, Account]:
    """Draw what was used since the last time, write the grants that changed, and return the account after.

    Who pays nothing draws nothing: its credit is for what it will use on another plan.
    """
    used = 0 if held.plan is BillingPlan.FREE else max(0, total - held.accounted_nanousd)
    after, moves = credit.booked(given, used, now)
    before = {grant.id: grant for grant in given}
    for grant in after:
        if grant != before[grant.id]:
            connection.execute(sa.update(_GRANTS).where(_GRANTS.c.grant_id == grant.id).values(_values(grant)))
    _enter(connection, held.tenant_id, moves, now)
    return bool(moves), msgspec.structs.replace(held, accounted_nanousd=max(total, held.accounted_nanousd))


def _enter(connection: sa.Connection, tenant_id: str, moves: Sequence[credit.Move], now: float) -> None:
    values = [
        {
            "grant_id": move.grant_id,
            "kind": move.kind.value,
            "day": day_of(now),
            "tenant_id": tenant_id,
            "at": int(now),
            "amount_nanousd": move.amount_nanousd,
        }
        for move in moves
    ]
    if not values:
        return
    statement = insert(connection, _ENTRIES)
    raised = {
        "at": statement.excluded.at,
        "amount_nanousd": _ENTRIES.c.amount_nanousd + statement.excluded.amount_nanousd,
    }
    keys = [column.name for column in _ENTRIES.primary_key]
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=raised), values)


def _values(grant: Grant) -> Values:
    values = msgspec.structs.asdict(grant)
    del values["id"]
    return values


def _grant(row: sa.Row[tuple[object, ...]]) -> Grant:
    values = dict(row._mapping)
    return Grant(id=values.pop("grant_id"), **values)
