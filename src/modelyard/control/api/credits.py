"""How tenants pay, and their credit: admins set and grant, a tenant sees its own."""

import asyncio
from typing import Annotated

import msgspec

from modelyard.control.api import money
from modelyard.control.api.access import find_tenant, missing
from modelyard.control.api.money import Amount, Moment, TenantRef
from modelyard.control.context import Context
from modelyard.domain.billing import Account, BillingEvent, BillingPlan, CreditKind, EventData, Grant
from modelyard.domain.tenants import Scope
from modelyard.errors import conflict, invalid_value
from modelyard.policy.credit import draw_order, left
from modelyard.policy.money import exact
from modelyard.web.decoding import pattern
from modelyard.web.paging import LIMIT_DEFAULT, Limit, Page
from modelyard.web.routes import AnyRoute, Call, Empty, Route

CREDIT_MAX = 1_000_000_000
"""Most that one grant may be, in whole units: sums stay within 64 bits."""
TEXT_MAX = 1000
EMAIL_PATTERN = pattern(
    r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$",
    "it must be an e-mail address, like money@acme.example",
)

Email = Annotated[str, msgspec.Meta(pattern=EMAIL_PATTERN, max_length=254)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


class PutAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a tenant pays; what is left out stays."""

    plan: Annotated[BillingPlan | msgspec.UnsetType, msgspec.Meta(description="free, pay_as_you_go or prepaid.")] = (
        msgspec.UNSET
    )
    name: Annotated[_Text | msgspec.UnsetType, msgspec.Meta(description="Who is billed.")] = msgspec.UNSET
    address: _Text | msgspec.UnsetType = msgspec.UNSET
    email: Annotated[
        Email | msgspec.UnsetType | None, msgspec.Meta(description="Where invoices are announced; null: nowhere.")
    ] = msgspec.UNSET
    tax_id: _Text | msgspec.UnsetType = msgspec.UNSET
    is_tax_exempt: bool | msgspec.UnsetType = msgspec.UNSET


class AccountView(msgspec.Struct, frozen=True, kw_only=True):
    """How a tenant pays."""

    object: str = "billing.account"
    tenant_id: str
    plan: BillingPlan
    name: str
    address: str
    email: str
    tax_id: str
    is_tax_exempt: bool
    currency: str
    credit: str
    """What is left of its credit, as an exact decimal."""


class AddCredit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Credit to be given."""

    tenant: Annotated[str, msgspec.Meta(description="Id or name.")]
    amount: Amount
    expires_at: Annotated[Moment | None, msgspec.Meta(description="What is left then is lost. Left out: never.")] = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""


class GrantView(msgspec.Struct, frozen=True, kw_only=True):
    """Credit that was given. Amounts are exact decimals."""

    id: str
    object: str = "credit.grant"
    tenant_id: str
    currency: str
    amount: str
    drawn: str
    expired: str
    left: str
    granted_at: int
    expires_at: int | None
    reason: str


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the credit ledger; draws on one grant in one day (UTC) are one line."""

    object: str = "credit.entry"
    kind: CreditKind
    grant_id: str
    at: int
    amount: str
    """Negative where credit went."""


class CreditView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's credit: what is left, from which grants in the order in which they are drawn, and what happened."""

    object: str = "credit"
    tenant_id: str
    currency: str
    left: str
    grants: list[GrantView]
    entries: list[EntryView]


class CreditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose credit."""

    tenant: TenantRef = ""
    limit: Annotated[Limit, msgspec.Meta(description="Most lines of the ledger to return.")] = LIMIT_DEFAULT


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose events."""

    tenant: TenantRef = ""
    limit: Limit = LIMIT_DEFAULT


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was told."""

    id: str
    object: str = "event"
    type: str
    created_at: int
    tenant_id: str
    data: EventData
    notices: dict[str, str]
    """What became of each e-mail and message: ``pending``, ``sent`` or ``failed``, with the reason."""


class Credits:
    """The routes of accounts and credit."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._currency = context.config.billing.currency
        self._giving = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        one, manage, admin = "/v1/billing/accounts/{tenant_id}", Scope.MANAGE, Scope.ADMIN
        account = {"plan": "prepaid", "name": "ACME Ltd", "address": "1 Main Street", "email": "money@acme.example"}
        grant = {"tenant": "acme", "amount": "50", "expires_at": "2099-01-01", "reason": "paid by card"}
        events = "/v1/billing/events"
        return [
            Route("GET", one, manage, "How a tenant pays", self.account, Empty, Empty, AccountView),
            Route("PUT", one, admin, "Set how it pays", self.put, PutAccount, Empty, AccountView, 200, account),
            Route("GET", "/v1/credits", manage, "Credit", self.credit, Empty, CreditQuery, CreditView),
            Route("POST", "/v1/credits", admin, "Give credit", self.add, AddCredit, Empty, GrantView, 201, grant),
            Route("DELETE", "/v1/credits/{grant}", admin, "Take back credit", self.revoke, Empty, Empty, GrantView),
            Route("GET", events, manage, "What was told", self.events, Empty, EventsQuery, Page[EventView]),
        ]

    async def account(self, call: Call[Empty, Empty]) -> AccountView:
        """Return how a tenant pays."""
        tenant_id = await money.owner_of(self._context, call.identity, call.path("tenant_id"))
        return await self._account_view(await self._account(tenant_id))

    async def put(self, call: Call[PutAccount, Empty]) -> AccountView:
        """Change how a tenant pays; at the gateways when the answer is sent."""
        context, wanted = self._context, call.body
        tenant = await find_tenant(context.store, call.path("tenant_id"))
        given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not msgspec.UNSET}
        if "email" in given:
            given["email"] = given["email"] or ""
        for name in ("name", "address", "tax_id"):
            if not all(letter.isprintable() or letter == "\n" for letter in given.get(name, "")):
                raise invalid_value(name, "use printable characters")
        account = msgspec.structs.replace(await self._account(tenant.id), **given)
        change = money.audit(context, call.identity, "account.set", tenant.id)
        account = await context.billing.put_account(account, change, now=context.clock.unix_s())
        await self._publish()
        return await self._account_view(account)

    async def credit(self, call: Call[Empty, CreditQuery]) -> CreditView:
        """Return a tenant's credit."""
        context = self._context
        tenant_id = await money.owner_of(context, call.identity, call.query.tenant)
        grants = await context.billing.grants(tenant_id=tenant_id)
        entries = await context.billing.credit_entries(tenant_id, limit=call.query.limit)
        return CreditView(
            tenant_id=tenant_id,
            currency=self._currency,
            left=exact(left(grants, context.clock.unix_s())),
            grants=[self._grant_view(one) for one in sorted(grants, key=draw_order)],
            entries=[
                EntryView(
                    kind=one.kind,
                    grant_id=one.grant_id,
                    at=one.at,
                    amount=exact(one.amount_nanousd if one.kind is CreditKind.GRANT else -one.amount_nanousd),
                )
                for one in entries
            ],
        )

    async def add(self, call: Call[AddCredit, Empty]) -> GrantView:
        """Give credit, for what is used from now on; at the gateways when the answer is sent.

        The same idempotency key gives it once.
        """
        context, body = self._context, call.body
        tenant = await find_tenant(context.store, body.tenant)
        now = int(context.clock.unix_s())
        expires_at = None if body.expires_at is None else money.moment("expires_at", body.expires_at)
        if expires_at is not None and expires_at <= now:
            raise invalid_value("expires_at", "it is in the past")
        amount = money.nano("amount", body.amount, most=CREDIT_MAX)
        if not amount:
            raise invalid_value("amount", "give more than nothing")
        if not body.reason.isprintable():
            raise invalid_value("reason", "use printable characters")
        once = money.once(call, "grant-")
        grant = Grant(
            id=once.id,
            tenant_id=tenant.id,
            amount_nanousd=amount,
            granted_at=now,
            expires_at=expires_at,
            reason=body.reason,
            created_by=call.identity.key_id,
        )
        change = money.audit(context, call.identity, "credit.grant", tenant.id)
        async with self._giving:
            if once.stem:
                known = money.repeated(once, await context.billing.grants(tenant_id=None))
                if known is not None:
                    return self._grant_view(known)
            await context.billing.add_grant(grant, change, now=context.clock.unix_s())
        await self._publish()
        return self._grant_view(grant)

    async def revoke(self, call: Call[Empty, Empty]) -> GrantView:
        """Take back what is left of a grant, after what was used by now is drawn from it."""
        context, grant_id = self._context, call.path("grant")
        known = next((one for one in await context.billing.grants(tenant_id=None) if one.id == grant_id), None)
        if known is None:
            raise missing("grant", grant_id)
        change = money.audit(context, call.identity, "credit.revoke", known.tenant_id)
        ended = await context.billing.end_grant(grant_id, change, now=context.clock.unix_s())
        await self._publish()
        if ended is None:
            raise conflict("Nothing is left of it: it was used, or has expired.")
        return self._grant_view(ended)

    async def events(self, call: Call[Empty, EventsQuery]) -> Page[EventView]:
        """Return what was told of budgets, credit and invoices, newest first."""
        context, query = self._context, call.query
        tenant_id = await money.tenant_of(context, call.identity, query.tenant)
        events = await context.billing.billing_events(tenant_id=tenant_id, limit=query.limit + 1)
        return Page([await self._event_view(one) for one in events[: query.limit]], len(events) > query.limit)

    async def _publish(self) -> None:
        self._context.terms.void()
        await self._context.refresh()

    async def _account(self, tenant_id: str) -> Account:
        accounts = await self._context.billing.accounts()
        return next((one for one in accounts if one.tenant_id == tenant_id), Account(tenant_id))

    async def _account_view(self, account: Account) -> AccountView:
        grants = await self._context.billing.grants(tenant_id=account.tenant_id)
        return AccountView(
            tenant_id=account.tenant_id,
            plan=account.plan,
            name=account.name,
            address=account.address,
            email=account.email,
            tax_id=account.tax_id,
            is_tax_exempt=account.is_tax_exempt,
            currency=self._currency,
            credit=exact(left(grants, self._context.clock.unix_s())),
        )

    def _grant_view(self, grant: Grant) -> GrantView:
        return GrantView(
            id=grant.id,
            tenant_id=grant.tenant_id,
            currency=self._currency,
            amount=exact(grant.amount_nanousd),
            drawn=exact(grant.drawn_nanousd),
            expired=exact(grant.expired_nanousd),
            left=exact(grant.left_nanousd),
            granted_at=grant.granted_at,
            expires_at=grant.expires_at,
            reason=grant.reason,
        )

    async def _event_view(self, event: BillingEvent) -> EventView:
        notices = await self._context.billing.notices(event.id)
        return EventView(
            id=event.id,
            type=event.type,
            created_at=event.at,
            tenant_id=event.tenant_id,
            data=event.data,
            notices={
                one.target: f"{one.status.value}: {one.error}" if one.error else one.status.value for one in notices
            },
        )
