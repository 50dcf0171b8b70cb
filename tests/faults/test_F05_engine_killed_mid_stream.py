"""F5: ``kill -9`` of an engine in the middle of a stream."""

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import Yard

SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 5})
    return "sim"


@pytest.fixture(autouse=True)
async def _whole(yard: Yard, model: str) -> None:
    """Begin each test with an engine that answers."""
    async with Load(yard.port, yard.admin_key) as load:
        await load.until_served(model)
        SEEN.extend(load.exchanges)


def assert_ended_with_engine_lost(stream: Exchange) -> None:
    assert stream.outcome is Outcome.ERROR_EVENT, f"{stream!r} {bytes(stream.received)[-300:]!r}"
    assert stream.status == 200
    assert (stream.error["type"], stream.error["code"]) == ("server_error", "engine_lost")
    assert set(stream.error) == {"message", "type", "param", "code"}
    assert "[DONE]" not in stream.data


async def test_the_stream_ends_with_an_error_event_and_delivered_tokens_are_billed(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        stream = load.start(chat(model, "[[sim: tokens=300 slow=20]] on and on", stream=True))
        await load.delivered(stream, 5)

        yard.kill(yard.engines(model)[0].pid)

        await load.finish()
        assert_ended_with_engine_lost(stream)
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    row = rows[stream.request_id or ""]
    assert (row.status, row.completion_tokens) == ("error", stream.delivered)


async def test_an_engine_that_crashes_after_k_tokens_bills_no_more_than_k(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        stream = await load.send(chat(model, "[[sim: tokens=20 crash_after=7]] again", stream=True))
        assert_ended_with_engine_lost(stream)
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    assert stream.delivered <= rows[stream.request_id or ""].completion_tokens <= 7


async def test_others_on_the_same_engine_are_told_too_and_new_ones_are_served_after_the_restart(
    yard: Yard, model: str
) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        streams = [load.start(chat(model, "[[sim: tokens=300 slow=20]] on", stream=True)) for _ in range(4)]
        for stream in streams:
            await load.delivered(stream, 2)
        yard.kill(yard.engines(model)[0].pid)
        await load.finish()
        for stream in streams:
            assert_ended_with_engine_lost(stream)
        after = await load.until_served(model)
        assert after.outcome is Outcome.COMPLETE, after
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
