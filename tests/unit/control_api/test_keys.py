"""API keys and tenants."""

import asyncio

import pytest
from tests.support.management import PEPPER, Management

from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.ids import hash_secret, parse_api_key


async def test_key_is_shown_once_and_stored_as_a_hash(api: Management, manager: Identity) -> None:
    answer = await api.call(
        manager, "POST", "/v1/keys", {"name": "ci", "limits": {"concurrency": 4}, "models": ["smol"]}
    )
    assert answer.status_code == 201, answer.text
    body = answer.json()
    parsed = parse_api_key(body["key"])
    assert parsed is not None
    assert parsed.key_id == body["id"]
    assert body["scopes"] == ["inference"]
    assert api.refreshed, "the key works at the gateways when the answer is there"
    stored = next(key for key in await api.context.store.keys() if key.id == body["id"])
    assert stored.secret_hash == hash_secret(PEPPER, parsed.secret)
    assert stored.tenant_id == manager.tenant_id
    for path in ("/v1/keys", f"/v1/keys/{body['id']}"):
        shown = (await api.call(manager, "GET", path)).text
        assert body["key"] not in shown
        assert parsed.secret not in shown
        assert stored.secret_hash.hex() not in shown
        assert "hash" not in shown


async def test_rotated_key_keeps_its_id_and_the_old_secret_for_a_while(api: Management, manager: Identity) -> None:
    first = (await api.call(manager, "POST", "/v1/keys", {"name": "ci"})).json()
    answer = await api.call(manager, "POST", f"/v1/keys/{first['id']}/rotate", {"overlap_s": 60})
    assert answer.status_code == 200, answer.text
    second = answer.json()
    assert second["id"] == first["id"]
    assert second["key"] != first["key"]
    stored = next(key for key in await api.context.store.keys() if key.id == first["id"])
    old, new = parse_api_key(first["key"]), parse_api_key(second["key"])
    assert old is not None
    assert new is not None
    assert stored.secret_hash == hash_secret(PEPPER, new.secret)
    assert stored.previous_hash == hash_secret(PEPPER, old.secret)
    assert stored.previous_expires_at == int(api.clock.unix_s()) + 60
    await api.call(manager, "POST", f"/v1/keys/{first['id']}/rotate", {"overlap_s": 0})
    stored = next(key for key in await api.context.store.keys() if key.id == first["id"])
    assert stored.previous_hash is None


async def test_revoked_key_is_dead_for_good(api: Management, manager: Identity) -> None:
    key_id = (await api.call(manager, "POST", "/v1/keys", {"name": "ci"})).json()["id"]
    before = len(api.refreshed)
    answer = await api.call(manager, "DELETE", f"/v1/keys/{key_id}")
    assert answer.status_code == 200
    assert answer.json()["deleted"] is True
    assert len(api.refreshed) == before + 1
    assert (await api.call(manager, "GET", f"/v1/keys/{key_id}")).json()["status"] == "revoked"
    assert (await api.call(manager, "DELETE", f"/v1/keys/{key_id}")).status_code == 200, "repeating is harmless"
    assert (await api.call(manager, "POST", f"/v1/keys/{key_id}/rotate")).status_code == 409


async def test_nobody_gives_more_than_he_has(api: Management, manager: Identity, admin: Identity) -> None:
    for scopes in (["admin"], ["inference", "admin"]):
        refused = await api.call(manager, "POST", "/v1/keys", {"name": "up", "scopes": scopes})
        assert refused.status_code == 403
    strong, _ = await api.key(manager.tenant_id, Scope.ADMIN)
    assert (await api.call(manager, "POST", f"/v1/keys/{strong.key_id}/rotate")).status_code == 403
    assert (await api.call(manager, "DELETE", f"/v1/keys/{strong.key_id}")).status_code == 403
    narrow, _ = await api.key(manager.tenant_id, Scope.MANAGE, models=("smol",))
    assert (await api.call(narrow, "POST", "/v1/keys", {"name": "wide"})).status_code == 400
    assert (await api.call(narrow, "POST", "/v1/keys", {"name": "wide", "models": ["smol", "big"]})).status_code == 400
    assert (await api.call(narrow, "POST", "/v1/keys", {"name": "fits", "models": ["smol"]})).status_code == 201
    assert (await api.call(narrow, "POST", f"/v1/keys/{manager.key_id}/rotate")).status_code == 400
    elsewhere = await api.call(manager, "POST", "/v1/keys", {"name": "x", "tenant_id": PLATFORM})
    assert elsewhere.status_code == 404
    made = await api.call(admin, "POST", "/v1/keys", {"name": "x", "tenant_id": manager.tenant_id})
    assert made.json()["tenant_id"] == manager.tenant_id
    assert (await api.call(admin, "POST", "/v1/keys", {"name": "x", "tenant_id": "ten-none"})).status_code == 404


