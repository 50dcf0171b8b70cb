"""An engine that refuses more requests than it can queue (vLLM's ``--max-num-queued-reqs``): they wait in our line.

Its 503 is neither the caller's business nor the replica's failure.
"""

import asyncio

from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.queue_wait_s": 10}
SLOTS, ADMITTED = 8, 3


async def test_what_an_engine_has_no_room_for_waits_and_completes(yard: Yard) -> None:
    options = {"slots": SLOTS, "queued_max": ADMITTED, "ttft_ms": 20, "itl_ms": 5}
    await asyncio.to_thread(yard.deploy, "small", options=options)
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(16):
            load.start(chat("small", "[[sim: tokens=60]] hello", stream=number % 2 == 0), within_s=60)
        await eventually_async(lambda: all(exchange.outcome for exchange in load.exchanges), 30, "all have ended")
        rows = check_ledger(yard, load.exchanges)
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    assert {row.completion_tokens for row in rows.values()} == {60}
    attempts = yard.query("SELECT sum(attempts) AS n FROM inference_requests")[0]["n"]
    assert attempts > len(rows), "the engine did refuse some"
    assert attempts < 4 * len(rows), "and was not asked again and again"
    page = yard.call("GET", "/metrics").body.decode()
    failed = [line for line in page.splitlines() if line.startswith("modelyard_retries_total{")]
    assert all(line.endswith(" 0") for line in failed), "none of it counts as a retry"
    assert yard.ready_replicas("small") == 1


async def test_an_engine_that_stays_full_makes_them_wait_as_long_as_the_line_lets_them(yard: Yard) -> None:
    await asyncio.to_thread(yard.deploy, "tiny", options={"slots": 4, "queued_max": 1, "ttft_ms": 1, "itl_ms": 1})
    async with Load(yard.port, yard.admin_key) as load:
        hog = load.start(chat("tiny", "[[sim: tokens=400 slow=100]] on and on", stream=True), within_s=60)
        await load.delivered(hog, 1)
        waiting = load.start(chat("tiny", "hello"), within_s=40)
        await eventually_async(lambda: waiting.outcome is not None, 30, "it is told in the end")
        hog.leave()
    assert (waiting.status, waiting.error["code"]) == (429, "queue_timeout")
