"""Budgets: what a tenant, key or model may cost in a month before somebody is told, or requests are refused.

A tenant manages its own. A budget that an admin set for it is the operator's:
the tenant sees it, and cannot change it.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated

import msgspec

from modelyard.control.api import money
from modelyard.control.api.access import check_title, find_key, missing
from modelyard.control.api.budget_spending import spent_of
from modelyard.control.api.credits import CREDIT_MAX, Email
from modelyard.control.api.money import Amount, TenantRef
from modelyard.control.billing import NO_MAIL
from modelyard.control.context import Context
from modelyard.domain.billing import Budget
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.tenants import Identity, Scope
from modelyard.errors import conflict, invalid_value
from modelyard.ids import new_id
from modelyard.policy.budgets import SHARES
from modelyard.policy.money import exact
from modelyard.web.fetcher import FetchError
from modelyard.web.paging import Page, Paging, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

BUDGETS_MAX = 100
"""Of one tenant."""
EMAILS_MAX = 10

_Threshold = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class PutBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A budget to be made, or what is to stand in its place."""

    amount: Annotated[Amount, msgspec.Meta(description="Of a month (UTC).")]
    tenant: TenantRef = ""
    key: Annotated[str, msgspec.Meta(description="Only what this key spends.")] = ""
    model: Annotated[str, msgspec.Meta(description="Only what this model costs.")] = ""
    thresholds: Annotated[
        tuple[_Threshold, ...],
        msgspec.Meta(max_length=10, description="Percents that are told, each once a month."),
    ] = SHARES
    is_hard: Annotated[
        bool, msgspec.Meta(description="Refuse requests that could exceed it (429 insufficient_quota).")
    ] = False
    emails: Annotated[tuple[Email, ...], msgspec.Meta(max_length=EMAILS_MAX)] = ()
    slack_url: Annotated[str, msgspec.Meta(description="Gets messages as Slack's incoming webhooks take them.")] = ""
    name: str = ""


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A budget."""

    id: str
    object: str = "budget"
    name: str
    tenant_id: str
    key_id: str
    model: str
    currency: str
    amount: str
    thresholds: tuple[int, ...]
    is_hard: bool
    is_operators: bool
    """Set by an admin; only admins change it."""
    emails: tuple[str, ...]
    slack_url: str
    created_at: int
    spent: str
    """Of this month (UTC), as the ledger has it."""
    note: str
    """What is amiss with it, for whoever made it; "": nothing."""


class Budgets:
    """The routes of budgets."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._changing = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, manage = "/v1/budgets", "/v1/budgets/{budget}", Scope.MANAGE
        example = {"amount": "500", "emails": ["money@acme.example"]}
        return [
            Route("GET", every, manage, "List budgets", self.page, Empty, Paging, Page[BudgetView]),
            Route("POST", every, manage, "Make a budget", self.create, PutBudget, Empty, BudgetView, 201, example),
            Route("GET", one, manage, "Get a budget", self.get, Empty, Empty, BudgetView),
            Route("PUT", one, manage, "Replace a budget", self.replace, PutBudget, Empty, BudgetView, 200, example),
            Route("DELETE", one, manage, "Remove a budget", self.remove, Empty, Empty, BudgetView),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[BudgetView]:
        """Return the budgets that the caller may see."""
        budgets = await self._context.billing.budgets(tenant_id=call.identity.visible_tenant)
        rows, has_more = page_of(budgets, limit=call.query.limit, after=call.query.after, id_of=lambda one: one.id)
        spent = await spent_of(self._context, rows)
        return Page([self._view(one, spent) for one in rows], has_more)

    async def create(self, call: Call[PutBudget, Empty]) -> BudgetView:
        """Make a budget."""
        async with self._changing:
            budget = await self._wanted(call, new_id("bud-"))
            if len(await self._context.billing.budgets(tenant_id=budget.tenant_id)) >= BUDGETS_MAX:
                raise conflict(f"A tenant has at most {BUDGETS_MAX} budgets. Remove one first.")
            return await self._put(call.identity, budget)

    async def get(self, call: Call[Empty, Empty]) -> BudgetView:
        """Return one."""
        budget = await self._find(call.identity, call.path("budget"))
        return await self._seen(budget)

    async def replace(self, call: Call[PutBudget, Empty]) -> BudgetView:
        """Replace one; another amount is told anew."""
        async with self._changing:
            before = await self._mine(call.identity, call.path("budget"))
            budget = await self._wanted(call, before.id, before)
            return await self._put(call.identity, budget)

    async def remove(self, call: Call[Empty, Empty]) -> BudgetView:
        """Remove one; a hard one bounds no longer when the answer is sent."""
        async with self._changing:
            budget = await self._mine(call.identity, call.path("budget"))
            change = money.audit(self._context, call.identity, "budget.remove", budget.id)
            await self._context.billing.remove_budget(budget.id, change)
            await self._publish()
        return await self._seen(budget)

    async def _put(self, identity: Identity, budget: Budget) -> BudgetView:
        change = money.audit(self._context, identity, "budget.set", budget.id)
        await self._context.billing.put_budget(budget, change)
        await self._publish()
        return await self._seen(budget)

    async def _publish(self) -> None:
        self._context.terms.void()
        await self._context.refresh()

    async def _find(self, identity: Identity, budget_id: str) -> Budget:
        for budget in await self._context.billing.budgets(tenant_id=identity.visible_tenant):
            if budget.id == budget_id:
                return budget
        raise missing("budget", budget_id)

    async def _mine(self, identity: Identity, budget_id: str) -> Budget:
        budget = await self._find(identity, budget_id)
        if budget.is_operators and not identity.may(Scope.ADMIN):
            raise conflict("The operator set this budget: only an admin changes it.")
        return budget

    async def _wanted(self, call: Call[PutBudget, Empty], budget_id: str, before: Budget | None = None) -> Budget:
        context, body, identity = self._context, call.body, call.identity
        tenant = body.tenant or (before.tenant_id if before is not None else "")
        tenant_id = await money.owner_of(context, identity, tenant)
        if before is not None and tenant_id != before.tenant_id:
            raise invalid_value("tenant", "a budget stays with its tenant; make another one")
        amount = money.nano("amount", body.amount, most=CREDIT_MAX)
        if not amount:
            raise invalid_value("amount", "give more than nothing; a tenant is stopped by suspending it")
        key_id = await self._key(identity, tenant_id, body.key)
        if body.model and NAME_PATTERN.fullmatch(body.model) is None:
            raise invalid_value("model", f"'{body.model[:100]}' is not a possible endpoint name")
        if body.name:
            check_title("name", body.name)
        await self._check_url(body.slack_url)
        return Budget(
            id=budget_id,
            tenant_id=tenant_id,
            amount_nanousd=amount,
            key_id=key_id,
            model=body.model,
            thresholds=tuple(sorted(set(body.thresholds))),
            is_hard=body.is_hard,
            emails=tuple(dict.fromkeys(body.emails)),
            slack_url=body.slack_url,
            name=body.name,
            created_at=before.created_at if before is not None else int(context.clock.unix_s()),
            changed_at=int(context.clock.unix_s()),
            is_operators=before.is_operators if before is not None else identity.tenant_id != tenant_id,
        )

    async def _key(self, identity: Identity, tenant_id: str, key_id: str) -> str:
        if not key_id:
            return ""
        key = await find_key(self._context.store, identity, key_id)
        if key.tenant_id != tenant_id:
            raise missing("key", key_id)
        return key.id

    async def _check_url(self, url: str) -> None:
        if url:
            try:
                await self._context.webhooks.fetcher.check(url)
            except FetchError as error:
                raise invalid_value("slack_url", str(error)) from None

    async def _seen(self, budget: Budget) -> BudgetView:
        return self._view(budget, await spent_of(self._context, [budget]))

    def _note(self, budget: Budget) -> str:
        has_no_way = budget.emails and not self._context.config.billing.smtp.host
        return f"E-mail of it is not sent: {NO_MAIL}." if has_no_way else ""

    def _view(self, budget: Budget, spent: Mapping[str, int]) -> BudgetView:
        return BudgetView(
            id=budget.id,
            name=budget.name,
            tenant_id=budget.tenant_id,
            key_id=budget.key_id,
            model=budget.model,
            currency=self._context.config.billing.currency,
            amount=exact(budget.amount_nanousd),
            thresholds=budget.thresholds,
            is_hard=budget.is_hard,
            is_operators=budget.is_operators,
            emails=budget.emails,
            slack_url=budget.slack_url,
            created_at=budget.created_at,
            spent=exact(spent[budget.id]),
            note=self._note(budget),
        )
