"""One idempotency key at two workers, one of which is killed: whoever is still connected gets the one answer."""

import signal

import pytest
from tests.support.ledger import gather, violations
from tests.support.load import Load, Outcome, chat
from tests.support.refusals import post
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2}
CALLERS = 12


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


def check_books(yard: Yard) -> None:
    def agree() -> bool:
        found = [one for one in violations(gather(yard, [])) if "rows of unknown requests" not in one]
        assert not found, found
        return True

    eventually(agree, 30, "the histories agree")


async def test_the_workers_agree_on_one_run(yard: Yard, model: str) -> None:
    known = set(yard.generated())
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(CALLERS):
            load.start(chat(model, "[[sim: tokens=40 slow=20]] both"), headers=[("Idempotency-Key", "both")])
        await load.finish()
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    assert len({exchange.request_id for exchange in load.exchanges}) == 1
    assert len(set(yard.generated()) - known) == 1
    check_books(yard)


async def test_when_the_worker_that_runs_it_dies_another_one_runs_it(yard: Yard, model: str) -> None:
    known = set(yard.generated())
    header = ("Idempotency-Key", "killed")
    body = chat(model, "[[sim: tokens=100 slow=20]] survive")
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(CALLERS):
            load.start(body, headers=[header], within_s=60)
        (first,) = await eventually_async(lambda: set(yard.generated()) - known, 30, "the engine has it")
        for pid in yard.plane_pids("gateway"):
            yard.signal(pid, signal.SIGKILL)
            break
        await load.finish()
    ends = [exchange.outcome for exchange in load.exchanges]
    assert set(ends) <= {Outcome.COMPLETE, Outcome.ABRUPT}, {
        str(one.error) + str(one.reader.answer.headers) for one in load.exchanges
    }
    answers = {
        bytes(exchange.reader.answer.body) for exchange in load.exchanges if exchange.outcome is Outcome.COMPLETE
    }
    assert len(answers) <= 1, "all who got an answer got the same"
    again = post(yard, "/v1/chat/completions", body, headers=[header])
    assert again.status == 200
    if answers:
        assert {bytes(again.body)} == answers
        assert again.header("idempotency-replayed") == "true"
    runs = set(yard.generated()) - known
    assert first in runs
    assert len(runs) <= 2, "a run that was cut off, and one more at most"
    check_books(yard)
