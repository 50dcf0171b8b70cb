"""Batches over the management API: what is taken on, and what is refused with the parameter that is wrong."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.management import Management, management

from modelyard.config import Config
from modelyard.domain.tenants import Identity, Scope

EVERY = "/v1/batches"
WANTED = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    """Return one whose tenants may have two batches under way."""
    config = Config()
    batch = msgspec.structs.replace(config.batch, open_max=2)
    async with management(tmp_path, msgspec.structs.replace(config, batch=batch)) as running:
        yield running


@pytest.fixture
async def user(api: Management) -> Identity:
    """Someone who may call models."""
    return (await api.key(await api.tenant("acme"), Scope.INFERENCE))[0]


async def made(api: Management, who: Identity, key: str = "", **changes: Any) -> httpx2.Response:
    async with api.client(who) as client:
        headers = {"idempotency-key": key} if key else {}
        return await client.post(EVERY, json=WANTED | changes, headers=headers)


async def test_one_more_than_may_be_is_refused_but_a_repetition_gets_its_own(api: Management, user: Identity) -> None:
    first = await made(api, user, "once")
    assert first.status_code == 200, first.text
    assert (await made(api, user)).status_code == 200
    refused = await made(api, user, "another")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "batches_full")
    again = await made(api, user, "once")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    other = (await api.key(await api.tenant("other"), Scope.INFERENCE))[0]
    assert (await made(api, other)).status_code == 200
    admin = (await api.key("platform", Scope.ADMIN))[0]
    owners = [one["modelyard"]["tenant_id"] for one in (await api.call(admin, "GET", EVERY)).json()["data"]]
    assert sorted(owners) == sorted([other.tenant_id, user.tenant_id, user.tenant_id])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-\0"}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"endpoint": "/v1/videos"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1w"}, "completion_window"),
        ({"metadata": {"a": None}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"output_expires_after": {"anchor": "last_active_at", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10**30}}, "output_expires_after.seconds"),
        ({"idempotency_key": "\n"}, "idempotency_key"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_what_is_wrong_is_named(api: Management, user: Identity, changes: dict[str, Any], param: str) -> None:
    refused = await made(api, user, **changes)
    assert refused.status_code == 400, refused.text
    assert str(refused.json()["error"]["param"]).startswith(param)


@pytest.mark.parametrize("odd", ["batch_%00", "batch_%F0%9F%98%80", "%27%20OR%201=1", "batch_" + "a" * 500])
async def test_an_id_that_none_has_is_not_found(api: Management, user: Identity, odd: str) -> None:
    for method, path in (("GET", f"{EVERY}/{odd}"), ("POST", f"{EVERY}/{odd}/cancel")):
        answer = await api.call(user, method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    listed = await api.call(user, "GET", f"{EVERY}?after={odd}")
    assert (listed.status_code, listed.json()["error"]["param"]) == (400, "after")
