"""F38: each end of a batch is told as OpenAI tells it, and receivers that hang or are away do not hold up batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types.webhooks import (
    BatchCancelledWebhookEvent,
    BatchCompletedWebhookEvent,
    BatchExpiredWebhookEvent,
    BatchFailedWebhookEvent,
)
from tests.support.batches import chat_line, client_of, submit, until
from tests.support.receivers import receiving
from tests.support.waiting import eventually
from tests.support.yard import Yard

EVENTS = {
    "completed": BatchCompletedWebhookEvent,
    "failed": BatchFailedWebhookEvent,
    "expired": BatchExpiredWebhookEvent,
    "cancelled": BatchCancelledWebhookEvent,
}
SETTINGS = {"batch.completion_windows": "24h,2s", "batch.lease_s": 2, "batch.shard_lines": 2}
MANY = [chat_line(f"line-{at}", "[[sim: tokens=20 slow=20]]") for at in range(200)]
"""More than are answered in two seconds."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder: Path = tmp_path_factory.mktemp("yard")
    settings = folder / "modelyard.toml"
    settings.write_text('[fetch]\nprivate_networks = ["127.0.0.0/8"]\n')
    with Yard(folder, SETTINGS, options=("--config", str(settings))) as running:
        running.deploy("sim", options={"slots": 4, "ttft_ms": 1, "itl_ms": 1})
        yield running


def test_each_end_of_a_batch_is_told_while_another_receiver_hangs(yard: Yard) -> None:
    client = client_of(yard)
    with receiving() as receiver, receiving() as hanging:
        hanging.always = "hang"
        secret = yard.call("POST", "/v1/webhooks", {"url": receiver.url, "event_types": ["batch.*"]}).json()["secret"]
        assert yard.call("POST", "/v1/webhooks", {"url": hanging.url}).status == 201
        ends = {
            submit(client, [chat_line("1"), chat_line("2")]).id: "completed",
            submit(client, ["no json"]).id: "failed",
            submit(client, MANY, completion_window="2s").id: "expired",
        }
        cancelled = submit(client, MANY).id
        until(client, cancelled, ("in_progress",))
        client.batches.cancel(cancelled)
        ends[cancelled] = "cancelled"
        for batch_id, status in ends.items():
            assert until(client, batch_id).status == status
        eventually(lambda: len(receiver.got) == len(ends), 30, "each is told")
        eventually(lambda: hanging.got, 30, "it was asked")
        unwrap = OpenAI(api_key="none", base_url="http://127.0.0.1:1", webhook_secret=secret).webhooks.unwrap
        told = [unwrap(body, headers) for headers, body in receiver.got]
        assert {event.data.id: type(event) for event in told} == {
            batch_id: EVENTS[status] for batch_id, status in ends.items()
        }
