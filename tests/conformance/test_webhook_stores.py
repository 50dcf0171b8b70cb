"""Every ``EventStore`` and ``WebhookStore``: an event is told to each who wants it, once, and to nobody else."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import BACKENDS, open_fresh

from modelyard.domain.events import EventType, envelope
from modelyard.domain.tenants import Tenant
from modelyard.domain.webhooks import Attempt, Delivery, DeliveryStatus, Due, Settled, SigningSecret, Webhook
from modelyard.policy.webhooks import HURRY_AFTER_S, after
from modelyard.stores import Backlog, EventStore, WebhookStore
from modelyard.stores.sql import SqlControlStore, SqlEventStore, SqlWebhookStore

DONE, FAILED = EventType.BATCH_COMPLETED, EventType.BATCH_FAILED
ALL = 1000


@dataclass
class Stores:
    """The two stores on one database."""

    events: EventStore
    webhooks: WebhookStore

    async def add(self, webhook_id: str = "wh_1", tenant_id: str = "ten-a", *types: str) -> Webhook:
        webhook = a_webhook(webhook_id, tenant_id=tenant_id, types=types or ("*",))
        assert await self.webhooks.add_webhook(webhook, most=ALL)
        return webhook

    async def due(self, now: float, *, of_lane: int = ALL, of_tenant: int = ALL, is_failing: bool = False) -> list[Due]:
        return await self.webhooks.due(now=now, limit=ALL, of_lane=of_lane, of_tenant=of_tenant, is_failing=is_failing)

    async def attempt(self, due: Due, status: int | None, *, at: float, reason: str = "") -> Delivery:
        attempt = Attempt(at, status)
        told = after(due.delivery, attempt, now=at, chance=0.5)
        await self.webhooks.settle(Settled(told, attempt, reason))
        return told

    async def all_of(self, webhook_id: str) -> list[Delivery]:
        return await self.webhooks.deliveries(webhook_id, status=None, limit=ALL, after=None)

    async def now(self, webhook_id: str = "wh_1") -> Webhook:
        webhook = await self.webhooks.webhook(webhook_id, tenant_id=None)
        assert webhook is not None
        return webhook


@pytest.fixture(params=BACKENDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    database = open_fresh(request.param, tmp_path)
    control = SqlControlStore(database)
    for tenant in ("ten-a", "ten-b"):
        await control.add_tenant(Tenant(tenant, tenant, 1))
    yield Stores(SqlEventStore(database), SqlWebhookStore(database))
    await control.close()


def a_webhook(webhook_id: str = "wh_1", **changes: object) -> Webhook:
    webhook = Webhook(
        id=webhook_id,
        tenant_id="ten-a",
        url=f"https://hooks.example.com/{webhook_id}",
        types=("*",),
        created_at=10.0,
        description="for the tests",
        secret=SigningSecret("salt", "before", 99.0),
    )
    return msgspec.structs.replace(webhook, **changes)


# --- webhooks ---


async def test_what_is_added_is_there_whole_and_only_its_tenants(stores: Stores) -> None:
    webhook = await stores.add()
    other = await stores.add("wh_2", "ten-b")
    assert await stores.webhooks.webhook("wh_1", tenant_id="ten-a") == webhook
    assert await stores.webhooks.webhook("wh_1", tenant_id="ten-b") is None
    assert await stores.webhooks.webhooks(tenant_id="ten-a") == [webhook]
    assert await stores.webhooks.webhooks(tenant_id=None) == [webhook, other]


async def test_a_tenant_has_no_more_than_it_may(stores: Stores) -> None:
    assert await stores.webhooks.add_webhook(a_webhook("wh_1"), most=1)
    assert not await stores.webhooks.add_webhook(a_webhook("wh_2"), most=1)
    assert await stores.webhooks.add_webhook(a_webhook("wh_3", tenant_id="ten-b"), most=1)
    assert [one.id for one in await stores.webhooks.webhooks(tenant_id=None)] == ["wh_1", "wh_3"]


async def test_a_change_is_of_what_is_there_now(stores: Stores) -> None:
    await stores.add()
    changed = await stores.webhooks.change_webhook("wh_1", lambda one: msgspec.structs.replace(one, types=("a.*",)))
    assert changed == msgspec.structs.replace(a_webhook(), types=("a.*",)) == await stores.now()
    assert await stores.webhooks.change_webhook("wh_none", lambda one: one) is None


async def test_a_removed_webhook_takes_its_deliveries_along(stores: Stores) -> None:
    await stores.add()
    await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    await stores.webhooks.remove_webhook("wh_1")
    assert await stores.webhooks.webhooks(tenant_id=None) == []
    assert await stores.due(9.0) == []
    assert await stores.webhooks.next_due() is None


async def test_a_tenants_secret_has_a_beginning_and_is_replaced(stores: Stores) -> None:
    assert await stores.webhooks.secret("ten-a") == SigningSecret()
    for secret in (SigningSecret("s1", "", 5.0), SigningSecret("s2", "s1", 9.0)):
        await stores.webhooks.put_secret("ten-a", secret)
        assert await stores.webhooks.secret("ten-a") == secret
    assert await stores.webhooks.secret("ten-b") == SigningSecret()


# --- events ---


async def test_an_event_is_due_at_once_for_each_who_wants_it_and_for_nobody_else(stores: Stores) -> None:
    await stores.add("wh_all")
    await stores.add("wh_batch", "ten-a", "batch.*")
    await stores.add("wh_other", "ten-a", "batch.failed", "budget.*")
    await stores.add("wh_stranger", "ten-b")
    await stores.webhooks.add_webhook(a_webhook("wh_off", is_enabled=False), most=ALL)
    event_id = await stores.events.add("ten-a", DONE, {"id": "batch_1", "n": 2}, now=5.5)
    due = await stores.due(5.5)
    assert {one.delivery.webhook_id for one in due} == {"wh_all", "wh_batch"}
    assert {one.delivery.event_id for one in due} == {event_id}
    first = due[0]
    body = msgspec.json.decode(envelope(first.event))
    assert body == {
        "id": event_id,
        "object": "event",
        "type": "batch.completed",
        "created_at": 5,
        "data": {"id": "batch_1", "n": 2},
    }
    assert first.secret == SigningSecret("salt", "before", 99.0)
    assert first.url == f"https://hooks.example.com/{first.delivery.webhook_id}"
    assert await stores.due(5.4) == []


async def test_a_cause_that_is_told_twice_is_one_event(stores: Stores) -> None:
    await stores.add()
    first = await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0, key="b")
    assert await stores.events.add("ten-a", DONE, {"id": "b"}, now=2.0, key="b") == first
    assert len(await stores.due(9.0)) == 1
    others = [
        await stores.events.add("ten-a", FAILED, {"id": "b"}, now=2.0, key="b"),
        await stores.events.add("ten-a", DONE, {"id": "c"}, now=2.0, key="c"),
        await stores.events.add("ten-b", DONE, {"id": "b"}, now=2.0, key="b"),
        await stores.events.add("ten-a", DONE, {"id": "b"}, now=2.0),
    ]
    assert len({first, *others}) == 5


async def test_a_webhook_is_told_only_of_what_comes_after_it(stores: Stores) -> None:
    await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    await stores.add()
    assert await stores.due(9.0) == []


async def test_old_events_go_unless_somebody_is_still_to_be_told(stores: Stores) -> None:
    await stores.add()
    for number in range(4):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=float(number))
    told, given_up, waiting, _ = sorted(await stores.due(9.0), key=lambda one: one.event.created_at)
    await stores.attempt(told, 200, at=9.0)
    await stores.attempt(given_up, 410, at=9.0)
    await stores.attempt(waiting, 500, at=9.0)
    assert await stores.events.forget_events(before=3.0, limit=1) == 1
    assert await stores.events.forget_events(before=3.0, limit=9) == 1
    assert await stores.events.forget_events(before=3.0, limit=9) == 0
    assert len(await stores.all_of("wh_1")) == 2, "their deliveries went with them"


# --- whose turn it is ---


async def test_what_is_longest_due_comes_first(stores: Stores) -> None:
    assert await stores.webhooks.next_due() is None
    await stores.add()
    for at in (30.0, 10.0, 20.0):
        await stores.events.add("ten-a", DONE, {"id": str(at)}, now=at)
    assert await stores.webhooks.next_due() == 10.0
    assert [one.event.created_at for one in await stores.due(20.0)] == [10.0, 20.0]


async def test_no_webhook_and_no_tenant_takes_all_turns(stores: Stores) -> None:
    for webhook_id in ("wh_1", "wh_2", "wh_3"):
        await stores.add(webhook_id)
    for number in range(5):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0 + number)
    await stores.add("wh_b", "ten-b")
    await stores.events.add("ten-b", DONE, {"id": "late"}, now=50.0)
    turns = [one.delivery.webhook_id for one in await stores.due(60.0, of_lane=2)]
    assert sorted(map(str, turns)) == ["wh_1", "wh_1", "wh_2", "wh_2", "wh_3", "wh_3", "wh_b"]
    turns = [one.delivery.tenant_id for one in await stores.due(60.0, of_lane=2, of_tenant=3)]
    assert turns == ["ten-a"] * 3 + ["ten-b"]


async def test_receivers_that_fail_have_turns_of_their_own(stores: Stores) -> None:
    await stores.add("wh_down")
    await stores.add("wh_up")
    for number in range(3):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    down = next(one for one in await stores.due(1.0) if one.delivery.webhook_id == "wh_down")
    pending = await stores.attempt(down, None, at=2.0)
    assert pending.due_at is not None
    assert (await stores.now("wh_down")).failing_since == 2.0
    assert {one.delivery.webhook_id for one in await stores.due(9e9)} == {"wh_up"}
    (turn,) = await stores.due(9e9, of_lane=1, is_failing=True)
    assert turn.delivery.webhook_id == "wh_down"
    await stores.attempt(turn, 200, at=3.0)
    assert (await stores.now("wh_down")).failing_since is None
    assert await stores.due(9e9, is_failing=True) == []


async def test_one_that_fails_is_left_alone_however_much_waits_for_it(stores: Stores) -> None:
    await stores.add()
    for number in range(4):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    (first, *_) = await stores.due(1.0)
    await stores.attempt(first, 500, at=2.0)
    assert (await stores.now()).quiet_until == 3.0
    assert await stores.webhooks.next_due() == 3.0
    assert await stores.due(2.9, is_failing=True) == []
    (second,) = await stores.due(3.0, of_lane=1, is_failing=True)
    await stores.attempt(second, 500, at=3.0)
    assert ((await stores.now()).failures, (await stores.now()).quiet_until) == (2, 5.0)
    await stores.webhooks.redeliver(second.delivery.id, now=3.5)
    assert len(await stores.due(3.5, is_failing=True)) == 3, "what is asked for by hand goes at once"
    await stores.attempt(second, 200, at=3.6)
    webhook = await stores.now()
    assert (webhook.failing_since, webhook.failures, webhook.quiet_until) == (None, 0, None)


# --- attempts ---


async def test_an_attempt_is_kept_with_what_follows_from_it(stores: Stores) -> None:
    await stores.add()
    await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    (due,) = await stores.due(1.0)
    told = await stores.attempt(due, 500, at=2.0)
    assert await stores.webhooks.delivery(told.id, webhook_id="wh_1") == told
    assert await stores.webhooks.delivery(told.id, webhook_id="wh_2") is None
    assert await stores.webhooks.next_due() == told.due_at
    assert await stores.webhooks.pending(tenant_id="ten-a") == {"wh_1": 1}
    assert await stores.webhooks.pending(tenant_id="ten-b") == {}
    (due,) = await stores.due(9e9, is_failing=True)
    told = await stores.attempt(due, 204, at=9.0)
    assert (told.status, told.due_at, told.tries) == (DeliveryStatus.DELIVERED, None, 2)
    assert await stores.all_of("wh_1") == [told]


async def test_a_receiver_that_comes_back_gets_at_once_what_waits(stores: Stores) -> None:
    await stores.add()
    for number in range(3):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    for due in await stores.due(1.0):
        await stores.attempt(due, 503, at=2.0)
    first, *_ = await stores.due(9e9, is_failing=True)
    back = 2.0 + HURRY_AFTER_S
    await stores.attempt(first, 200, at=back)
    assert len(await stores.due(back)) == 2


async def test_one_that_only_stumbled_keeps_its_pauses(stores: Stores) -> None:
    """Else a message that always fails, among others that do not, would be tried in a loop."""
    await stores.add()
    for number in range(2):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    bad, good = await stores.due(1.0)
    told = await stores.attempt(bad, 500, at=2.0)
    await stores.attempt(good, 200, at=3.0)
    assert await stores.webhooks.next_due() == told.due_at


async def test_a_disabled_webhook_is_told_nothing_more_and_the_others_learn_of_it(stores: Stores) -> None:
    await stores.add("wh_gone")
    await stores.add("wh_other", "ten-a", "webhook.*")
    for number in range(3):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    under_way, gone, _ = await stores.due(1.0)
    await stores.attempt(gone, 410, at=2.0, reason="its receiver answered 410 Gone")
    webhook = await stores.now("wh_gone")
    assert (webhook.is_enabled, webhook.disabled_reason) == (False, "its receiver answered 410 Gone")
    assert {one.status for one in await stores.all_of("wh_gone")} == {DeliveryStatus.FAILED}
    await stores.attempt(under_way, 500, at=3.0)
    assert (await stores.now("wh_gone")).is_enabled is False
    (told,) = await stores.due(9e9)
    assert (told.delivery.webhook_id, told.event.type) == ("wh_other", EventType.WEBHOOK_DISABLED)
    assert msgspec.json.decode(told.event.data)["id"] == "wh_gone"


async def test_an_owner_who_disables_gives_up_what_waits(stores: Stores) -> None:
    await stores.add()
    await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    await stores.webhooks.change_webhook("wh_1", lambda one: msgspec.structs.replace(one, is_enabled=False))
    assert await stores.due(9e9) == []
    (told,) = await stores.all_of("wh_1")
    assert told.status is DeliveryStatus.FAILED


async def test_a_test_is_for_one_webhook_and_says_nothing_of_its_health(stores: Stores) -> None:
    webhook = await stores.add("wh_1", "ten-a", "batch.*")
    await stores.add("wh_2")
    due = await stores.webhooks.add_test(webhook, now=5.0, due_at=25.0)
    assert await stores.due(24.0) == []
    assert [one.delivery for one in await stores.due(25.0)] == [due.delivery]
    told = await stores.attempt(due, 500, at=6.0)
    assert told.status is DeliveryStatus.FAILED
    assert (await stores.now()).failing_since is None
    assert await stores.all_of("wh_1") == [told]
    assert await stores.all_of("wh_2") == []


# --- by hand ---


async def test_deliveries_turn_pages_newest_first(stores: Stores) -> None:
    await stores.add()
    for number in range(5):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=float(number // 2))
    for due in (await stores.due(9.0))[:2]:
        await stores.attempt(due, 200, at=9.0)
    found = await stores.all_of("wh_1")
    first = await stores.webhooks.deliveries("wh_1", status=None, limit=2, after=None)
    rest = await stores.webhooks.deliveries("wh_1", status=None, limit=9, after=first[-1])
    assert first + rest == found
    assert [one.created_at for one in found] == [2.0, 1.0, 1.0, 0.0, 0.0]
    done = await stores.webhooks.deliveries("wh_1", status=DeliveryStatus.DELIVERED, limit=9, after=None)
    assert len(done) == 2


async def test_a_delivery_is_made_again_with_a_new_span_of_retries(stores: Stores) -> None:
    await stores.add()
    event_id = await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    (due,) = await stores.due(1.0)
    told = await stores.attempt(due, 200, at=2.0)
    await stores.webhooks.redeliver(told.id, now=50.0)
    (again,) = await stores.due(50.0)
    assert (again.delivery.event_id, again.delivery.tries, again.delivery.since) == (event_id, 0, None)
    assert again.delivery.attempts == told.attempts, "what was tried before stays visible"


async def test_a_replay_brings_what_is_wanted_and_not_there(stores: Stores) -> None:
    before = await stores.events.add("ten-a", DONE, {"id": "before the webhook"}, now=10.0)
    await stores.add("wh_1", "ten-a", "batch.*")
    for tenant, kind, now in (("ten-a", EventType.BUDGET_EXCEEDED, 11.0), ("ten-b", DONE, 11.0), ("ten-a", DONE, 5.0)):
        await stores.events.add(tenant, kind, {"id": "x"}, now=now)
    taken = await stores.events.add("ten-a", DONE, {"id": "taken"}, now=12.0)
    given_up = await stores.events.add("ten-a", DONE, {"id": "given up"}, now=13.0)
    waits = await stores.events.add("ten-a", DONE, {"id": "waits"}, now=14.0)
    for due in await stores.due(14.0):
        status = {taken: 200, given_up: 500, waits: 500}.get(due.event.id, 200)
        told = await stores.attempt(due, status, at=15.0)
        if due.event.id == given_up:
            attempt = Attempt(16.0, 500)
            ended = msgspec.structs.replace(told, status=DeliveryStatus.FAILED, due_at=None)
            await stores.webhooks.settle(Settled(ended, attempt))
    webhook = await stores.now()
    first = await stores.webhooks.replay(webhook, since=10.0, after=None, now=99.0, limit=1, delivered_too=False)
    assert (first.count, first.last_event_id) == (1, before)
    rest = await stores.webhooks.replay(webhook, since=10.0, after=before, now=99.0, limit=9, delivered_too=False)
    assert (rest.count, rest.last_event_id) == (1, None)
    due_now = {one.event_id for one in await stores.all_of("wh_1") if one.due_at == 99.0}
    assert due_now == {before, given_up}
    again = await stores.webhooks.replay(webhook, since=10.0, after=None, now=100.0, limit=9, delivered_too=True)
    assert again.count == 1
    assert {one.event_id for one in await stores.all_of("wh_1") if one.due_at == 100.0} == {taken}


async def test_what_is_asked_for_by_hand_while_it_is_tried_keeps_its_new_span(stores: Stores) -> None:
    await stores.add()
    await stores.events.add("ten-a", DONE, {"id": "b"}, now=1.0)
    (due,) = await stores.due(1.0)
    await stores.attempt(due, 500, at=2.0)
    (under_way,) = await stores.due(9e9, is_failing=True)
    await stores.webhooks.redeliver(under_way.delivery.id, now=500.0)
    await stores.attempt(under_way, 500, at=400.0)
    (told,) = await stores.all_of("wh_1")
    assert (told.status, told.due_at, told.tries, told.since) == (DeliveryStatus.PENDING, 500.0, 0, None)
    await stores.attempt(under_way, 200, at=501.0)
    (told,) = await stores.all_of("wh_1")
    assert told.status is DeliveryStatus.DELIVERED, "whoever brought it"


async def test_a_new_place_gets_at_once_what_waits_for_the_old_one(stores: Stores) -> None:
    await stores.add()
    for number in range(3):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    for due in (await stores.due(1.0))[:2]:
        await stores.attempt(due, 500, at=2.0)
    moved = {"url": "https://new.example.com/", "failing_since": None, "quiet_until": None}
    await stores.webhooks.change_webhook("wh_1", lambda one: msgspec.structs.replace(one, **moved))
    assert {one.url for one in await stores.due(2.0)} == {"https://new.example.com/"}
    assert len(await stores.due(2.0)) == 3


async def test_what_waits_is_counted_over_all_with_the_oldest(stores: Stores) -> None:
    assert await stores.webhooks.backlog() == Backlog(0)
    await stores.add("wh_1")
    await stores.add("wh_2", "ten-b")
    for at, tenant_id in ((7.0, "ten-a"), (5.0, "ten-b"), (6.0, "ten-b")):
        await stores.events.add(tenant_id, DONE, {"id": "b"}, now=at)
    assert await stores.webhooks.backlog() == Backlog(3, 5.0)
    first, *_ = await stores.due(9.0)
    await stores.attempt(first, 200, at=9.0)
    assert await stores.webhooks.backlog() == Backlog(2, 6.0)
    assert await stores.webhooks.pending(tenant_id=None) == {"wh_1": 1, "wh_2": 1}
    assert await stores.webhooks.pending(tenant_id="ten-b") == {"wh_2": 1}


async def test_an_event_is_known_to_its_tenant_alone(stores: Stores) -> None:
    event_id = await stores.events.add("ten-a", DONE, {"id": "b"}, now=7.0)
    assert await stores.events.time_of(event_id, "ten-a") == 7.0
    assert await stores.events.time_of(event_id, "ten-b") is None
    assert await stores.events.time_of("evt_none", "ten-a") is None


async def test_a_receiver_is_left_alone_for_as_long_as_it_asks(stores: Stores) -> None:
    await stores.add()
    for number in range(2):
        await stores.events.add("ten-a", DONE, {"id": str(number)}, now=1.0)
    (first, _) = await stores.due(1.0)
    attempt = Attempt(2.0, 429, retry_after_s=600.0)
    await stores.webhooks.settle(Settled(after(first.delivery, attempt, now=2.0, chance=0.5), attempt))
    assert await stores.due(601.0, is_failing=True) == []
    assert len(await stores.due(602.0, is_failing=True)) == 2
