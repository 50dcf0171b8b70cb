"""F32: one request crashes any engine that gets it, and must not take the fleet down."""

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import Yard

SETTINGS = {"control.crash_backoff_s": 5, "control.crash_backoff_max_s": 5}
SEEN: list[Exchange] = []
DEATH = "[[sim: crash_always]] the query of death"


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 5}, replicas=4)
    return "sim"


@pytest.fixture(autouse=True)
def _whole(yard: Yard, model: str) -> None:
    yard.wait_ready(model, 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_two_engines_die_and_no_more_whoever_asks_again(yard: Yard, model: str, stream: bool) -> None:
    before = {engine.pid for engine in yard.engines(model)}
    prompt = f"{DEATH} {stream}"
    async with Load(yard.port, yard.admin_key) as load:
        first = await load.send(chat(model, prompt, stream=stream))
        assert (first.outcome, first.status) == (Outcome.REFUSED, 400), first
        assert first.error["code"] == "request_crashes_engine"
        again = [load.start(chat(model, prompt, stream=stream), key=yard.new_key()) for _ in range(10)]
        await load.finish()
        assert {(exchange.status, exchange.error["code"]) for exchange in again} == {(400, "request_crashes_engine")}
        honest = await load.send(chat(model, "an honest question"))
        assert honest.outcome is Outcome.COMPLETE, honest
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    assert len(before & {engine.pid for engine in yard.engines(model)}) == 2, "exactly two died of it"
    assert rows[first.request_id or ""].cost_nanousd == 0


async def test_those_who_were_on_the_same_engine_are_served_elsewhere(yard: Yard, model: str) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        innocent = [load.start(chat(model, f"[[sim: tokens=60 slow=20]] innocent {n}", stream=True)) for n in range(8)]
        for stream in innocent:
            await load.delivered(stream, 3)
        death = await load.send(chat(model, f"{DEATH} among others"))
        await load.finish()
        SEEN.extend(load.exchanges)
        assert death.error["code"] in ("request_crashes_engine", "engine_unavailable")
        assert {stream.outcome for stream in innocent} == {Outcome.COMPLETE}, innocent
        again = await load.send(chat(model, "[[sim: tokens=60 slow=1]] innocent 0", stream=True))
        assert again.outcome is Outcome.COMPLETE, again
        SEEN.append(again)
        check_ledger(yard, SEEN)


async def test_a_stream_that_kills_in_mid_answer_is_not_cleared_by_those_who_go_on_with_it(
    yard: Yard, model: str
) -> None:
    before = {engine.pid for engine in yard.engines(model)}
    body = chat(model, "[[sim: crash_after=3]] a b c d e f g h that kills whoever begins it", stream=True)
    async with Load(yard.port, yard.admin_key) as load:
        asked = [await load.send(body) for _ in range(4)]
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
    assert asked[0].outcome is Outcome.COMPLETE, asked[0]
    assert [(one.status, one.error["code"]) for one in asked[2:]] == [(400, "request_crashes_engine")] * 2, asked
    assert len(before & {engine.pid for engine in yard.engines(model)}) == 2, "two died, and no more"
