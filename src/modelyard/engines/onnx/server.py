"""The process of a replica: ``python -m modelyard.engines.onnx.server``.

It listens at once and says 503 on ``/health`` until its model is loaded and
warm; without the secret nothing but readiness is answered. Further models are
taken in by ``POST /v1/load_model`` while others serve.
"""

import argparse
import asyncio
import hmac
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from modelyard.clock import Clock, SystemClock
from modelyard.engines.onnx.handlers import Handlers, decode
from modelyard.engines.onnx.metrics import Metrics
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.engines.onnx.refusals import Refused, wrong_request
from modelyard.engines.onnx.scheduler import Scheduler
from modelyard.engines.onnx.shelf import Known, Shelf
from modelyard.formats import ArtifactInvalidError

BODY_BYTES_MAX = 64 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
_STOP_S = 0.5
_NAME_MAX = 512
_READY = ("/health", "/v2/health/live", "/v2/health/ready")
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LoadRequest(msgspec.Struct):
    """``POST /v1/load_model``."""

    name: str
    path: str
    options: dict[str, Any] = {}


class UnloadRequest(msgspec.Struct):
    """``POST /v1/unload_model``."""

    name: str


class Server:
    """The routes over one shelf of models."""

    def __init__(self, shelf: Shelf, scheduler: Scheduler, metrics: Metrics, secret: str) -> None:
        self._shelf = shelf
        self._metrics = metrics
        self._secret = secret.encode()
        self._handlers = Handlers(shelf, scheduler, metrics)
        self.is_ready = False

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        routes = app.router
        for path in _READY:
            routes.add_get(path, self._health)
        routes.add_get("/metrics", self._page)
        routes.add_get("/v1/models", self._models)
        routes.add_get("/v2", self._about)
        routes.add_get("/v2/models/{model}", self._metadata)
        routes.add_get("/v2/models/{model}/ready", self._model_ready)
        routes.add_post("/v2/models/{model}/infer", self._infer)
        routes.add_post("/v1/load_model", self._load)
        routes.add_post("/v1/unload_model", self._unload)
        for path, handle in self._handlers.routes.items():
            routes.add_post(path, _answering(handle))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handle) -> web.StreamResponse:
        """Let in who knows the secret; make an error object of every failure."""
        try:
            if request.path not in _READY:
                self._check(request)
            return await handler(request)
        except Refused as refusal:
            headers = {"retry-after": "1"} if refusal.status in (429, 503) else {}
            return _json(refusal.body(), refusal.status, headers)
        except web.HTTPRequestEntityTooLarge:
            return _json(Refused(413, "body_too_large", f"A body has at most {BODY_BYTES_MAX:,} bytes.").body(), 413)
        except web.HTTPException as error:
            return _json(
                Refused(error.status, "route_unknown", f"{error.reason}: {request.path[:200]}").body(), error.status
            )
        except TimeoutError:
            return _json(Refused(408, "body_timeout", "The body did not come in time.").body(), 408)
        except Exception:  # noqa: BLE001 - boundary: one request must not end the process
            _log.exception("a request failed: %s", request.path)
            return _json(Refused(500, "internal_error", "The engine failed; its log says how.").body(), 500)

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self._secret):
            raise Refused(401, "unauthorized", "This engine answers its platform only.")
        if not self.is_ready:
            raise Refused(503, "loading", "The model is still being loaded.")

    async def _health(self, request: web.Request) -> web.Response:
        if request.path.endswith("/live"):
            return _json({"live": True})
        return _json({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_shown(known) for known in self._shelf.all()]})

    async def _about(self, request: web.Request) -> web.Response:
        return _json({"name": "modelyard-onnx", "version": "2", "extensions": []})

    async def _metadata(self, request: web.Request) -> web.Response:
        return _json(await self._handlers.metadata(request.match_info["model"]))

    async def _model_ready(self, request: web.Request) -> web.Response:
        async with self._shelf.use(request.match_info["model"]) as model:
            return _json({"name": model.name, "ready": True})

    async def _infer(self, request: web.Request) -> web.Response:
        return _json(await self._handlers.infer(request.match_info["model"], await _body(request)))

    async def _load(self, request: web.Request) -> web.Response:
        wanted = decode(await _body(request), LoadRequest)
        if not 0 < len(wanted.name) <= _NAME_MAX or not wanted.name.isprintable():
            raise wrong_request(f"A name has 1 to {_NAME_MAX} printable characters.", "name")
        try:
            options = msgspec.convert(wanted.options, OnnxOptions)
        except msgspec.ValidationError as error:
            raise wrong_request(f"The options are wrong: {error}.", "options") from None
        await self._shelf.add_guest(wanted.name, Path(wanted.path), options)
        return _json({"name": wanted.name, "loaded": True})

    async def _unload(self, request: web.Request) -> web.Response:
        wanted = decode(await _body(request), UnloadRequest)
        await self._shelf.remove(wanted.name)
        return _json({"name": wanted.name, "loaded": False})


