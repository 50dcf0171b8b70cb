"""Webhooks over the management API: what is added, refused, shown, sent again."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from standardwebhooks import Webhook as Verifier
from tests.support.management import Management, management
from tests.support.receivers import Receiver, receiving

from modelyard.config import Config
from modelyard.control.api.webhooks import WEBHOOKS_MAX
from modelyard.domain.events import EventType
from modelyard.domain.tenants import Identity

EVERY = "/v1/webhooks"
URL = "http://127.0.0.1:9/in"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    """Return one that may reach this machine."""
    config = Config()
    fetch = msgspec.structs.replace(config.fetch, private_networks=("127.0.0.0/8",))
    async with management(tmp_path, msgspec.structs.replace(config, fetch=fetch)) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


async def added(api: Management, owner: Identity, **body: Any) -> dict[str, Any]:
    answer = await api.call(owner, "POST", EVERY, {"url": URL} | body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def happen(api: Management, tenant_id: str, object_id: str = "batch_1") -> str:
    now = api.clock.unix_s()
    return await api.context.events.add(tenant_id, EventType.BATCH_COMPLETED, {"id": object_id}, now=now)


async def send_due(api: Management) -> None:
    sender = api.context.webhooks
    for is_failing in (False, True):
        for due in await sender.store.due(
            now=api.clock.unix_s(), limit=99, of_lane=99, of_tenant=99, is_failing=is_failing
        ):
            await sender.send(due)


async def deliveries(api: Management, owner: Identity, webhook_id: str, query: str = "") -> list[dict[str, Any]]:
    answer = await api.call(owner, "GET", f"{EVERY}/{webhook_id}/deliveries{query}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def test_the_secret_is_shown_once(api: Management, manager: Identity) -> None:
    new = await added(api, manager, event_types=["batch.*", "batch.*"], description="nightly")
    assert new["secret"].startswith("whsec_")
    one = (await api.call(manager, "GET", f"{EVERY}/{new['id']}")).json()
    (listed,) = (await api.call(manager, "GET", EVERY)).json()["data"]
    assert one == listed == new | {"secret": None}
    assert (one["event_types"], one["status"], one["why"], one["pending"]) == (["batch.*"], "enabled", None, 0)
    other = await added(api, manager)
    assert other["secret"] != new["secret"]
    assert other["event_types"] == ["*"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "https://169.254.169.254/"}, "url"),
        ({"url": "http://10.0.0.1/"}, "url"),
        ({"url": "ftp://127.0.0.1/"}, "url"),
        ({"url": "https://no-such-host.invalid/"}, "url"),
        ({"url": ""}, "url"),
        ({"url": URL, "event_types": []}, "event_types"),
        ({"url": URL, "event_types": ["batch"]}, "event_types"),
        ({"url": URL, "event_types": ["batch.done"]}, "event_types"),
        ({"url": URL, "event_types": ["webhook.test"]}, "event_types"),
        ({"url": URL, "event_types": ["b*"]}, "event_types"),
        ({"url": URL, "event_types": ["*"] * 33}, "event_types"),
        ({"url": URL, "description": "a\nb"}, "description"),
        ({"url": URL, "description": "x" * 301}, "description"),
        ({"url": URL, "secret": "mine"}, "secret"),
    ],
)
async def test_what_cannot_be_a_webhook_is_refused_by_name(
    api: Management, manager: Identity, body: dict[str, Any], param: str
) -> None:
    answer = await api.call(manager, "POST", EVERY, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    there = await added(api, manager)
    answer = await api.call(manager, "PATCH", f"{EVERY}/{there['id']}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_tenant_has_so_many_and_no_more(api: Management, manager: Identity, admin: Identity) -> None:
    for _ in range(WEBHOOKS_MAX):
        last = await added(api, manager)
    answer = await api.call(manager, "POST", EVERY, {"url": URL})
    assert answer.status_code == 409
    assert "Delete one" in answer.json()["error"]["message"]
    await added(api, admin)
    assert (await api.call(manager, "DELETE", f"{EVERY}/{last['id']}")).json()["deleted"]
    await added(api, manager)


async def test_a_change_is_of_what_is_given(api: Management, manager: Identity) -> None:
    new = await added(api, manager, description="before", event_types=["batch.*"])
    changed = await api.call(manager, "PATCH", f"{EVERY}/{new['id']}", {"event_types": ["budget.exceeded"]})
    assert changed.json() == new | {"secret": None, "event_types": ["budget.exceeded"]}
    off = (await api.call(manager, "PATCH", f"{EVERY}/{new['id']}", {"enabled": False})).json()
    assert (off["status"], off["why"]) == ("disabled", "Its owner disabled it.")


async def test_a_disabled_one_says_why_takes_nothing_and_begins_anew(
    api: Management, manager: Identity, receiver: Receiver
) -> None:
    new = await added(api, manager, url=receiver.url)
    one = f"{EVERY}/{new['id']}"
    receiver.answers = [410]
    await happen(api, manager.tenant_id)
    await send_due(api)
    shown = (await api.call(manager, "GET", one)).json()
    assert (shown["status"], shown["enabled"]) == ("disabled", False)
    assert "410 Gone" in shown["why"]
    assert "replay" in shown["why"]
    (delivery,) = await deliveries(api, manager, new["id"])
    for path, body in (("/replay", {"since": 0}), (f"/deliveries/{delivery['id']}/redeliver", None)):
        answer = await api.call(manager, "POST", one + path, body)
        assert answer.status_code == 409
        assert "Enable it first" in answer.json()["error"]["message"]
    again = (await api.call(manager, "PATCH", one, {"enabled": True})).json()
    assert (again["status"], again["failing_since"], again["why"]) == ("enabled", None, None)


async def test_deliveries_show_attempts_and_filter(api: Management, manager: Identity, receiver: Receiver) -> None:
    new = await added(api, manager, url=receiver.url)
    receiver.answers, receiver.body = [500], b"out of order"
    event_id = await happen(api, manager.tenant_id)
    await send_due(api)
    api.clock.advance(1)
    await happen(api, manager.tenant_id, "batch_2")
    await send_due(api)
    done, waits = await deliveries(api, manager, new["id"])
    assert (done["status"], waits["status"], waits["event_id"]) == ("delivered", "pending", event_id)
    assert waits["event_type"] == "batch.completed"
    assert waits["next_attempt_at"] > waits["attempts"][0]["at"]
    assert done["next_attempt_at"] is None
    (attempt,) = waits["attempts"]
    assert (attempt["status_code"], attempt["response"], attempt["error"]) == (500, "out of order", None)
    assert await deliveries(api, manager, new["id"], "?status=pending") == [waits]
    assert await deliveries(api, manager, new["id"], f"?limit=1&after={done['id']}") == [waits]
    shown = (await api.call(manager, "GET", f"{EVERY}/{new['id']}")).json()
    assert (shown["pending"], shown["status"]) == (1, "enabled"), "the last one was taken"
    for query in ("?status=waiting", "?after=dlv_none"):
        assert (await api.call(manager, "GET", f"{EVERY}/{new['id']}/deliveries{query}")).status_code == 400


async def test_one_that_fails_says_since_when(api: Management, manager: Identity, receiver: Receiver) -> None:
    receiver.always = 503
    new = await added(api, manager, url=receiver.url)
    await happen(api, manager.tenant_id)
    await send_due(api)
    shown = (await api.call(manager, "GET", f"{EVERY}/{new['id']}")).json()
    assert (shown["status"], shown["failing_since"]) == ("failing", int(api.clock.unix_s()))
    assert shown["why"].startswith("Its receiver took nothing since 20")


async def test_one_is_sent_again_and_so_is_all_since_a_time(
    api: Management, manager: Identity, receiver: Receiver
) -> None:
    early = await happen(api, manager.tenant_id, "before the webhook")
    new = await added(api, manager, url=receiver.url)
    one = f"{EVERY}/{new['id']}"
    event_id = await happen(api, manager.tenant_id)
    await send_due(api)
    (delivery,) = await deliveries(api, manager, new["id"])
    again = await api.call(manager, "POST", f"{one}/deliveries/{delivery['id']}/redeliver")
    assert (again.status_code, again.json()["status"]) == (202, "pending")
    await send_due(api)
    replayed = await api.call(manager, "POST", f"{one}/replay", {"since": api.clock.unix_s() - 60})
    assert replayed.status_code == 202
    assert replayed.json() == {"count": 1, "has_more": False, "last_event_id": None, "object": "webhook.replay"}
    await send_due(api)
    assert [headers["webhook-id"] for headers, _ in receiver.got] == [event_id, event_id, early]
    body = {"since": 0, "delivered_too": True}
    assert (await api.call(manager, "POST", f"{one}/replay", body)).json()["count"] == 2


async def test_a_test_is_answered_with_what_came_of_it(api: Management, manager: Identity, receiver: Receiver) -> None:
    new = await added(api, manager, url=receiver.url, event_types=["budget.*"], enabled=False)
    receiver.answers = [302]
    for status, code, error in (("failed", 302, "redirects are not followed"), ("delivered", 200, "")):
        answer = await api.call(manager, "POST", f"{EVERY}/{new['id']}/test")
        assert answer.status_code == 200
        (attempt,) = answer.json()["attempts"]
        assert (answer.json()["status"], attempt["status_code"]) == (status, code)
        assert (attempt["error"] or "").startswith(error)
        assert answer.json()["event_type"] == "webhook.test"
    headers, body = receiver.got[-1]
    Verifier(new["secret"]).verify(body, {**headers, "webhook-timestamp": headers["webhook-timestamp"]})
    assert json.loads(body)["data"]["id"] == new["id"]


async def test_a_rotated_secret_and_the_one_before_both_sign(
    api: Management, manager: Identity, receiver: Receiver
) -> None:
    new = await added(api, manager, url=receiver.url)
    answer = await api.call(manager, "POST", f"{EVERY}/{new['id']}/rotate", {"overlap_seconds": 60})
    rotated = answer.json()
    assert rotated["secret"] not in (None, new["secret"])
    assert rotated["previous_secret_expires_at"] == int(api.clock.unix_s()) + 60
    await happen(api, manager.tenant_id)
    await send_due(api)
    headers, body = receiver.got[0]
    for secret in (new["secret"], rotated["secret"]):
        Verifier(secret).verify(body, headers)
    api.clock.advance(61)
    shown = (await api.call(manager, "GET", f"{EVERY}/{new['id']}")).json()
    assert shown["previous_secret_expires_at"] is None


async def test_the_secret_of_requests_is_the_tenants_and_is_rotated(api: Management, manager: Identity) -> None:
    first = (await api.call(manager, "GET", f"{EVERY}/secret")).json()
    assert first["previous_expires_at"] is None
    rotated = (await api.call(manager, "POST", f"{EVERY}/secret/rotate", {})).json()
    assert rotated["secret"] != first["secret"]
    assert rotated["previous_expires_at"] == int(api.clock.unix_s()) + 86_400
    assert (await api.call(manager, "GET", f"{EVERY}/secret")).json() == rotated


async def test_a_new_url_begins_anew(api: Management, manager: Identity, receiver: Receiver) -> None:
    """The days in which the old one failed are not the new one's."""
    receiver.always = 503
    new = await added(api, manager, url=receiver.url)
    await happen(api, manager.tenant_id)
    await send_due(api)
    receiver.always = 200
    changed = await api.call(manager, "PATCH", f"{EVERY}/{new['id']}", {"url": receiver.url + "/other"})
    assert (changed.json()["status"], changed.json()["failing_since"], changed.json()["pending"]) == (
        "enabled",
        None,
        1,
    )
    await send_due(api)
    assert receiver.paths == ["/in", "/in/other"]
    same = await api.call(manager, "PATCH", f"{EVERY}/{new['id']}", {"url": receiver.url + "/other"})
    assert same.status_code == 200


async def test_a_replay_goes_on_behind_events_of_its_tenant_only(
    api: Management, manager: Identity, admin: Identity
) -> None:
    new = await added(api, manager)
    foreign = await happen(api, admin.tenant_id)
    for after in ("", "evt_none", foreign):
        answer = await api.call(manager, "POST", f"{EVERY}/{new['id']}/replay", {"since": 0, "after": after})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
    own = await happen(api, manager.tenant_id)
    answer = await api.call(manager, "POST", f"{EVERY}/{new['id']}/replay", {"since": 0, "after": own})
    assert (answer.status_code, answer.json()["count"]) == (202, 0)
