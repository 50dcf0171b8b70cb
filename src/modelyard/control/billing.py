"""What happens about money without anybody asking: credit is drawn and expires, budgets are told, months end.

Every round reads everything it decides by and may be done again at any time:
an event that was told is not told again, since its occasion is unique in the
store; a month that was invoiced has nothing left to invoice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from modelyard.clock import Clock
from modelyard.config.billing import BillingConfig
from modelyard.control.tasks import boundary
from modelyard.control.terms import TermsDesk
from modelyard.domain.billing import (
    Account,
    AuditEntry,
    BillingEvent,
    Budget,
    Channel,
    EventData,
    Grant,
    Notice,
    NoticeStatus,
)
from modelyard.domain.invoices import Invoice, Party, Tax
from modelyard.domain.tenants import PLATFORM, Tenant
from modelyard.ids import new_id
from modelyard.metering.prices import micro_of
from modelyard.policy import budgets as budgeting
from modelyard.policy import credit
from modelyard.policy.invoicing import Terms as InvoiceTerms
from modelyard.policy.utc import DAY_S, day_of, first_of_month, month_name, next_month
from modelyard.stores import BillingStore, ControlStore, JournalPosition, UsageStore

INTERVAL_S = 5.0
LATE_S = 86_400.0
"""How long after its end a month's budgets are looked at: what was used at its end is delivered later."""
MONTH_END_S = 600.0
"""Pause between two looks for months that are over."""
NO_MAIL = "no mail server is configured ([billing.smtp])"
ITSELF = "controller"
"""Who issued an invoice that nobody asked for."""

_log = logging.getLogger(__name__)


def invoice_terms(settings: BillingConfig, tenants: Sequence[Tenant], account: Account) -> InvoiceTerms:
    """Return what an invoice for ``account`` says beside its lines."""
    name = next((one.name for one in tenants if one.id == account.tenant_id), account.tenant_id)
    seller = Party(
        settings.seller_name or "Modelyard", settings.seller_address, settings.seller_email, settings.seller_tax_id
    )
    buyer = Party(account.name or name, account.address, account.email, account.tax_id)
    tax = Tax(settings.tax_name, micro_of(settings.tax_percent / 100), settings.tax_is_inclusive, account.is_tax_exempt)
    return InvoiceTerms(settings.currency, seller, buyer, tax)


