"""F1: ``kill -9`` of a gateway worker with 50 streams and 50 plain requests open."""

import asyncio

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

STREAMS = PLAIN = 50
MARK_TOKENS = 8
SETTINGS = {"gateway.mark_tokens": MARK_TOKENS}
SLOW = "[[sim: tokens=1000 slow=50]] going on and on"


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 128, "itl_ms": 5, "ttft_ms": 5})
    return "sim"


async def test_a_killed_worker_cuts_streams_visibly_and_everything_is_settled_once(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        streams = [load.start(chat(model, SLOW, stream=True), label=f"stream {n}") for n in range(STREAMS)]
        for number in range(PLAIN):
            load.start(chat(model, SLOW), label=f"plain {number}")
        await asyncio.gather(*(load.delivered(stream, MARK_TOKENS + 4) for stream in streams))
        await eventually_async(lambda: len(yard.generated()) >= STREAMS + PLAIN, 30, "all requests are at the engine")
        (worker,) = yard.plane_pids("gateway")

        yard.kill(worker)

        await load.finish()
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.ABRUPT}
        afterwards = await load.until_served(model)
        assert afterwards.outcome is Outcome.COMPLETE
        rows = check_ledger(yard, load.exchanges)

    assert {row.status for rid, row in rows.items() if rid != afterwards.request_id} == {"interrupted"}
    assert len(rows) == STREAMS + PLAIN + 1
    marked = [rows[stream.request_id or ""] for stream in streams]
    assert all(row.completion_tokens >= MARK_TOKENS for row in marked), "streams are billed at their last mark"


async def test_the_engine_stops_working_for_a_dead_worker(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        stream = load.start(chat(model, SLOW, stream=True))
        await load.delivered(stream, 2)
        yard.kill(yard.plane_pids("gateway")[0])
        await load.finish()
    eventually(lambda: yard.events_of(stream.request_id, "abort"), 30, "the engine gives up the request")
    eventually(lambda: yard.call("GET", "/readyz", key="").status == 200, 30, "the gateway is back")
