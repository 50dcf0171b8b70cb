"""F26: 500 requests at once for a model that is scaled to zero and takes seconds to load."""

from collections import Counter

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.yard import Yard

PLACES = 128
HERD = 500
LOAD_S = 6.0
"""Longer than it takes to send them all: nobody comes when the model is there."""
SETTINGS = {"gateway.queue_max": PLACES, "gateway.loading_comment_s": 0.3, "gateway.load_wait_s": 60}


@pytest.fixture(scope="module")
def cold(yard: Yard) -> str:
    yard.deploy(
        "cold",
        options={"slots": 32, "ttft_ms": 1, "itl_ms": 1, "load_s": LOAD_S},
        scaling={"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1},
        wait=False,
    )
    yard.wait_asleep("cold")
    return "cold"


def starts_of(yard: Yard, model: str) -> int:
    """Return how often an engine of a model was started."""
    events = yard.get(f"/v1/endpoints/{model}/events?limit=200")["data"]
    return sum(1 for event in events if event["kind"] == "replica_started")


async def test_a_herd_starts_one_engine_and_nobody_hangs(yard: Yard, cold: str) -> None:
    before = starts_of(yard, cold)
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(HERD):
            load.start(chat(cold, f"hello {number}", stream=number % 2 == 0), within_s=90)
        await load.finish(90)
        check_ledger(yard, load.exchanges)

    ends = Counter(exchange.outcome for exchange in load.exchanges)
    assert set(ends) == {Outcome.COMPLETE, Outcome.REFUSED}, ends
    assert PLACES <= ends[Outcome.COMPLETE] <= PLACES + 64, f"the line has {PLACES} places: {ends}"
    for exchange in load.exchanges:
        if exchange.outcome is Outcome.REFUSED:
            assert exchange.status in (429, 503), exchange
            assert exchange.error["code"] in ("model_loading", "queue_full"), exchange
            assert 1 <= int(exchange.header("retry-after") or 0) <= 120
    served = [exchange for exchange in load.exchanges if exchange.outcome is Outcome.COMPLETE]
    streams = [exchange for exchange in served if exchange.asks_stream]
    assert streams
    for stream in streams:
        assert any(comment.startswith(": loading") for comment in stream.comments), f"no progress told: {stream!r}"
    assert starts_of(yard, cold) - before == 1, "one load for all"
