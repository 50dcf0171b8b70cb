"""The contract of what is kept of money beside the ledger: prices, accounts, credit, budgets, invoices.

Whoever changes something says who did it: the audit entry is written in the
same transaction as the change.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from modelyard.domain.billing import Account, AuditEntry, BillingEvent, Budget, CreditEntry, Grant, Notice
from modelyard.domain.invoices import CreditNote, Invoice, UsageSum
from modelyard.domain.prices import PriceEntry
from modelyard.policy.invoicing import Terms


class BillingStore(Protocol):
    """All methods raise ``StoreUnavailableError``; each is one transaction."""

    # --- prices ---

    async def prices(self) -> list[PriceEntry]:
        """Return all entries, by what they price and when they begin."""
        ...

    async def put_price(self, entry: PriceEntry, audit: AuditEntry, *, now: float) -> PriceEntry | None:
        """Add; in the place of the entry for the same that begins in the same second, if that is to come.

        Returns that one; raises ``AlreadyExistsError`` where it has begun.
        """
        ...

    async def end_price(self, price_id: str, audit: AuditEntry, *, now: float) -> PriceEntry | None:
        """End an entry now, or forget one that is to come; return it as it was, None if there is none or it is over."""
        ...

    # --- accounts and credit ---

    async def accounts(self) -> list[Account]:
        """Return the accounts of tenants that have one."""
        ...

    async def put_account(self, account: Account, audit: AuditEntry, *, now: float) -> Account:
        """Add or replace how a tenant pays, not what was accounted; return the whole.

        Credit is booked first. What was used before is owed, or not, by the plan of its time.
        """
        ...

    async def grants(self, *, tenant_id: str | None) -> list[Grant]:
        """Return the grants (of a tenant), oldest first."""
        ...

    async def add_grant(self, grant: Grant, audit: AuditEntry, *, now: float) -> None:
        """Add, for what is used from now on: what the ledger has already is booked first."""
        ...

    async def end_grant(self, grant_id: str, audit: AuditEntry, *, now: float) -> Grant | None:
        """Let what is left of a grant expire now, after what was used is drawn; None where nothing is left of it."""
        ...

    async def credit_entries(self, tenant_id: str, *, limit: int) -> list[CreditEntry]:
        """Return the newest lines of a tenant's credit ledger, newest first."""
        ...

    async def book(self, *, now: float) -> list[str]:
        """Draw what was used and end what expired, for all accounts; return the tenants whose credit changed."""
        ...

    # --- budgets and what is told ---

    async def budgets(self, *, tenant_id: str | None) -> list[Budget]:
        """Return the budgets (of a tenant), oldest first."""
        ...

    async def put_budget(self, budget: Budget, audit: AuditEntry) -> None:
        """Add or replace."""
        ...

    async def remove_budget(self, budget_id: str, audit: AuditEntry) -> None:
        """Forget."""
        ...

    async def add_event(self, event: BillingEvent, notices: Sequence[Notice]) -> bool:
        """Add an event with the notices that tell it, unless its occasion was told; say whether it was new.

        Those beyond ``NOTICES_A_DAY`` of a tenant are kept as failed.
        """
        ...

    async def billing_events(self, *, tenant_id: str | None, limit: int) -> list[BillingEvent]:
        """Return the newest events, newest first."""
        ...

    async def due_notices(self, *, now: float, limit: int) -> list[Notice]:
        """Return the notices that are due, the longest due first."""
        ...

    async def put_notice(self, notice: Notice) -> None:
        """Replace what became of a notice."""
        ...

    async def notices(self, event_id: str) -> list[Notice]:
        """Return the notices about an event."""
        ...

    # --- invoices ---

    async def open_months(self, *, before: str) -> list[tuple[str, str]]:
        """Return who is to be invoiced, and for which month, when all months before that one have ended.

        These are tenants with costs that no invoice has, each with the last month of them. What came too late for a
        month that was invoiced waits for the invoice of the next.
        """
        ...

    async def uninvoiced(self, tenant_id: str, *, until: str) -> list[UsageSum]:
        """Return what a tenant used up to the end of that month and no issued invoice has."""
        ...

    async def last_invoiced(self, tenant_id: str) -> str:
        """Return the last month of which a tenant has an issued invoice, "" for none."""
        ...

    async def waive(self, tenant_id: str, *, until: str) -> None:
        """Take what a tenant used up to the end of that month as settled, without an invoice."""
        ...

    async def draft_invoice(
        self, tenant_id: str, month: str, terms: Callable[[Account], Terms], *, invoice_id: str, now: int
    ) -> Invoice | None:
        """Draft the invoice of a month anew, or for the first time with ``invoice_id``; None where nothing is owed.

        It has all that was used up to the end of that month and that no issued invoice has.
        """
        ...

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
        """Draft it a last time, number it, and close it for good; None if it is no draft (any more).

        What ``told`` makes of it is added with it, as by ``add_event``: nobody can be in between.
        """
        ...

    async def invoice(self, invoice_id: str, *, tenant_id: str | None) -> Invoice | None:
        """Return the invoice of this id or number (of this tenant)."""
        ...

    async def invoices(self, *, tenant_id: str | None, month: str | None, limit: int, after: str) -> list[Invoice]:
        """Return invoices after the one with the id ``after``, newest first."""
        ...

    async def add_credit_note(
        self, note: CreditNote, audit: AuditEntry, *, prefix: str, tax_of: Callable[[Invoice, int, int], int]
    ) -> CreditNote | None:
        """Number it and add it to its invoice; None where that has less left than ``note.total``.

        ``tax_of(invoice, credited, credited_tax)`` says how much of it is tax, after the notes that there are.
        """
        ...

    async def credit_notes(self, *, tenant_id: str | None, invoice_id: str | None) -> list[CreditNote]:
        """Return the credit notes (of a tenant, of an invoice), oldest first."""
        ...

    async def audit(self, *, limit: int, after: int, prefix: str) -> list[AuditEntry]:
        """Return what was changed by actions that begin with ``prefix``, newest first; ``after`` is a sequence."""
        ...
