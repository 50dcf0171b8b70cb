"""F33: one caller's bad requests must not cost others the model: they are not the replica's fault."""

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import Yard

SETTINGS = {"gateway.queue_wait_s": 0.2}
"""Shorter than the pause of an ejected replica: who waits for one is refused."""
SEEN: list[Exchange] = []


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 16, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


async def served_after(yard: Yard, model: str, fault: str) -> Exchange:
    """Send twelve requests with a fault under one key, then one honest request under another."""
    poison, honest = yard.new_key(name="poison"), yard.new_key(name="honest")
    async with Load(yard.port, poison) as load:
        for number in range(12):
            load.start(chat(model, f"[[sim: {fault}]] oh", stream=number % 2 == 0))
        await load.finish()
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.REFUSED}
        after = await load.send(chat(model, "hello"), key=honest)
        SEEN.extend(load.exchanges)
        check_ledger(yard, SEEN)
    return after


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_client_errors_of_an_engine_never_count_against_it(yard: Yard, model: str, status: int) -> None:
    after = await served_after(yard, model, f"http_error={status}")
    assert after.outcome is Outcome.COMPLETE, after


@pytest.mark.parametrize("fault", ["http_error=500", "garbage=invalid_json"])
async def test_the_only_replica_is_not_taken_out_for_what_it_answers_to_one_caller(
    yard: Yard, model: str, fault: str
) -> None:
    after = await served_after(yard, model, fault)
    assert after.outcome is Outcome.COMPLETE, after
