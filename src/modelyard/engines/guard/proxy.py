"""What the guard does with a request: check it, pass it to the engine, relay the answer byte by byte.

A request is rebuilt from what was parsed, with four headers of the caller's at
most, so that guard and engine cannot read one differently. An answer is relayed
as it comes, at the pace of whoever reads it. A caller that leaves cancels the
task of its request, which closes the engine's connection: that is how engines
learn to stop generating.
"""

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress

import httptools
import msgspec

from modelyard.engines.guard import Plan, Route
from modelyard.engines.http import Connection, Request

ENGINE_HOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0
SILENT_MAX_S = 3600.0
"""Longest pause within an answer. Whoever asks has limits of its own, and leaves."""
LIST_TIMEOUT_S = 10.0
LIST_BYTES_MAX = 4 * 1024 * 1024
_READ_BYTES = 64 * 1024
_PASSED_ON = ("content-type", "accept", "x-request-id")
_FAILED = b"HTTP/1.1 500"
_NEVER_BODY = frozenset({"GET", "HEAD"})

_Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Handles the requests of all connections. ``ports`` are the engine's, ``key`` what it wants to be asked with."""

    def __init__(self, plan: Plan, secret: str, ports: Mapping[str, int], key: str) -> None:
        self._routes = {(route.method, route.path): route for route in plan.routes}
        self._plan = plan
        self._secret = f"Bearer {secret}".encode()
        self._ports = ports
        self._key = key

    async def handle(self, request: Request, connection: Connection) -> None:
        """Answer one request."""
        route = self._routes.get((request.method, request.path))
        given = request.headers.get("authorization", "").encode()
        if not (route is not None and route.is_open) and not hmac.compare_digest(given, self._secret):
            connection.respond(401, _error("the secret of this replica is missing or wrong", 401))
            return
        if route is None:
            connection.respond(
                404, _error(f"{request.method} {request.path} is not among what this replica serves", 404)
            )
            return
        if route.guest_field and await self._has_guest(request.body, route.guest_field):
            connection.respond(200, b'{"success":true}')
            return
        body = self._body(request.body, route) if request.method == "POST" else request.body
        try:
            peer = await self._connect(route.port)
        except (OSError, TimeoutError):
            connection.respond(503, _error("the engine does not listen yet", 503))
            return
        try:
            peer[1].write(self._head(request, route, len(body)) + body)
            await _relay(peer[0], connection, route.caller_fault.encode())
        finally:
            # At once, also in the middle of an answer: the engine must see that nobody reads any more.
            peer[1].transport.abort()

    async def _connect(self, port: str) -> _Peer:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_connection(ENGINE_HOST, self._ports[port])

    def _head(self, request: Request, route: Route, length: int) -> bytes:
        lines = [f"{request.method} {route.engine_path or request.path} HTTP/1.1", f"host: {ENGINE_HOST}"]
        lines += [f"{name}: {request.headers[name]}" for name in _PASSED_ON if name in request.headers]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        if request.method not in _NEVER_BODY or length:
            lines.append(f"content-length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _body(self, body: bytes, route: Route) -> bytes:
        """Return ``body`` with the adapter named where the engine wants it, and without what it refuses there."""
        field = self._plan.adapter_field
        if not (field or route.dropped) or route.guest_field:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            model = msgspec.json.decode(fields["model"], type=str)
        except (msgspec.MsgspecError, KeyError):
            return body  # the engine says what is wrong with it
        if field and model != self._plan.model:
            fields[field] = msgspec.Raw(msgspec.json.encode(model))
        for name in route.dropped:
            fields.pop(name, None)
        return msgspec.json.encode(fields)

    async def _has_guest(self, body: bytes, field: str) -> bool:
        """Say whether the engine lists the guest already, which it would refuse to load again."""
        with suppress(msgspec.MsgspecError, OSError, TimeoutError, KeyError, asyncio.IncompleteReadError):
            name = msgspec.json.decode(msgspec.json.decode(body, type=dict[str, msgspec.Raw])[field], type=str)
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return name in await self._guests()
        return False

    async def _guests(self) -> frozenset[str]:
        peer = await self._connect("http")
        try:
            peer[1].write(self._head(Request(method="GET", path="/v1/models"), Route("GET", "/v1/models"), 0))
            answer = _Answer()
            content = bytearray()
            while not answer.has_ended() and (data := await peer[0].read(_READ_BYTES)):
                answer.feed(data)
                content += data
                if len(content) > LIST_BYTES_MAX:
                    break
            page = msgspec.json.decode(bytes(answer.body), type=_Models)
        finally:
            peer[1].transport.abort()
        return frozenset(model.id for model in page.data)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Answer:
    """Where an answer ends, by its own framing."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_whole = False
        self.is_last = False
        """The engine closes the connection after it."""
        self.body = bytearray()
        self._keeps_body = True

    def forget_body(self) -> None:
        """Keep nothing of it: only where it ends matters."""
        self._keeps_body = False
        self.body.clear()

    def has_ended(self) -> bool:
        """Say whether all of it was read."""
        return self._is_whole

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self._keeps_body:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_last = not self._parser.should_keep_alive()
        # An interim answer (100 Continue) is followed by the real one.
        self._is_whole = self._parser.get_status_code() >= 200


async def _relay(reader: asyncio.StreamReader, connection: Connection, caller_fault: bytes) -> None:
    """Pass the answer on as it comes; whatever ends it early ends the caller's connection, too."""
    answer = _Answer()
    has_begun = False
    held = b""
    while not answer.has_ended():
        if not (data := await _piece(reader, answer)):
            if not has_begun:
                connection.respond(502, _error("the engine closed the connection without an answer", 502))
            connection.close()
            return
        if caller_fault and not has_begun and (held or data.startswith(_FAILED)):
            held += data
            if not answer.has_ended() and len(held) < _READ_BYTES:
                continue
            data, held = held, b""
            if answer.body.startswith(caller_fault):
                data = data.replace(_FAILED, b"HTTP/1.1 400", 1)
        has_begun = True
        answer.forget_body()
        connection.write(data)
        await connection.drain()
    if answer.is_last:
        connection.close()


async def _piece(reader: asyncio.StreamReader, answer: _Answer) -> bytes:
    """Return the next bytes of an answer, b"" when they end, make no sense or do not come."""
    try:
        async with asyncio.timeout(SILENT_MAX_S):
            data = await reader.read(_READ_BYTES)
        answer.feed(data)
    except (OSError, TimeoutError, httptools.HttpParserError):
        return b""
    return data


def _error(message: str, code: int) -> bytes:
    kind = "invalid_request_error" if code < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
