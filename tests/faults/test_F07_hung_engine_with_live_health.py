"""F7: an engine answers its probes and decodes nothing. F8 beside it: slow and full, but healthy, is left alone.

The engine is asked over its own port to stall: ``/health`` and ``/metrics``
answer as before, ``running`` stands and no token comes.
"""

import asyncio
import http.client
import json

from tests.support import processes
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import EngineProcess, Yard

HANG_S = 4.0
SETTINGS = {
    "control.hang_timeout_s": HANG_S,
    "gateway.first_token_timeout_s": 30,
    "gateway.token_timeout_s": 30,
}
OPTIONS = {"slots": 4, "ttft_ms": 1, "itl_ms": 2}
SEEN: list[Exchange] = []


def secret_of(engine: EngineProcess, yard: Yard) -> str:
    (row,) = yard.query(f"SELECT secret FROM replicas WHERE replica_id = '{engine.replica_id}'")
    return str(row["secret"])


def stall(engine: EngineProcess, yard: Yard) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
    try:
        headers = {"Authorization": f"Bearer {secret_of(engine, yard)}", "Content-Type": "application/json"}
        connection.request("POST", "/sim/faults", json.dumps([{"stalled": True}]), headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status < 300
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, "it looks healthy"
    finally:
        connection.close()


def killed_for(yard: Yard, name: str, replica_id: str) -> str:
    """Return why a replica was killed, "" while it was not."""
    events = yard.get(f"/v1/endpoints/{name}/events?limit=200")["data"]
    found = [e["reason"] for e in events if e["kind"] == "replica_killed" and e["replica_id"] == replica_id]
    return str(found[0]) if found else ""


async def test_engine_that_decodes_nothing_is_killed_and_replaced(yard: Yard) -> None:
    yard.deploy("hung", options=OPTIONS)
    (engine,) = yard.engines("hung")
    async with Load(yard.port, yard.admin_key) as load:
        streams = [load.start(chat("hung", "[[sim: tokens=400 slow=20]] on and on", stream=True)) for _ in range(2)]
        for stream in streams:
            await load.delivered(stream, 5)
        await asyncio.to_thread(stall, engine, yard)
        late = load.start(chat("hung", "hello"))
        reason = await eventually_async(
            lambda: asyncio.to_thread(killed_for, yard, "hung", engine.replica_id), 4 * HANG_S + 30, "it is killed"
        )
        assert "produced no token" in reason
        await load.finish()
        for stream in streams:
            # Its answer may be continued by the replica that takes its place, or end with an error that says so.
            assert stream.outcome in (Outcome.COMPLETE, Outcome.ERROR_EVENT), stream
        assert late.outcome in (Outcome.COMPLETE, Outcome.REFUSED), late
        eventually(lambda: [one for one in yard.engines("hung") if one.pid != engine.pid], 30, "another is started")
        eventually(lambda: not processes.is_alive(engine.pid), 30, "the first is gone")
        await load.until_served("hung")
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)


async def test_engine_that_hangs_idle_is_found_by_the_first_request(yard: Yard) -> None:
    yard.deploy("idle", options=OPTIONS)
    (engine,) = yard.engines("idle")
    stall(engine, yard)
    async with Load(yard.port, yard.admin_key) as load:
        load.start(chat("idle", "hello", stream=True))
        reason = await eventually_async(
            lambda: asyncio.to_thread(killed_for, yard, "idle", engine.replica_id), 4 * HANG_S + 30, "it is killed"
        )
        assert "produced no token" in reason
        await load.finish()
        await load.until_served("idle")
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)


async def test_slow_and_full_engine_is_left_alone(yard: Yard) -> None:
    # Four at a time, each with a first token after more than the hang timeout, and a queue behind them.
    yard.deploy("slow", options={**OPTIONS, "slots": 2, "ttft_ms": 1000 * HANG_S / 2, "itl_ms": 1})
    (engine,) = yard.engines("slow")
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(8):
            load.start(chat("slow", f"hello {number}", stream=number % 2 == 0))
        await load.finish(60)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        SEEN.extend(load.exchanges)
    assert [one.pid for one in yard.engines("slow")] == [engine.pid]
    assert not killed_for(yard, "slow", engine.replica_id)
    check_ledger(yard, SEEN)


async def test_engine_that_reads_a_long_prompt_is_left_alone(yard: Yard) -> None:
    # 180 tokens at 30 a second take six seconds, in which no counter moves; a slow machine is no hung one.
    yard.deploy("reader", options={**OPTIONS, "prefill_tokens_per_s": 30})
    (engine,) = yard.engines("reader")
    async with Load(yard.port, yard.admin_key) as load:
        exchange = await load.send(chat("reader", "word " * 180, stream=True))
        assert exchange.outcome is Outcome.COMPLETE, exchange
        assert exchange.duration_s > HANG_S, "or it proves nothing"
        SEEN.extend(load.exchanges)
    assert [one.pid for one in yard.engines("reader")] == [engine.pid]
    check_ledger(yard, SEEN)
