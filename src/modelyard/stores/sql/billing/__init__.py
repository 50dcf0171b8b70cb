"""``BillingStore`` in SQL: one file a noun, each method one transaction on the database's threads."""

from collections.abc import Callable, Sequence

import msgspec
import sqlalchemy as sa

from modelyard.domain.billing import Account, AuditEntry, BillingEvent, Budget, CreditEntry, Grant, Notice
from modelyard.domain.invoices import CreditNote, Invoice, UsageSum
from modelyard.domain.prices import PriceEntry
from modelyard.policy.invoicing import Terms
from modelyard.stores.sql.billing import accounts, budgets, credit, invoices, lists, sums
from modelyard.stores.sql.billing import audit as audits
from modelyard.stores.sql.database import Database

_to_json = msgspec.json.Encoder().encode


class SqlBillingStore:
    """What is kept of money in ``database``, which somebody else closes."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- prices ---

    async def prices(self) -> list[PriceEntry]:
        """Return all entries."""
        return await self._database.read(lists.entries)

    async def put_price(self, entry: PriceEntry, audit: AuditEntry, *, now: float) -> PriceEntry | None:
        """Add, or replace what is to come; see the contract."""
        return await self._database.write(lambda c: lists.put(c, entry, audit, now))

    async def end_price(self, price_id: str, audit: AuditEntry, *, now: float) -> PriceEntry | None:
        """End an entry, or forget one that is to come; see the contract."""
        return await self._database.write(lambda c: lists.end(c, price_id, audit, now))

    # --- accounts and credit ---

    async def accounts(self) -> list[Account]:
        """Return the accounts of tenants that have one."""
        return await self._database.read(accounts.every)

    async def put_account(self, account: Account, audit: AuditEntry, *, now: float) -> Account:
        """Add or replace how a tenant pays; see the contract."""

        def put(connection: sa.Connection) -> Account:
            before, after = credit.put_account(connection, account, now)
            audits.add(connection, _changed(audit, before, after))
            return after

        return await self._database.write(put)

    async def grants(self, *, tenant_id: str | None) -> list[Grant]:
        """Return the grants (of a tenant), oldest first."""
        return await self._database.read(lambda c: credit.grants(c, tenant_id))

    async def add_grant(self, grant: Grant, audit: AuditEntry, *, now: float) -> None:
        """Add; see the contract."""

        def add(connection: sa.Connection) -> None:
            credit.add_grant(connection, grant, now)
            audits.add(connection, _changed(audit, None, grant))

        await self._database.write(add)

    async def end_grant(self, grant_id: str, audit: AuditEntry, *, now: float) -> Grant | None:
        """Let what is left of a grant expire now; see the contract."""

        def end(connection: sa.Connection) -> Grant | None:
            ended = credit.end_grant(connection, grant_id, now)
            if ended is None:
                return None
            audits.add(connection, _changed(audit, *ended))
            return ended[1]

        return await self._database.write(end)

    async def credit_entries(self, tenant_id: str, *, limit: int) -> list[CreditEntry]:
        """Return the newest lines of a tenant's credit ledger, newest first."""
        return await self._database.read(lambda c: credit.entries(c, tenant_id, limit))

    async def book(self, *, now: float) -> list[str]:
        """Draw what was used and end what expired; see the contract."""
        return await self._database.write(lambda c: credit.book(c, now))

    # --- budgets and what is told ---

    async def budgets(self, *, tenant_id: str | None) -> list[Budget]:
        """Return the budgets (of a tenant), oldest first."""
        return await self._database.read(lambda c: budgets.budgets(c, tenant_id))

    async def put_budget(self, budget: Budget, audit: AuditEntry) -> None:
        """Add or replace."""

        def put(connection: sa.Connection) -> None:
            budgets.put(connection, budget)
            audits.add(connection, _changed(audit, None, budget))

        await self._database.write(put)

    async def remove_budget(self, budget_id: str, audit: AuditEntry) -> None:
        """Forget."""

        def remove(connection: sa.Connection) -> None:
            budgets.remove(connection, budget_id)
            audits.add(connection, audit)

        await self._database.write(remove)

    async def add_event(self, event: BillingEvent, notices: Sequence[Notice]) -> bool:
        """Add an event, unless its occasion was told; say whether it was new."""
        return await self._database.write(lambda c: budgets.add_event(c, event, notices))

    async def billing_events(self, *, tenant_id: str | None, limit: int) -> list[BillingEvent]:
        """Return the newest events, newest first."""
        return await self._database.read(lambda c: budgets.events(c, tenant_id, limit))

    async def due_notices(self, *, now: float, limit: int) -> list[Notice]:
        """Return the notices that are due, the longest due first."""
        return await self._database.read(lambda c: budgets.due(c, now, limit))

    async def put_notice(self, notice: Notice) -> None:
        """Replace what became of a notice."""
        await self._database.write(lambda c: budgets.put_notice(c, notice))

    async def notices(self, event_id: str) -> list[Notice]:
        """Return the notices about an event."""
        return await self._database.read(lambda c: budgets.of_event(c, event_id))

    # --- invoices ---

    async def open_months(self, *, before: str) -> list[tuple[str, str]]:
        """Return tenants with costs that no invoice has; see the contract."""
        return await self._database.read(lambda c: sums.open_months(c, before))

    async def uninvoiced(self, tenant_id: str, *, until: str) -> list[UsageSum]:
        """Return what no issued invoice has."""
        return await self._database.read(lambda c: sums.uninvoiced(c, tenant_id, until))

    async def last_invoiced(self, tenant_id: str) -> str:
        """Return the last month that was invoiced."""
        return await self._database.read(lambda c: sums.last_invoiced(c, tenant_id))

    async def waive(self, tenant_id: str, *, until: str) -> None:
        """Take it as settled."""
        await self._database.write(lambda c: sums.close(c, tenant_id, until))

    async def draft_invoice(
        self, tenant_id: str, month: str, terms: Callable[[Account], Terms], *, invoice_id: str, now: int
    ) -> Invoice | None:
        """Draft the invoice of a month; see the contract."""
        return await self._database.write(lambda c: invoices.draft(c, tenant_id, month, terms, invoice_id, now))

    async def issue_invoice(
        self,
        invoice_id: str,
        terms: Callable[[Account], Terms],
        audit: AuditEntry,
        *,
        prefix: str,
        now: int,
        due_at: int,
        told: Callable[[Invoice], tuple[BillingEvent, Sequence[Notice]]] | None = None,
    ) -> Invoice | None:
        """Number a draft and close it for good; see the contract."""

        def issue(connection: sa.Connection) -> Invoice | None:
            issued = invoices.issue(
                connection, invoice_id, terms, prefix=prefix, now=now, due_at=due_at, by=audit.key_id
            )
            if issued is not None:
                audits.add(connection, msgspec.structs.replace(audit, after=issued.number))
                if told is not None:
                    budgets.add_event(connection, *told(issued))
            return issued

        return await self._database.write(issue)

    async def invoice(self, invoice_id: str, *, tenant_id: str | None) -> Invoice | None:
        """Return the invoice of this id or number (of this tenant)."""
        return await self._database.read(lambda c: invoices.one(c, invoice_id, tenant_id))

    async def invoices(self, *, tenant_id: str | None, month: str | None, limit: int, after: str) -> list[Invoice]:
        """Return invoices, newest first."""
        return await self._database.read(lambda c: invoices.page(c, tenant_id, month, limit, after))

    async def add_credit_note(
        self, note: CreditNote, audit: AuditEntry, *, prefix: str, tax_of: Callable[[Invoice, int, int], int]
    ) -> CreditNote | None:
        """Number it and add it to its invoice; see the contract."""

        def add(connection: sa.Connection) -> CreditNote | None:
            added = invoices.add_note(connection, note, prefix, tax_of)
            if added is not None:
                audits.add(connection, _changed(audit, None, added))
            return added

        return await self._database.write(add)

    async def credit_notes(self, *, tenant_id: str | None, invoice_id: str | None) -> list[CreditNote]:
        """Return the credit notes, oldest first."""
        return await self._database.read(lambda c: invoices.notes(c, tenant_id, invoice_id))

    async def audit(self, *, limit: int, after: int, prefix: str) -> list[AuditEntry]:
        """Return what was changed, newest first."""
        return await self._database.read(lambda c: audits.entries(c, limit, after, prefix))


def _changed(audit: AuditEntry, before: msgspec.Struct | None, after: msgspec.Struct | None) -> AuditEntry:
    return msgspec.structs.replace(
        audit,
        before=_to_json(before).decode() if before is not None else "",
        after=_to_json(after).decode() if after is not None else "",
    )
