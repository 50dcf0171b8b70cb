"""Webhooks in the console: what is shown, sent again and rotated, and by whom."""

import re

import httpx2
from tests.support.management import URL, Management

from modelyard.domain.events import EventType
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.webhooks import Attempt, DeliveryStatus, Settled, SigningSecret, Webhook
from modelyard.policy.webhooks import after

HOSTILE = "<img src=x onerror=alert(1)>"
ORIGIN = {"origin": URL}


async def entered(api: Management, browser: httpx2.AsyncClient, tenant_id: str, *scopes: Scope) -> Identity:
    identity, key = await api.key(tenant_id, *scopes)
    answer = await browser.post("/console/login", data={"key": key}, headers=ORIGIN)
    assert answer.status_code == 303
    return identity


async def a_webhook(api: Management, tenant_id: str, id: str = "wh_1") -> Webhook:
    """Add one whose receiver answered an event with 500 and a hostile text."""
    now = api.clock.unix_s()
    webhook = Webhook(
        id=id,
        tenant_id=tenant_id,
        url=f"https://hooks.example.com/?{HOSTILE}",
        types=("batch.*",),
        created_at=now,
        description=HOSTILE,
        secret=SigningSecret("salt"),
    )
    store = api.context.webhooks.store
    assert await store.add_webhook(webhook, most=9)
    await api.context.events.add(tenant_id, EventType.BATCH_COMPLETED, {"id": "batch_1"}, now=now)
    (due,) = [one for one in await store.due(now=now, limit=9, of_lane=9, of_tenant=9) if one.delivery.webhook_id == id]
    attempt = Attempt(now, 500, answer=HOSTILE)
    await store.settle(Settled(after(due.delivery, attempt, now=now, chance=0.5), attempt))
    return webhook


async def test_they_are_listed_with_how_they_are_and_why(api: Management, browser: httpx2.AsyncClient) -> None:
    tenant_id = await api.tenant("a")
    await a_webhook(api, tenant_id)
    await entered(api, browser, tenant_id, Scope.MANAGE)
    for path in ("/console/webhooks", "/console/webhooks/wh_1"):
        text = (await browser.get(path)).text
        assert ">failing<" in text, path
        assert "it took nothing since 20" in text
        assert "<img" not in text, "what others wrote is only text"
        assert "&lt;img" in text
        assert "salt" not in text
    assert "HTTP 500: &lt;img" in text
    assert "batch.completed" in text
    assert "batch.completed" not in (await browser.get("/console/webhooks/wh_1?status=delivered")).text
    assert (await browser.get("/console/webhooks/wh_1?status=%00")).status_code == 200


async def test_one_is_sent_again_and_a_new_secret_is_shown_once(api: Management, browser: httpx2.AsyncClient) -> None:
    tenant_id = await api.tenant("a")
    await a_webhook(api, tenant_id)
    store = api.context.webhooks.store
    await entered(api, browser, tenant_id, Scope.MANAGE)
    (delivery,) = await store.deliveries("wh_1", status=None, limit=9, after=None)
    again = f"/console/webhooks/wh_1/redeliver/{delivery.id}"
    assert again in (await browser.get("/console/webhooks/wh_1")).text
    answer = await browser.post(again, headers=ORIGIN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/webhooks/wh_1")
    (delivery,) = await store.deliveries("wh_1", status=None, limit=9, after=None)
    assert (delivery.status, delivery.due_at, delivery.tries) == (DeliveryStatus.PENDING, api.clock.unix_s(), 0)

    answer = await browser.post("/console/webhooks/wh_1/rotate", headers=ORIGIN)
    (secret,) = re.findall(r"whsec_[A-Za-z0-9+/=]+", answer.text)
    assert answer.headers["cache-control"] == "no-store"
    assert secret not in (await browser.get("/console/webhooks/wh_1")).text
    webhook = await store.webhook("wh_1", tenant_id=tenant_id)
    assert webhook is not None
    assert (webhook.secret.previous_salt, webhook.secret.previous_expires_at) == ("salt", api.clock.unix_s() + 86_400)


async def test_a_disabled_one_says_what_to_do_and_sends_nothing(api: Management, browser: httpx2.AsyncClient) -> None:
    import msgspec

    tenant_id = await api.tenant("a")
    await a_webhook(api, tenant_id)
    store = api.context.webhooks.store
    await store.change_webhook("wh_1", lambda one: msgspec.structs.replace(one, is_enabled=False))
    await entered(api, browser, tenant_id, Scope.MANAGE)
    (delivery,) = await store.deliveries("wh_1", status=None, limit=9, after=None)
    text = (await browser.get("/console/webhooks/wh_1")).text
    assert "its owner disabled it" in text
    assert "modelyard webhooks set wh_1 --enable" in text
    assert "redeliver" not in text
    answer = await browser.post(f"/console/webhooks/wh_1/redeliver/{delivery.id}", headers=ORIGIN)
    assert answer.status_code == 409
    assert "--enable" in answer.text


async def test_nobody_elses_are_shown_or_touched(api: Management, browser: httpx2.AsyncClient) -> None:
    owner, stranger = await api.tenant("a"), await api.tenant("b")
    webhook = await a_webhook(api, owner)
    store = api.context.webhooks.store
    (delivery,) = await store.deliveries("wh_1", status=None, limit=9, after=None)
    paths = ("/console/webhooks/wh_1/rotate", f"/console/webhooks/wh_1/redeliver/{delivery.id}")
    for path in paths:
        assert (await browser.post(path, headers=ORIGIN)).headers["location"] == "/console/login"
    await entered(api, browser, stranger, Scope.MANAGE)
    assert "wh_1" not in (await browser.get("/console/webhooks")).text
    assert (await browser.get("/console/webhooks/wh_1")).status_code == 404
    for path in paths:
        assert (await browser.post(path, headers=ORIGIN)).status_code == 404, path
    await entered(api, browser, owner, Scope.MANAGE)
    for path in paths:
        for origin in ({}, {"origin": "http://evil.example"}):
            assert (await browser.post(path, headers=origin)).status_code == 403, path
    await a_webhook(api, owner, "wh_2")
    assert (await browser.post(f"/console/webhooks/wh_2/redeliver/{delivery.id}", headers=ORIGIN)).status_code == 404
    now = await store.webhook("wh_1", tenant_id=None)
    assert now is not None
    assert now.secret == webhook.secret
    await entered(api, browser, PLATFORM, Scope.ADMIN)
    assert "wh_1" in (await browser.get("/console/webhooks")).text
