"""Every ``RequestStore`` lets one of two same requests run, keeps its end, and shows nobody another tenant's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh
from tests.support.kept import an_end

from modelyard.domain.requests import (
    Attempt,
    Finish,
    KeptRequest,
    RequestStatus,
    Webhook,
    WebhookSecret,
    WebhookStatus,
)
from modelyard.domain.tenants import Tenant
from modelyard.stores import RequestStore
from modelyard.stores.sql import SqlControlStore, SqlRequestStore

URL = "https://hooks.example.com/in"


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RequestStore]:
    database = open_fresh(request.param, tmp_path)
    control = SqlControlStore(database)
    for tenant in ("ten-a", "ten-b"):
        await control.add_tenant(Tenant(tenant, tenant, 1))
    yield SqlRequestStore(database)
    await control.close()


def a_request(request_id: str = "req_1", **changes: object) -> KeptRequest:
    request = KeptRequest(
        id=request_id,
        tenant_id="ten-a",
        key_id="key-1",
        instance="gw-1",
        route="/v1/chat/completions",
        model="sim",
        fingerprint="f" * 64,
        created_at=100.0,
        expires_at=1000.0,
        is_detached=True,
        webhook=Webhook(URL, "evt_1"),
    )
    return msgspec.structs.replace(request, **changes)


async def test_what_is_claimed_is_there_whole(store: RequestStore) -> None:
    request = a_request(idempotency_key="k")
    assert await store.claim(request) is None
    assert await store.request("req_1", tenant_id="ten-a") == request
    assert await store.request("req_1", tenant_id=None) == request
    assert await store.request("req_1", tenant_id="ten-b") is None


async def test_of_many_same_requests_exactly_one_is_new(store: RequestStore) -> None:
    claims = [store.claim(a_request(f"req_{number}", idempotency_key="k")) for number in range(20)]
    found = await asyncio.gather(*claims)
    assert found.count(None) == 1
    (winner,) = await store.open_requests()
    assert {one.id for one in found if one is not None} == {winner.id}


@pytest.mark.parametrize("other", [{"tenant_id": "ten-b"}, {"key_id": "key-2"}, {"idempotency_key": "l"}])
async def test_other_keys_do_not_meet(store: RequestStore, other: dict[str, str]) -> None:
    assert await store.claim(a_request(idempotency_key="k")) is None
    assert await store.claim(a_request("req_2", **{"idempotency_key": "k", **other})) is None


async def test_requests_without_a_key_never_meet(store: RequestStore) -> None:
    assert await store.claim(a_request("req_1")) is None
    assert await store.claim(a_request("req_2")) is None


async def test_an_expired_key_is_free_again(store: RequestStore) -> None:
    await store.claim(a_request(idempotency_key="k"))
    late = a_request("req_2", idempotency_key="k", created_at=1000.0, expires_at=1900.0)
    assert await store.claim(late) is not None, "not while it runs"
    assert await store.forget(before=1000.0) == 0
    await store.finish(an_end(), now=1000.0)
    assert await store.claim(late) is None
    assert await store.request("req_1", tenant_id=None) is None


async def test_a_request_ends_once(store: RequestStore) -> None:
    await store.claim(a_request())
    assert await store.finish(an_end(), now=105.0)
    assert not await store.finish(an_end(status=RequestStatus.CANCELLED), now=106.0)
    ended = await store.request("req_1", tenant_id=None)
    assert ended is not None
    assert (ended.status, ended.finished_at, ended.answer) == (RequestStatus.SUCCEEDED, 105.0, b'{"a":1}')
    assert ended.webhook == Webhook(URL, "evt_1", WebhookStatus.PENDING, due_at=105.0)
    assert await store.open_requests() == []


async def test_begun_is_running_unless_it_is_over(store: RequestStore) -> None:
    await store.claim(a_request("req_1"))
    await store.claim(a_request("req_2"))
    await store.finish(an_end("req_2"), now=1.0)
    await store.begin(["req_1", "req_2", "req_gone"])
    found = {one.id: one.status for one in await store.detached(tenant_id=None, limit=10, after=None)}
    assert found == {"req_1": RequestStatus.RUNNING, "req_2": RequestStatus.SUCCEEDED}


async def test_a_released_key_is_free_and_a_detached_request_stays_visible(store: RequestStore) -> None:
    await store.claim(a_request("req_1", idempotency_key="k"))
    await store.finish(an_end("req_1", status=RequestStatus.FAILED, is_released=True), now=1.0)
    assert await store.claim(a_request("req_2", idempotency_key="k", is_detached=False, webhook=None)) is None
    assert await store.finish(an_end("req_2", status=RequestStatus.FAILED, is_released=True), now=1.0)
    assert await store.request("req_2", tenant_id=None) is None
    kept = await store.request("req_1", tenant_id=None)
    assert kept is not None
    assert kept.status is RequestStatus.FAILED


async def test_releasing_what_has_ended_changes_nothing(store: RequestStore) -> None:
    await store.claim(a_request(idempotency_key="k", is_detached=False, webhook=None))
    await store.finish(an_end(), now=1.0)
    assert not await store.finish(an_end(status=RequestStatus.FAILED, is_released=True), now=2.0)
    assert await store.claim(a_request("req_2", idempotency_key="k")) is not None


async def test_lists_are_of_one_tenant_newest_first_and_turn_pages(store: RequestStore) -> None:
    for number in range(5):
        await store.claim(a_request(f"req_{number}", created_at=100.0 + number // 2))
    await store.claim(a_request("req_b", tenant_id="ten-b"))
    await store.claim(a_request("req_i", is_detached=False, webhook=None))
    await store.finish(an_end("req_4"), now=1.0)
    first = await store.detached(tenant_id="ten-a", limit=2, after=None)
    rest = await store.detached(tenant_id="ten-a", limit=9, after=first[-1])
    assert [one.id for one in [*first, *rest]] == ["req_4", "req_3", "req_2", "req_1", "req_0"]
    assert first[0].answer == b"", "lists are light"


async def test_what_is_kept_is_counted_and_forgotten(store: RequestStore) -> None:
    await store.claim(a_request("req_1", expires_at=500.0))
    await store.claim(a_request("req_2"))
    await store.finish(an_end("req_1", answer=b""), now=1.0)
    await store.finish(an_end("req_2"), now=1.0)
    assert await store.held("ten-a") == (2, 7)
    assert await store.held("ten-b") == (0, 0)
    assert await store.forget(before=500.0) == 1
    await store.forget_request("req_2")
    assert await store.held("ten-a") == (0, 0)


async def test_a_gateway_learns_what_of_its_requests_was_cancelled(store: RequestStore) -> None:
    await store.claim(a_request("req_1"))
    await store.claim(a_request("req_2", instance="gw-2"))
    for number in (1, 2):
        await store.finish(Finish(id=f"req_{number}", status=RequestStatus.CANCELLED), now=50.0)
    assert await store.cancelled("gw-1", since=50.0) == ["req_1"]
    assert await store.cancelled("gw-1", since=50.1) == []


async def test_webhooks_come_in_the_order_they_are_due(store: RequestStore) -> None:
    assert await store.next_webhook() is None
    for number, now in ((1, 30.0), (2, 10.0), (3, 20.0)):
        await store.claim(a_request(f"req_{number}"))
        await store.finish(an_end(f"req_{number}"), now=now)
    await store.claim(a_request("req_4", webhook=None))
    await store.finish(an_end("req_4"), now=1.0)
    assert await store.next_webhook() == 10.0
    assert [one.id for one in await store.due_webhooks(now=20.0, limit=9, of_tenant=9)] == ["req_2", "req_3"]
    after = Webhook(URL, "evt_1", WebhookStatus.PENDING, 99.0, 10.0, 1, (Attempt(10.0, 500), Attempt(11.0, None, "x")))
    await store.put_webhook("req_2", after)
    kept = await store.request("req_2", tenant_id=None)
    assert kept is not None
    assert kept.webhook == after
    assert [one.id for one in await store.due_webhooks(now=50.0, limit=9, of_tenant=9)] == ["req_3", "req_1"]


async def test_no_tenant_takes_all_turns_of_webhooks(store: RequestStore) -> None:
    for number in range(5):
        await store.claim(a_request(f"req_a{number}"))
        await store.finish(an_end(f"req_a{number}"), now=1.0 + number)
    await store.claim(a_request("req_b", tenant_id="ten-b"))
    await store.finish(an_end("req_b"), now=50.0)
    due = await store.due_webhooks(now=60.0, limit=3, of_tenant=2)
    assert [one.id for one in due] == ["req_a0", "req_a1", "req_b"]


async def test_a_secret_has_a_beginning_and_is_replaced(store: RequestStore) -> None:
    assert await store.webhook_secret("ten-a") == WebhookSecret("ten-a")
    for secret in (WebhookSecret("ten-a", "s1", "", 5.0), WebhookSecret("ten-a", "s2", "s1", 9.0)):
        await store.put_webhook_secret(secret)
        assert await store.webhook_secret("ten-a") == secret
    assert await store.webhook_secret("ten-b") == WebhookSecret("ten-b")
