"""Billing accounts in SQL: how tenants pay, and who is billed."""

from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import Account, BillingPlan
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.database import CHUNK, insert

_ACCOUNTS = schema.billing_accounts

_to_json = msgspec.json.Encoder().encode


class _Details(msgspec.Struct, frozen=True):
    """What nothing is ever looked up by."""

    name: str = ""
    address: str = ""
    email: str = ""
    tax_id: str = ""
    is_tax_exempt: bool = False
    free_since: int = 0
    free_until: int | None = None


_details = msgspec.json.Decoder(_Details).decode


def every(connection: sa.Connection, *, is_locked: bool = False) -> list[Account]:
    """Return all, of which nobody else changes any before this transaction ends if ``is_locked``."""
    query = sa.select(_ACCOUNTS).order_by(_ACCOUNTS.c.tenant_id)
    return [_account(row) for row in connection.execute(query.with_for_update() if is_locked else query)]


def of(connection: sa.Connection, tenant_ids: Collection[str]) -> dict[str, Account]:
    """Return the accounts of those of these tenants that have one."""
    found: dict[str, Account] = {}
    wanted = sorted(tenant_ids)
    for start in range(0, len(wanted), CHUNK):
        query = sa.select(_ACCOUNTS).where(_ACCOUNTS.c.tenant_id.in_(wanted[start : start + CHUNK]))
        found.update((row.tenant_id, _account(row)) for row in connection.execute(query))
    return found


def stored(connection: sa.Connection, tenant_id: str) -> Account | None:
    """Return the account of a tenant, which nobody else changes before this transaction ends; None without one."""
    row = connection.execute(sa.select(_ACCOUNTS).where(_ACCOUNTS.c.tenant_id == tenant_id).with_for_update()).first()
    return _account(row) if row is not None else None


def write(connection: sa.Connection, held: Account) -> None:
    """Add or replace."""
    free = held.free_since, held.free_until
    details = _Details(held.name, held.address, held.email, held.tax_id, held.is_tax_exempt, *free)
    values = {
        "tenant_id": held.tenant_id,
        "plan": held.plan.value,
        "details": _to_json(details).decode(),
        "accounted_nanousd": held.accounted_nanousd,
        "applied_nanousd": held.applied_nanousd,
    }
    statement = insert(connection, _ACCOUNTS).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["tenant_id"], set_=values))


def _account(row: sa.Row[tuple[object, ...]]) -> Account:
    values = row._mapping
    details = _details(values["details"])
    return Account(
        tenant_id=values["tenant_id"],
        plan=BillingPlan(values["plan"]),
        name=details.name,
        address=details.address,
        email=details.email,
        tax_id=details.tax_id,
        is_tax_exempt=details.is_tax_exempt,
        accounted_nanousd=values["accounted_nanousd"],
        applied_nanousd=values["applied_nanousd"],
        free_since=details.free_since,
        free_until=details.free_until,
    )
