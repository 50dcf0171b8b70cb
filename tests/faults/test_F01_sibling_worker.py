"""F1 with two gateway workers: the sibling goes on, and takes new requests at once."""

import asyncio
from collections import Counter

from tests.support import processes
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2}


async def test_streams_of_the_sibling_finish_and_new_requests_are_served(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 128, "ttft_ms": 1, "itl_ms": 1})
    async with Load(yard.port, yard.admin_key) as load:
        streams = [load.start(chat("sim", "[[sim: tokens=150 slow=40]] on", stream=True)) for _ in range(60)]
        await asyncio.gather(*(load.delivered(stream, 5) for stream in streams))
        victim, _ = yard.plane_pids("gateway")

        yard.kill(victim)
        # Until it is dead and gone its socket takes connections, which are lost with it.
        await eventually_async(lambda: not processes.state(victim), 30, "its supervisor has seen it die")

        later = [load.start(chat("sim", "hello", stream=number % 2 == 0)) for number in range(40)]
        await load.finish(90)
        check_ledger(yard, load.exchanges)
    ends = Counter(stream.outcome for stream in streams)
    assert set(ends) == {Outcome.ABRUPT, Outcome.COMPLETE}, ends
    assert {exchange.outcome for exchange in later} == {Outcome.COMPLETE}
