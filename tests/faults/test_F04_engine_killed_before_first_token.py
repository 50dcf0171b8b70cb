"""F4: ``kill -9`` of an engine that has a request and has said nothing yet."""

import asyncio

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

THINKING = "[[sim: ttft=3000]] four words to echo"
OPTIONS = {"slots": 4, "ttft_ms": 1, "itl_ms": 1}


async def kill_the_engine_of(yard: Yard, model: str, exchange: Exchange) -> str:
    """Wait until some engine of ``model`` has begun a request that no ledger row knows, and kill that engine."""
    known = {row.request_id for row in yard.rows()}
    engines = {engine.pid: engine for engine in yard.engines(model)}

    def begun() -> list[int]:
        assert exchange.outcome is None, f"ended before the engine was killed: {exchange!r}"
        records = [r for r in yard.journal() if r["event"] == "begin" and r["pid"] in engines]
        return [record["pid"] for record in records if record["rid"].startswith("req_") and record["rid"] not in known]

    pid = (await eventually_async(begun, 30, "an engine has the request"))[0]
    yard.kill(pid)
    return engines[pid].replica_id


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_with_another_replica_the_client_sees_nothing(yard: Yard, stream: bool) -> None:
    model = f"pair-{stream}".lower()
    await asyncio.to_thread(yard.deploy, model, options=OPTIONS, replicas=2)
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, THINKING, stream=stream))
        killed = await kill_the_engine_of(yard, model, exchange)
        await load.finish()
        assert exchange.outcome is Outcome.COMPLETE, exchange
        assert exchange.text.strip() == "four words to echo"
        rows = check_ledger(yard, load.exchanges + SEEN)
        SEEN.extend(load.exchanges)
    assert rows[exchange.request_id or ""].replica_id != killed
    assert yard.row_of(exchange.request_id)["attempts"] == 2, "the failed attempt is recorded, not billed"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_with_a_single_replica_the_client_is_told_when_to_retry(yard: Yard, stream: bool) -> None:
    model = f"single-{stream}".lower()
    await asyncio.to_thread(yard.deploy, model, options=OPTIONS)
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(model, THINKING, stream=stream))
        await kill_the_engine_of(yard, model, exchange)
        await load.finish()
        assert exchange.outcome is Outcome.REFUSED, exchange
        assert (exchange.status, exchange.error["code"]) == (503, "engine_unavailable")
        assert 1 <= int(exchange.header("retry-after") or 0) <= 120
        again = await load.until_served(model)
        assert again.outcome is Outcome.COMPLETE
        check_ledger(yard, load.exchanges + SEEN)
        SEEN.extend(load.exchanges)


SEEN: list[Exchange] = []
"""Everything sent in this file: the ledger is checked as a whole."""
