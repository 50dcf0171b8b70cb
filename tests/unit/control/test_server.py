"""The controller's server: nobody who has reached it is left without an answer because it stops."""

import asyncio
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.support.waiting import eventually_async

from modelyard.control.server import CLOSE_TIMEOUT_S, bind, serve


async def _hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def _slow(_: Request) -> PlainTextResponse:
    await asyncio.sleep(CLOSE_TIMEOUT_S + 0.5)
    return PlainTextResponse("at last")


async def test_who_connected_before_the_stop_and_asks_a_while_after_it_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    listener = bind(path)
    stop = asyncio.Event()
    app = Starlette(routes=[Route("/", _hello)])
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        server = group.create_task(serve(app, listener, stop))
        reader, writer = await asyncio.open_unix_connection(str(path))
        idle_reader, idle = await asyncio.open_unix_connection(str(path))
        stop.set()
        await eventually_async(lambda: not path.exists(), within_s=10, what="the name of the socket to go")
        await asyncio.sleep(0.5)  # a gateway on a machine that is short of cores
        writer.write(b"GET / HTTP/1.1\r\nhost: control\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"hello")
        await server  # although one never asks
        assert await idle_reader.read() == b""
        for one in (writer, idle):
            one.close()


async def test_an_answer_that_takes_long_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    listener = bind(path)
    stop = asyncio.Event()
    app = Starlette(routes=[Route("/", _slow)])
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        server = group.create_task(serve(app, listener, stop))
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET / HTTP/1.1\r\nhost: control\r\nconnection: close\r\n\r\n")
        stop.set()
        assert (await reader.read()).endswith(b"at last")
        writer.close()
        await server
