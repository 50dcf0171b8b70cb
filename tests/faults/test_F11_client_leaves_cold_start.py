"""F11: clients leave while the model that they asked for loads: the load goes on, and nobody else notices."""

import asyncio

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

LOAD_S = 3.0
TOKENS = 20_000
SEEN: list[Exchange] = []
"""Every request of this file: the ledger is checked against all of them."""


@pytest.fixture
def cold(yard: Yard, request: pytest.FixtureRequest) -> str:
    """Return a model of which nothing runs."""
    name = f"cold-{abs(hash(request.node.name)) % 10_000}"
    yard.deploy(
        name,
        options={"slots": 8, "ttft_ms": 1, "itl_ms": 1, "load_s": LOAD_S},
        scaling={"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 5},
        wait=False,
    )
    return name


def begun(yard: Yard, model: str) -> int:
    """Return how often an engine of a model was started."""
    events = yard.get(f"/v1/endpoints/{model}/events?limit=200")["data"]
    return sum(1 for event in events if event["kind"] == "replica_started")


async def admitted(load: Load, model: str, key: str) -> Exchange | None:
    """Send a request; return it if it stands in line, or is answered already, and was not refused."""
    sent = load.start(chat(model, "mine", stream=True, max_tokens=9_000), key=key)
    await eventually_async(lambda: sent.outcome is not None or sent.comments, 30, "it is told something")
    return None if sent.outcome is Outcome.REFUSED else sent


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_the_load_goes_on_and_the_others_are_served(yard: Yard, cold: str, stream: bool) -> None:
    key = yard.new_key(name="bounded", limits={"tokens_per_minute": TOKENS, "concurrency": 2})
    await asyncio.to_thread(yard.wait_asleep, cold)
    before = begun(yard, cold)
    async with Load(yard.port, yard.admin_key) as load:
        # Two that leave hold all of their key's concurrency and most of its tokens.
        leaving = [load.start(chat(cold, "bye", stream=stream, max_tokens=9_000), key=key) for _ in range(2)]
        staying = [load.start(chat(cold, f"stay {number}", stream=number % 2 == 0)) for number in range(4)]
        await eventually_async(lambda: begun(yard, cold) > before, 30, "the load has begun")
        for exchange in leaving:
            assert exchange.outcome is None
            exchange.leave()
        await eventually_async(lambda: all(exchange.outcome for exchange in leaving), 30, "they are gone")

        # What they had reserved is free again, long before the model is there.
        next_one = await eventually_async(lambda: admitted(load, cold, key), 30, "there is room for another one")
        await load.finish()
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
    assert {exchange.outcome for exchange in leaving} == {Outcome.LEFT}
    assert {exchange.outcome for exchange in staying} == {Outcome.COMPLETE}
    assert next_one.outcome is Outcome.COMPLETE, next_one
    assert begun(yard, cold) - before == 1, "one load for all"


async def test_a_load_that_nobody_waits_for_any_more_is_finished(yard: Yard, cold: str) -> None:
    await asyncio.to_thread(yard.wait_asleep, cold)
    before = begun(yard, cold)
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(chat(cold, "never mind"))
        await eventually_async(lambda: begun(yard, cold) > before, 30, "the load has begun")
        exchange.leave()
        await load.finish()
        eventually(lambda: yard.ready_replicas(cold) == 1, 30, "the model is there all the same")
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
    assert begun(yard, cold) - before == 1
    assert not [row for row in yard.rows() if row.request_id == exchange.request_id], "it cost nothing"
    eventually(lambda: not any(yard.gauges().values()), 30, "nothing is in flight or queued")
