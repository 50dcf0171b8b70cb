"""Batches in tests: their files, their course, and what must hold of every one that is over."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import openai
from openai.types import Batch

from tests.support.waiting import eventually
from tests.support.yard import Yard

OVER = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


def client_of(yard: Yard, key: str = "") -> openai.OpenAI:
    """Return OpenAI's own client."""
    return openai.OpenAI(base_url=f"{yard.url}/v1", api_key=key or yard.admin_key, max_retries=0)


def chat_line(custom_id: str, text: str = "hello", *, model: str = "sim", **fields: object) -> str:
    """Return a line that asks for a chat."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def submit(client: openai.OpenAI, lines: Sequence[str], endpoint: Any = CHAT, **fields: Any) -> Batch:
    """Upload the lines and make a batch of them."""
    file = client.files.create(file=("input.jsonl", "\n".join(lines).encode()), purpose="batch")
    wanted = {"completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **wanted)


def look(client: openai.OpenAI, batch_id: str) -> Batch | None:
    """Return a batch; None while nobody answers."""
    try:
        return client.batches.retrieve(batch_id)
    except (openai.APIConnectionError, openai.APIStatusError):
        return None


def until(client: openai.OpenAI, batch_id: str, statuses: Sequence[str] = OVER, within_s: float = 60.0) -> Batch:
    """Wait until a batch has one of these statuses."""

    def has() -> Batch | None:
        batch = look(client, batch_id)
        assert batch is not None, "nobody answers"
        assert batch.status in statuses, f"{batch.status} {batch.request_counts} {batch.errors}"
        return batch

    return eventually(has, within_s, f"{batch_id} is {' or '.join(statuses)}")


def watch(client: openai.OpenAI, batch_id: str, each: Callable[[Batch], None], within_s: float = 60.0) -> Batch:
    """Look again and again until a batch is over, with ``each`` look; counts must never go down."""
    give_up_s, most = time.monotonic() + within_s, 0
    while time.monotonic() < give_up_s:
        batch = look(client, batch_id)
        if batch is not None:
            assert batch.request_counts is not None
            done = batch.request_counts.completed + batch.request_counts.failed
            assert done >= most, f"counts went down from {most} to {done}"
            most = done
            if batch.status in OVER:
                return batch
            each(batch)
        time.sleep(0.02)
    raise AssertionError(f"{batch_id} is not over after {within_s} s: {look(client, batch_id)}")


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    text = client.files.content(file_id).text
    assert text.endswith("\n"), "the last line has its end"
    return [json.loads(line) for line in text.split("\n")[:-1]]


def check_whole(client: openai.OpenAI, batch: Batch, custom_ids: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Hold a batch that is over to I10: each line once, in one of two files; counts add up; return the two files."""
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    found = [line["custom_id"] for line in (*output, *errors)]
    assert len(found) == len(set(found)), "a line stands twice"
    assert sorted(found) == sorted(custom_ids), "a line is missing"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (len(custom_ids), len(output), len(errors))
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in output)
    assert all(line["error"]["code"] for line in errors)
    return output, errors
