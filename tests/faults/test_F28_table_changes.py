"""F28: the routing table changes every 200 ms under load, and a model in use is removed: nobody else notices."""

import asyncio
import itertools

from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

SETTINGS = {"control.drain_timeout_s": 20}
"""Far longer than what is in use when its model is removed."""
CHANGES = 25
PAUSE_S = 0.2


async def change(yard: Yard, is_over: asyncio.Event) -> int:
    """Create and delete keys and endpoints, one change every 200 ms; return how many were made."""
    made = 0
    for number in itertools.count():
        name = f"passing-{number}"
        order = {
            "model_name": name,
            "framework": "simulated",
            "hardware": {"min_replicas": 0, "max_replicas": 1},
            "scaling": {"scale_to_zero": True},
        }
        key = await asyncio.to_thread(yard.call, "POST", "/v1/keys", {"name": name, "scopes": ["inference"]})
        assert key.status == 201, key
        deployed = await asyncio.to_thread(yard.call, "POST", "/v1/models/deploy", order)
        assert deployed.status == 202, deployed
        await asyncio.sleep(PAUSE_S)  # the pace is the fault
        gone = await asyncio.to_thread(yard.call, "DELETE", f"/v1/endpoints/{name}")
        assert gone.status in (200, 202, 204), gone
        gone = await asyncio.to_thread(yard.call, "DELETE", f"/v1/keys/{key.json()['id']}")
        assert gone.status in (200, 204), gone
        refused = await asyncio.to_thread(
            yard.call, "POST", "/v1/models/deploy", {"model_name": name, "framework": "no such thing"}
        )
        assert refused.status == 400, refused
        await asyncio.sleep(PAUSE_S)
        made += 4
        if is_over.is_set() and made >= CHANGES:
            return made
    raise AssertionError("unreachable")


async def test_other_models_do_not_notice_and_the_removed_one_finishes_its_requests(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 64, "ttft_ms": 1, "itl_ms": 2})
    yard.deploy("leaving", options={"slots": 64, "ttft_ms": 1, "itl_ms": 2})
    is_over = asyncio.Event()
    async with Load(yard.port, yard.admin_key) as load:
        changing = asyncio.create_task(change(yard, is_over))
        steady = [load.start(chat("sim", "[[sim: tokens=60 slow=40]] on", stream=True)) for _ in range(30)]
        in_use = [load.start(chat("leaving", "[[sim: tokens=30 slow=40]] on", stream=True)) for _ in range(10)]
        await asyncio.gather(*(load.delivered(stream, 2) for stream in in_use))
        gone = await asyncio.to_thread(yard.call, "DELETE", "/v1/endpoints/leaving")
        assert gone.status in (200, 202, 204), gone

        async def refused() -> bool:
            return (await load.send(chat("leaving", "hello"))).status == 404

        await eventually_async(refused, 15, "new requests for the removed model are 404")
        while not changing.done():
            quick = await load.send(chat("sim", "hello", max_tokens=2))
            assert quick.outcome is Outcome.COMPLETE, quick
            if all(stream.outcome for stream in [*steady, *in_use]):
                is_over.set()
        assert await changing >= CHANGES
        await load.finish()
        check_ledger(yard, load.exchanges)
    assert {stream.outcome for stream in steady} == {Outcome.COMPLETE}
    assert {stream.outcome for stream in in_use} == {Outcome.COMPLETE}, "those that ran when it was removed"
    others = [exchange for exchange in load.exchanges if exchange not in in_use and exchange.outcome is Outcome.REFUSED]
    assert all(exchange.status == 404 for exchange in others)
