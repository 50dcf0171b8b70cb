"""Time-outs of an endpoint's own: four values, four codes (that of the connection has F37).

Each endpoint here has one short time-out; all others are the gateway's, which
are far longer than any test. What one endpoint asked for is nobody else's.
"""

from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import CONTEXT, Yard

SETTINGS = {
    "gateway.first_token_timeout_s": 30,
    "gateway.token_timeout_s": 30,
    "gateway.total_timeout_s": 60,
    "gateway.loading_comment_s": 0.4,  # looked at every tenth of a second
}
OPTIONS = {"slots": 8, "ttft_ms": 1, "itl_ms": 1}
OWN_S = {"first_token_s": 0.6, "token_s": 0.5, "total_s": 1.8}
SLOW_FIRST = "[[sim: ttft=1200]] four words to echo"
SLOW_NEXT = "[[sim: tokens=2 slow=1200]] on and on"
LONG = "[[sim: tokens=160 slow=20]] on and on"
SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def endpoints(yard: Yard) -> None:
    """Deploy an endpoint for each time-out, two of them changed after they were made, and one without."""
    for name, value in OWN_S.items():
        model = name.replace("_", "-")
        serving: dict[str, Any] = {"timeouts": {name: value}}
        if name == "total_s":
            order = {"model_name": model, "framework": "simulated", "serving": serving}
            order["options"] = {**OPTIONS, "context_length": CONTEXT, "journal": str(yard.folder / "tokens/own.jsonl")}
            assert yard.call("POST", "/v1/models/deploy", order).status == 202
            continue
        yard.deploy(model, options=OPTIONS, wait=False)
        reply = yard.call("PATCH", f"/v1/endpoints/{model}", {"serving": serving})
        assert reply.status == 200, reply.body
        assert reply.json()["serving"]["timeouts"][name] == value
    yard.deploy("patient", options=OPTIONS)
    for name in OWN_S:
        yard.wait_ready(name.replace("_", "-"))


async def both(yard: Yard, model: str, prompt: str, *, stream: bool) -> tuple[Exchange, Exchange]:
    """Send the same to an endpoint and to the one without a time-out of its own; return both ends."""
    async with Load(yard.port, yard.admin_key) as load:
        short, patient = (load.start(chat(name, prompt, stream=stream)) for name in (model, "patient"))
        await load.finish()
        SEEN.extend(load.exchanges)
    assert patient.outcome is Outcome.COMPLETE, patient
    return short, patient


def engine_was_stopped(yard: Yard, exchange: Exchange) -> bool:
    return any(event["why"] == "client gone" for event in yard.events_of(exchange.request_id, "abort"))


@pytest.mark.usefixtures("endpoints")
async def test_no_first_token_in_time_is_a_504(yard: Yard) -> None:
    short, _ = await both(yard, "first-token-s", SLOW_FIRST, stream=True)
    assert (short.status, short.error["code"]) == (504, "engine_first_token_timeout"), short
    assert "0.6 s" in short.error["message"]
    rows = check_ledger(yard, SEEN)
    assert rows[short.request_id or ""].status == "timeout"
    eventually(lambda: engine_was_stopped(yard, short), 30, "its engine is told to stop")


@pytest.mark.usefixtures("endpoints")
async def test_an_answer_that_is_not_streamed_has_no_first_token_to_wait_for(yard: Yard) -> None:
    short, _ = await both(yard, "first-token-s", SLOW_FIRST, stream=False)
    assert short.outcome is Outcome.COMPLETE, short
    check_ledger(yard, SEEN)


@pytest.mark.usefixtures("endpoints")
async def test_no_next_token_in_time_ends_the_stream_with_an_error(yard: Yard) -> None:
    short, _ = await both(yard, "token-s", SLOW_NEXT, stream=True)
    assert (short.outcome, short.error["code"]) == (Outcome.ERROR_EVENT, "engine_token_timeout"), short
    assert "0.5 s" in short.error["message"]
    rows = check_ledger(yard, SEEN)
    assert short.delivered == rows[short.request_id or ""].completion_tokens == 1, "what was delivered is billed"
    eventually(lambda: engine_was_stopped(yard, short), 30, "its engine is told to stop")


@pytest.mark.usefixtures("endpoints")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_an_answer_that_takes_too_long_in_all_ends(yard: Yard, stream: bool) -> None:
    short, _ = await both(yard, "total-s", LONG, stream=stream)
    assert short.error["code"] == "engine_total_timeout", short
    assert (short.status, short.outcome) == ((200, Outcome.ERROR_EVENT) if stream else (504, Outcome.REFUSED))
    assert "1.8 s" in short.error["message"]
    rows = check_ledger(yard, SEEN)
    billed = rows[short.request_id or ""].completion_tokens
    assert (0 < short.delivered <= billed < 160) if stream else billed == 0
    eventually(lambda: engine_was_stopped(yard, short), 30, "its engine is told to stop")
