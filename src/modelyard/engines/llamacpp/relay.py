"""Passing a request on to a llama.cpp process and its answer back, as bytes and as they come.

A caller that leaves cancels this coroutine, which closes the connection to
llama.cpp, which stops at once; a caller that reads slowly holds llama.cpp back.
"""

from collections.abc import AsyncIterator

import aiohttp
import msgspec
from aiohttp import web

from modelyard.engines.llamacpp import bodies
from modelyard.engines.llamacpp.desk import Desk, Place

_SILENT_S_MAX = 3600.0
"""A long prompt that is not streamed is answered after all of it, so silence says little."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENT_S_MAX)
_PING = b":"


class Relay:
    """Forwards what the front was asked, for a base of the name ``model``."""

    def __init__(self, session: aiohttp.ClientSession, desk: Desk, model: str) -> None:
        self._session = session
        self._desk = desk
        self._own_name = _named(model)

    async def forward(self, request: web.Request, body: bodies.Body, owner: str) -> web.StreamResponse:
        """Answer ``request`` by a process of the desk.

        Raises:
            QueueFullError: too many wait.
            AdapterGoneError: the adapter was unloaded meanwhile.
        """
        async with self._desk.place(owner, bodies.prompt_of(body)) as place:
            child = place.child
            raw = bodies.written(body, place.grant, adapter=place.adapter, has_adapters=bool(child.adapters))
            headers = {**child.headers, "content-type": "application/json"}
            async with self._session.post(
                child.url + request.path, data=raw, headers=headers, timeout=_TIMEOUT
            ) as answer:
                if answer.content_type == "text/event-stream":
                    return await self._stream(request, answer, place, owner)
                content = await answer.read()
                place.has_run = answer.status == 200
                return web.Response(
                    status=answer.status, body=self._renamed(content, owner), content_type=answer.content_type
                )

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, place: Place, owner: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for piece in self._pieces(answer, owner):
                place.has_run = place.has_run or not piece.startswith(_PING)
                await response.write(piece)
        except aiohttp.ClientConnectionResetError:
            # The caller has left, between two reads.
            raise
        except (aiohttp.ClientError, TimeoutError):
            # Cut off, not ended: the caller must not take half an answer for a whole one.
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    async def _pieces(self, answer: aiohttp.ClientResponse, owner: str) -> AsyncIterator[bytes]:
        """Yield what comes; of an adapter by whole lines, in which the model's name is the adapter's."""
        if not owner:
            async for piece in answer.content.iter_any():
                yield piece
            return
        rest = b""
        async for piece in answer.content.iter_any():
            lines, end, rest = (rest + piece).rpartition(b"\n")
            if end:
                yield self._renamed(lines + end, owner)
        if rest:
            yield self._renamed(rest, owner)

    def _renamed(self, content: bytes, owner: str) -> bytes:
        """Return an answer under the adapter's name: llama.cpp says its own whatever it was asked for.

        Quotation marks inside a text are escaped, so that this is found as the field only.
        """
        return content.replace(self._own_name, _named(owner)) if owner else content


def _named(model: str) -> bytes:
    return b'"model":' + msgspec.json.encode(model)
