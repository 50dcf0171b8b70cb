"""A provider's replica: OpenAI's routes on loopback, answered by somebody else.

What the provider says of itself never reaches a caller: a refused key, an
unknown model, no credit and every kind of failure are 503 here, so that the
gateway asks another replica; too many requests stay 429 with the provider's
``retry-after``; only what is wrong with the request goes through.
"""

import asyncio
import contextlib
import difflib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import aiohttp
from aiohttp import web

from modelyard.engines.providers.dialect import (
    Asked,
    Counted,
    Dialect,
    Json,
    Refused,
    StreamReader,
    encode,
    read_object,
)
from modelyard.engines.providers.upstream import NotAllowedError, UnreachableError, Upstream
from modelyard.errors.platform import PROVIDER_REFUSED

BODY_BYTES_MAX = 64 * 1024 * 1024
ERROR_BYTES_MAX = 64 * 1024
LIST_BYTES_MAX = 16 * 1024 * 1024
EVENT_BYTES_MAX = 8 * 1024 * 1024
MESSAGE_LENGTH_MAX = 500
REST_S = 1.0
NAMED_MAX = 3
"""Models of the provider that are named where ours is none of them."""
CHECKS = 40
CHECK_PAUSE_S = 0.25
"""Until a provider that does not answer is given up: ten seconds and more, then the platform's own pauses hold."""
_OURS = frozenset({401, 402, 403, 404, 405, 407})
"""Statuses that are about the operator's key, account or settings, and not about the request."""
_REFUSALS = {
    401: "the key of the platform is not taken",
    402: "the account of the platform has no credit",
    403: "the key of the platform may not do that",
    404: "it knows no such model or route",
    405: "it has no such route",
}
"""What callers hear of those: our words alone, for the provider's may hold the key."""
_ABOUT_REQUEST = frozenset({400, 409, 411, 413, 415, 422})

