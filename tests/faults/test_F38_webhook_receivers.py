"""F38: a receiver of webhooks is down for a day, slow, answers 500 or a redirect; the controller is killed meanwhile.

The day is one of virtual time: the sender, the store and HTTP are real.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from openai import OpenAI
from standardwebhooks import Webhook as Verifier
from tests.support.hooks import Site, site
from tests.support.load import chat
from tests.support.receivers import Behaviour, Message, port_without_listener, receiving
from tests.support.refusals import post
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

from modelyard.domain.webhooks import DeliveryStatus, well
from modelyard.policy.webhooks import GIVE_UP_S, JITTER, PAUSES_S

DAY_S = 86_400.0
TOLERANCE_S = 10**9
"""Virtual time is ahead of the verifier's clock."""


@pytest.fixture
def port() -> Iterator[int]:
    with port_without_listener() as held:
        yield held


async def check_signed(here: Site, got: list[Message]) -> None:
    """Check every message with OpenAI's own verifier."""
    client = OpenAI(api_key="none", base_url="http://127.0.0.1:1", webhook_secret=await here.secret())
    for headers, body in got:
        client.webhooks.verify_signature(body, headers, tolerance=TOLERANCE_S)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (500, 500),
        (302, 302),
        (404, 404),
        ("cut", None),
        ("hang", None),
        ("drip", None),
    ],
)
async def test_after_a_day_its_receiver_has_the_event_once_and_all_that_waited(
    tmp_path: Path, fails: Behaviour, told: int | None
) -> None:
    is_silent = fails in ("hang", "drip")
    async with site(tmp_path, timeout_s=0.5 if is_silent else 20.0) as here:
        with receiving() as receiver:
            receiver.always = fails
            await here.add(receiver.url)
            began = here.clock.unix_s()
            event_id = await here.happen("batch_1")
            await here.run_until(began + DAY_S)
            (delivery,) = await here.deliveries()
            assert delivery.status is DeliveryStatus.PENDING
            assert 8 <= delivery.tries <= 16
            await eventually_async(lambda: len(receiver.got) == delivery.tries, 30, "it has read them all")
            assert {one.status_code for one in delivery.attempts} == {told}
            assert delivery.due_at is not None
            pauses = [later.at - one.at for one, later in zip(delivery.attempts, delivery.attempts[1:], strict=False)]
            for pause, meant in zip(pauses, [*PAUSES_S, *PAUSES_S[-1:] * 20], strict=False):
                assert meant * (1 - JITTER) - 1 <= pause <= meant * (1 + JITTER) + 1
            waiting = await here.happen("batch_2")
            receiver.always = 200
            here.sender._timeout_s = 20.0
            await here.run_until(delivery.due_at + 1)
        assert {one.status for one in await here.deliveries()} == {DeliveryStatus.DELIVERED}
        assert {headers["webhook-id"] for headers, _ in receiver.got} == {event_id, waiting}
        assert len({body for headers, body in receiver.got if headers["webhook-id"] == event_id}) == 1
        stamps = [int(headers["webhook-timestamp"]) for headers, _ in receiver.got]
        assert stamps == sorted(stamps), "each attempt has its own time"
        assert set(receiver.paths) == {"/in"}, "no redirect was followed"
        assert (await here.webhook()).failing_since is None
        await check_signed(here, receiver.got)


async def test_a_port_that_nobody_listens_on_is_tried_for_three_days_and_then_by_hand(
    tmp_path: Path, port: int
) -> None:
    async with site(tmp_path, webhook_failing_s=30 * DAY_S) as here:
        await here.add(f"http://127.0.0.1:{port}/in")
        began = here.clock.unix_s()
        event_id = await here.happen()
        await here.run_until(began + 10 * DAY_S)
        (delivery,) = await here.deliveries()
        assert delivery.status is DeliveryStatus.FAILED
        assert GIVE_UP_S / 2 < delivery.attempts[-1].at - began <= GIVE_UP_S + 1
        assert "refused" in delivery.attempts[-1].error
        with receiving(port) as receiver:
            await here.webhooks.redeliver(delivery.id, now=here.clock.unix_s())
            await here.run_until(here.clock.unix_s() + 1)
        assert [headers["webhook-id"] for headers, _ in receiver.got] == [event_id]