def main() -> int:
    """Run the server; return the exit code."""
    arguments = _read_arguments()
    # Out of the environment at once, so that nothing that this process starts inherits it.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'", 2)
    try:
        options = msgspec.json.decode(arguments.options, type=OnnxOptions)
    except msgspec.MsgspecError as error:
        return _refuse(f"--options is wrong: {error}", 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    code = asyncio.run(_serve(arguments, options, secret))
    sys.stdout.flush()
    sys.stderr.flush()
    # A batch that does not heed the request to stop must not keep the process: its answers have nobody any more.
    os._exit(code)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m modelyard.engines.onnx.server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--options", default="{}")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace, options: OnnxOptions, secret: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock: Clock = SystemClock()
    metrics = Metrics()
    workers = options.parallel or 1
    scheduler = Scheduler(workers, metrics, clock)
    shelf = Shelf(
        scheduler,
        metrics,
        clock,
        threads=max(1, arguments.threads // workers),
        guests_max=options.guests,
        limit_bytes=arguments.memory_bytes,
    )
    server = Server(shelf, scheduler, metrics, secret)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, arguments.host, arguments.port).start()
        return await _until(stop, server, shelf, scheduler, arguments, options)
    except OSError as error:
        return _refuse(f"{arguments.host}:{arguments.port} cannot be used: {error.strerror}", 1)
    finally:
        scheduler.close()
        shelf.close()
        await runner.cleanup()


async def _until(
    stop: asyncio.Event,
    server: Server,
    shelf: Shelf,
    scheduler: Scheduler,
    arguments: argparse.Namespace,
    options: OnnxOptions,
) -> int:
    """Load the model and serve until told to stop."""
    stopping = asyncio.create_task(stop.wait())
    working = asyncio.create_task(scheduler.run())
    loading = asyncio.create_task(shelf.add_main(arguments.model_name, arguments.model, options))
    tasks: set[asyncio.Task[Any]] = {stopping, working}
    try:
        await asyncio.wait({*tasks, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            server.is_ready = True
            print(f"ready on {arguments.host}:{arguments.port}", flush=True)  # noqa: T201 - the log
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    except ArtifactInvalidError as error:
        return _refuse(f"the model cannot be loaded: {error}", 1)
    except OSError as error:
        return _refuse(f"the model cannot be read: {error}", 1)
    finally:
        for task in (*tasks, loading):
            task.cancel()
        await asyncio.gather(*tasks, loading, return_exceptions=True)
    return 0


def _answering(handle: Callable[[bytes], Awaitable[dict[str, Any]]]) -> Handle:
    async def answer(request: web.Request) -> web.Response:
        return _json(await handle(await _body(request)))

    return answer


async def _body(request: web.Request) -> bytes:
    async with asyncio.timeout(BODY_TIMEOUT_S):
        return await request.read()


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json", headers=headers)


def _shown(known: Known) -> dict[str, Any]:
    return {
        "id": known.name,
        "object": "model",
        "owned_by": "modelyard",
        "is_guest": known.is_guest,
        "is_loaded": known.model is not None,
        "memory_bytes": known.resident.memory_bytes if known.resident is not None else 0,
        "task": known.model.task if known.model is not None else None,
        "max_model_len": known.model.max_tokens if known.model is not None else None,
    }


def _refuse(why: str, code: int) -> int:
    print(f"onnx engine: {why}", file=sys.stderr)  # noqa: T201 - the log
    return code


if __name__ == "__main__":
    sys.exit(main())
