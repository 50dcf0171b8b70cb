"""The line before a busy endpoint: what those in it are told, when it is full, and who gives way.

The endpoint does one request at a time, so a long one makes all others wait.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

PLACES = 4
QUEUE_WAIT_S = 6.0
SETTINGS = {
    "gateway.queue_max": PLACES,
    "gateway.queue_wait_s": QUEUE_WAIT_S,
    "gateway.loading_comment_s": 0.2,
}
SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("one", options={"slots": 1, "ttft_ms": 1, "itl_ms": 1}, shared=True)
    return "one"


@pytest.fixture
async def load(yard: Yard) -> AsyncIterator[Load]:
    async with Load(yard.port, yard.admin_key) as load:
        yield load
        SEEN.extend(load.exchanges)


@pytest.fixture(scope="module")
def urgent(yard: Yard) -> str:
    return yard.new_tenant("urgent", plan="priority")


def queued(yard: Yard) -> int:
    return int(sum(value for name, value in yard.gauges().items() if "queued" in name))


async def occupy(load: Load, model: str) -> Exchange:
    """Keep the only slot busy until the stream is left."""
    stream = load.start(chat(model, "[[sim: tokens=2500 slow=20]] on and on", stream=True))
    await load.delivered(stream, 1)
    return stream


async def join(yard: Yard, load: Load, model: str, count: int, **fields: object) -> list[Exchange]:
    """Send requests one by one, each when the one before stands in line."""
    joined = []
    for _ in range(count):
        before = queued(yard)
        joined.append(load.start(chat(model, "hello", **fields)))
        await eventually_async(lambda before=before: queued(yard) > before, 30, "it waits")
    return joined


def check_told(refused: Exchange, code: str) -> None:
    """Check a refusal and that it says when to come back."""
    assert (refused.status, refused.error["code"]) == (429, code), refused
    assert 1 <= int(refused.header("retry-after") or 0) <= 120
    assert refused.error["type"] == "requests"


async def test_streams_in_line_are_told_their_position_and_answers_how_long_they_waited(
    yard: Yard, load: Load, model: str
) -> None:
    hog = await occupy(load, model)
    (first,) = await join(yard, load, model, 1, stream=True)
    (second,) = await join(yard, load, model, 1, stream=True)
    (plain,) = await join(yard, load, model, 1)
    await eventually_async(lambda: first.comments and second.comments, 5, "they are told")
    hog.leave()
    await load.finish()
    assert {exchange.outcome for exchange in (first, second, plain)} == {Outcome.COMPLETE}, load.exchanges
    assert {comment.partition(",")[2][:11] for comment in first.comments} == {" position 1"}, first.comments
    assert second.comments[0].startswith(": queued, position 2"), second.comments
    waited_ms = int(plain.header("x-modelyard-queued-ms") or 0)
    assert 1 <= waited_ms <= plain.duration_s * 1000
    at_once = await load.send(chat(model, "hello"))
    assert at_once.header("x-modelyard-queued-ms") is None, "it did not wait"
    check_ledger(yard, [*SEEN, *load.exchanges])


async def test_who_finds_the_line_full_is_refused_at_once_and_served_when_it_comes_back_as_told(
    yard: Yard, load: Load, model: str
) -> None:
    hog = await occupy(load, model)
    standing = await join(yard, load, model, PLACES)
    late = await load.send(chat(model, "hello"))
    check_told(late, "queue_full")
    assert not any(exchange.outcome for exchange in standing), "it was told before anything changed"
    hog.leave()
    await asyncio.sleep(int(late.header("retry-after") or 0))  # as an SDK does
    again = await load.send(chat(model, "hello"))
    assert again.outcome is Outcome.COMPLETE, again
    await load.finish()
    assert {exchange.outcome for exchange in standing} == {Outcome.COMPLETE}, "those in line lost nothing"
    rows = check_ledger(yard, [*SEEN, *load.exchanges])
    assert late.request_id not in rows


async def test_who_waits_too_long_is_told_so_in_the_form_that_is_left(yard: Yard, load: Load, model: str) -> None:
    hog = await occupy(load, model)
    (plain,) = await join(yard, load, model, 1)
    (stream,) = await join(yard, load, model, 1, stream=True)
    await eventually_async(lambda: plain.outcome and stream.outcome, QUEUE_WAIT_S + 30, "both are refused")
    check_told(plain, "queue_timeout")
    assert plain.duration_s >= QUEUE_WAIT_S, "not before its time"
    assert (stream.status, stream.outcome) == (200, Outcome.ERROR_EVENT), "its head was out with the first comment"
    assert stream.error["code"] == "queue_timeout"
    hog.leave()
    await load.finish()
    rows = check_ledger(yard, [*SEEN, *load.exchanges])
    assert {plain.request_id, stream.request_id}.isdisjoint(rows), "waiting costs nothing"
    assert not yard.events_of(stream.request_id), "no engine has seen it"


async def test_batch_fills_half_of_the_line_and_gives_way_to_the_urgent(
    yard: Yard, load: Load, model: str, urgent: str
) -> None:
    hog = await occupy(load, model)
    older, younger = await join(yard, load, model, PLACES // 2, service_tier="flex")
    third = await load.send(chat(model, "hello", service_tier="flex"))
    check_told(third, "queue_full")
    standard = await join(yard, load, model, PLACES // 2)
    full = await load.send(chat(model, "hello", service_tier="flex"))
    check_told(full, "queue_full")
    assert not younger.outcome, "no batch request takes the place of another of its tenant"
    first = load.start(chat(model, "hello"), key=urgent)
    await eventually_async(lambda: younger.outcome, 30, "the youngest of the least urgent gives way")
    check_told(younger, "queue_full")
    assert hog.outcome is None, "to who came, not to time"
    hog.leave()
    await load.finish()
    served = [first, *standard, older]
    assert {exchange.outcome for exchange in served} == {Outcome.COMPLETE}, served
    begun = [r["rid"] for r in yard.journal() if r["event"] == "begin"]
    in_line = sorted(served, key=lambda exchange: begun.index(exchange.request_id))
    assert in_line[0] is first, "who came last is next"
    check_ledger(yard, [*SEEN, *load.exchanges])
