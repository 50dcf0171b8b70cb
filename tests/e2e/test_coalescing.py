"""An endpoint whose tokens go out in groups: the same stream in fewer pieces, and the first token never waits."""

import asyncio
import json
import re

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import CHAT, Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.wire import request_bytes
from tests.support.yard import Yard

HOLD_MS = 200
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PACE = "[[sim: tokens=40 slow=20]] in one go"
SEEN: list[Exchange] = []


@pytest.fixture(scope="module", autouse=True)
def endpoints(yard: Yard) -> None:
    """Deploy "each", "held" and "long", which differ only in how long tokens are held."""
    holds = {"each": 0, "held": HOLD_MS, "long": 1000}
    for name in holds:
        yard.deploy(name, options={"slots": 8, "ttft_ms": 1, "itl_ms": 1}, wait=False)
    for name, hold_ms in holds.items():
        reply = yard.call("PATCH", f"/v1/endpoints/{name}", {"serving": {"coalesce_ms": hold_ms}})
        assert reply.json()["serving"]["coalesce_ms"] == hold_ms
        yard.wait_ready(name)


async def read(yard: Yard, body: dict[str, object]) -> tuple[Exchange, int]:
    """Send a request; return it and in how many pieces its answer came."""
    exchange, pieces = Exchange(f"#{len(SEEN)}", CHAT, asks_stream=True), 0
    SEEN.append(exchange)
    headers = [("Authorization", f"Bearer {yard.admin_key}"), ("Content-Type", "application/json")]
    reader, writer = await asyncio.open_connection("127.0.0.1", yard.port)
    try:
        async with asyncio.timeout(40):
            writer.write(request_bytes("POST", CHAT, body=json.dumps(body).encode(), headers=headers))
            while not exchange.reader.answer.is_complete and (data := await reader.read(65536)):
                pieces += 1
                exchange.received += data
                exchange.reader.feed(data)
    finally:
        writer.transport.abort()
    exchange.outcome = exchange.judge()
    return exchange, pieces


def events(exchange: Exchange) -> bytes:
    """Return a stream's body without what differs between any two streams."""
    body = bytes(exchange.reader.answer.body)
    body = re.sub(rb'"id":"[^"]*"', b'"id":""', body)
    body = re.sub(rb'"created":\d+', b'"created":0', body)
    body = re.sub(rb'"model":"[^"]*"', b'"model":""', body)
    return re.sub(rb'"cached_tokens":\d+', b'"cached_tokens":0', body)


@pytest.mark.parametrize("wanted", [STREAM, {"stream": True}], ids=["usage", "plain"])
async def test_the_same_bytes_in_fewer_pieces(yard: Yard, wanted: dict[str, object]) -> None:
    # Without usage wanted, the engine's "usage": null is cut out of each chunk on its way.
    each: list[Exchange] = []
    held: list[Exchange] = []

    async def is_held_together() -> bool:
        one, pieces = await read(yard, chat("each", PACE, **wanted))
        other, pieces_held = await read(yard, chat("held", PACE, **wanted))
        each.append(one)
        held.append(other)
        assert pieces_held * 2 < pieces, f"{pieces_held} against {pieces}"
        return True

    # A reader that is kept from reading finds what came one by one together, too: then it is asked again.
    await eventually_async(is_held_together, 60, "fewer pieces")
    assert {one.outcome for one in (*each, *held)} == {Outcome.COMPLETE}
    assert {one.delivered for one in (*each, *held)} == {40}
    assert len({events(one) for one in (*each, *held)}) == 1
    check_ledger(yard, SEEN)


async def test_the_first_token_does_not_wait_for_the_second(yard: Yard) -> None:
    async with Load(yard.port, yard.admin_key) as load:

        async def is_first_alone() -> bool:
            stream = load.start(chat("long", "[[sim: tokens=3 slow=950]] in one go", **STREAM))
            await load.delivered(stream, 1)
            made = len(yard.events_of(stream.request_id, "token"))
            await load.finish(20)
            return made == 1

        # Held for a second, it would always have come behind the second token.
        await eventually_async(is_first_alone, 30, "the first token comes by itself")
        SEEN.extend(load.exchanges)
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    check_ledger(yard, SEEN)


async def test_what_is_held_goes_out_before_the_end_whatever_that_is(yard: Yard) -> None:
    ends = ("", "cut_after=8", "error_after=8", "clean_end_after=8")
    async with Load(yard.port, yard.admin_key) as load:
        # Several of each: whether the end comes in the same read as what is before it is chance.
        for number in range(32):
            prompt = f"[[sim: tokens=10 slow=5 {ends[number % 4]}]] in one go"
            load.start(chat(("each", "long")[number // 4 % 2], prompt, **STREAM))
        await load.finish(20)
        SEEN.extend(load.exchanges)
    for number, end in enumerate(ends):
        streams = load.exchanges[number::4]
        outcome, delivered = (Outcome.ERROR_EVENT, 8) if end else (Outcome.COMPLETE, 10)
        assert {(stream.outcome, stream.delivered) for stream in streams} == {(outcome, delivered)}, end
        assert len({events(stream) for stream in streams}) == 1, end
    rows = check_ledger(yard, SEEN)
    assert {rows[stream.request_id or ""].completion_tokens for stream in load.exchanges} == {8, 10}