async def test_last_admin_key_cannot_be_revoked(api: Management, admin: Identity) -> None:
    answer = await api.call(admin, "DELETE", f"/v1/keys/{admin.key_id}")
    assert answer.status_code == 409
    second, _ = await api.key(PLATFORM, Scope.ADMIN)
    answers = await asyncio.gather(
        api.call(second, "DELETE", f"/v1/keys/{admin.key_id}"), api.call(admin, "DELETE", f"/v1/keys/{second.key_id}")
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409], "two at once cannot both succeed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\u202eb"}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "x", "expires_at": 1}, "expires_at"),
        ({"name": "x", "limits": {"concurrency": 0}}, "limits.concurrency"),
        ({"name": "x", "limits": {"rpm": 1}}, "limits.rpm"),
        ({"name": "x", "models": ["ok", "../x"]}, "models[1]"),
        ({"name": "x", "is_admin": True}, "is_admin"),
        ({}, "name"),
    ],
)
async def test_bad_key_is_refused_by_parameter(
    api: Management, manager: Identity, body: dict[str, object], param: str
) -> None:
    answer = await api.call(manager, "POST", "/v1/keys", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_pages_follow_one_another(api: Management, manager: Identity) -> None:
    for number in range(5):
        api.clock.advance(1)
        await api.call(manager, "POST", "/v1/keys", {"name": f"key {number}"})
    seen: list[str] = []
    path = "/v1/keys?limit=2"
    while True:
        page = (await api.call(manager, "GET", path)).json()
        assert page["object"] == "list"
        seen += [key["id"] for key in page["data"]]
        if not page["has_more"]:
            break
        path = f"/v1/keys?limit=2&after={seen[-1]}"
    assert len(seen) == len(set(seen)) == 6
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("after=no", "after")):
        refused = await api.call(manager, "GET", f"/v1/keys?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await api.call(manager, "GET", "/v1/keys?nope=1")).json()["error"]["param"] == "nope"


async def test_tenants_are_the_admins(api: Management, admin: Identity, manager: Identity) -> None:
    assert (await api.call(manager, "GET", "/v1/tenants")).status_code == 403
    made = await api.call(admin, "POST", "/v1/tenants", {"name": "Globex", "limits": {"tokens_per_minute": 1000}})
    assert made.status_code == 201, made.text
    tenant_id = made.json()["id"]
    assert (await api.call(admin, "POST", "/v1/tenants", {"name": "Globex"})).status_code == 409
    path = f"/v1/tenants/{tenant_id}"
    changed = await api.call(admin, "PATCH", path, {"is_suspended": True})
    assert changed.json()["is_suspended"] is True
    assert changed.json()["limits"] == {"tokens_per_minute": 1000}, "what is left out stays"
    changed = await api.call(admin, "PATCH", path, {"limits": {}, "name": "Globex Ltd"})
    assert (changed.json()["limits"], changed.json()["name"]) == ({}, "Globex Ltd")
    assert (await api.call(admin, "PATCH", path, {"name": "acme"})).status_code == 409
    assert (await api.call(admin, "PATCH", path, {"name": None})).status_code == 400
    assert (await api.call(admin, "PATCH", "/v1/tenants/ten-none", {})).status_code == 404
    assert (await api.call(admin, "PATCH", f"/v1/tenants/{PLATFORM}", {"is_suspended": True})).status_code == 409
    names = [tenant["name"] for tenant in (await api.call(admin, "GET", "/v1/tenants")).json()["data"]]
    assert {"platform", "acme", "Globex Ltd"} == set(names)
