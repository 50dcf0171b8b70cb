"""The process of a llama.cpp replica that takes adapters in while it runs: a small HTTP server before its own children.

It answers nothing but ``/health`` without the secret, and passes on only the
routes of ``_FORWARDED``. It ends as the child that serves ends, so that the
fleet sees what happened. SIGTERM ends it at once, as it does the plain server:
the platform drains before it asks.
"""

import argparse
import asyncio
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from modelyard.clock import SystemClock
from modelyard.engines.llamacpp import bodies, children
from modelyard.engines.llamacpp.adapters import Adapter, AdapterMissingError, Base, admit, read_base
from modelyard.engines.llamacpp.desk import AdapterGoneError, Desk, QueueFullError
from modelyard.engines.llamacpp.generations import FullError, Generations
from modelyard.engines.llamacpp.relay import Relay
from modelyard.engines.llamacpp.server import read_arguments
from modelyard.engines.llamacpp.slots import BASE
from modelyard.formats import ArtifactInvalidError

_FORWARDED = ("/v1/chat/completions", "/v1/completions")
_BODY_BYTES_MAX = 256 * 1024 * 1024
_QUEUE_PER_SLOT = 8

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Load(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str


class _Unload(msgspec.Struct, frozen=True):
    lora_name: str


class Front:
    """The handlers, and what they need."""

    def __init__(
        self, arguments: argparse.Namespace, own: argparse.Namespace, secret: str, group: asyncio.TaskGroup
    ) -> None:
        self._model: str = arguments.model_name
        self._file: Path = arguments.model
        self._work_dir: Path = own.work_dir
        self._rank_max: int = own.max_adapter_rank
        self._bearer = f"Bearer {secret}".encode()
        self._base: Base | None = None
        self._started_at = int(SystemClock().unix_s())
        # llama.cpp closes a connection some time after a stream; a request must not race with that.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._desk = Desk(arguments.slots * _QUEUE_PER_SLOT)
        self._relay = Relay(self._session, self._desk, self._model)
        environment = children.environment_for_children()

        async def launch(adapters: Sequence[Adapter]) -> children.Child:
            return await children.start(own.passed_on, adapters, slots=arguments.slots, environment=environment)

        self._generations = Generations(launch, self._desk, most=own.max_adapters, clock=SystemClock(), group=group)

    def application(self) -> web.Application:
        """Return the routes; anything else does not exist."""
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        for path in _FORWARDED:
            app.router.add_post(path, self._forward)
        return app

    async def serve(self) -> None:
        """Start the first child, then make generations for ever.

        Raises:
            ChildError: it did not come up.
            ArtifactInvalidError: the model is no GGUF file.
        """
        self._base = await asyncio.to_thread(read_base, self._file)
        await self._generations.start()
        print("ready", flush=True)  # noqa: T201 - the log
        await self._generations.run()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode()
        if request.path != "/health" and not hmac.compare_digest(given, self._bearer):
            return _error(401, "The replica's secret is missing or wrong.", "authentication_error")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason, "invalid_request_error")
        except bodies.BodyError as error:
            return _error(400, str(error), "invalid_request_error", param=error.param)
        except QueueFullError:
            return _error(429, "As many requests wait before this replica as may.", "rate_limit_error", retry=True)
        except AdapterGoneError:
            return _error(404, "The adapter was unloaded.", "NotFoundError", param="model")
        except (aiohttp.ClientError, TimeoutError) as error:
            return _error(502, f"The engine did not answer ({type(error).__name__}).", "server_error")

    async def _health(self, request: web.Request) -> web.Response:
        if self._desk.current is None:
            return _error(503, "Loading model", "unavailable_error")
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._generations.page(self._session), content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        shared = {"object": "model", "created": self._started_at, "owned_by": "modelyard"}
        listed = [{"id": self._model, **shared, "parent": None}]
        listed += [{"id": name, **shared, "parent": self._model} for name in self._generations.names]
        return web.json_response({"object": "list", "data": listed})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = bodies.read_body(await request.read())
        owner = bodies.owner_of(bodies.model_of(body), self._model)
        if owner != BASE and owner not in self._generations.names:
            return _error(404, f"The model '{owner[:200]}' does not exist.", "NotFoundError", param="model")
        return await self._relay.forward(request, body, owner)

    async def _load(self, request: web.Request) -> web.Response:
        order = _read(await request.read(), _Load)
        source = Path(order.lora_path)
        if not order.lora_name or order.lora_name == self._model:
            raise bodies.BodyError("'lora_name' must be a name that is not the base's.", "lora_name")
        if self._base is None or self._desk.current is None:
            return _error(503, "The base is still loading.", "unavailable_error", retry=True)
        known = self._generations.find(order.lora_name)
        if known is not None and known.source != source:
            raise bodies.BodyError(
                f"'{order.lora_name}' stands for another adapter already; a name stands for one content.", "lora_name"
            )
        try:
            with self._generations.expecting():
                adapter = known or await self._admitted(order.lora_name, source, self._base)
            await self._generations.load(adapter)
        except AdapterMissingError as error:
            return _error(404, str(error), "NotFoundError", param="lora_path")
        except (ArtifactInvalidError, OSError) as error:
            return _error(400, str(error), "invalid_request_error", param="lora_path")
        except FullError:
            reason = f"This replica holds its {len(self._generations.names)} adapters already: unload one first."
            return _error(400, reason, "invalid_request_error", param="lora_name")
        except children.ChildError as error:
            reason = f"llama.cpp did not take the adapter: {error}"
            return _error(400, reason, "invalid_request_error", param="lora_path")
        return web.Response(text=f"Success: LoRA adapter '{order.lora_name}' added.")

    async def _admitted(self, name: str, source: Path, base: Base) -> Adapter:
        return await asyncio.to_thread(admit, name, source, base, work_dir=self._work_dir, rank_max=self._rank_max)

    async def _unload(self, request: web.Request) -> web.Response:
        order = _read(await request.read(), _Unload)
        if not self._generations.unload(order.lora_name):
            return _error(404, f"There is no adapter '{order.lora_name[:200]}'.", "NotFoundError", param="lora_name")
        return web.Response(text=f"Success: LoRA adapter '{order.lora_name}' removed.")


