"""F34: all engines answer 503 for a while, and clients retry as SDKs do. The gateway must not add a storm of its own.

Times are a fifth of an SDK's. Afterwards all must be as before: no backlog
that feeds itself, no replica left out.
"""

import asyncio
import random
import time

from tests.support.engines import plan, requests_of
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.queue_wait_s": 5}
CLIENTS = 24
SLOTS, REPLICAS, ANSWER_MS = 2, 3, 150
SCALE = 5.0
WINDOW_S = 1.0
RESERVE = 5
"""Retries that even an endpoint with few requests may make (``policy/retries.py``)."""


async def call_as_sdk(load: Load, chance: random.Random) -> None:
    """Make one call as OpenAI's SDK does: three tries, and pauses as the server asks or doubling."""
    for tries in range(3):
        exchange = await load.send(chat("sim", "hello"))
        told = exchange.header("retry-after")
        if exchange.status not in (0, 408, 409, 429) and exchange.status < 500:
            return
        if exchange.header("x-should-retry") == "false" or (told and int(told) > 120):
            return
        pause_s = float(told) if told else 0.5 * 2**tries * (1 - 0.25 * chance.random())
        await asyncio.sleep(pause_s / SCALE)


def good(exchanges: list[Exchange], since_s: float) -> list[Exchange]:
    return [e for e in exchanges if e.outcome is Outcome.COMPLETE and (e.ended_s or 0) >= since_s]


def retries_metric(yard: Yard) -> int:
    page = yard.call("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in page if line.startswith("modelyard_retries_total{"))


async def test_storm_of_clients_is_not_multiplied_and_ends_with_its_cause(yard: Yard) -> None:
    await asyncio.to_thread(
        yard.deploy, "sim", options={"slots": SLOTS, "ttft_ms": ANSWER_MS, "itl_ms": 1}, replicas=REPLICAS
    )
    engines = yard.engines("sim")
    is_over = asyncio.Event()

    async def caller(load: Load, number: int) -> None:
        chance = random.Random(number)
        while not is_over.is_set():
            await call_as_sdk(load, chance)

    async with Load(yard.port, yard.admin_key) as load:
        callers = [asyncio.create_task(caller(load, number)) for number in range(CLIENTS)]

        def served(window_s: float = WINDOW_S) -> int:
            return len(good(load.exchanges, time.monotonic() - window_s))

        await eventually_async(lambda: served() > 10, 30, "they are served")
        await asyncio.sleep(WINDOW_S)  # the measure itself: how many in a second
        before = served()

        for engine in engines:
            plan(yard, engine, "http_error=503")
        stormed_s = time.monotonic()
        began = {engine.pid: len(requests_of(yard, engine)) for engine in engines}

        def has_stormed() -> bool:
            return sum(e.status == 503 for e in load.exchanges) > 100 and time.monotonic() > stormed_s + 2

        await eventually_async(has_stormed, 30, "the storm has blown")
        arrived = len(load.exchanges)
        worked = sum(len(requests_of(yard, engine)) - began[engine.pid] for engine in engines)
        stormy = [e for e in load.exchanges[:arrived] if e.started_s >= stormed_s]
        # Of requests in ten seconds before, too, a tenth may be retried; all of this test is hardly longer.
        assert worked <= len(stormy) + CLIENTS + max(RESERVE, 0.1 * arrived), f"{worked} for {len(stormy)}"
        refused = {e.error["code"] for e in stormy if e.outcome is Outcome.REFUSED}
        assert refused == {"engine_unavailable"}, refused
        assert all(1 <= int(e.header("retry-after") or 0) <= 120 for e in stormy if e.status == 503)

        for engine in engines:
            plan(yard, engine, "")
        await eventually_async(lambda: served() >= 0.9 * before, 30, f"{before} answers a second, as before")
        calm_s = time.monotonic()
        await eventually_async(lambda: len(good(load.exchanges, calm_s)) >= before, 30, "it stays so")
        failed = [e for e in load.exchanges if e.started_s > calm_s and e.outcome is Outcome.REFUSED]
        assert not failed, "nobody is refused any more"
        is_over.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*callers)
        rows = check_ledger(yard, load.exchanges)
    attempts = yard.query("SELECT sum(attempts) AS n FROM inference_requests")[0]["n"]
    retried = sum(len(requests_of(yard, engine)) for engine in engines) - len(rows)
    assert 0 < retried <= max(RESERVE, 0.1 * len(load.exchanges)), (
        f"{retried} retries of {len(load.exchanges)} requests"
    )
    assert attempts - len(rows) == retried, "all are billed to"
    await eventually_async(lambda: retries_metric(yard) == retried, 30, "all are counted")
    late = {rows[e.request_id or ""].replica_id for e in good(load.exchanges, calm_s)}
    assert len(late) >= REPLICAS - 1, "replicas come back"
