"""An ASGI application from declared routes.

Promises, for every path and method: nothing is answered without the internal
token; a declared route needs an identity with its scope; every failure is
OpenAI's error object (never HTML, never a traceback) with ``x-request-id``;
no body above the limit is kept.
"""

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.domain.tenants import IDENTITY_HEADER, INTERNAL_TOKEN_HEADER, Identity
from modelyard.errors import (
    ApiError,
    bad_request,
    internal_error,
    invalid_api_key,
    method_not_allowed,
    permission_denied,
    storage_unavailable,
    unknown_url,
    unsupported_content_encoding,
)
from modelyard.ids import RequestIds
from modelyard.stores import StoreUnavailableError
from modelyard.web.decoding import decode, decode_query
from modelyard.web.gathering import Flaw, gather
from modelyard.web.routes import JSON, AnyRoute, Call, Empty

BODY_BYTES_MAX = 1024 * 1024
"""Largest body of a management request; a deployment is a few hundred bytes."""

READ_AWAY_S = 60.0
"""How long a body that nobody wants is read away; a gateway that has its answer leaves long before."""

REQUEST_ID_HEADER = "x-request-id"

PublicPage = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder(order="deterministic").encode
_identity_decoder = msgspec.json.Decoder(Identity)
_request_ids = RequestIds()
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def build_app(
    routes: Sequence[AnyRoute],
    *,
    internal_token: str,
    public: Mapping[str, PublicPage],
    mounts: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the application. ``public`` pages (GET) need no identity; ``mounts`` guard themselves."""
    methods: dict[str, dict[str, _Endpoint]] = {}
    for route in routes:
        taken = methods.setdefault(route.path, {})
        assert route.method not in taken, "a route is declared once"
        taken[route.method] = _Endpoint(route)
    served: list[BaseRoute] = [StarletteRoute(path, page, methods=["GET"]) for path, page in public.items()]
    served += [StarletteRoute(path, _by_method(taken), methods=list(taken)) for path, taken in methods.items()]
    app = Starlette(
        routes=[*served, *mounts],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            StoreUnavailableError: _store_error,
        },
    )
    # A redirect to the path without its slash would drop bodies and tell nothing.
    app.router.redirect_slashes = False
    app.add_middleware(_Gate, internal_token=internal_token)
    app.add_middleware(_Boundary)
    return app


def json_response(value: object, status: int = 200) -> Response:
    """Return ``value`` as JSON."""
    return Response(_encode(value), status, dict(_HEADERS), JSON)


def error_response(error: ApiError) -> Response:
    """Return ``error`` as OpenAI's error object."""
    return Response(error.body(), error.status, {**_HEADERS, **dict(error.headers())}, JSON)


def request_id_of(scope: Scope) -> str:
    """Return the id of the request, as the gateway gave it or, without a good one, our own."""
    return str(scope["modelyard.request_id"])


async def read_body(request: Request, *, most: int = BODY_BYTES_MAX) -> bytes:
    """Return the body.

    Raises:
        ApiError: 413 or 415.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise unsupported_content_encoding(encoding)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            message = f"The request body is larger than {most} bytes. Send less."
            raise ApiError(413, code="request_too_large", message=message)
        parts.append(part)
    return b"".join(parts)


class _Endpoint:
    """Decodes for one route, asks its handler, encodes the answer."""

    __slots__ = ("_body", "_route")

    def __init__(self, route: AnyRoute) -> None:
        self._route = route
        self._body = msgspec.json.Decoder(route.body)

    async def __call__(self, request: Request) -> Response:
        route = self._route
        identity = _identity_of(request)
        if not identity.may(route.scope):
            raise permission_denied(route.scope)
        body: Any = None
        flaws: list[Flaw] = []
        if route.body is not Empty:
            # No body at all reads as {}: either everything has a default, or the first missing field is named.
            content = await read_body(request) or b"{}"
            if route.gathers:
                body, flaws = gather(self._body, route.body, content)
            else:
                body = decode(self._body, content)
        query = decode_query(route.query, request.scope["query_string"])
        answer = await route.handler(Call(identity, body, query, request, flaws))
        return answer if isinstance(answer, Response) else json_response(answer, route.status)


def _by_method(endpoints: Mapping[str, _Endpoint]) -> PublicPage:
    async def dispatch(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    return dispatch


def _identity_of(request: Request) -> Identity:
    found = request.headers.getlist(IDENTITY_HEADER)
    if len(found) != 1:
        raise invalid_api_key()
    try:
        return _identity_decoder.decode(found[0])
    except (msgspec.MsgspecError, ValueError):
        raise invalid_api_key() from None


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for ApiError"
    return error_response(error)


async def _store_error(request: Request, error: Exception) -> Response:
    _log.warning("store unavailable: %s", error, extra={"request_id": request_id_of(request.scope)})
    return error_response(storage_unavailable())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException"
    path = request.scope["path"]
    if error.status_code == 404:
        return error_response(unknown_url(request.method, path))
    if error.status_code == 405:
        response = error_response(method_not_allowed(request.method, path))
        response.headers["allow"] = (error.headers or {}).get("Allow", "GET")
        return response
    return error_response(bad_request("invalid_request", "The request is not valid HTTP for this route."))


@dataclass(slots=True)
class _Gate:
    """Refuses every request that does not come from a gateway."""

    app: ASGIApp
    internal_token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not self._is_from_gateway(scope):
            raise invalid_api_key()
        await self.app(scope, receive, send)

    def _is_from_gateway(self, scope: Scope) -> bool:
        name = INTERNAL_TOKEN_HEADER.encode()
        given = [value for header, value in scope["headers"] if header == name]
        return len(given) == 1 and hmac.compare_digest(given[0], self.internal_token.encode())


@dataclass(slots=True)
class _Boundary:
    """The edge: gives the request its id, and turns whatever was not caught into an answer."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["modelyard.request_id"] = request_id
        started = False
        is_read = not _has_body(scope)

        async def receive_marked() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message.setdefault("headers", []).append((REQUEST_ID_HEADER.encode(), request_id.encode()))
            elif not is_read and not message.get("more_body", False):
                # The whole answer goes out now; its end, behind which the server closes, when the body was read away.
                await send({**message, "more_body": True})
                await _read_away(receive_marked)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await self.app(scope, receive_marked, send_marked)
        except ClientDisconnect:
            return
        except Exception as error:  # boundary: one request's bug must not show a traceback or end the controller
            answer = error if isinstance(error, ApiError) else internal_error(request_id)
            if answer.status == 500:
                _log.exception("request failed", extra={"request_id": request_id})
            if started:
                raise
            await error_response(answer)(scope, receive, send_marked)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _read_away(receive: Receive) -> None:
    """Read what is left of a body: the answer is lost on a gateway that still writes, if the server closes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_AWAY_S):
            while (await receive()).get("more_body", False):
                continue


def _request_id(scope: Scope) -> str:
    name = REQUEST_ID_HEADER.encode()
    given = next((value.decode("latin-1") for header, value in scope["headers"] if header == name), "")
    return given if _REQUEST_ID.fullmatch(given) else _request_ids.next()
