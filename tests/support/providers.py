"""A provider that says what a test tells it to, and the replica in front of it, both in this process."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from modelyard.engines.providers.anthropic import AnthropicDialect
from modelyard.engines.providers.dialect import Dialect
from modelyard.engines.providers.openai import OpenAIDialect
from modelyard.engines.providers.server import ProviderServer
from modelyard.engines.providers.upstream import Bounds, Key, Upstream
from modelyard.policy.addresses import networks

KEY = "sk-provider-key-1234567890"
SECRET = "replica-secret"
THEIRS, OURS = "their-model", "acme/ours"
HOME = networks(["127.0.0.0/8"])

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Provider:
    """What answers in the provider's place; ``seen`` are the requests that came, with their bodies."""

    handler: Handler
    url: str = ""
    models_status: int = 200
    models: tuple[str, ...] = (THEIRS,)
    aliases: tuple[str, ...] = ()
    """Models that are on no list, and known by their name."""
    seen: list[tuple[web.Request, Any]] = field(default_factory=list)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Note a request and answer it."""
        if request.path.endswith("/models"):
            return web.json_response({"data": [{"id": one} for one in self.models]}, status=self.models_status)
        if "/models/" in request.path:
            return web.json_response({}, status=200 if request.path.rpartition("/")[2] in self.aliases else 404)
        self.seen.append((request, await request.json()))
        return await self.handler(request)


@dataclass(slots=True)
class Front:
    """The replica, and how to talk to it."""

    provider: Provider
    server: ProviderServer
    session: aiohttp.ClientSession
    url: str
    said: list[str]

    @asynccontextmanager
    async def post(
        self, body: Any, path: str = "/v1/chat/completions", *, secret: str = SECRET
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request."""
        headers = {"authorization": f"Bearer {secret}"}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            yield response

    async def whole(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        """Return the status and the decoded answer."""
        async with self.post(body, path) as response:
            return response.status, await response.json()

    async def metrics(self) -> dict[str, float]:
        """Return the samples of the metrics page."""
        async with self.session.get(self.url + "/metrics", headers={"authorization": f"Bearer {SECRET}"}) as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, value in (line.split(" ") for line in lines if line[0] != "#")}


def dialect_of(kind: str, **more: Any) -> Dialect:
    """Return a dialect under the names that tests use."""
    if kind == "anthropic":
        return AnthropicDialect(model=THEIRS, name=OURS, version="2023-06-01", now=lambda: 1_700_000_000.0, **more)
    return OpenAIDialect(model=THEIRS, name=OURS, **more)


@asynccontextmanager
async def front_of(
    handler: Handler,
    kind: str = "openai",
    *,
    key_file: Path | None = None,
    silence_s: float = 5.0,
    is_ready: bool = True,
    url: str = "",
    certificate: tuple[Path, Path] | None = None,
    trusted: ssl.SSLContext | None = None,
    is_checked: bool = True,
    **more: Any,
) -> AsyncIterator[Front]:
    """Run a provider with ``handler`` and a replica in front of it (of ``url``, where that is given).

    ``certificate`` (and its key) make the provider speak TLS; ``trusted`` is what the replica trusts.
    """
    provider = Provider(handler)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", provider.serve)
    said: list[str] = []
    async with _listening(app, certificate) as port:
        scheme = "https" if certificate else "http"
        provider.url = url or f"{scheme}://127.0.0.1:{port}" + ("" if kind == "anthropic" else "/v1")
        key = Key(KEY, key_file)
        upstream = Upstream(provider.url, key, private=HOME, tls=trusted, bounds=Bounds(20.0, silence_s))
        server = ProviderServer(
            dialect_of(kind, **more),
            upstream,
            model=THEIRS,
            name=OURS,
            secret=SECRET,
            say=said.append,
            is_checked=is_checked,
        )
        async with upstream, _listening(server.app()) as own, aiohttp.ClientSession() as session:
            if is_ready:
                assert await server.get_ready() == ""
            yield Front(provider, server, session, f"http://127.0.0.1:{own}", said)


@asynccontextmanager
async def _listening(app: web.Application, certificate: tuple[Path, Path] | None = None) -> AsyncIterator[int]:
    tls = None
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*certificate)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
