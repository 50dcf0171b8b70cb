"""The circuit of a replica that answers, but badly: out, asked for one token, and back.

An engine is told over its own port which prompts it shall fail. The gateway's
probes say "Hi", so that a probe may fare better or worse than requests do.
"""

from collections.abc import AsyncIterator

import pytest
from tests.support.engines import plan, probes_of, requests_of
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import EngineProcess, Yard

OPTIONS = {"slots": 8, "ttft_ms": 1, "itl_ms": 1}
SEEN: list[Exchange] = []
TURNS = 8
"""Requests at once, of which some fall to each of two replicas that take any."""


@pytest.fixture
async def load(yard: Yard) -> AsyncIterator[Load]:
    async with Load(yard.port, yard.admin_key) as load:
        yield load
        SEEN.extend(load.exchanges)


def pair(yard: Yard, name: str) -> tuple[EngineProcess, EngineProcess]:
    """Deploy two replicas: the one to be sick and the other."""
    yard.deploy(name, options=OPTIONS, replicas=2)
    sick, well = yard.engines(name)
    return sick, well


async def is_left_out(yard: Yard, load: Load, name: str, engine: EngineProcess) -> bool:
    """Say whether requests pass an engine by."""
    before = len(requests_of(yard, engine))
    for _ in range(TURNS):
        load.start(chat(name, "hello"))
    await load.finish()
    return len(requests_of(yard, engine)) == before


async def ask(yard: Yard, load: Load, name: str, engine: EngineProcess, times: int) -> None:
    """Send requests, one after another, until an engine has had so many of them."""
    while len(requests_of(yard, engine)) < times:
        assert len(load.exchanges) < 20 * times, "it gets no more"
        await load.send(chat(name, "hello"))


@pytest.mark.parametrize("status", [400, 429])
async def test_answers_that_blame_the_request_never_take_a_replica_out(yard: Yard, load: Load, status: int) -> None:
    name = f"blamed-{status}"
    sick, well = pair(yard, name)
    plan(yard, sick, f"http_error={status}", contains="hello")
    for _ in range(4):
        for number in range(10):
            load.start(chat(name, f"hello {number}", stream=number % 2 == 0))
        await load.finish()
    ended = {exchange.outcome for exchange in load.exchanges}
    assert ended == {Outcome.COMPLETE, Outcome.REFUSED}, ended
    assert len(requests_of(yard, sick)) >= 10, "far more than it takes where answers are bad"
    assert not await is_left_out(yard, load, name, sick)
    assert not probes_of(yard, sick)
    assert not probes_of(yard, well)
    check_ledger(yard, [*SEEN, *load.exchanges])


async def test_more_than_a_tenth_of_bad_answers_takes_a_replica_out_and_a_tenth_does_not(
    yard: Yard, load: Load
) -> None:
    sick, well = pair(yard, "share")
    plan(yard, sick, "http_error=500", contains="poison")
    await ask(yard, load, "share", sick, 25)  # so that one or two bad answers are no tenth

    def bad() -> int:
        return sum(exchange.status == 502 for exchange in load.exchanges)

    answers = 0
    while not (answers and (await is_left_out(yard, load, "share", sick) or probes_of(yard, sick))):
        had = bad()
        assert had < 10, "it is never taken out"
        while bad() == had:
            await load.send(chat("share", "poison"))
        answers = len(requests_of(yard, sick))
    assert bad() * 10 > answers, f"{bad()} of {answers} is not more than a tenth"
    assert (bad() - 1) * 10 <= answers, f"{bad() - 1} of {answers} should have been enough"
    await eventually_async(lambda: probes_of(yard, sick, "end"), 30, "it is asked for a token, and gives it")
    assert not probes_of(yard, well)
    check_ledger(yard, [*SEEN, *load.exchanges])


async def test_one_good_token_brings_a_replica_back_and_a_bad_answer_does_not(yard: Yard, load: Load) -> None:
    sick, well = pair(yard, "back")
    plan(yard, sick, "http_error=500")
    await ask(yard, load, "back", sick, 5)
    out = requests_of(yard, sick)
    assert await is_left_out(yard, load, "back", sick), "five bad answers in a row are enough"
    await eventually_async(lambda: probes_of(yard, sick, "abort"), 30, "the first probe has failed")
    assert await is_left_out(yard, load, "back", sick)
    assert {exchange.outcome for exchange in load.exchanges[-TURNS:]} == {Outcome.COMPLETE}
    assert requests_of(yard, sick) == out

    plan(yard, sick, "")
    (good,) = await eventually_async(lambda: probes_of(yard, sick, "end"), 30, "a probe gets its token")
    assert good["n"] == 1, "a real request, for one token"

    async def is_back() -> bool:
        return not await is_left_out(yard, load, "back", sick)

    await eventually_async(is_back, 30, "it gets requests again")
    assert {exchange.outcome for exchange in load.exchanges[-TURNS:]} == {Outcome.COMPLETE}
    assert not probes_of(yard, well)
    rows = check_ledger(yard, [*SEEN, *load.exchanges])
    assert not [rid for rid in rows if rid.startswith("side-")], "probes are nobody's to pay"


async def test_answers_of_503_count_also_where_another_replica_made_up_for_them(yard: Yard, load: Load) -> None:
    sick, well = pair(yard, "quiet")
    plan(yard, sick, "http_error=503")
    await ask(yard, load, "quiet", sick, 5)
    assert await is_left_out(yard, load, "quiet", sick), "five bad answers in a row are enough"
    # Five retries in ten seconds are the reserve of an endpoint with few requests.
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}, "no caller was troubled"
    assert not probes_of(yard, well)
    check_ledger(yard, [*SEEN, *load.exchanges])


async def test_no_more_than_half_are_out_for_what_they_answer(yard: Yard, load: Load) -> None:
    yard.deploy("four", options=OPTIONS, replicas=4)
    *sick, well = yard.engines("four")
    for engine in sick:
        plan(yard, engine, "http_error=500")

    def out() -> list[EngineProcess]:
        return [engine for engine in sick if probes_of(yard, engine)]

    async def burst() -> None:
        for _ in range(10):
            load.start(chat("four", "hello"))
        await load.finish()

    async def two_are_out() -> bool:
        await burst()
        return len(out()) == 2

    await eventually_async(two_are_out, 30, "two of four are taken out")
    (third,) = [engine for engine in sick if engine not in out()]
    before = len(requests_of(yard, third))

    async def has_had_enough() -> bool:
        await burst()
        return len(requests_of(yard, third)) >= before + 10

    await eventually_async(has_had_enough, 30, "the third is used in spite of its answers")
    assert len(out()) == 2
    assert not probes_of(yard, well)
    check_ledger(yard, [*SEEN, *load.exchanges])
