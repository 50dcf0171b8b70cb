"""The desk lets one of two run, wakes who waits, ends what nobody runs any more, and tells of ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from standardwebhooks import Webhook as Verifier
from tests.support.hooks import PEPPER, Site, site
from tests.support.kept import an_end
from tests.support.receivers import receiving

from modelyard.clock import ManualClock
from modelyard.config import ControlConfig
from modelyard.control.requests import CLAIM_S_MAX, HELD_S, SILENCE_S_MAX, RequestDesk
from modelyard.control.webhooks import keys_of, shown
from modelyard.domain.requests import Claim, Finish, KeptRequest, RequestStatus, Sync, view
from modelyard.domain.webhooks import SigningSecret
from modelyard.errors import ApiError
from modelyard.stores.sql import SqlRequestStore


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        yield running


@pytest.fixture
def clock(here: Site) -> ManualClock:
    return here.clock


@pytest.fixture
def store(here: Site) -> SqlRequestStore:
    return here.requests


@pytest.fixture
def desk(here: Site) -> RequestDesk:
    settings = ControlConfig(kept_requests_max=5, kept_bytes_max=100)
    return RequestDesk(store=here.requests, webhooks=here.sender, settings=settings, clock=here.clock)


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
        reply = await asyncio.wait_for(task, 20)
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
    done, rest = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    (first,) = done
    assert first.result().is_new
    assert len(rest) == 2
    await desk.finish(an_end(first.result().request.id))
    replies = await asyncio.wait_for(asyncio.gather(*rest), 20)
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
    here: Site, store: SqlRequestStore, desk: RequestDesk, clock: ManualClock
) -> None:
    await desk.claim(a_claim())
    clock.advance(1000)
    restarted = RequestDesk(store=store, webhooks=here.sender, settings=ControlConfig(), clock=clock)
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


async def test_the_end_of_a_request_is_told_to_the_url_that_came_with_it(here: Site, desk: RequestDesk) -> None:
    with receiving() as receiver:
        await desk.claim(a_claim(webhook_url=receiver.url))
        waiting = view(await kept(here.requests)).webhook
        assert waiting is not None
        assert (waiting.status, waiting.tries, waiting.next_attempt_at) == ("waiting", 0, None)
        await desk.finish(an_end(answer=b"secret"))
        receiver.answers = [500]
        await here.run_until(here.clock.unix_s() + 60)
    told = view(await kept(here.requests)).webhook
    assert told is not None
    assert (told.status, [one.status_code for one in told.attempts]) == ("delivered", [500, 200])
    ((headers, body), again) = receiver.got
    assert again[1] == body
    assert headers["webhook-id"] == told.event_id
    event = json.loads(body)
    assert set(event) == {"id", "type", "created_at", "data", "object"}
    assert event["data"] == {"id": "req_1", "status": "succeeded", "model": "sim", "object": "request"}
    key = keys_of(PEPPER, "ten-a", SigningSecret(), now=here.clock.unix_s())[0]
    assert Verifier(shown(key)).verify(body, headers) == event


async def test_no_url_leads_to_a_neighbour(desk: RequestDesk, store: SqlRequestStore) -> None:
    for url in ("http://10.0.0.1/", "https://169.254.169.254/", "https://127.1/", "file:///etc/passwd"):
        with pytest.raises(ApiError) as refused:
            await desk.claim(a_claim(webhook_url=url))
        assert refused.value.param == "X-Modelyard-Webhook"
    assert await store.open_requests() == []