async def test_a_receiver_that_takes_nothing_for_days_is_disabled_and_misses_nothing_for_good(tmp_path: Path) -> None:
    async with site(tmp_path, webhook_failing_s=5 * DAY_S) as here:
        with receiving() as receiver, receiving() as operator:
            receiver.always = 503
            await here.add(receiver.url)
            await here.add(operator.url, "wh_operator", types="webhook.*")
            began = here.clock.unix_s()
            events = []
            for _ in range(7):
                events.append(await here.happen())
                await here.run_until(here.clock.unix_s() + DAY_S)
            webhook = await here.webhook()
            assert (webhook.is_enabled, webhook.disabled_reason) == (
                False,
                "it took nothing for 5 days, the last time: HTTP 503",
            )
            ((_, body),) = operator.got
            assert json.loads(body)["type"] == "webhook.disabled"
            assert json.loads(body)["data"]["id"] == "wh_1"
            assert {one.status for one in await here.deliveries()} == {DeliveryStatus.FAILED}
            tried = len(receiver.got)
            await here.run_until(here.clock.unix_s() + 5 * DAY_S)
            assert len(receiver.got) == tried, "nobody asks it any more"

            receiver.always, receiver.got = 200, []
            await here.webhooks.change_webhook("wh_1", lambda one: well(msgspec.structs.replace(one, is_enabled=True)))
            replayed = await here.webhooks.replay(
                await here.webhook(), since=began, after=None, now=here.clock.unix_s(), limit=100, delivered_too=False
            )
            await here.run_until(here.clock.unix_s() + 1)
            assert {headers["webhook-id"] for headers, _ in receiver.got} > set(events)
            assert replayed.count == len(receiver.got) == len(events) + 1, "also that it was disabled"


def test_a_controller_that_is_killed_between_attempts_loses_nothing(tmp_path: Path, port: int) -> None:
    settings = tmp_path / "modelyard.toml"
    settings.write_text('[fetch]\nprivate_networks = ["127.0.0.0/8"]\n')
    with Yard(tmp_path, options=("--config", str(settings))) as yard:
        reply = yard.call("POST", "/v1/webhooks", {"url": f"http://127.0.0.1:{port}/in"})
        assert reply.status == 201, reply.body
        webhook_id, secret = reply.json()["id"], reply.json()["secret"]
        yard.deploy("sim", options={"slots": 4, "ttft_ms": 1, "itl_ms": 1})
        answer = post(yard, "/v1/chat/completions", chat("sim", "hello"), headers=[("Prefer", "respond-async")])
        request_id = answer.json()["id"]
        deliveries = f"/v1/webhooks/{webhook_id}/deliveries"

        def tried() -> bool:
            found = {one["event_type"]: one for one in yard.get(deliveries)["data"]}
            ready, done = found["deployment.ready"], found["request.succeeded"]
            return bool(ready["tries"] and done["tries"]) and "refused" in done["attempts"][0]["error"]

        eventually(tried, 30, "both were tried, and nobody was there")
        eventually(lambda: yard.get(f"/v1/webhooks/{webhook_id}")["status"] == "failing", 30, "that is told")
        (control,) = yard.plane_pids("control")
        yard.kill(control)
        with receiving(port) as receiver:
            eventually(lambda: yard.plane_pids("control") not in ([], [control]), 30, "another controller runs")
            eventually(lambda: len(receiver.got) >= 2, 90, "both come")  # the third try is after half a minute
            eventually(lambda: yard.get(f"/v1/webhooks/{webhook_id}")["status"] == "enabled", 30, "it is well again")
        client = OpenAI(api_key="none", base_url="http://127.0.0.1:1", webhook_secret=secret)
        events = {}
        for headers, body in receiver.got:
            client.webhooks.verify_signature(body, headers)
            Verifier(secret).verify(body, headers)
            event = json.loads(body)
            assert headers["webhook-id"] == event["id"]
            events[event["type"]] = event
        assert set(events) == {"deployment.ready", "request.succeeded"}
        assert events["request.succeeded"]["data"]["id"] == request_id
        ready = events["deployment.ready"]["data"]
        assert (ready["object"], ready["name"], ready["version"]) == ("endpoint", "sim", "v1")
        done = {one["event_id"]: one for one in yard.get(deliveries)["data"]}
        assert {one["status"] for one in done.values()} == {"delivered"}
        assert {event["id"] for event in events.values()} == set(done), "the same events as before"
        logs = "".join(file.read_text() for file in (yard.data / "logs").glob("*.log"))
        assert secret not in logs
