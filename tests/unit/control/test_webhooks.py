"""The sender of webhooks: what it signs, whom it keeps waiting, what it does about one that fails."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from openai import OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from prometheus_client.parser import text_string_to_metric_families
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError
from tests.support.hooks import PEPPER, Site, site
from tests.support.receivers import Receiver, receiving
from tests.support.waiting import eventually_async

from modelyard.control.webhooks import (
    ANSWER_CHARACTERS_KEPT,
    LANE_SENDING_MAX,
    keys_of,
    shown,
    signed_headers,
    snippet,
)
from modelyard.domain.events import EventType
from modelyard.domain.webhooks import DeliveryStatus, SigningSecret
from modelyard.stores import StoreUnavailableError
from modelyard.web.fetcher import Fetcher, FetchError

DAY_S = 86_400.0


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def other() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


async def stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- signatures ---


async def test_receivers_verify_a_message_with_any_library(here: Site, receiver: Receiver) -> None:
    await here.add(receiver.url)
    event_id = await here.happen("batch_abc")
    await here.run_until(here.clock.unix_s())
    ((headers, body),) = receiver.got
    secret = await here.secret()
    assert Verifier(secret).verify(body, headers)["data"] == {"id": "batch_abc"}
    client = OpenAI(api_key="none", base_url="http://127.0.0.1:1", webhook_secret=secret)
    event = client.webhooks.unwrap(body, headers)
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert (event.id, event.data.id, event.object) == (event_id, "batch_abc", "event")
    assert event.created_at == int(here.clock.unix_s())
    assert headers["webhook-id"] == event_id


def test_an_independent_verifier_accepts_what_is_signed_and_nothing_else() -> None:
    now = time.time()  # its tolerance is measured by the real clock
    body = b'{"type":"request.succeeded"}'
    before, during, after = (
        SigningSecret("s1"),
        SigningSecret("s2", "s1", now + 60),
        SigningSecret("s2", "s1", now - 1),
    )
    (old,) = keys_of(PEPPER, "ten-a", before, now=now)
    new, overlapping = keys_of(PEPPER, "ten-a", during, now=now)
    assert overlapping == old
    assert keys_of(PEPPER, "ten-a", after, now=now) == [new]
    headers = signed_headers("evt_1", int(now), body, keys_of(PEPPER, "ten-a", during, now=now))
    for key in (old, new):
        assert Verifier(shown(key)).verify(body, headers)["type"] == "request.succeeded"
    strangers = keys_of(PEPPER, "ten-b", SigningSecret("s2"), now=now)
    for key, sent, told in (
        (strangers[0], body, headers),
        (new, body + b" ", headers),
        (new, body, {**headers, "webhook-id": "evt_2"}),
        (new, body, {**headers, "webhook-timestamp": str(int(now) - 400)}),
    ):
        with pytest.raises(WebhookVerificationError):
            Verifier(shown(key)).verify(sent, told)


async def test_both_secrets_sign_while_the_old_one_lives_and_then_only_the_new_one(
    here: Site, receiver: Receiver
) -> None:
    await here.add(receiver.url)
    old = await here.secret()
    until = here.clock.unix_s() + 60

    await here.webhooks.change_webhook(
        "wh_1", lambda one: msgspec.structs.replace(one, secret=SigningSecret("new", one.secret.salt, until))
    )
    new = await here.secret()
    assert new != old
    await here.happen()
    await here.run_until(here.clock.unix_s())
    headers, body = receiver.got[0]
    for secret in (old, new):
        Verifier(secret).verify(body, headers)
    here.clock.advance(61)
    await here.happen()
    await here.run_until(here.clock.unix_s())
    headers, body = receiver.got[1]
    Verifier(new).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(old).verify(body, headers)


# --- whose turn it is ---


async def test_the_loop_sends_at_once_what_happens(here: Site, receiver: Receiver) -> None:
    await here.add(receiver.url)
    running = asyncio.create_task(here.sender.run())
    await here.happen()
    here.sender.wake()
    await eventually_async(lambda: receiver.got, 20, "it came")
    await eventually_async(lambda: is_told(here, "wh_1"), 20, "it is known to have come")
    await stop(running)
    assert len(receiver.got) == 1


async def is_told(here: Site, webhook_id: str) -> bool:
    return all(one.status is DeliveryStatus.DELIVERED for one in await here.deliveries(webhook_id))


async def test_a_receiver_that_does_not_answer_delays_nobody_elses(
    here: Site, receiver: Receiver, other: Receiver
) -> None:
    receiver.always = "hang"
    await here.add(receiver.url, "wh_hangs")
    await here.add(other.url, "wh_same_tenant")
    await here.add(other.url, "wh_other", tenant_id="ten-b")
    for number in range(20):
        await here.happen(str(number))
        await here.happen(str(number), tenant_id="ten-b")
    running = asyncio.create_task(here.sender.run())
    await eventually_async(lambda: len(other.got) == 40, 20, "the others are told while it hangs")
    assert {one.status for one in await here.deliveries("wh_hangs")} == {DeliveryStatus.PENDING}
    assert 1 <= receiver.at_once_most <= LANE_SENDING_MAX
    await stop(running)


async def test_one_that_fails_has_one_turn_at_a_time(here: Site, receiver: Receiver, other: Receiver) -> None:
    await here.add(receiver.url)
    for number in range(6):
        await here.happen(str(number))
    receiver.answers = [500]
    (first, *_) = await here.due()
    await here.sender.send(first)
    here.clock.advance(2)
    receiver.always = "hang"
    await here.add(other.url, "wh_other", tenant_id="ten-b")
    running = asyncio.create_task(here.sender.run())
    await eventually_async(lambda: len(receiver.got) == 2, 20, "it is tried again")
    for number in range(3):
        await here.happen(str(number), tenant_id="ten-b")
        here.sender.wake()
        await eventually_async(lambda number=number: len(other.got) == number + 1, 20, "there was another round")
    assert len(receiver.got) == 2
    await stop(running)


async def test_a_sender_that_is_killed_in_an_attempt_leaves_it_to_the_next(here: Site, receiver: Receiver) -> None:
    await here.add(receiver.url)
    event_id = await here.happen()
    receiver.answers = ["hang"]
    killed = asyncio.create_task(here.sender.run())
    await eventually_async(lambda: receiver.got, 20, "an attempt is under way")
    await stop(killed)
    await here.run_until(here.clock.unix_s())
    assert [headers["webhook-id"] for headers, _ in receiver.got] == [event_id, event_id]
    (told,) = await here.deliveries()
    assert (told.status, told.tries) == (DeliveryStatus.DELIVERED, 1)


async def test_a_day_of_messages_to_one_that_is_away_costs_few_attempts(here: Site, receiver: Receiver) -> None:
    receiver.always = "cut"
    await here.add(receiver.url)
    for number in range(500):
        await here.happen(str(number))
    await here.run_until(here.clock.unix_s() + 6 * 3600)
    assert 50 < len(receiver.got) < 100, "one in five minutes, after the first ones"
    receiver.always, receiver.got = 200, []
    await here.run_until(here.clock.unix_s() + 300)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == len(receiver.got) == 500


# --- where it may go ---


async def test_a_name_that_leads_elsewhere_by_now_is_not_followed_there(here: Site, receiver: Receiver) -> None:
    addresses = ["203.0.113.7"]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    here.sender.fetcher = Fetcher(resolve=resolve)
    url = f"https://hooks.example.com:{receiver.port}/in"
    with pytest.raises(FetchError):
        await here.sender.fetcher.check(url.replace("https", "http"))
    addresses[:] = ["127.0.0.1"]
    await here.add(url)
    await here.happen()
    await here.run_until(here.clock.unix_s())
    (told,) = await here.deliveries()
    assert "has no public address" in told.attempts[0].error
    assert receiver.got == []


# --- answers ---


async def test_of_an_answer_no_more_is_read_and_kept_than_can_be_shown(here: Site, receiver: Receiver) -> None:
    receiver.body = b"no: \x1b[31mred\n" + b"x" * 1_000_000
    receiver.always = 500
    await here.add(receiver.url)
    await here.happen()
    await here.run_until(here.clock.unix_s())
    (told,) = await here.deliveries()
    (attempt,) = told.attempts
    assert attempt.answer.startswith("no:  [31mred x")
    assert len(attempt.answer) == ANSWER_CHARACTERS_KEPT


@pytest.mark.parametrize(
    ("body", "shown_as"),
    [(b"", ""), (b"\xff\xfe", "\ufffd\ufffd"), ("grün \u202eevil".encode(), "grün  evil"), (b" a\tb ", "a b")],
)
def test_a_snippet_is_safe_to_show(body: bytes, shown_as: str) -> None:
    assert snippet(body) == shown_as


async def test_a_receiver_that_is_gone_is_asked_once_and_disabled(here: Site, receiver: Receiver) -> None:
    receiver.always = 410
    await here.add(receiver.url)
    await here.happen()
    await here.run_until(here.clock.unix_s() + DAY_S)
    assert len(receiver.got) == 1
    webhook = await here.webhook()
    assert (webhook.is_enabled, webhook.disabled_reason) == (False, "its receiver answered 410 Gone")


async def test_a_test_is_sent_now_and_once(here: Site, receiver: Receiver) -> None:
    webhook = await here.add(receiver.url, types="batch.*")
    receiver.answers = [500]
    told = await here.sender.test(webhook)
    assert (told.event_type, told.status, told.attempts[0].status_code) == (EventType.WEBHOOK_TEST, "failed", 500)
    await here.run_until(here.clock.unix_s() + DAY_S)
    assert len(receiver.got) == 1
    assert (await here.sender.test(webhook)).status is DeliveryStatus.DELIVERED
    assert json.loads(receiver.got[1][1])["data"] == {"id": "wh_1", "object": "webhook"}


async def test_a_test_whose_sender_was_killed_is_sent_by_the_loop(here: Site, receiver: Receiver) -> None:
    webhook = await here.add(receiver.url)
    receiver.answers = ["hang"]
    killed = asyncio.create_task(here.sender.test(webhook))
    await eventually_async(lambda: receiver.got, 20, "it is under way")
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    assert await here.due() == []
    await here.run_until(here.clock.unix_s() + 60)
    assert len(receiver.got) == 2
    assert await is_told(here, "wh_1")


# --- retention ---


async def test_old_events_are_forgotten_and_what_is_still_to_be_told_is_not(tmp_path: Path) -> None:
    async with site(tmp_path, events_kept_s=2 * DAY_S, kept_s=DAY_S) as here:
        with receiving() as receiver:
            await here.add(receiver.url)
            await here.happen("told")
            await here.run_until(here.clock.unix_s())
            receiver.always = 500
            await here.happen("waits")
            await here.run_until(here.clock.unix_s() + 2 * DAY_S + 1)
            await here.sender.forget()
            (left,) = await here.deliveries()
            assert left.status is DeliveryStatus.PENDING


async def test_the_loop_forgets_by_itself(tmp_path: Path) -> None:
    async with site(tmp_path, events_kept_s=10.0, kept_s=10.0) as here:
        await here.happen()
        here.clock.advance(11)
        running = asyncio.create_task(here.sender.run())

        async def count() -> bool:
            rows = await here.database.read(lambda c: c.exec_driver_sql("SELECT event_id FROM tenant_events").all())
            return not rows

        await eventually_async(count, 20, "it is gone")
        await stop(running)


# --- what a receiver asks for, and what operators see ---


async def test_one_that_is_busy_says_when_to_come_again(here: Site, receiver: Receiver) -> None:
    await here.add(receiver.url)
    receiver.answers, receiver.retry_after = [429], "1800"
    await here.happen()
    await here.happen()
    first, second = await here.due()
    began = here.clock.unix_s()
    await here.sender.send(first)
    assert (await here.webhook()).quiet_until == began + 1800
    (waits, _) = sorted(await here.deliveries(), key=lambda one: one.tries, reverse=True)
    assert (waits.due_at, waits.attempts[0].retry_after_s) == (began + 1800, 1800.0)
    await here.run_until(began + 1799)
    assert len(receiver.got) == 1, f"nobody sent {second.delivery.id} meanwhile"
    await here.run_until(began + 1801)
    assert len(receiver.got) == 3


async def test_attempts_are_counted_by_what_came_of_them_and_what_waits_has_an_age(
    here: Site, receiver: Receiver
) -> None:
    await here.add(receiver.url)
    assert b"modelyard_webhook_waiting" not in here.sender.metrics.render(), "nobody has looked yet"
    receiver.answers = [500, 200, 410]
    for _ in range(3):
        await here.happen()
        await here.run_until(here.clock.unix_s() + 60)
    await here.webhooks.change_webhook("wh_1", lambda one: msgspec.structs.replace(one, is_enabled=True))
    await here.happen()
    here.clock.advance(30)
    running = asyncio.create_task(here.sender._measure())

    def page() -> dict[str, float]:
        families = text_string_to_metric_families(here.sender.metrics.render().decode())
        return {one.name + "".join(one.labels.values()): one.value for family in families for one in family.samples}

    await eventually_async(lambda: "modelyard_webhook_waiting" in page(), 20, "somebody has looked")
    await stop(running)
    found = page()
    assert found["modelyard_webhook_deliveries_totalretried"] == 1
    assert found["modelyard_webhook_deliveries_totaldelivered"] == 1
    assert found["modelyard_webhook_deliveries_totalfailed"] == 1
    assert (found["modelyard_webhook_waiting"], found["modelyard_webhook_oldest_seconds"]) == (1, 30)


async def test_whoever_wants_to_hears_of_one_that_is_disabled(here: Site, receiver: Receiver) -> None:
    heard: list[tuple[str, ...]] = []

    async def hear(*told: str) -> None:
        heard.append(told)
        raise StoreUnavailableError("away")

    here.sender.on_disabled = hear
    webhook = await here.add(receiver.url)
    receiver.answers = [410, 500, 410]
    assert (await here.sender.test(webhook)).status is DeliveryStatus.FAILED
    await here.happen()
    await here.run_until(here.clock.unix_s() + 60)
    assert heard == [("wh_1", "ten-a", receiver.url, "its receiver answered 410 Gone")]


async def test_one_failure_after_a_quiet_week_disables_nothing(here: Site, receiver: Receiver) -> None:
    await here.add(receiver.url)
    receiver.always = 500
    await here.happen()
    await here.run_until(here.clock.unix_s() + 9 * DAY_S)
    assert (await here.webhook()).is_enabled, "three days of one message are not five"
    await here.happen()
    receiver.always, receiver.answers = 200, [500]
    await here.run_until(here.clock.unix_s() + 3600)
    webhook = await here.webhook()
    assert (webhook.is_enabled, webhook.failing_since) == (True, None)
