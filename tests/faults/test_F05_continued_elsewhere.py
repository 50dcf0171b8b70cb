"""F5, the better end: an engine is lost in the middle of a stream, and another one goes on with it."""

import os
import signal

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import Yard

SEEN: list[Exchange] = []
PROMPT = "the quick brown fox jumps over the lazy dog, é 你好 🙂, and then some more of it until the end of the story"


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("pair", options={"slots": 8, "ttft_ms": 1, "itl_ms": 5}, replicas=2)
    return "pair"


@pytest.fixture(autouse=True)
def _two(yard: Yard, model: str) -> None:
    yard.wait_ready(model, 2)


async def _cut(yard: Yard, load: Load, stream: Exchange, how: signal.Signals, tokens: int) -> None:
    """Kill or stop the engine that works on ``stream`` once the client has ``tokens``."""
    await load.delivered(stream, tokens)
    busy = [engine for engine in yard.engines() if engine.replica_id in _workers(yard, stream)]
    for engine in busy:
        yard.signal(engine.pid, how)


def _workers(yard: Yard, stream: Exchange) -> set[str]:
    return {event["replica"] for event in yard.events_of(stream.request_id, "begin")}


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_the_client_gets_the_whole_answer_once_and_one_bill(yard: Yard, model: str, wants_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    prompt = f"{PROMPT} {wants_usage}"  # not one that was on two engines when they died
    async with Load(yard.port, yard.admin_key) as load:
        whole = await load.send(chat(model, prompt, stream=True))
        stream = load.start(chat(model, f"[[sim: slow=60]]{prompt}", stream=True, **options))
        await _cut(yard, load, stream, signal.SIGKILL, 6)
        await load.finish()
        SEEN.extend(load.exchanges)
        assert stream.outcome is Outcome.COMPLETE, f"{stream!r} {bytes(stream.received)[-300:]!r}"
        assert stream.text == whole.text == prompt
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
        deltas = [choice["delta"] for chunk in stream.chunks for choice in chunk["choices"]]
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        rows = check_ledger(yard, SEEN)
    row, plain = rows[stream.request_id or ""], rows[whole.request_id or ""]
    assert row.status == "success"
    assert yard.row_of(stream.request_id)["attempts"] == 2
    assert abs(row.completion_tokens - plain.completion_tokens) <= 2, "a token may be cut in two at the seam"
    if wants_usage:
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == row.completion_tokens
        assert stream.usage["prompt_tokens"] == row.prompt_tokens
    else:
        assert all("usage" not in chunk for chunk in stream.chunks)


async def test_a_completion_is_continued_too(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        body = {"model": model, "prompt": f"[[sim: slow=60]]{PROMPT}", "stream": True, "max_tokens": 400}
        stream = load.start(body, path="/v1/completions")
        await _cut(yard, load, stream, signal.SIGKILL, 6)
        await load.finish()
        SEEN.extend(load.exchanges)
        assert stream.outcome is Outcome.COMPLETE, f"{stream!r} {bytes(stream.received)[-300:]!r}"
        # The engine echoes its prompt, and the prompt of the second one ends with what the first one said.
        assert stream.text in {PROMPT[:cut] + PROMPT + PROMPT[:cut] for cut in range(len(PROMPT))}
        check_ledger(yard, SEEN)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "unmentioned"}}]},
    ],
)
async def test_what_text_alone_does_not_hold_ends_with_an_error_event(
    yard: Yard, model: str, fields: dict[str, object]
) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        stream = load.start(chat(model, f"[[sim: slow=60 tokens=200]]{PROMPT}", stream=True, **fields))
        await _cut(yard, load, stream, signal.SIGKILL, 3)
        await load.finish()
        SEEN.extend(load.exchanges)
        assert stream.outcome is Outcome.ERROR_EVENT, f"{stream!r} {bytes(stream.received)[-300:]!r}"
        assert stream.error["code"] == "engine_lost"
        check_ledger(yard, SEEN)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals")
async def test_the_way_back_to_the_first_replica_is_a_probe(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        stream = load.start(chat(model, f"[[sim: slow=60]]{PROMPT} the way back", stream=True))
        await _cut(yard, load, stream, signal.SIGKILL, 4)
        await load.finish()
        yard.wait_ready(model, 2)
        after = [await load.send(chat(model, "again")) for _ in range(6)]
        assert all(exchange.outcome is Outcome.COMPLETE for exchange in after)
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
