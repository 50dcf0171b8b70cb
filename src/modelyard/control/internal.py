"""What gateways ask the controller about kept requests: msgpack over the unix socket.

The paths lie outside ``/v1``, which is all that a gateway forwards, and the
web layer refuses every request without the internal token: no client gets here.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from modelyard.control.requests import RequestDesk
from modelyard.domain.requests import CLAIM_PATH, FINISH_PATH, SYNC_PATH, Claim, Finish, Sync
from modelyard.web.app import read_body
from modelyard.web.decoding import decode

BODY_BYTES_MAX = 256 * 1024 * 1024

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


def internal_routes(desk: RequestDesk) -> list[BaseRoute]:
    """Return the routes that only gateways reach."""
    return [
        _route(CLAIM_PATH, Claim, desk.claim, is_void_alone=True),
        _route(FINISH_PATH, Finish, desk.finish),
        _route(SYNC_PATH, Sync, desk.sync),
    ]


def _route(
    path: str, type_: type[T], answer: Callable[[T], Coroutine[Any, Any, object]], *, is_void_alone: bool = False
) -> BaseRoute:
    """Return a route; with ``is_void_alone`` what is asked for is dropped when the gateway that asks has gone."""
    decoder = msgspec.msgpack.Decoder(type_)

    async def ask(request: Request) -> Response:
        body = await read_body(request, most=BODY_BYTES_MAX)
        work = answer(decode(decoder, body))
        found = await _while_connected(request, work) if is_void_alone else await work
        return Response(_encode(found), media_type="application/msgpack")

    return Route(path, ask, methods=["POST"])


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns.

    Raises:
        ClientDisconnect: the gateway left first. A claim that waited for a dead one would keep those of the living out.
    """
    loop = asyncio.get_running_loop()
    working, leaving = loop.create_task(work), loop.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
