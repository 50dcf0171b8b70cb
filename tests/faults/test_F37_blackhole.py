"""F37: a replica whose host swallows connections: none is refused, none is accepted."""

import signal
import socket
from contextlib import ExitStack

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import EngineProcess, Yard

SETTINGS = {"gateway.connect_timeout_s": 0.5, "control.hang_timeout_s": 60}
SEEN: list[Exchange] = []
BACKLOG_MAX = 5000


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("pair", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1}, replicas=2)
    return "pair"


def swallow(yard: Yard, engine: EngineProcess, stack: ExitStack) -> None:
    """Stop an engine and fill its accept queue, so that the kernel answers no more connections for it."""
    yard.signal(engine.pid, signal.SIGSTOP)
    for _ in range(BACKLOG_MAX):
        waiting = stack.enter_context(socket.socket())
        waiting.settimeout(0.2)
        try:
            waiting.connect(("127.0.0.1", engine.port))
        except TimeoutError:
            return
    pytest.fail("the accept queue has no end")


async def test_after_the_connect_timeout_another_replica_answers_and_the_hole_gets_nothing_more(
    yard: Yard, model: str
) -> None:
    hole = yard.engines(model)[0]
    with ExitStack() as stack:
        swallow(yard, hole, stack)
        async with Load(yard.port, yard.admin_key) as load:
            # More at once than the good replica has idle connections for.
            for number in range(12):
                load.start(chat(model, f"hello {number}", stream=number % 2 == 0))
            await load.finish()
            assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}, load.exchanges
            later = [await load.send(chat(model, "again")) for _ in range(4)]
            SEEN.extend(load.exchanges)
            rows = check_ledger(yard, SEEN)
    assert hole.replica_id not in {rows[exchange.request_id or ""].replica_id for exchange in load.exchanges}
    assert max(yard.row_of(exchange.request_id)["attempts"] for exchange in load.exchanges) == 2, "it met the fault"
    assert {yard.row_of(exchange.request_id)["attempts"] for exchange in later} == {1}, "and was ejected for it"


async def test_alone_it_is_a_504_that_says_so(yard: Yard) -> None:
    yard.deploy("single", options={"slots": 8})
    hole = yard.engines("single")[0]
    with ExitStack() as stack:
        swallow(yard, hole, stack)
        async with Load(yard.port, yard.admin_key) as load:
            answer = await load.send(chat("single", "hello"))
            assert (answer.status, answer.error["code"]) == (504, "engine_connect_timeout"), answer
            SEEN.extend(load.exchanges)
            check_ledger(yard, SEEN)
    yard.signal(hole.pid, signal.SIGCONT)
