"""Who pays, and how: billing accounts, credit, budgets, and what is told of them.

Money is whole nano-units of the installation's currency (``…_nanousd``), as in the ledger.
"""

from enum import StrEnum

import msgspec

EventData = dict[str, str | int | None]


class BillingPlan(StrEnum):
    """How a tenant pays."""

    FREE = "free"
    """Nothing: up to the free allowance of a month, and never by invoice."""
    PAY_AS_YOU_GO = "pay_as_you_go"
    """By invoice, for what was used."""
    PREPAID = "prepaid"
    """In advance: a request whose worst case exceeds the credit that is left is refused."""


class Account(msgspec.Struct, frozen=True):
    """How a tenant pays, and who is billed."""

    tenant_id: str
    plan: BillingPlan = BillingPlan.PAY_AS_YOU_GO
    name: str = ""
    address: str = ""
    email: str = ""
    tax_id: str = ""
    is_tax_exempt: bool = False
    accounted_nanousd: int = 0
    """How much of all that the tenant ever used was set against its credit, whether there was enough or not."""
    applied_nanousd: int = 0
    """How much of the credit that was drawn is on invoices."""
    free_since: int = 0
    free_until: int | None = None
    """When the plan ``free`` began and ended the last time (unix seconds); set by the store."""

    def is_free_at(self, at: float) -> bool:
        """Say whether what a request costs that arrived then is never to be paid."""
        if at < self.free_since:
            return False
        return self.plan is BillingPlan.FREE or (self.free_until is not None and at < self.free_until)


class Grant(msgspec.Struct, frozen=True):
    """Credit that was given or bought. What is left of it at ``expires_at`` (unix seconds) is lost."""

    id: str
    tenant_id: str
    amount_nanousd: int
    granted_at: int
    expires_at: int | None = None
    reason: str = ""
    created_by: str = ""
    drawn_nanousd: int = 0
    expired_nanousd: int = 0

    @property
    def left_nanousd(self) -> int:
        """What can still be drawn."""
        return self.amount_nanousd - self.drawn_nanousd - self.expired_nanousd


class CreditKind(StrEnum):
    """What an entry of the credit ledger is."""

    GRANT = "grant"
    DRAW = "draw"
    EXPIRY = "expiry"


class CreditEntry(msgspec.Struct, frozen=True):
    """One line of the credit ledger. Draws on one grant in one UTC day are one line; amounts are never negative."""

    tenant_id: str
    grant_id: str
    kind: CreditKind
    day: int
    at: int
    amount_nanousd: int


class Budget(msgspec.Struct, frozen=True):
    """An amount a UTC month for a tenant, one of its keys, or one model. Each of ``thresholds`` (percent) is told once
    a month; a hard one also refuses what could exceed it."""

    id: str
    tenant_id: str
    amount_nanousd: int
    key_id: str = ""
    model: str = ""
    thresholds: tuple[int, ...] = (50, 80, 100)
    is_hard: bool = False
    emails: tuple[str, ...] = ()
    slack_url: str = ""
    name: str = ""
    created_at: int = 0
    is_operators: bool = False
    """Set by an admin for somebody else."""
    changed_at: int = 0


class BillingEvent(msgspec.Struct, frozen=True):
    """Something that somebody should be told. ``once`` names the occasion: it is told once."""

    id: str
    tenant_id: str
    type: str
    at: int
    once: str
    data: EventData


class Channel(StrEnum):
    """By which way a notice goes."""

    EMAIL = "email"
    SLACK = "slack"


class NoticeStatus(StrEnum):
    """What became of a notice."""

    PENDING = "pending"
    SENT = "sent"
    FAILED = "failed"


class Notice(msgspec.Struct, frozen=True):
    """One message about an event. ``due_at`` is when it is tried next, None when it is over."""

    id: str
    event: BillingEvent
    channel: Channel
    target: str
    due_at: float | None
    since: float | None = None
    tries: int = 0
    status: NoticeStatus = NoticeStatus.PENDING
    error: str = ""


class AuditEntry(msgspec.Struct, frozen=True):
    """Who changed what about money. ``before`` and ``after`` are JSON, "" for nothing."""

    at: float
    key_id: str
    tenant_id: str
    action: str
    subject: str
    before: str = ""
    after: str = ""
    sequence: int = 0
