"""The desk lets one of two run, wakes who waits, ends what nobody runs any more; the sender keeps its promises."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError
from tests.support.kept import an_end

from modelyard.clock import ManualClock
from modelyard.config import ControlConfig
from modelyard.control.requests import CLAIM_S_MAX, HELD_S, SILENCE_S_MAX, RequestDesk
from modelyard.control.webhooks import WebhookSender, event_body, keys_of, shown, signed_headers
from modelyard.domain.requests import (
    Claim,
    Finish,
    KeptRequest,
    RequestStatus,
    Sync,
    Webhook,
    WebhookSecret,
    WebhookStatus,
    view,
)
from modelyard.domain.tenants import Tenant
from modelyard.errors import ApiError
from modelyard.policy.addresses import networks
from modelyard.policy.webhooks import GIVE_UP_S
from modelyard.stores.sql import SqlControlStore, SqlRequestStore, open_database
from modelyard.web.fetcher import Fetcher

PEPPER = b"p" * 32
T0 = 1_700_000_000.0


class Receiver:
    """A receiver whose next answers are ``statuses``, then 200; None is a connection that is closed."""

    def __init__(self) -> None:
        self.statuses: list[int | None] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.got.append((headers, await reader.readexactly(int(headers["content-length"]))))
        status = self.statuses.pop(0) if self.statuses else 200
        if status is not None:
            body = b"x" * 100_000
            writer.write(b"HTTP/1.1 %d X\r\nlocation: http://127.0.0.1:1/\r\n" % status)
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    running = Receiver()
    server = await asyncio.start_server(running.serve, "127.0.0.1", 0)
    running.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/in"
    yield running
    server.close()
    await server.wait_closed()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=T0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlRequestStore]:
    database = open_database(f"sqlite:///{tmp_path / 'db.sqlite'}", timeout_s=5)
    control = SqlControlStore(database)
    await control.add_tenant(Tenant("ten-a", "a", 1))
    yield SqlRequestStore(database)
    await control.close()


@pytest.fixture
def sender(store: SqlRequestStore, clock: ManualClock) -> WebhookSender:
    fetcher = Fetcher(networks(["127.0.0.0/8"]))
    return WebhookSender(store=store, fetcher=fetcher, pepper=PEPPER, clock=clock, chance=lambda: 0.5)


@pytest.fixture
def desk(store: SqlRequestStore, sender: WebhookSender, clock: ManualClock) -> RequestDesk:
    settings = ControlConfig(kept_requests_max=5, kept_bytes_max=100)
    return RequestDesk(store=store, webhooks=sender, settings=settings, clock=clock)


def a_claim(request_id: str = "req_1", **changes: Any) -> Claim:
    claim = Claim(
        id=request_id,
        tenant_id="ten-a",
        key_id="k",
        instance="gw",
        route="/v1/completions",
        model="sim",
        fingerprint="f",
        is_detached=True,
    )
    return msgspec.structs.replace(claim, **changes)


async def kept(store: SqlRequestStore, request_id: str = "req_1") -> KeptRequest:
    found = await store.request(request_id, tenant_id=None)
    assert found is not None
    return found


# --- claims ---


async def test_who_comes_second_waits_for_the_end_of_the_first(desk: RequestDesk) -> None:
    assert (await desk.claim(a_claim(idempotency_key="k"))).is_new
    waiting = [asyncio.create_task(desk.claim(a_claim(f"req_{n}", idempotency_key="k", wait_s=20.0))) for n in (2, 3)]
    await asyncio.sleep(0)
    await desk.finish(an_end())
    for task in waiting:
        reply = await asyncio.wait_for(task, 5)
        assert not reply.is_new
        assert (reply.request.id, reply.request.answer) == ("req_1", b'{"a":1}')


async def test_when_the_first_fails_exactly_one_of_those_who_wait_runs(desk: RequestDesk) -> None:
    await desk.claim(a_claim(idempotency_key="k", is_detached=False))
    waiting = [
        asyncio.create_task(desk.claim(a_claim(f"req_{n}", idempotency_key="k", is_detached=False, wait_s=20.0)))
        for n in (2, 3, 4)
    ]
    await asyncio.sleep(0)
    await desk.finish(an_end(status=RequestStatus.FAILED, http_status=502, is_released=True))
    done, rest = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    (first,) = done
    assert first.result().is_new
    assert len(rest) == 2
    await desk.finish(an_end(first.result().request.id))
    replies = await asyncio.wait_for(asyncio.gather(*rest), 5)
    assert {reply.request.id for reply in replies} == {first.result().request.id}
    assert not any(reply.is_new for reply in replies)


async def test_another_request_under_the_key_is_refused(desk: RequestDesk) -> None:
    await desk.claim(a_claim(idempotency_key="k"))
    with pytest.raises(ApiError) as refused:
        await desk.claim(a_claim("req_2", idempotency_key="k", fingerprint="g"))
    assert refused.value.code == "idempotency_key_reused"


async def test_a_claim_that_was_taken_back_before_it_was_read_stands_in_nobodys_way(
    desk: RequestDesk, store: SqlRequestStore
) -> None:
    await desk.finish(Finish(id="req_1", status=RequestStatus.FAILED, is_dropped=True))
    with pytest.raises(ApiError) as refused:
        await desk.claim(a_claim(idempotency_key="k"))
    assert refused.value.code == "control_unavailable"
    assert await store.request("req_1", tenant_id=None) is None
    assert (await desk.claim(a_claim("req_2", idempotency_key="k"))).is_new


async def test_a_tenant_keeps_no_more_than_it_may(desk: RequestDesk) -> None:
    for number in range(5):
        await desk.claim(a_claim(f"req_{number}"))
    with pytest.raises(ApiError) as refused:
        await desk.claim(a_claim("req_5"))
    assert (refused.value.status, refused.value.code) == (429, "kept_requests_full")


async def test_nor_more_bytes(desk: RequestDesk, clock: ManualClock) -> None:
    await desk.claim(a_claim())
    await desk.finish(an_end(answer=b"x" * 100))
    clock.advance(HELD_S + 1)
    with pytest.raises(ApiError):
        await desk.claim(a_claim("req_2"))


# --- gateways that are gone ---


async def test_what_a_silent_gateway_ran_is_interrupted_and_not_before(
    desk: RequestDesk, store: SqlRequestStore, clock: ManualClock
) -> None:
    await desk.claim(a_claim(idempotency_key="k"))
    await desk.claim(a_claim("req_2", instance="other"))
    for _ in range(4):
        clock.advance(SILENCE_S_MAX / 2)
        await desk.sync(Sync("other", ["req_2"], ["req_2"]))
        await desk.end_interrupted()
    ended = await kept(store)
    assert (ended.status, ended.code, ended.idempotency_key) == (RequestStatus.FAILED, "interrupted", None)
    shown_error = view(ended).error
    assert shown_error is not None
    assert shown_error.code == "interrupted"
    assert (await kept(store, "req_2")).status is RequestStatus.RUNNING


async def test_a_controller_that_has_just_begun_waits_for_signs_of_life(
    store: SqlRequestStore, sender: WebhookSender, desk: RequestDesk, clock: ManualClock
) -> None:
    await desk.claim(a_claim())
    clock.advance(1000)
    restarted = RequestDesk(store=store, webhooks=sender, settings=ControlConfig(), clock=clock)
    await restarted.end_interrupted()
    assert (await kept(store)).status is RequestStatus.QUEUED
    clock.advance(SILENCE_S_MAX + 1)
    await restarted.end_interrupted()
    assert (await kept(store)).status is RequestStatus.FAILED


async def test_what_a_living_gateway_does_not_know_is_interrupted(
    desk: RequestDesk, store: SqlRequestStore, clock: ManualClock
) -> None:
    await desk.claim(a_claim())
    await desk.sync(Sync("gw", [], []))
    await desk.end_interrupted()
    assert (await kept(store)).status is RequestStatus.QUEUED, "its claim may be on its way"
    clock.advance(CLAIM_S_MAX + 1)
    await desk.sync(Sync("gw", [], []))
    await desk.end_interrupted()
    assert (await kept(store)).code == "interrupted"


async def test_a_cancelled_request_is_told_to_its_gateway_and_stays_cancelled(
    desk: RequestDesk, store: SqlRequestStore
) -> None:
    request = (await desk.claim(a_claim())).request
    await desk.cancel(request)
    assert (await desk.sync(Sync("gw", ["req_1"], ["req_1"]))).cancelled == ["req_1"]
    assert (await desk.sync(Sync("other", [], []))).cancelled == []
    await desk.finish(an_end())
    assert (await kept(store)).status is RequestStatus.CANCELLED


# --- webhooks ---


async def send_due(sender: WebhookSender, store: SqlRequestStore, clock: ManualClock) -> Webhook:
    """Send what is due, at the time it is due; return what came of it."""
    due = await store.next_webhook()
    assert due is not None
    clock.advance(max(0.0, due - clock.unix_s()))
    (request,) = await store.due_webhooks(now=clock.unix_s() + 0.001, limit=9, of_tenant=9)
    await sender.send(request)
    webhook = (await kept(store)).webhook
    assert webhook is not None
    return webhook


async def test_a_receiver_that_is_down_for_a_day_gets_one_event_signed_each_time(
    desk: RequestDesk, sender: WebhookSender, store: SqlRequestStore, clock: ManualClock, receiver: Receiver
) -> None:
    await desk.claim(a_claim(webhook_url=receiver.url))
    await desk.finish(an_end())
    began = clock.unix_s()
    receiver.statuses = [500, 302, None, 404] * 100
    while clock.unix_s() - began < 86_400:
        webhook = await send_due(sender, store, clock)
        assert webhook.status is WebhookStatus.PENDING
    receiver.statuses = []
    webhook = await send_due(sender, store, clock)
    assert (webhook.status, webhook.due_at) == (WebhookStatus.DELIVERED, None)
    assert webhook.tries == len(receiver.got) >= 9
    codes = [attempt.status_code for attempt in webhook.attempts]
    assert codes[:4] == [500, 302, None, 404]
    assert codes[-1] == 200
    assert len({(headers["webhook-id"], body) for headers, body in receiver.got}) == 1
    stamps = [int(headers["webhook-timestamp"]) for headers, _ in receiver.got]
    assert stamps == sorted(set(stamps)), "each try has its own time"
    assert await store.next_webhook() is None


async def test_one_that_is_down_for_good_is_given_up_and_can_be_replayed(
    desk: RequestDesk, sender: WebhookSender, store: SqlRequestStore, clock: ManualClock, receiver: Receiver
) -> None:
    await desk.claim(a_claim(webhook_url=receiver.url))
    await desk.finish(an_end())
    began = clock.unix_s()
    receiver.statuses = [503] * 100
    while (webhook := await send_due(sender, store, clock)).status is WebhookStatus.PENDING:
        assert clock.unix_s() - began < GIVE_UP_S + 1
    assert webhook.status is WebhookStatus.FAILED
    assert clock.unix_s() - began > GIVE_UP_S / 2
    assert await store.next_webhook() is None


async def test_a_receiver_that_is_gone_is_asked_once(
    desk: RequestDesk, sender: WebhookSender, store: SqlRequestStore, clock: ManualClock, receiver: Receiver
) -> None:
    await desk.claim(a_claim(webhook_url=receiver.url))
    await desk.finish(an_end())
    receiver.statuses = [410]
    assert (await send_due(sender, store, clock)).status is WebhookStatus.FAILED


async def test_the_loop_sends_at_once_what_becomes_due(
    desk: RequestDesk, sender: WebhookSender, store: SqlRequestStore, receiver: Receiver
) -> None:
    running = asyncio.create_task(sender.run())
    await desk.claim(a_claim(webhook_url=receiver.url))
    await desk.finish(an_end())
    async with asyncio.timeout(5):
        while (webhook := (await kept(store)).webhook) is None or webhook.status is not WebhookStatus.DELIVERED:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(receiver.got) == 1


async def test_no_url_leads_to_a_neighbour(desk: RequestDesk, store: SqlRequestStore) -> None:
    for url in ("http://10.0.0.1/", "https://169.254.169.254/", "https://127.1/", "file:///etc/passwd"):
        with pytest.raises(ApiError) as refused:
            await desk.claim(a_claim(webhook_url=url))
        assert refused.value.param == "X-Modelyard-Webhook"
    assert await store.open_requests() == []


def a_request(**changes: Any) -> KeptRequest:
    request = KeptRequest(
        id="req_1",
        tenant_id="ten-a",
        key_id="k",
        instance="gw",
        route="/v1/completions",
        model="sim",
        fingerprint="f",
        created_at=T0,
        expires_at=T0 + 1,
        is_detached=True,
        status=RequestStatus.SUCCEEDED,
        finished_at=T0,
        webhook=Webhook("https://x.example/", "evt_1"),
    )
    return msgspec.structs.replace(request, **changes)


def test_an_independent_verifier_accepts_what_is_signed_and_nothing_else() -> None:
    import time

    now = time.time()  # its tolerance is measured by the real clock
    body = event_body(a_request())
    before, during, after = (
        WebhookSecret("ten-a", "s1"),
        WebhookSecret("ten-a", "s2", "s1", now + 60),
        WebhookSecret("ten-a", "s2", "s1", now - 1),
    )
    (old,) = keys_of(PEPPER, before, now=now)
    new, overlapping = keys_of(PEPPER, during, now=now)
    assert overlapping == old
    assert keys_of(PEPPER, after, now=now) == [new]
    headers = signed_headers("evt_1", int(now), body, keys_of(PEPPER, during, now=now))
    for key in (old, new):
        assert Verifier(shown(key)).verify(body, headers)["type"] == "request.succeeded"
    strangers = keys_of(PEPPER, WebhookSecret("ten-b", "s2"), now=now)
    for key, sent, told in (
        (strangers[0], body, headers),
        (new, body + b" ", headers),
        (new, body, {**headers, "webhook-id": "evt_2"}),
        (new, body, {**headers, "webhook-timestamp": str(int(now) - 400)}),
    ):
        with pytest.raises(WebhookVerificationError):
            Verifier(shown(key)).verify(sent, told)


def test_an_event_tells_no_more_than_what_to_ask_for() -> None:
    event = json.loads(event_body(a_request(answer=b"secret")))
    assert set(event) == {"id", "type", "created_at", "data", "object"}
    assert set(event["data"]) == {"id", "status", "model", "object"}