def main() -> int:
    """Run the front; return the exit code."""
    own, passed_on = arguments_of(sys.argv[1:])
    own.passed_on = passed_on
    # Out of the environment at once, so that no child inherits it.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'")
    try:
        return uvloop.run(_serve(read_arguments([*passed_on, "--port", str(own.port)]), own, secret))
    except* children.ChildError as errors:
        told = errors.exceptions[0]
        assert isinstance(told, children.ChildError), "no group in a group: one task starts it"
        _refuse(f"the model cannot be loaded: {told}")
        children.die_as(told.code)
    except* (ArtifactInvalidError, OSError) as errors:
        _refuse(str(errors.exceptions[0]))
    return 1


async def _serve(arguments: argparse.Namespace, own: argparse.Namespace, secret: str) -> int:
    async with asyncio.TaskGroup() as group:
        front = Front(arguments, own, secret, group)
        runner = web.AppRunner(front.application(), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, arguments.host, arguments.port).start()
        await front.serve()
    return 0


def arguments_of(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the front's own flags, and the rest, which is its children's."""
    parser = argparse.ArgumentParser(prog="python -m modelyard.engines.llamacpp.front", allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--max-adapters", type=int, required=True)
    parser.add_argument("--max-adapter-rank", type=int, required=True)
    return parser.parse_known_args(argv)


def _read(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise bodies.BodyError(f"The body is not what is asked for here: {error}.", "") from error


def _error(status: int, message: str, kind: str, *, param: str = "", retry: bool = False) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param or None, "code": status}}
    return web.json_response(body, status=status, headers={"retry-after": "1"} if retry else None)


def _refuse(why: str) -> int:
    print(f"llama.cpp engine: {why}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return 2


if __name__ == "__main__":
    sys.exit(main())
