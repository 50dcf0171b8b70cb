"""F10: the client leaves before the first token, in mid-stream, or after the last token and before the usage."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.ledger import Row, check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 2, "ttft_ms": 1, "itl_ms": 2})
    return "sim"


async def leave(yard: Yard, body: dict[str, Any], when: Callable[[Exchange], bool], *, path: str) -> tuple[str, Row]:
    """Send a request, leave at ``when``, and return its id and its ledger row once everything is settled."""
    known = set(yard.generated())
    async with Load(yard.port, yard.admin_key) as load:
        exchange = load.start(body, path=path)
        (rid,) = await eventually_async(lambda: set(yard.generated()) - known, 30, "the engine has the request")
        await eventually_async(lambda: when(exchange), 30, f"the moment to leave {exchange!r}")
        assert exchange.outcome is None, f"ended too early: {exchange!r}"
        exchange.leave()
        await load.finish()
        assert exchange.outcome is Outcome.LEFT
        eventually(lambda: yard.events_of(rid, "abort"), 30, "the engine is told to stop")
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    assert len(yard.events_of(rid, "begin")) == 1, "it was not tried again"
    assert rows[rid].status == "client_closed"
    assert rows[rid].completion_tokens >= exchange.delivered
    return rid, rows[rid]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_before_the_first_token_only_the_prompt_is_billed(yard: Yard, model: str, stream: bool) -> None:
    body = chat(model, "[[sim: ttft=20000]] never heard", stream=stream)
    _, row = await leave(yard, body, lambda exchange: True, path="/v1/chat/completions")
    assert row.completion_tokens == 0
    assert row.prompt_tokens > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_in_mid_stream_what_was_generated_is_billed_once(yard: Yard, model: str, path: str) -> None:
    prompt = "[[sim: tokens=500 slow=20]] on and on"
    body: dict[str, Any] = chat(model, prompt, stream=True)
    if path == "/v1/completions":
        body = {"model": model, "prompt": prompt, "max_tokens": 600, "stream": True}
    rid, row = await leave(yard, body, lambda exchange: exchange.delivered >= 5, path=path)
    assert 5 <= row.completion_tokens <= sum(yard.generated()[rid].values()) < 500
    assert row.cost_nanousd > 0


async def test_a_plain_answer_that_nobody_waits_for_stops_its_engine(yard: Yard, model: str) -> None:
    body = chat(model, "[[sim: tokens=500 slow=20]] on and on")
    rid, _ = await leave(yard, body, lambda exchange: True, path="/v1/chat/completions")
    assert sum(yard.generated()[rid].values()) < 500


async def test_after_the_last_token_and_before_the_usage_all_tokens_are_billed(yard: Yard, model: str) -> None:
    body = chat(model, "[[sim: tokens=6 hang_after=6]] all is said", stream=True)
    _, row = await leave(yard, body, lambda exchange: exchange.delivered >= 6, path="/v1/chat/completions")
    assert row.completion_tokens == 6


async def test_slots_of_those_who_left_are_free_again(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(6):  # three times the slots
            left = load.start(chat(model, "[[sim: tokens=1500 slow=20]] on", stream=True))
            await load.delivered(left, 1)
            left.leave()
        after = await load.send(chat(model, "still here"), within_s=20)  # far less than a stream takes
        await load.finish()
        assert after.outcome is Outcome.COMPLETE, after
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