_HEALTH = "/health"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProviderServer:
    """The routes. ``model`` is the provider's name of the model, ``name`` ours; ``say`` writes a line of the log.

    ``is_checked``: it is ready only once the provider says that it has the model.
    """

    def __init__(
        self,
        dialect: Dialect,
        upstream: Upstream,
        *,
        model: str,
        name: str,
        secret: str,
        say: Callable[[str], None],
        is_checked: bool = True,
    ) -> None:
        self._is_checked = is_checked
        self._dialect = dialect
        self._upstream = upstream
        self._model = model
        self._name = name
        self._secret = f"Bearer {secret}".encode()
        self._say = say
        self._said = ""
        self._is_ready = False
        self._waiting = 0
        self._totals = Counted()

    def __repr__(self) -> str:
        return f"<ProviderServer for {self._model} at {self._upstream.host}: {self._waiting} under way>"

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.router.add_get(_HEALTH, self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            app.router.add_post(route, self._infer)
        return app

    async def get_ready(self) -> str:
        """Look whether the provider takes the key and has the model, then be ready; return why that cannot be, "" when
        it is."""
        reason = ""
        for _ in range(CHECKS):
            try:
                status, models = await self._listed()
                is_known = status != 200 or models is None or self._model in models or await self._is_known_by_name()
            except NotAllowedError as error:
                return str(error)
            except UnreachableError as error:
                reason = f"the provider at {self._upstream.host} does not answer: {error}"
            else:
                if status in (401, 403):
                    return (
                        f"the provider at {self._upstream.host} refuses the key (status {status}); "
                        "put a good one where key_env or key_file says"
                    )
                if self._is_checked and status == 404:
                    return (
                        f"the provider at {self._upstream.host} has no {self._upstream.path}{self._dialect.models_path}"
                        " (status 404): check the option url, which often ends in /v1; of one that lists no models set"
                        " check_model=false"
                    )
                if self._is_checked and not is_known:
                    near = _near(self._model, models)
                    return (
                        f"the provider at {self._upstream.host} does not list the model '{self._model}'{near}:"
                        " check the option model; where it serves more than it lists set check_model=false"
                    )
                if status < 500 and status != 429:
                    # One whose list cannot be read cannot say; the first request will.
                    self._is_ready = True
                    return ""
                reason = f"the provider at {self._upstream.host} answers {status}"
            await asyncio.sleep(CHECK_PAUSE_S)
        return reason

    async def _listed(self) -> tuple[int, frozenset[str] | None]:
        """Return the status of the provider's list of models and what is on it, None where that cannot be read."""
        async with self._upstream.ask("GET", self._dialect.models_path, self._headers()) as response:
            if response.status != 200 or not self._is_checked:
                return response.status, None
            try:
                found = read_object(await _whole(response, LIST_BYTES_MAX)).get("data")
            except ValueError:
                return response.status, None
        if not isinstance(found, list):
            return 200, None
        return 200, frozenset(str(one["id"]) for one in found if isinstance(one, dict) and "id" in one)

    async def _is_known_by_name(self) -> bool:
        """Ask for the model alone: lists come in pages, and aliases are on none."""
        path = f"{self._dialect.models_path}/{quote(self._model, safe='')}"
        async with self._upstream.ask("GET", path, self._headers()) as response:
            return response.status == 200

    # --- routes ---

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer nobody without the secret, and nothing before the provider was heard; health is everybody's."""
        if request.path != _HEALTH:
            given = request.headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, self._secret):
                return _error(Refused(401, "Unauthorized", kind="authentication_error"))
            if not self._is_ready and request.method == "POST":
                return _error(Refused(503, "The provider was not heard yet.", kind="server_error"))
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok" if self._is_ready else "loading"}, status=200 if self._is_ready else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = (
            "# TYPE provider:requests_running gauge",
            "provider:requests_running 0",
            "# TYPE provider:requests_waiting gauge",
            f"provider:requests_waiting {self._waiting}",
            "# TYPE provider:prompt_tokens_total counter",
            f"provider:prompt_tokens_total {self._totals.prompt}",
            "# TYPE provider:generation_tokens_total counter",
            f"provider:generation_tokens_total {self._totals.generated}",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "provider"}
        return web.json_response({"object": "list", "data": [model]})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        self._waiting += 1
        try:
            return await self._answer(request)
        except Refused as refused:
            return _error(self._told(refused))
        except NotAllowedError as error:
            self._note(str(error))
        except (UnreachableError, aiohttp.ClientError, TimeoutError) as error:
            self._note(str(error) or type(error).__name__)
        except ValueError as error:
            self._note(f"its answer makes no sense: {error}")
        finally:
            self._waiting -= 1
        return _error(_unavailable())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = read_object(await request.read())
        except ValueError as error:
            raise Refused(400, f"The body is {error}.") from None
        asked = self._dialect.asked(request.path, body)
        async with self._asked(asked) as response:
            if asked.body.get("stream"):
                if response.content_type != "text/event-stream":
                    raise ValueError("no stream")
                return await self._relay(request, response, self._dialect.reader(request.path))
            answer, counted = self._dialect.answered(request.path, await _whole(response, BODY_BYTES_MAX))
            self._count(counted)
            return web.Response(body=answer, content_type="application/json")

    @contextlib.asynccontextmanager
    async def _asked(self, asked: Asked) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the provider's answer; every other status than 200 is an error.

        Raises:
            Refused: the provider did.
        """
        body = encode(asked.body)
        for is_last in (False, True):
            async with self._upstream.ask("POST", asked.path, self._headers(), body) as response:
                if response.status == 200:
                    self._said = ""
                    yield response
                    return
                # Somebody may have put a new key there since this process read it.
                if response.status == 401 and not is_last and self._upstream.key.renew():
                    continue
                raise await self._refusal(response)

    async def _relay(
        self, request: web.Request, response: aiohttp.ClientResponse, reader: StreamReader
    ) -> web.StreamResponse:
        """Pass a stream on as fast as it is read; its head goes out with the first event, so that until then an error
        is a status, and another replica can be asked."""
        stream = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        try:
            async for out in _translated(response, reader):
                if not stream.prepared:
                    await stream.prepare(request)
                await stream.write(out)
        except Refused as refused:
            if not stream.prepared:
                raise
            self._note(str(refused))
            await stream.write(b"data: %b\n\n" % self._told(refused).body())
            await stream.write_eof()
            return stream
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._note(f"it was lost in a stream: {str(error) or type(error).__name__}")
        finally:
            self._count(reader.counted)
        if not stream.prepared:
            raise ValueError("an empty stream")
        if not reader.is_done and request.transport is not None:
            # A clean end would say that the answer is whole.
            request.transport.abort()
            raise ConnectionResetError("the provider's stream ended too early")
        await stream.write_eof()
        await _read_out(response)
        return stream

    # --- inside ---

    def _headers(self) -> dict[str, str]:
        return {"content-type": "application/json", **self._dialect.headers(self._upstream.key.text)}

    def _count(self, counted: Counted) -> None:
        totals = self._totals
        self._totals = Counted(totals.prompt + counted.prompt, totals.generated + counted.generated)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Refused:
        raw = await _whole(response, ERROR_BYTES_MAX)
        try:
            found: Json = read_object(raw)
        except ValueError:
            found = {}
        refused = self._dialect.refusal(response.status, found)
        refused.retry_after = response.headers.get("retry-after", "")
        if response.status not in _ABOUT_REQUEST:
            about = " (its key, account or settings)" if response.status in _OURS else ""
            self._note(f"it answers {response.status}{about}: {refused}")
        return refused

    def _told(self, refused: Refused) -> Refused:
        """Return what a caller may hear of it."""
        if refused.status in _ABOUT_REQUEST:
            message = self._upstream.key.scrubbed(str(refused)).replace(self._model, self._name)[:MESSAGE_LENGTH_MAX]
            return Refused(refused.status, message, param=refused.param, code=refused.code)
        if refused.status == 429:
            told = Refused(429, "The provider takes no more requests now.", kind="rate_limit_error")
        elif why := _REFUSALS.get(refused.status):
            told = Refused(
                503, f"{why} at the provider (status {refused.status})", kind="server_error", code=PROVIDER_REFUSED
            )
        else:
            told = _unavailable()
        told.retry_after = refused.retry_after
        return told

    def _note(self, reason: str) -> None:
        """Write a line of the log, once for the same in a row."""
        reason = self._upstream.key.scrubbed(reason)[:MESSAGE_LENGTH_MAX]
        if reason != self._said:
            self._said = reason
            self._say(f"{self._upstream.host}: {reason}")


async def _translated(response: aiohttp.ClientResponse, reader: StreamReader) -> AsyncIterator[bytes]:
    """Yield what to send for each read of a stream, until it says that it is whole."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > EVENT_BYTES_MAX:
            raise ValueError("an endless event")
        out = []
        try:
            for event in events:
                name, value = _fields(event)
                if value and not reader.is_done:
                    out.append(reader.feed(name, value))
        except Refused:
            if out and (sent := b"".join(out)):
                yield sent
            raise
        if sent := b"".join(out):
            yield sent
        if reader.is_done:
            return


async def _read_out(response: aiohttp.ClientResponse) -> None:
    """Read what follows the end of a stream, which is nothing but the end of its body: only then can the connection,
    whose TLS took several round trips, serve the next request."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(REST_S):
            while not response.content.at_eof():
                await response.content.readany()


def _fields(event: bytes) -> tuple[str, bytes]:
    name, data = "", []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
    return name, b"\n".join(data)


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(body)


def _near(model: str, models: frozenset[str] | None) -> str:
    """Return the listed names that are most like ``model``."""
    near = difflib.get_close_matches(model, sorted(models or ()), n=NAMED_MAX, cutoff=0.0)
    return f" (it has {', '.join(near)[: MESSAGE_LENGTH_MAX // 2]})" if near else ""


def _unavailable() -> Refused:
    return Refused(503, "The provider does not answer now.", kind="server_error")


def _error(refused: Refused) -> web.Response:
    headers = {"retry-after": refused.retry_after} if refused.retry_after.isdigit() else {}
    return web.Response(body=refused.body(), status=refused.status, content_type="application/json", headers=headers)
