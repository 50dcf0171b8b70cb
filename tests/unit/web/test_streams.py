"""Server-sent events, also over a real socket whose client leaves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.support.waiting import eventually_async

from modelyard.control import server
from modelyard.web import streams
from modelyard.web.streams import event, event_stream


def test_line_breaks_cannot_end_an_event_early() -> None:
    assert event("a\nb") == b"data: a\ndata: b\n\n"
    assert event("") == b"data: \n\n"
    assert event("x\r\n\r\nevent: fake") == b"data: x\ndata: \ndata: event: fake\n\n"


async def test_each_line_is_one_event() -> None:
    async def lines() -> AsyncIterator[str]:
        yield "one"
        yield "two"

    parts = [part async for part in event_stream(lines(), str.upper).body_iterator]
    assert parts == [b"data: ONE\n\n", b"data: TWO\n\n"]


async def test_client_that_leaves_ends_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    ended: list[str] = []

    async def lines() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may take its time
            ended.append("cleaned up")

    async def stream(_: Request) -> Response:
        return event_stream(lines())

    stop = asyncio.Event()
    path = tmp_path / "control.sock"
    serving = asyncio.create_task(server.serve(Starlette(routes=[Route("/", stream)]), server.bind(path), stop))
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"data: first\n\n")
            await reader.readuntil(b": keep-alive\n\n")
            writer.close()
            await writer.wait_closed()
            await eventually_async(lambda: ended, 30, "the source was closed")
    finally:
        stop.set()
        await serving