class BillingDesk:
    """Does the rounds. ``refresh`` pushes what changed to the gateways, ``wake`` the sender of notices."""

    def __init__(
        self,
        *,
        store: BillingStore,
        usage: UsageStore,
        control: ControlStore,
        terms: TermsDesk,
        settings: BillingConfig,
        refresh: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._store = store
        self._usage = usage
        self._control = control
        self._terms = terms
        self._settings = settings
        self._refresh = refresh
        self._wake = wake
        self._clock = clock
        self._month_end_s = float("-inf")
        self._seen: list[tuple[int, tuple[Budget, ...], tuple[JournalPosition, ...]]] = []
        """What the months that are looked at were last told by."""
        self._told: set[str] = set()
        """Occasions that are known to be told; the store knows the others."""

    def __repr__(self) -> str:
        return f"<BillingDesk, month end: {self._settings.month_end}>"

    async def run(self) -> None:
        """Do rounds until cancelled."""
        while True:
            with boundary("billing"):
                await self.round()
            await asyncio.sleep(INTERVAL_S)

    async def round(self) -> None:
        """Do all that is due now.

        Raises:
            StoreUnavailableError: the rest is put off.
        """
        await self.book()
        await self.tell_budgets()
        if self._clock.monotonic_s() - self._month_end_s >= MONTH_END_S:
            await self.end_months()
            self._month_end_s = self._clock.monotonic_s()

    # --- credit ---

    async def book(self) -> None:
        """Draw what was used, end what expired, and tell whose credit is used up, or nearly."""
        if not (await self._terms.current()).accounts:
            return  # nobody has credit, and nobody pays in another way than all do
        now = self._clock.unix_s()
        if await self._store.book(now=now):
            self._terms.void()
            await self._refresh()
        held: dict[str, list[Grant]] = {}
        for grant in await self._store.grants(tenant_id=None):
            held.setdefault(grant.tenant_id, []).append(grant)
        # Level, not edge: a controller that died before it told is followed by one that does.
        for tenant_id, account in (await self._terms.current()).accounts.items():
            grants = held.get(tenant_id, [])
            left = credit.left(grants, now)
            if not grants or (left and not credit.is_low(grants, now)):
                continue
            data: EventData = {"tenant_id": tenant_id, "currency": self._settings.currency}
            emails = (account.email,) if account.email else ()
            once = f"credit/{tenant_id}/{len(grants)}"
            if left:
                await self._tell("credit.low", tenant_id, f"{once}/low", {**data, "left_nanousd": left}, emails)
            else:
                await self._tell("credit.exhausted", tenant_id, once, data, emails)

    # --- budgets ---

    async def tell_budgets(self) -> None:
        """Tell each threshold that was reached this month, or at the end of the last one, and not told yet."""
        budgets = await self._store.budgets(tenant_id=None)
        if not budgets:
            return
        now = self._clock.unix_s()
        months = {first_of_month(day_of(at)) for at in (now - LATE_S, now)}
        owners = {budget.tenant_id for budget in budgets}
        of_models = {budget.tenant_id for budget in budgets if budget.model}
        for month in sorted(months):
            rows, positions = await self._usage.spent(owners, day=month, models_of=of_models)
            seen = (month, tuple(budgets), tuple(positions))
            if seen in self._seen:
                continue  # nothing was spent, or asked for, since the last look
            spent = budgeting.sums((row.tenant_id, row.key_id, row.model, row.month_nanousd) for row in rows)
            for budget in budgets:
                # Who asks in a month wants to know of that one, not of the last.
                if max(budget.created_at, budget.changed_at) < next_month(month) * DAY_S:
                    used = spent.get((budget.tenant_id, budget.key_id, budget.model), 0)
                    await self._tell_budget(budget, used, month_name(month))
            self._seen = [one for one in self._seen if one[0] in months - {month}] + [seen]

    async def _tell_budget(self, budget: Budget, spent: int, month: str) -> None:
        for share in budgeting.reached(budget, spent):
            data: EventData = {
                "budget_id": budget.id,
                "name": budget.name,
                "tenant_id": budget.tenant_id,
                "key_id": budget.key_id or None,
                "model": budget.model or None,
                "month": month,
                "threshold_percent": share,
                "amount_nanousd": budget.amount_nanousd,
                "spent_nanousd": spent,
                "currency": self._settings.currency,
            }
            once = budgeting.once(budget, share, month)
            await self._tell("budget.threshold_reached", budget.tenant_id, once, data, budget.emails, budget.slack_url)

    # --- months ---

    async def end_months(self) -> None:
        """Draft, or issue, what was used in months that ended long enough ago."""
        if self._settings.month_end == "none":
            return
        before = month_name(day_of(self._clock.unix_s() - self._settings.grace_s))
        for tenant_id, month in await self._store.open_months(before=before):
            # One whose invoice cannot be made must not keep all others from theirs.
            with boundary(f"the invoice of {tenant_id} for {month}"):
                await self._end_month(tenant_id, month)

    async def _end_month(self, tenant_id: str, month: str) -> None:
        if tenant_id == PLATFORM:
            # The operator's own use is nobody's to pay.
            await self._store.waive(tenant_id, until=month)
            return
        invoice = await self.draft(tenant_id, month)
        if invoice is not None and self._settings.month_end == "issue":
            await self.issue(invoice.id, key_id=ITSELF)

    async def draft(self, tenant_id: str, month: str) -> Invoice | None:
        """Draft the invoice of a month; None where nothing is owed."""
        tenants = await self._control.tenants()
        return await self._store.draft_invoice(
            tenant_id,
            month,
            lambda account: invoice_terms(self._settings, tenants, account),
            invoice_id=new_id("inv-"),
            now=int(self._clock.unix_s()),
        )

    async def issue(self, invoice_id: str, *, key_id: str) -> Invoice | None:
        """Number a draft and close it for good; None if it is none, or nothing is owed any more."""
        await self._store.book(now=self._clock.unix_s())
        tenants = await self._control.tenants()
        now = int(self._clock.unix_s())
        issued = await self._store.issue_invoice(
            invoice_id,
            lambda account: invoice_terms(self._settings, tenants, account),
            AuditEntry(now, key_id, "", "invoice.issue", invoice_id),
            prefix=self._settings.invoice_prefix,
            now=now,
            due_at=now + self._settings.due_days * DAY_S,
            told=self._issue_told,
        )
        if issued is not None:
            _log.info("invoice %s of %s for %s was issued", issued.number, issued.tenant_id, issued.month)
            self._wake()
        return issued

    def _issue_told(self, issued: Invoice) -> tuple[BillingEvent, list[Notice]]:
        data: EventData = {
            "invoice_id": issued.id,
            "number": issued.number,
            "tenant_id": issued.tenant_id,
            "month": issued.month,
            "total": issued.total,
            "currency": issued.currency,
            "due_at": issued.due_at,
        }
        emails = (issued.buyer.email,) if issued.buyer.email else ()
        return self._told_as("invoice.issued", issued.tenant_id, f"invoice/{issued.id}", data, emails)

    async def tell_of_webhook(self, webhook_id: str, tenant_id: str, url: str, reason: str) -> None:
        """Tell by e-mail that a webhook was disabled: its tenant may have no other one that could tell it.

        Raises:
            StoreUnavailableError: nobody was told.
        """
        account = next((one for one in await self._store.accounts() if one.tenant_id == tenant_id), None)
        if account is not None and account.email:
            once = f"webhook/{webhook_id}/{self._clock.unix_s() // DAY_S:.0f}"
            data: EventData = {"webhook_id": webhook_id, "url": url, "reason": reason}
            await self._tell("webhook.disabled", tenant_id, once, data, (account.email,))

    async def _tell(
        self, kind: str, tenant_id: str, once: str, data: EventData, emails: Sequence[str], slack_url: str = ""
    ) -> None:
        if once in self._told:
            return
        if await self._store.add_event(*self._told_as(kind, tenant_id, once, data, emails, slack_url)):
            _log.info("%s: %s", kind, once)
            self._wake()
        self._told.add(once)

    def _told_as(
        self, kind: str, tenant_id: str, once: str, data: EventData, emails: Sequence[str], slack_url: str = ""
    ) -> tuple[BillingEvent, list[Notice]]:
        """Return the event, and the notices that tell it."""
        now = self._clock.unix_s()
        event = BillingEvent(new_id("evt-"), tenant_id, kind, int(now), once, data)
        ways = [(Channel.EMAIL, email) for email in emails]
        ways += [(Channel.SLACK, slack_url)] if slack_url else []
        notices = [Notice(new_id("ntc-"), event, channel, target, due_at=now) for channel, target in ways]
        return event, notices if self._settings.smtp.host else [_unsent(one) for one in notices]


def _unsent(notice: Notice) -> Notice:
    """Return a notice that nobody can send: whoever looks sees that it did not go out, and why."""
    if notice.channel is not Channel.EMAIL:
        return notice
    return msgspec.structs.replace(notice, due_at=None, status=NoticeStatus.FAILED, error=NO_MAIL)
