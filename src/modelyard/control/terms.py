"""What money means for gateways: the prices that are kept, and what each tenant and key may spend at most.

Kept in memory, since every build of the routing table asks; read anew after
each change made here, and every ``REREAD_S``, since another process may have
written. What is the same as before is the same object, so that the feed sees
at once that nothing changed.

How a tenant pays, and hard budgets, become limits as there are already:

* free: the free allowance, as money a month;
* prepaid: what was ever accounted and the credit that is left, as money in all.
  Drawing credit moves as much from one to the other, so it changes nothing;
* a hard budget: money a month of its tenant or key, or of these for one model.

The strictest counts; a limit that an administrator set is never lifted.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from modelyard.clock import Clock
from modelyard.config.billing import BillingConfig
from modelyard.domain.billing import Account, BillingPlan, Budget
from modelyard.domain.prices import PriceEntry
from modelyard.domain.tenants import ApiKey, Limits, Tenant
from modelyard.metering.prices import nano_of
from modelyard.policy import budgets, credit
from modelyard.stores import BillingStore

T = TypeVar("T", Tenant, ApiKey)

REREAD_S = 30.0
TOTAL_MAX = 2**62
"""Most that a limit may be: it travels in 64 bits, and what more was given nobody can spend."""


class Terms:
    """What holds since it was read; made anew when it was read again."""

    def __init__(
        self,
        prices: Sequence[PriceEntry],
        accounts: Sequence[Account],
        left: dict[str, int],
        hard: Sequence[Budget],
        free_nanousd: int,
    ) -> None:
        self.prices = tuple(prices)
        self.accounts = {account.tenant_id: account for account in accounts}
        self._left = left
        self._free_nanousd = free_nanousd
        self._budgets: dict[str, list[Budget]] = {}
        for budget in hard:
            self._budgets.setdefault(budget.key_id or budget.tenant_id, []).append(budget)
        self._hard = tuple(hard)
        self._bound = frozenset(self.accounts) | frozenset(self._budgets)

    @property
    def bound(self) -> frozenset[str]:
        """The tenants and keys whose limits may be others than they were set to: of thousands, most are not."""
        return self._bound

    def facts(self) -> tuple[object, ...]:
        """Return all that it is made of; equal ones mean the same."""
        return self.prices, self.accounts, self._left, self._hard, self._free_nanousd

    def of_tenant(self, tenant: Tenant) -> Limits:
        """Return the limits of a tenant."""
        account = self.accounts.get(tenant.id)
        plan = account.plan if account is not None else BillingPlan.PAY_AS_YOU_GO
        most: list[int | None] = [self._free_nanousd if plan is BillingPlan.FREE else None]
        total = None
        if account is not None and plan is BillingPlan.PREPAID:
            total = min(TOTAL_MAX, account.accounted_nanousd + self._left.get(tenant.id, 0))
        return self._limited(tenant.id, tenant.limits, most, total)

    def of_key(self, key: ApiKey) -> Limits:
        """Return the limits of a key."""
        return self._limited(key.id, key.limits, [], None)

    def _limited(self, subject_id: str, limits: Limits, most: list[int | None], total: int | None) -> Limits:
        mine = self._budgets.get(subject_id, ())
        most = [limits.nanousd_per_month, *most, *(one.amount_nanousd for one in mine if not one.model)]
        by_model: dict[str, int] = {}
        for one in mine:
            if one.model:
                by_model[one.model] = min(one.amount_nanousd, by_model.get(one.model, one.amount_nanousd))
        return msgspec.structs.replace(
            limits, nanousd_per_month=budgets.lowest(most), nanousd_total=total, model_budgets=by_model
        )


NO_TERMS = Terms((), (), {}, (), 0)


class TermsDesk:
    """Reads terms, and applies them to tenants and keys."""

    def __init__(self, store: BillingStore, settings: BillingConfig, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._free_nanousd = nano_of(settings.free_usd_per_month)
        self._terms = NO_TERMS
        self._due_s: float | None = None
        self._voided = 0
        self._turn = asyncio.Lock()
        self._tenants: dict[str, tuple[Tenant, Terms, Tenant]] = {}
        self._keys: dict[str, tuple[ApiKey, Terms, ApiKey]] = {}

    def __repr__(self) -> str:
        return f"<TermsDesk {len(self._terms.prices)} prices, {len(self._terms.accounts)} accounts>"

    def void(self) -> None:
        """Read anew at the next question."""
        self._due_s = None
        self._voided += 1

    async def current(self) -> Terms:
        """Return what holds.

        Raises:
            StoreUnavailableError: nothing is known, or it is out of date.
        """
        if self._is_due():
            async with self._turn:
                if self._is_due():
                    await self._read()
        return self._terms

    async def tenants(self, stored: Sequence[Tenant]) -> list[Tenant]:
        """Return tenants with the limits that come from how they pay."""
        terms = await self.current()
        return [
            _applied(self._tenants, one, terms, terms.of_tenant) if one.id in terms.bound else one for one in stored
        ]

    async def keys(self, stored: Sequence[ApiKey]) -> list[ApiKey]:
        """Return keys with the limits that come from budgets."""
        terms = await self.current()
        return [_applied(self._keys, one, terms, terms.of_key) if one.id in terms.bound else one for one in stored]

    def _is_due(self) -> bool:
        return self._due_s is None or self._clock.monotonic_s() >= self._due_s

    async def _read(self) -> None:
        # Due until it is read: who asks meanwhile waits for it, and what is voided meanwhile is read once more.
        voided, now = self._voided, self._clock.unix_s()
        prices, accounts = await self._store.prices(), await self._store.accounts()
        left: dict[str, int] = {}
        for grant in await self._store.grants(tenant_id=None):
            left[grant.tenant_id] = left.get(grant.tenant_id, 0) + credit.left([grant], now)
        hard = [one for one in await self._store.budgets(tenant_id=None) if one.is_hard]
        terms = Terms(prices, accounts, left, hard, self._free_nanousd)
        if terms.facts() != self._terms.facts():
            self._terms = terms
            for made in (self._tenants, self._keys):
                for gone in made.keys() - terms.bound:
                    del made[gone]
        if voided == self._voided:
            self._due_s = self._clock.monotonic_s() + REREAD_S


def _applied(made: dict[str, tuple[T, Terms, T]], stored: T, terms: Terms, limits_of: Callable[[T], Limits]) -> T:
    """Return what is stored as it is with these terms: the same object as before where it can be."""
    known = made.get(stored.id)
    if known is not None and known[0] is stored and known[1] is terms:
        return known[2]
    limits = limits_of(stored)
    effective = stored if limits == stored.limits else msgspec.structs.replace(stored, limits=limits)
    if known is not None and known[2] == effective:
        effective = known[2]
    made[stored.id] = stored, terms, effective
    return effective
