"""What invoices and prepaid credit are made of: roll-ups in the transaction that writes the ledger's rows."""

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from modelyard.domain.invoices import UsageSum
from modelyard.domain.tenants import PLATFORM
from modelyard.domain.usage import Intent, Price, Settle
from modelyard.policy.utc import day_number, day_of, month_name
from modelyard.stores.sql import schema_billing as schema
from modelyard.stores.sql.billing import accounts
from modelyard.stores.sql.database import CHUNK
from modelyard.stores.sql.mapping import Values
from modelyard.stores.sql.sums import add_to

_SUMS = schema.billing_sums
_TOTALS = schema.usage_totals
_NAMES = schema.SUMMED
_BILLED = tuple(f"billed_{name}" for name in _NAMES)

_to_json = msgspec.json.Encoder().encode
_to_price = msgspec.json.Decoder(Price).decode


def add(
    connection: sa.Connection,
    rows: Sequence[Values],
    intents: Mapping[str, Intent],
    settles: Mapping[str, Settle],
    source: str,
) -> None:
    """Add new rows of the ledger, which came from the journal of ``source``.

    What nobody is to pay, by the plan that its tenant had when it arrived, is settled from the beginning: so what is
    open is owed, whatever the plan is when its month is invoiced.
    """
    payers = accounts.of(connection, {row["customer_id"] for row in rows})
    sums: dict[tuple[str, ...], list[int]] = {}
    totals: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        request_id = row["request_id"]
        price = settles[request_id].price
        amounts = _amounts(row)
        if not any(amounts):
            continue  # nothing was counted
        month = month_name(day_of(row["created_at"]))
        at = _to_json(intents[request_id].price if price is None else price).decode()
        key = (row["customer_id"], month, row["model_name"], at, row["unit"])
        payer = payers.get(row["customer_id"])
        # The operator's own use is nobody's to pay.
        is_free = row["customer_id"] == PLATFORM or (payer is not None and payer.is_free_at(row["created_at"]))
        used = (1, *amounts)
        total = sums.setdefault(key, [0] * 2 * len(_NAMES))
        added = (*used, *(used if is_free else (0,) * len(used)))
        total[:] = [have + more for have, more in zip(total, added, strict=True)]
        if row["cost_nanousd"]:
            owner = (row["customer_id"], row["api_key_id"], source)
            totals.setdefault(owner, [0])[0] += row["cost_nanousd"]
    if any(total[-len(_BILLED)] for total in sums.values()):
        add_to(connection, _SUMS, (*_NAMES, *_BILLED), sums)
    else:
        add_to(connection, _SUMS, _NAMES, {key: total[: len(_NAMES)] for key, total in sums.items()})
    add_to(connection, _TOTALS, ("cost_nanousd",), totals)


def _amounts(row: Values) -> tuple[int, ...]:
    prompt, cached = row["prompt_tokens"], row["cached_tokens"]
    return prompt - cached, cached, row["completion_tokens"], row["units_micro"], row["cost_nanousd"]


def totals_by_key(connection: sa.Connection, tenant_ids: Sequence[str]) -> dict[tuple[str, str, str], int]:
    """Return what each key of these tenants ever cost, by tenant, key and source."""
    found: dict[tuple[str, str, str], int] = {}
    for start in range(0, len(tenant_ids), CHUNK):
        query = sa.select(_TOTALS).where(_TOTALS.c.tenant_id.in_(tenant_ids[start : start + CHUNK]))
        for row in connection.execute(query):
            found[row.tenant_id, row.api_key_id, row.source] = row.cost_nanousd
    return found


def totals(connection: sa.Connection, tenant_id: str | None) -> dict[str, int]:
    """Return what each tenant (or this one) ever cost."""
    query = sa.select(_TOTALS.c.tenant_id, sa.func.sum(_TOTALS.c.cost_nanousd)).group_by(_TOTALS.c.tenant_id)
    if tenant_id is not None:
        query = query.where(_TOTALS.c.tenant_id == tenant_id)
    return {owner: int(total) for owner, total in connection.execute(query)}


def open_months(connection: sa.Connection, before: str) -> list[tuple[str, str]]:
    """Return who is to be invoiced for which month; see the contract."""
    query = (
        sa.select(_SUMS.c.tenant_id, sa.func.max(_SUMS.c.month))
        .where(_SUMS.c.month < before, _SUMS.c.cost_nanousd > _SUMS.c.billed_cost_nanousd)
        .group_by(_SUMS.c.tenant_id)
        .order_by(_SUMS.c.tenant_id)
    )
    last_ended = month_name(day_number(f"{before}-01") - 1)
    issued = _last_issued(connection)
    found = []
    for tenant_id, open_month in connection.execute(query):
        last = issued.get(tenant_id, "")
        month = open_month if open_month > last else last_ended
        if month > last:
            found.append((tenant_id, month))
    return found


def _last_issued(connection: sa.Connection) -> dict[str, str]:
    """Return the last month of each tenant that was invoiced."""
    table = schema.invoices
    query = sa.select(table.c.tenant_id, sa.func.max(table.c.month)).where(table.c.number.is_not(None))
    return {row[0]: row[1] for row in connection.execute(query.group_by(table.c.tenant_id))}


def last_invoiced(connection: sa.Connection, tenant_id: str) -> str:
    """Return the last month of a tenant that was invoiced, "" for none."""
    table = schema.invoices
    query = sa.select(sa.func.max(table.c.month)).where(table.c.number.is_not(None), table.c.tenant_id == tenant_id)
    return connection.execute(query).scalar() or ""


def uninvoiced(connection: sa.Connection, tenant_id: str, until: str, *, is_locked: bool = False) -> list[UsageSum]:
    """Return what no issued invoice has; ``is_locked``: nobody else adds to it before this transaction ends."""
    left = [(_SUMS.c[name] - _SUMS.c[f"billed_{name}"]).label(name) for name in _NAMES]
    keys = (_SUMS.c.month, _SUMS.c.model_name, _SUMS.c.price, _SUMS.c.unit)
    query = sa.select(*keys, *left).where(_open(tenant_id, until)).order_by(*keys)
    if is_locked:
        query = query.with_for_update()
    return [UsageSum(row[0], row[1], _to_price(row[2]), row[3], *row[4:]) for row in connection.execute(query)]


def close(connection: sa.Connection, tenant_id: str, until: str) -> None:
    """Note that all of it is on an invoice now, or waived."""
    values = {billed: _SUMS.c[name] for billed, name in zip(_BILLED, _NAMES, strict=True)}
    connection.execute(sa.update(_SUMS).where(_open(tenant_id, until)).values(values))


def _open(tenant_id: str, until: str) -> sa.ColumnElement[bool]:
    is_open = _SUMS.c.requests > _SUMS.c.billed_requests
    return sa.and_(_SUMS.c.tenant_id == tenant_id, _SUMS.c.month <= until, is_open)
