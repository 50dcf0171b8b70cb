"""F36: an engine that answers garbage is told apart from an answer, in bounded memory, and never billed as one."""

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.processes import memory_of
from tests.support.yard import Yard

SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["garbage=invalid_json", "garbage=error_200", "garbage=content_type"])
async def test_what_is_no_answer_is_a_502_and_free(yard: Yard, model: str, fault: str, stream: bool) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        bad = await load.send(chat(model, f"[[sim: {fault}]] hello there", stream=stream))
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    assert bad.error["code"] in ("bad_engine_response", "engine_error"), bad
    assert bad.status in (502, 200)
    assert "hello" not in str(bad.error)
    assert rows[bad.request_id or ""].status == "error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["no_usage", "null_usage"])
async def test_an_answer_without_usage_is_billed_what_the_gateway_counted(
    yard: Yard, model: str, fault: str, stream: bool
) -> None:
    async with Load(yard.port, yard.admin_key) as load:
        answer = await load.send(chat(model, f"[[sim: {fault}]] one two three four five", stream=stream))
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    assert answer.outcome is Outcome.COMPLETE, answer
    assert rows[answer.request_id or ""].completion_tokens >= 4
    assert yard.row_of(answer.request_id)["is_estimated"]


async def test_a_line_without_end_is_cut_off_before_it_fills_the_memory(yard: Yard, model: str) -> None:
    (gateway,) = yard.plane_pids("gateway")
    before = memory_of(gateway)
    async with Load(yard.port, yard.admin_key) as load:
        bad = await load.send(chat(model, f"[[sim: huge_line={200 * 1024 * 1024}]] hi", stream=True))
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
    assert bad.error["code"] == "bad_engine_response", bad
    assert memory_of(gateway) - before < 64 * 1024 * 1024
