"""Limits of keys and tenants: all kinds are taken, shown and changed; every fault is told by its name."""

import pytest
from tests.support.management import Management

from modelyard.domain.tenants import Identity, Plan
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.stores import JournalPosition

ALL = {
    "requests_per_minute": 60,
    "tokens_per_minute": 9000,
    "concurrency": 4,
    "tokens_per_day": 100_000,
    "tokens_per_month": 0,
    "nanousd_per_day": 5_000_000_000,
    "nanousd_per_month": 20_000_000_000,
    "models": {"smol": {"requests_per_minute": 5}, "big-q4": {"concurrency": 1, "tokens_per_minute": 7}},
}


async def test_all_limits_are_kept_and_shown(api: Management, admin: Identity, manager: Identity) -> None:
    made = await api.call(manager, "POST", "/v1/keys", {"name": "ci", "limits": ALL})
    assert made.status_code == 201, made.text
    shown = (await api.call(manager, "GET", f"/v1/keys/{made.json()['id']}")).json()
    assert shown["limits"] == ALL
    made = await api.call(admin, "POST", "/v1/tenants", {"name": "Globex", "limits": ALL, "plan": "priority"})
    assert made.status_code == 201, made.text
    shown = (await api.call(admin, "GET", f"/v1/tenants/{made.json()['id']}")).json()
    assert (shown["limits"], shown["plan"], shown["weight"]) == (ALL, "priority", 1.0)


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"tokens_per_day": -1}, "limits.tokens_per_day"),
        ({"nanousd_per_month": 10**19}, "limits.nanousd_per_month"),
        ({"nanousd_per_day": 0.5}, "limits.nanousd_per_day"),
        ({"requests_per_minute": 0}, "limits.requests_per_minute"),
        ({"models": {"smol": {"requests_per_minute": -1}}}, "limits.models[...].requests_per_minute"),
        ({"models": {"smol": {"tokens_per_day": 5}}}, "limits.models.tokens_per_day"),
        ({"models": {"../x": {}}}, "limits.models"),
        ({"models": {f"m{number}": {} for number in range(101)}}, "limits.models"),
        ({"usd_per_day": 1}, "limits.usd_per_day"),
    ],
)
async def test_a_bad_limit_is_refused_by_its_name(
    api: Management, admin: Identity, limits: dict[str, object], param: str
) -> None:
    for path in ("/v1/keys", "/v1/tenants"):
        answer = await api.call(admin, "POST", path, {"name": "x", "limits": limits})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"), [({"plan": "gold"}, "plan"), ({"weight": 0}, "weight"), ({"weight": -1}, "weight")]
)
async def test_a_bad_plan_or_weight_is_refused(
    api: Management, admin: Identity, body: dict[str, object], param: str
) -> None:
    answer = await api.call(admin, "POST", "/v1/tenants", {"name": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_plan_and_weight_change_and_what_is_left_out_stays(api: Management, admin: Identity) -> None:
    made = (await api.call(admin, "POST", "/v1/tenants", {"name": "Globex", "weight": 2.5})).json()
    path = f"/v1/tenants/{made['id']}"
    changed = (await api.call(admin, "PATCH", path, {"plan": "batch"})).json()
    assert (changed["plan"], changed["weight"]) == ("batch", 2.5)
    changed = (await api.call(admin, "PATCH", path, {"weight": 4})).json()
    assert (changed["plan"], changed["weight"]) == ("batch", 4.0)
    stored = {tenant.id: tenant for tenant in await api.context.store.tenants()}[made["id"]]
    assert (stored.plan, stored.weight) == (Plan.BATCH, 4.0)


async def test_limits_of_a_key_are_replaced_at_the_gateways_too(api: Management, manager: Identity) -> None:
    made = (await api.call(manager, "POST", "/v1/keys", {"name": "ci", "limits": ALL})).json()
    path, refreshed = f"/v1/keys/{made['id']}", len(api.refreshed)
    changed = await api.call(manager, "PATCH", path, {"limits": {"tokens_per_day": 5}})
    assert (changed.status_code, changed.json()["limits"]) == (200, {"tokens_per_day": 5})
    assert len(api.refreshed) == refreshed + 1
    assert (await api.call(manager, "PATCH", path, {"name": "other"})).json()["limits"] == {"tokens_per_day": 5}
    assert (await api.call(manager, "PATCH", path, {"scopes": ["admin"]})).json()["error"]["param"] == "scopes"
    await api.call(manager, "DELETE", path)
    assert (await api.call(manager, "PATCH", path, {"limits": {}})).status_code == 409


async def test_another_tenants_key_cannot_be_changed(api: Management, admin: Identity, manager: Identity) -> None:
    made = (await api.call(admin, "POST", "/v1/keys", {"name": "ci"})).json()
    assert (await api.call(manager, "PATCH", f"/v1/keys/{made['id']}", {"limits": {}})).status_code == 404


async def test_what_a_key_and_its_tenant_spent_is_shown(api: Management, admin: Identity, manager: Identity) -> None:
    made = (await api.call(manager, "POST", "/v1/keys", {"name": "ci"})).json()
    now, tenant = api.clock.unix_s(), manager.tenant_id
    for number, key in enumerate((made["id"], "another")):
        intent = Intent(
            f"r{number}", now, tenant, key, "ep", "m", "v", "/x", False, 1, 9, Price(1_000_000, 0, 1_000_000)
        )
        settle = Settle(f"r{number}", now, 3, 0, 4, UsageStatus.SUCCESS, 200, "", 1.0, 2.0, "rep", 1, False)
        await api.context.usage.apply([intent, settle], JournalPosition("gateway-0", "1", number))
    spent = (await api.call(manager, "GET", f"/v1/keys/{made['id']}")).json()["spent"]
    assert spent == {
        "tokens_today": 7, "tokens_this_month": 7, "nanousd_today": 7, "nanousd_this_month": 7,
        "currency": "USD", "budgets": [],
    }  # fmt: skip
    assert (await api.call(admin, "GET", f"/v1/tenants/{tenant}")).json()["spent"]["tokens_today"] == 14
    assert (await api.call(manager, "GET", "/v1/keys")).json()["data"][0]["spent"] is None


async def test_a_tenant_is_found_by_its_name_and_an_id_goes_first(api: Management, admin: Identity) -> None:
    globex = (await api.call(admin, "POST", "/v1/tenants", {"name": "Globex"})).json()
    await api.call(admin, "POST", "/v1/tenants", {"name": globex["id"]})
    assert (await api.call(admin, "GET", "/v1/tenants/Globex")).json()["id"] == globex["id"]
    assert (await api.call(admin, "GET", f"/v1/tenants/{globex['id']}")).json()["name"] == "Globex"
    made = (await api.call(admin, "POST", "/v1/keys", {"name": "k", "tenant_id": "Globex"})).json()
    assert made["tenant_id"] == globex["id"]
    assert (await api.call(admin, "GET", "/v1/tenants/nobody")).status_code == 404
