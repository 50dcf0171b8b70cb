"""What money means for gateways: limits of tenants and keys, the same objects while nothing changed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import open_fresh

from modelyard.clock import ManualClock
from modelyard.config.billing import BillingConfig
from modelyard.control.terms import REREAD_S, TermsDesk
from modelyard.domain.billing import Account, AuditEntry, BillingPlan, Budget, Grant
from modelyard.domain.tenants import ApiKey, Limits, Tenant
from modelyard.stores.sql import Database, SqlBillingStore

WHO = AuditEntry(0.0, "k", "platform", "test", "")
TENANT = Tenant("ten-a", "acme", 1, Limits(nanousd_per_month=500))
KEY = ApiKey("key-1", "ten-a", "ci", b"", (), 1)


class Place:
    def __init__(self, database: Database) -> None:
        self.clock = ManualClock()
        self.store = SqlBillingStore(database)
        self.desk = TermsDesk(self.store, BillingConfig(free_usd_per_month=2e-7), self.clock)

    async def limits(self, tenant: Tenant = TENANT, key: ApiKey = KEY) -> tuple[Limits, Limits]:
        self.desk.void()
        return (await self.desk.tenants([tenant]))[0].limits, (await self.desk.keys([key]))[0].limits

    async def pays(self, plan: BillingPlan) -> None:
        await self.store.put_account(Account("ten-a", plan), WHO, now=self.clock.unix_s())


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    database = open_fresh("sqlite", tmp_path)
    yield Place(database)
    await database.close()


async def test_a_free_tenant_may_use_its_allowance_and_no_limit_is_ever_lifted(place: Place) -> None:
    assert (await place.limits())[0] == TENANT.limits
    await place.pays(BillingPlan.FREE)
    assert (await place.limits())[0].nanousd_per_month == 200
    strict = msgspec.structs.replace(TENANT, limits=Limits(nanousd_per_month=50, concurrency=3))
    assert (await place.limits(strict))[0] == strict.limits


async def test_a_prepaid_tenant_may_use_what_it_used_and_what_is_left_of_its_credit(place: Place) -> None:
    await place.pays(BillingPlan.PREPAID)
    assert (await place.limits())[0].nanousd_total == 0, "without credit, nothing"
    now = place.clock.unix_s()
    await place.store.add_grant(Grant("grant-1", "ten-a", 70, int(now), int(now) + 9), WHO, now=now)
    assert (await place.limits())[0].nanousd_total == 70
    place.clock.advance(9)
    assert (await place.limits())[0].nanousd_total == 0, "expired, though nobody has booked it"
    await place.pays(BillingPlan.PAY_AS_YOU_GO)
    assert (await place.limits())[0] == TENANT.limits


async def test_a_hard_budget_bounds_its_tenant_or_key_and_a_soft_one_nobody(place: Place) -> None:
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, is_hard=True), WHO)
    await place.store.put_budget(Budget("bud-2", "ten-a", 200, key_id="key-1", is_hard=True), WHO)
    await place.store.put_budget(Budget("bud-3", "ten-a", 100), WHO)
    tenant, key = await place.limits()
    assert (tenant.nanousd_per_month, key.nanousd_per_month) == (300, 200)
    other = msgspec.structs.replace(TENANT, id="ten-b"), msgspec.structs.replace(KEY, id="key-2")
    assert await place.limits(*other) == (TENANT.limits, Limits())


async def test_what_did_not_change_is_the_same_object_so_that_the_feed_sees_no_news(place: Place) -> None:
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, is_hard=True), WHO)
    terms = await place.desk.current()
    (before,) = await place.desk.tenants([TENANT])
    place.desk.void()
    (after,) = await place.desk.tenants([TENANT])
    assert (await place.desk.current(), after is before) == (terms, True)
    renamed = msgspec.structs.replace(TENANT, name="globex")
    assert (await place.desk.tenants([renamed]))[0].name == "globex"


async def test_what_another_process_wrote_is_seen_after_a_while(place: Place) -> None:
    assert (await place.desk.tenants([TENANT]))[0] is TENANT
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, is_hard=True), WHO)
    assert (await place.desk.tenants([TENANT]))[0] is TENANT
    place.clock.advance(REREAD_S)
    assert (await place.desk.tenants([TENANT]))[0].limits.nanousd_per_month == 300


async def test_who_asks_while_it_is_read_waits_for_what_holds(place: Place) -> None:
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, is_hard=True), WHO)
    first, second = await asyncio.gather(place.desk.tenants([TENANT]), place.desk.tenants([TENANT]))
    assert (first[0].limits.nanousd_per_month, second[0].limits.nanousd_per_month) == (300, 300)


async def test_a_change_while_it_is_read_is_read_at_the_next_question(place: Place) -> None:
    reading = asyncio.ensure_future(place.desk.current())
    await asyncio.sleep(0)  # it has begun
    place.desk.void()
    await reading
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, is_hard=True), WHO)
    assert (await place.desk.tenants([TENANT]))[0].limits.nanousd_per_month == 300


async def test_a_hard_budget_of_a_model_bounds_that_model_of_its_tenant_or_key(place: Place) -> None:
    await place.store.put_budget(Budget("bud-1", "ten-a", 300, model="chat", is_hard=True), WHO)
    await place.store.put_budget(Budget("bud-2", "ten-a", 200, model="chat", is_hard=True), WHO)
    await place.store.put_budget(Budget("bud-3", "ten-a", 100, key_id="key-1", model="chat", is_hard=True), WHO)
    await place.store.put_budget(Budget("bud-4", "ten-a", 50, model="other"), WHO)
    tenant, key = await place.limits()
    assert (tenant.model_budgets, key.model_budgets) == ({"chat": 200}, {"chat": 100})
    assert (tenant.nanousd_per_month, key.nanousd_per_month) == (TENANT.limits.nanousd_per_month, None)


async def test_no_amount_of_credit_is_more_than_travels_in_64_bits(place: Place) -> None:
    await place.pays(BillingPlan.PREPAID)
    for number in range(25):
        grant = Grant(f"grant-{number}", "ten-a", 999_999_999 * 10**9, 0)
        await place.store.add_grant(grant, WHO, now=place.clock.unix_s())
    tenant = msgspec.structs.replace(TENANT, limits=(await place.limits())[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tenant), type=Tenant) == tenant
