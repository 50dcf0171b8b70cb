"""F35: three times more requests than an endpoint can serve, of callers with more and less right to be served.

Requests come at fixed times, whatever becomes of them. The engine decides how
much can be served: four at a time, two fifths of a second each; a busy machine has time for that.
"""

import asyncio
import statistics
import time

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

PLACES = 24
QUEUE_WAIT_S = 4.0
SETTINGS = {"gateway.queue_max": PLACES, "gateway.queue_wait_s": QUEUE_WAIT_S}
SLOTS, ANSWER_MS = 4, 400
OVERLOAD = 3.0
LOAD_S = 6.0
MIX = ("urgent", "usual", "flex", "usual", "cheap", "urgent", "usual", "flex", "usual", "cheap")
"""Who sends each of ten requests: two are urgent, 0.6 of what can be served; a fair share of three tenants is 0.33."""
SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def keys(yard: Yard) -> dict[str, str]:
    """Deploy the endpoint; return the key of each kind of caller."""
    yard.deploy("busy", options={"slots": SLOTS, "ttft_ms": ANSWER_MS, "itl_ms": 1}, shared=True)
    usual = yard.new_tenant("usual", plan="standard")
    return {
        "urgent": yard.new_tenant("urgent", plan="priority"),
        "usual": usual,
        "flex": usual,
        "cheap": yard.new_tenant("cheap", plan="batch"),
    }


def send(load: Load, keys: dict[str, str], who: str) -> Exchange:
    tier = {"service_tier": "flex"} if who == "flex" else {}
    return load.start(chat("busy", "hello", **tier), key=keys[who], label=who)


async def peak_per_s(load: Load, keys: dict[str, str]) -> float:
    """Measure what can be served: answers a second while as many as there are slots are always waiting."""
    ended: list[float] = []
    start_s = time.monotonic()

    async def caller() -> None:
        while time.monotonic() < start_s + 3:
            exchange = await load.send(chat("busy", "hello"), key=keys["usual"])
            assert exchange.outcome is Outcome.COMPLETE, exchange
            ended.append(exchange.ended_s or 0)

    await asyncio.gather(*(caller() for _ in range(2 * SLOTS)))
    return len(ended) / (max(ended) - start_s)


async def test_overload_costs_those_with_less_right_and_nothing_else(yard: Yard, keys: dict[str, str]) -> None:
    async with Load(yard.port, keys["usual"]) as calm:
        peak = await peak_per_s(calm, keys)
    SEEN.extend(calm.exchanges)
    async with Load(yard.port, keys["usual"]) as load:
        start_s = time.monotonic()
        for number in range(int(LOAD_S * OVERLOAD * peak)):
            due_s = start_s + number / (OVERLOAD * peak)
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            send(load, keys, MIX[number % len(MIX)])
        end_s = time.monotonic()
        sent = list(load.exchanges)
        done = [e for e in sent if e.outcome is Outcome.COMPLETE and start_s + 1 <= (e.ended_s or 0) <= end_s]
        goodput = len(done) / (end_s - start_s - 1)
        await load.finish()
        SEEN.extend(load.exchanges)
    async with Load(yard.port, keys["usual"]) as calm:
        # A machine that got slower meanwhile serves fewer with or without overload.
        best = min(peak, await peak_per_s(calm, keys))
    SEEN.extend(calm.exchanges)
    assert goodput >= 0.9 * best, f"{goodput:.1f} answers a second under overload, {best:.1f} at best"

    refused = [e for e in sent if e.outcome is not Outcome.COMPLETE]
    assert len(refused) > len(sent) / 2, "three times too many"
    assert {e.error["code"] for e in refused} <= {"queue_full", "queue_timeout"}
    assert {e.status for e in refused} == {429}
    assert all(1 <= int(e.header("retry-after") or 0) <= 120 for e in refused)
    assert statistics.median(e.duration_s for e in refused) < QUEUE_WAIT_S / 2, "most are told at once"
    assert max(e.duration_s for e in refused) < QUEUE_WAIT_S + 3, "and nobody waits longer than one may"

    urgent = [e for e in sent if e.label == "urgent"]
    share = sum(e.outcome is Outcome.COMPLETE for e in urgent) / len(urgent)
    assert share >= 0.99, f"{share:.0%} of the urgent"
    batch = [e for e in sent if e.label in ("flex", "cheap")]
    served = {who: sum(e.outcome is Outcome.COMPLETE for e in sent if e.label == who) for who in set(MIX)}
    assert served["usual"] > served["flex"] + served["cheap"], served
    assert any(e.outcome is Outcome.COMPLETE for e in batch), "but batch is not starved"

    rows = check_ledger(yard, SEEN)
    assert not {e.request_id for e in refused} & set(rows), "refused is not billed"
    assert not {e.request_id for e in refused} & set(yard.generated()), "and has reached no engine"


async def test_when_it_is_over_everybody_is_served_at_once(yard: Yard, keys: dict[str, str]) -> None:
    await eventually_async(lambda: not any(yard.gauges().values()), 30, "nothing is left over")
    async with Load(yard.port, keys["usual"]) as load:
        after = [send(load, keys, who) for who in ("urgent", "usual", "flex", "cheap")]
        await load.finish()
        SEEN.extend(load.exchanges)
    assert {e.outcome for e in after} == {Outcome.COMPLETE}, after
    assert not any(e.header("x-modelyard-queued-ms") for e in after), "nobody had to wait"
    check_ledger(yard, SEEN)
