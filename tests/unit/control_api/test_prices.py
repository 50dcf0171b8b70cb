"""Price lists over the API: what is set, for whom and when; what has begun stays; who did it is told."""

from pathlib import Path
from typing import Any

from tests.support.management import Management, management

from modelyard.config import Config
from modelyard.config.billing import PriceConfig
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Price

CHAT = {"model": "chat", "input": "0.15", "cached_input": "0.075", "output": 0.6, "batch_factor": 0.5}


async def put(api: Management, who: Identity, **more: object) -> dict[str, Any]:
    answer = await api.call(who, "PUT", "/v1/prices", {**CHAT, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def listed(api: Management, who: Identity, query: str = "") -> list[dict[str, Any]]:
    answer = await api.call(who, "GET", f"/v1/prices{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def test_a_price_is_exact_and_at_the_gateways_when_it_is_answered(api: Management, admin: Identity) -> None:
    made = await put(api, admin)
    amounts = [made[name] for name in ("input", "cached_input", "output", "batch_factor")]
    assert amounts == ["0.15", "0.075", "0.6", "0.5"]
    assert (made["currency"], made["is_in_force"], made["effective_until"]) == ("USD", True, None)
    assert made["effective_from"] == int(api.clock.unix_s())
    assert len(api.refreshed) == 1
    (entry,) = (await api.context.terms.current()).prices
    assert entry.price == Price(150_000_000, 75_000_000, 600_000_000, batch_micro=500_000)


async def test_what_has_begun_is_followed_and_what_is_to_come_replaced(api: Management, admin: Identity) -> None:
    now = int(api.clock.unix_s())
    first = await put(api, admin)
    second = await put(api, admin, input=1)
    assert second["effective_from"] == now + 1, "two of one second would leave no trace of the first"
    third = await put(api, admin, input=2)
    assert third["effective_from"] == now + 1
    assert [one["id"] for one in await listed(api, admin)] == [first["id"], third["id"]]
    path = "/v1/prices/applying?model=chat"
    assert (await api.call(admin, "GET", f"{path}&at={now}")).json()["price"]["id"] == first["id"]
    later = (await api.call(admin, "GET", f"{path}&at={now + 1}")).json()
    assert (later["price"]["input"], [one["id"] for one in later["others"]]) == ("2", [first["id"]])


WRONG: list[tuple[dict[str, object], str]] = [
    ({"effective_from": "2020-01-01"}, "effective_from"),
    ({"effective_until": "2020-01-01"}, "effective_until"),
    ({"input": "0.0000000001"}, "input"),
    ({"input": 0.1 + 0.2}, "input"),
    ({"input": "-1"}, "input"),
    ({"input": "1e3"}, "input"),
    ({"input": "\u0663"}, "input"),
    ({"output": 1_000_001}, "output"),
    ({"unit": 11}, "unit"),
    ({"batch_factor": 1.5}, "batch_factor"),
    ({"batch_factor": "0.0000001"}, "batch_factor"),
    ({"model": "no such/name/at/all"}, "model"),
    ({"model": "*", "version": "v1"}, "version"),
    ({"model": "chat@v2", "version": "v1"}, "version"),
    ({"effective_from": "soon"}, "effective_from"),
    ({"effective_from": 10**13}, "effective_from"),
]


async def test_what_is_no_price_is_refused_by_name(api: Management, admin: Identity) -> None:
    for more, param in WRONG:
        answer = await api.call(admin, "PUT", "/v1/prices", {**CHAT, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert await api.context.billing.prices() == []


async def test_a_tenant_sees_what_is_for_all_and_its_own_and_changes_nothing(
    api: Management, admin: Identity, manager: Identity
) -> None:
    await api.tenant("globex")
    for_all = await put(api, admin)
    own = await put(api, admin, tenant="acme")
    others = await put(api, admin, tenant="globex")
    assert {one["id"] for one in await listed(api, admin)} == {for_all["id"], own["id"], others["id"]}
    assert {one["id"] for one in await listed(api, manager)} == {for_all["id"], own["id"]}
    assert (await api.call(manager, "GET", "/v1/prices?tenant=globex")).status_code == 404
    assert (await api.call(manager, "GET", "/v1/prices/applying?model=chat")).json()["price"]["id"] == own["id"]
    assert (await api.call(manager, "GET", "/v1/prices/applying?model=chat&tenant=globex")).status_code == 404
    assert (await api.call(manager, "PUT", "/v1/prices", CHAT)).status_code == 403
    assert (await api.call(manager, "DELETE", f"/v1/prices/{own['id']}")).status_code == 403


async def test_a_price_that_has_begun_ends_and_one_to_come_is_forgotten(api: Management, admin: Identity) -> None:
    begun = await put(api, admin)
    coming = await put(api, admin, effective_from="2099-01-01T00:00:00Z")
    api.clock.advance(60)
    now = int(api.clock.unix_s())
    for price in (begun, coming):
        assert (await api.call(admin, "DELETE", f"/v1/prices/{price['id']}")).status_code == 200
        assert (await api.call(admin, "DELETE", f"/v1/prices/{price['id']}")).status_code == 404
    (left,) = await listed(api, admin)
    assert (left["id"], left["effective_until"], left["is_in_force"]) == (begun["id"], now, False)


async def test_who_changed_a_price_is_kept_with_what_it_was(api: Management, admin: Identity) -> None:
    made = await put(api, admin, effective_from="2099-01-01")
    again = await put(api, admin, effective_from="2099-01-01", input=7)
    await api.call(admin, "DELETE", f"/v1/prices/{again['id']}")
    history = (await api.call(admin, "GET", "/v1/prices/history")).json()["data"]
    assert [(one["action"], one["subject"], one["key_id"]) for one in history] == [
        ("price.end", again["id"], admin.key_id),
        ("price.set", again["id"], admin.key_id),
        ("price.set", made["id"], admin.key_id),
    ]
    assert history[0]["before"]["price"][0] == 7_000_000_000
    assert history[0]["after"] is None
    assert (history[1]["before"]["id"], history[1]["after"]["id"]) == (made["id"], again["id"])
    page = (await api.call(admin, "GET", f"/v1/prices/history?limit=1&after={history[0]['id']}")).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([history[1]["id"]], True)


async def test_configured_prices_are_shown_beside_and_cannot_be_ended(tmp_path: Path) -> None:
    config = Config(prices={"*": PriceConfig(input=1), "chat@v2": PriceConfig(input=2)})
    async with management(tmp_path, config) as api:
        admin, _ = await api.key(PLATFORM, Scope.ADMIN)
        found = await listed(api, admin)
        assert [(one["model"], one["version"], one["source"]) for one in found] == [
            ("*", "", "configured"),
            ("chat", "v2", "configured"),
        ]
        path = "/v1/prices/applying?model=chat"
        assert (await api.call(admin, "GET", path)).json()["price"]["input"] == "1"
        assert (await api.call(admin, "GET", f"{path}&version=v2")).json()["price"]["input"] == "2"
        await put(api, admin, model="*", input=3)
        assert (await api.call(admin, "GET", path)).json()["price"]["input"] == "3"
        assert (await api.call(admin, "GET", f"{path}&version=v2")).json()["price"]["input"] == "2"
        assert (await api.call(admin, "DELETE", "/v1/prices/configured:*")).status_code == 409


async def test_a_factor_alone_makes_no_model_free(api: Management, admin: Identity) -> None:
    answer = await api.call(admin, "PUT", "/v1/prices", {"model": "chat", "batch_factor": "0.5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "batch_factor")
    free = await api.call(admin, "PUT", "/v1/prices", {"model": "chat", "input": 0, "output": 0})
    assert free.status_code == 200, "whoever says so may give it away"


async def test_what_costs_something_is_made_free_only_by_who_says_so(admin: Identity, tmp_path: Path) -> None:
    config = Config(prices={"*": PriceConfig(input=1.0, output=2.0)})
    async with management(tmp_path / "priced", config=config) as api:
        whole = {"model": "*", "request": "0.001"}
        answer = await api.call(admin, "PUT", "/v1/prices", whole)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), "all else became free, unsaid"
        assert "costs $1 until then; send it, or 0 to make it free" in answer.json()["error"]["message"]
        answer = await api.call(admin, "PUT", "/v1/prices", {**whole, "model": "chat", "input": "0"})
        assert answer.json()["error"]["param"] == "output"
        answer = await api.call(admin, "PUT", "/v1/prices", {**whole, "input": 0, "output": 3})
        assert (answer.json()["input"], answer.json()["output"], answer.json()["request"]) == ("0", "3", "0.001")
        assert (
            await api.call(admin, "PUT", "/v1/prices", {"model": "*", "output": 4, "request": 0})
        ).status_code == 200
