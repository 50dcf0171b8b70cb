"""What gateways ask the controller about kept requests: msgpack over the unix socket.

The paths lie outside ``/v1``, which is all that a gateway forwards, and the
web layer refuses every request without the internal token: no client gets here.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
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
        _route(CLAIM_PATH, Claim, desk.claim),
        _route(FINISH_PATH, Finish, desk.finish),
        _route(SYNC_PATH, Sync, desk.sync),
    ]


def _route(path: str, type_: type[T], answer: Callable[[T], Awaitable[object]]) -> BaseRoute:
    decoder = msgspec.msgpack.Decoder(type_)

    async def ask(request: Request) -> Response:
        body = await read_body(request, most=BODY_BYTES_MAX)
        return Response(_encode(await answer(decode(decoder, body))), media_type="application/msgpack")

    return Route(path, ask, methods=["POST"])
