"""Every ``RequestStore`` lets one of two same requests run, keeps its end, and shows nobody another tenant's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from tests.conformance.backends import BACKENDS, open_fresh
from tests.support.kept import an_end

from modelyard.domain.events import EventType
from modelyard.domain.requests import Finish, KeptRequest, RequestStatus, RequestWebhook
from modelyard.domain.tenants import Tenant
from modelyard.domain.webhooks import Attempt, Settled, Webhook
from modelyard.policy.webhooks import after
from modelyard.stores import RequestStore, WebhookStore
from modelyard.stores.sql import Database, SqlControlStore, SqlRequestStore, SqlWebhookStore, schema

URL = "https://hooks.example.com/in"


@pytest.fixture(params=BACKENDS)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    database = open_fresh(request.param, tmp_path)
    control = SqlControlStore(database)
    for tenant in ("ten-a", "ten-b"):
        await control.add_tenant(Tenant(tenant, tenant, 1))
    yield database
    await control.close()


@pytest.fixture
def store(database: Database) -> RequestStore:
    return SqlRequestStore(database)


@pytest.fixture
def webhooks(database: Database) -> WebhookStore:
    return SqlWebhookStore(database)


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
        webhook=RequestWebhook(URL, request_id.replace("req_", "evt_")),
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
    assert ended.webhook is not None
    assert ended.webhook.delivery is not None
    assert (ended.webhook.delivery.status, ended.webhook.delivery.due_at) == ("pending", 105.0)
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


async def test_the_end_of_a_detached_request_is_an_event_and_is_told_to_its_url(
    store: RequestStore, webhooks: WebhookStore
) -> None:
    await store.claim(a_request(webhook=RequestWebhook(URL, "evt_1")))
    await store.claim(a_request("req_kept", is_detached=False, webhook=None))
    await store.finish(an_end("req_kept"), now=5.0)
    assert await webhooks.next_due() is None
    await store.finish(an_end(), now=6.0)
    (due,) = await webhooks.due(now=6.0, limit=9, of_lane=9, of_tenant=9)
    assert (due.url, due.event.id, due.event.type) == (URL, "evt_1", EventType.REQUEST_SUCCEEDED)
    assert msgspec.json.decode(due.event.data) == {
        "id": "req_1",
        "status": "succeeded",
        "model": "sim",
        "object": "request",
    }
    attempt = Attempt(7.0, 500, "", 3, "no")
    told = after(due.delivery, attempt, now=7.0, chance=0.5)
    await webhooks.settle(Settled(told, attempt))
    kept = await store.request("req_1", tenant_id=None)
    assert kept is not None
    assert kept.webhook == RequestWebhook(URL, "evt_1", told)
    (listed,) = await store.detached(tenant_id=None, limit=9, after=None)
    assert listed.webhook == kept.webhook


async def test_webhooks_of_the_tenant_are_told_too_and_also_where_none_came_with_the_request(
    store: RequestStore, webhooks: WebhookStore
) -> None:
    webhook = Webhook(id="wh_1", tenant_id="ten-a", url=URL + "/all", types=("request.*",), created_at=1.0)
    await webhooks.add_webhook(webhook, most=9)
    await store.claim(a_request("req_1", webhook=RequestWebhook(URL, "evt_1")))
    await store.claim(a_request("req_2", webhook=None))
    await store.claim(a_request("req_3", webhook=None))
    await store.finish(an_end("req_1"), now=1.0)
    await store.finish(an_end("req_2", status=RequestStatus.FAILED), now=2.0)
    await store.finish(an_end("req_3", is_dropped=True), now=3.0)
    due = await webhooks.due(now=9.0, limit=9, of_lane=9, of_tenant=9)
    assert sorted((one.url, one.event.type.value) for one in due) == [
        (URL, "request.succeeded"),
        (URL + "/all", "request.failed"),
        (URL + "/all", "request.succeeded"),
    ]


async def test_what_a_release_before_this_one_left_is_taken_over_once(
    store: RequestStore, webhooks: WebhookStore, database: Database
) -> None:
    """That release kept the webhook's state in the row of the request."""
    for number in range(4):
        await store.claim(a_request(f"req_{number}", webhook=RequestWebhook(URL, f"evt_{number}")))
    states = {"req_0": ("pending", 7.0), "req_1": ("delivered", None), "req_2": ("failed", None)}
    for request_id, (status, due) in states.items():
        old = {
            "status": "succeeded",
            "finished_at": 5.0,
            "webhook_status": status,
            "webhook_due": due,
            "webhook_tries": 2,
            "webhook_since": 6.0,
            "webhook_attempts": '[{"at":6.0,"status_code":500}]',
        }
        change = sa.update(schema.kept_requests).where(schema.kept_requests.c.request_id == request_id).values(old)
        await database.write(lambda connection, change=change: connection.execute(change))
    assert await webhooks.adopt(limit=2) == 2
    assert await webhooks.adopt(limit=9) == 1
    assert await webhooks.adopt(limit=9) == 0
    (due_now,) = await webhooks.due(now=7.0, limit=9, of_lane=9, of_tenant=9, is_failing=True)
    assert (due_now.delivery.event_id, due_now.delivery.tries, due_now.url) == ("evt_0", 2, URL)
    found = {one.id: one.webhook for one in await store.detached(tenant_id=None, limit=9, after=None)}
    assert {
        request_id: None if one is None or one.delivery is None else one.delivery.status.value
        for request_id, one in found.items()
    } == {"req_0": "pending", "req_1": "delivered", "req_2": "failed", "req_3": None}
