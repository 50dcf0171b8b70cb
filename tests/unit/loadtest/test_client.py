"""The client and the driver against a real server of this process: kinds of errors, loops, and who is late."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from modelyard.domain.lengths import lengths_of
from modelyard.loadtest.client import Client, Target, settle
from modelyard.loadtest.driver import Driver, Level
from modelyard.loadtest.statistics import figures_of
from modelyard.loadtest.workload import Ask, Made, asks_of

ASK = Ask([{"role": "user", "content": "hi"}], 3)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, **target: object) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with Client(Target(url=f"http://127.0.0.1:{port}", model="m", key="k", **target)) as client:  # type: ignore[arg-type]
            yield client
    finally:
        await runner.cleanup()


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for piece in pieces:
        await answer.write(piece)
    await answer.write_eof()
    return answer


def chunk(**delta: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"delta": delta}]}) + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_tokens_are_those_of_the_usage_and_pieces_those_with_content() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        pieces = [
            chunk(role="assistant"),
            b": loading 3 %\n\n",
            chunk(reasoning_content="a"),
            chunk(content="b"),
            USAGE,
        ]
        return await stream(request, *pieces, DONE)

    async with serving(handler) as client:
        sample = await client.ask(ASK)
    assert (sample.error, sample.input_tokens, sample.output_tokens, sample.pieces) == ("", 7, 5, 2)
    assert sample.sent_s < sample.first_s <= sample.last_s


async def test_a_connection_is_kept_though_a_body_ends_after_its_stream() -> None:
    callers = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        callers.add(request.transport.get_extra_info("peername"))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(chunk(content="x") + DONE)
        await asyncio.sleep(0.02)  # as servers do that send the end of a body by itself
        await answer.write_eof()
        return answer

    async with serving(handler) as client:
        samples = [await client.ask(ASK) for _ in range(3)]
    assert [sample.error for sample in samples] == [""] * 3
    assert len(callers) == 1


async def test_the_body_asks_for_usage_and_for_the_exact_length() -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((await request.json(), request.headers["authorization"], request.path))
        return await stream(request, chunk(content="x"), DONE)

    async with serving(handler) as client:
        sample = await client.ask(ASK)
    ((body, key, path),) = bodies
    assert (key, path, sample.is_counted, sample.output_tokens) == ("Bearer k", "/v1/chat/completions", False, 1)
    assert (body["stream_options"], body["max_tokens"], body["ignore_eos"]) == ({"include_usage": True}, 3, True)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([chunk(content="x")], "stream cut"),
        (
            [chunk(content="x"), b'data: {"error": {"code": "engine_lost", "message": "gone"}}\n\n'],
            "in the stream engine_lost",
        ),
        ([DONE], "empty answer"),
        ([b"data: {]\n\n"], "not OpenAI's form"),
    ],
)
async def test_streams_that_go_wrong_are_told_apart(pieces: list[bytes], error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *pieces)

    async with serving(handler) as client:
        assert (await client.ask(ASK)).error == error


async def test_refusals_time_outs_and_servers_that_are_not_there_are_told_apart() -> None:
    async def refusing(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "rate_limit_exceeded", "message": "wait"}}, status=429)

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(refusing) as client:
        sample = await client.ask(ASK)
        assert (sample.error, sample.detail) == ("HTTP 429 rate_limit_exceeded", "wait")
    async with serving(silent, timeout_s=0.05) as client:
        assert (await client.ask(ASK)).error == "timeout"
    assert client._session is not None
    async with Client(client.target) as gone:
        assert (await gone.ask(ASK)).error == "no connection"


async def test_whole_answers_have_usage_and_no_first_token() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}})

    async with serving(handler, is_streamed=False) as client:
        sample = await client.ask(ASK)
    assert (sample.error, sample.input_tokens, sample.output_tokens, sample.first_s) == ("", 4, 9, 0.0)


async def test_a_server_that_knows_no_ignore_eos_is_asked_without_it() -> None:
    async def strict(request: web.Request) -> web.StreamResponse:
        if "ignore_eos" in await request.json():
            return web.json_response({"error": {"message": "Unknown parameter: 'ignore_eos'."}}, status=400)
        return await stream(request, chunk(content="x"), USAGE, DONE)

    async with serving(strict) as client:
        assert (await settle(client, ASK)).error == ""
        assert not client.target.ignores_eos


MADE = Made(lengths_of("4"), lengths_of("3"))


async def test_a_closed_loop_never_has_more_requests_than_callers_and_warm_up_does_not_count() -> None:
    seen: Counter[str] = Counter()
    have_met = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        seen["now"] += 1
        seen["all"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        if seen["now"] == 3:
            have_met.set()
        await have_met.wait()
        await asyncio.sleep(0.002)
        seen["now"] -= 1
        return await stream(request, chunk(content="x"), USAGE, DONE)

    async with serving(handler) as client:
        driver = Driver(client, asks_of(MADE, "chat", seed=0))
        found = await driver.run(Level(concurrency=3, requests=20, warmup=5))
    assert (len(found.samples), seen["all"], seen["most"], found.in_flight_max) == (20, 25, 3, 3)
    assert not found.is_stopped


async def test_an_open_loop_waits_for_nobody_and_counts_from_when_requests_were_due() -> None:
    stalled = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await stalled.wait()
        return await stream(request, chunk(content="x"), USAGE, DONE)

    async with serving(handler) as client:
        driver = Driver(client, asks_of(MADE, "chat", seed=0))
        running = asyncio.create_task(driver.run(Level(rate=400.0, arrivals="constant", requests=12)))
        async with asyncio.timeout(30):
            while len(client._session._connector._acquired) < 12:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
        stalled.set()
        found = await running
    assert (len(found.samples), found.in_flight_max) == (12, 12)
    due = sorted(one.due_s for one in found.samples)
    assert due[-1] - due[0] == pytest.approx(11 / 400, abs=1e-6)
    figures = figures_of(found)
    assert figures["request_rate"] == 400.0
    assert all(one.sent_s >= one.due_s for one in found.samples)


async def test_what_is_stopped_keeps_what_there_is() -> None:
    answered = asyncio.Event()
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen > 4:
            answered.set()
            await asyncio.sleep(30)
        return await stream(request, chunk(content="x"), USAGE, DONE)

    async with serving(handler) as client:
        driver = Driver(client, asks_of(MADE, "chat", seed=0))
        running = asyncio.create_task(driver.run(Level(concurrency=2, duration_s=60)))
        async with asyncio.timeout(30):
            await answered.wait()
        driver.stop()
        found = await running
    figures = figures_of(found)
    assert figures["is_stopped"]
    assert 1 <= figures["completed"] <= 4
