"""Requests that would not all fit an engine's KV cache wait before it, instead of throwing each other out of it.

The engine has slots for sixteen requests and memory for eight. To admit by
slots alone would preempt, which the last test shows on the engine itself.
"""

import asyncio
import json

import pytest
from tests.support.engines import PREEMPTIONS, samples_of, secret_of
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.wire import request_bytes
from tests.support.yard import Yard

SLOTS = 16
CACHE_TOKENS = 1024
PROMPT = "word " * 24
TOKENS = 96
LONG = f"[[sim: tokens={TOKENS}]] {PROMPT}"
LONGER = f"[[sim: tokens={TOKENS} slow=30]] {PROMPT}"
"""As many tokens, in six times the time: whatever else is to be seen beside it."""
SETTINGS = {"gateway.queue_wait_s": 30}
SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("small", options={"slots": SLOTS, "kv_blocks": CACHE_TOKENS // 16, "ttft_ms": 1, "itl_ms": 5})
    return "small"


async def test_thirty_long_requests_at_once_all_complete_and_none_is_thrown_out(yard: Yard, model: str) -> None:
    (engine,) = yard.engines(model)
    running: list[float] = []
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(30):
            load.start(chat(model, LONG, stream=number % 2 == 0, max_tokens=TOKENS))

        def is_over() -> bool:
            running.append(samples_of(yard, engine)["vllm:num_requests_running"])
            return all(exchange.outcome for exchange in load.exchanges)

        await eventually_async(is_over, 30, "all have ended")
        await load.finish()
        SEEN.extend(load.exchanges)
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    samples = samples_of(yard, engine)
    assert samples[PREEMPTIONS] == 0
    assert 4 <= max(running) <= CACHE_TOKENS // (TOKENS + 24), f"as many as fit, not as many as slots: {max(running)}"
    rows = check_ledger(yard, SEEN)
    assert {rows[exchange.request_id or ""].completion_tokens for exchange in load.exchanges} == {TOKENS}
    queued = [exchange.header("x-modelyard-queued-ms") for exchange in load.exchanges if not exchange.asks_stream]
    assert sum(value is not None for value in queued) >= 5, "the others waited before the engine"


async def test_what_no_replica_could_ever_hold_is_refused_at_once_even_behind_others(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(12):
            load.start(chat(model, LONGER, max_tokens=TOKENS))
        await eventually_async(lambda: any(yard.gauges().values()), 30, "it is busy")
        huge = await load.send(chat(model, "word " * 2 * CACHE_TOKENS, max_tokens=8))
        assert (huge.status, huge.error["code"]) == (503, "no_capacity"), huge
        assert huge.header("x-should-retry") == "false", "no retry can help"
        assert not all(exchange.outcome for exchange in load.exchanges), "it did not wait for the others"
        await load.finish()
        SEEN.extend(load.exchanges)
    assert sum(exchange.outcome is Outcome.COMPLETE for exchange in load.exchanges) == 12
    rows = check_ledger(yard, SEEN)
    assert huge.request_id not in rows
    assert not yard.events_of(huge.request_id), "no engine has seen it"


async def test_the_same_requests_straight_to_the_engine_preempt(yard: Yard, model: str) -> None:
    (engine,) = yard.engines(model)
    body = json.dumps(chat(model, LONGER, max_tokens=TOKENS)).encode()
    headers = [("Authorization", f"Bearer {secret_of(yard, engine)}"), ("Content-Type", "application/json")]

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(
            request_bytes("POST", "/v1/chat/completions", body=body, headers=[*headers, ("Connection", "close")])
        )
        try:
            return await reader.readuntil(b"\r\n")
        finally:
            writer.transport.abort()

    async with asyncio.timeout(60):
        heads = await asyncio.gather(*(ask() for _ in range(SLOTS)))
    assert {head.split()[1] for head in heads} == {b"200"}
    assert samples_of(yard, engine)[PREEMPTIONS] > 0, "the tests above prove nothing if this many fit"
