"""The simulated engine's HTTP routes: health, models, metrics, faults, and what it infers."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import msgspec

from modelyard.clock import Clock
from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.adapters import Adapters
from modelyard.engines.simulated.attempts import Attempts
from modelyard.engines.simulated.batching import Batch, PrefixCache
from modelyard.engines.simulated.faults import FaultPlan, Planned
from modelyard.engines.simulated.generation import Accelerator, Totals, crash_process
from modelyard.engines.simulated.journal import TokenJournal
from modelyard.engines.simulated.media import Media
from modelyard.engines.simulated.metrics import metrics_page
from modelyard.engines.simulated.nap import Nap
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.pooling import Pooling
from modelyard.engines.simulated.requests import Refused, decode
from modelyard.engines.simulated.serving import Serving

Route = Callable[[Request, Connection], Awaitable[None]]


class SimulatedServer:
    """All of one engine but its argv; ``serve`` runs until ``stop`` is set. ``say`` writes a line of its log,
    else it is printed.

    ``crash`` ends the engine as a fault asks; what is hosted with others must not take them along (``host.py``).
    """

    def __init__(
        self,
        *,
        options: SimulatedOptions,
        model: str,
        secret: str,
        journal: TokenJournal,
        clock: Clock,
        say: Callable[[str], None] | None = None,
        crash: Callable[[int | None], None] = crash_process,
    ) -> None:
        self._model = model
        self._say = say or partial(print, flush=True)
        self._secret = f"Bearer {secret}".encode()
        self._is_ready = False
        self._plan = FaultPlan()
        self._connections: set[Connection] = set()
        blocks = options.blocks
        self._cache = PrefixCache(blocks)
        self._accelerator = Accelerator(
            options=options,
            batch=Batch(slots=options.slots, blocks=blocks),
            journal=journal,
            totals=Totals(),
            clock=clock,
            crash=crash,
        )
        self._adapters = Adapters(options, journal)
        self._nap = nap = Nap(options, self._accelerator.batch)
        attempts = Attempts(self._accelerator, self._plan, model, self._adapters)
        serving = Serving(attempts, self._cache)
        pooling = Pooling(attempts)
        self._media = media = Media(attempts)
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/load_lora_adapter"): self._adapters.load,
            ("POST", "/v1/unload_lora_adapter"): self._adapters.unload,
            ("POST", "/sleep"): nap.sleep,
            ("POST", "/wake_up"): nap.wake,
            ("GET", "/sim/faults"): self._list_faults,
            ("POST", "/sim/faults"): self._plan_faults,
            ("POST", "/v1/chat/completions"): serving.chat,
            ("POST", "/v1/completions"): serving.completions,
            ("POST", "/v1/embeddings"): pooling.embeddings,
            ("POST", "/v1/rerank"): pooling.rerank,
            ("POST", "/v1/score"): pooling.score,
            ("POST", "/v1/classify"): pooling.classify,
            ("POST", "/v1/moderations"): pooling.moderations,
            ("POST", "/tokenize"): pooling.tokenize,
            ("POST", "/v1/audio/speech"): media.speech,
            ("POST", "/v1/audio/transcriptions"): media.transcribe,
            ("POST", "/v1/audio/translations"): media.transcribe,
            ("POST", "/v1/images/generations"): media.generate_images,
            ("POST", "/v1/images/edits"): media.edit_images,
        }

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> int:
        """Listen, load, answer until ``stop``; return the exit code."""
        options = self._accelerator.options
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Connection(self._answer, self._connections), host, port, backlog=1024
        )
        self._say(f"listening on {host}:{port}, loading {self._model} for {options.load_s:g} s")
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), options.load_s or 0.001)
                return 0
            if options.fail_load:
                self._say("loading failed, as option fail_load asks")
                return 1
            self._is_ready = True
            self._say("ready")
            await stop.wait()
            return 0
        finally:
            listener.close()
            for connection in list(self._connections):
                await connection.end()
            self._accelerator.journal.close()

    async def _answer(self, request: Request, connection: Connection) -> None:
        try:
            await self._route(request)(request, connection)
        except Refused as error:
            connection.respond(error.status, error.body())

    def _route(self, request: Request) -> Route:
        if request.path != "/health":
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._secret):
                raise Refused(401, "Unauthorized", "AuthenticationError")
            if not self._is_ready:
                raise Refused(503, "Loading model", "ServiceUnavailableError")
            self._nap.check(request)
        route = self._routes.get((request.method, request.path))
        if route is None and request.path.startswith("/v2/models/") and request.path.endswith("/infer"):
            return self._media.infer
        if route is None:
            raise Refused(404, "Not Found", "NotFoundError")
        return route

    async def _health(self, _request: Request, connection: Connection) -> None:
        if self._plan.health_ms:
            await asyncio.sleep(self._plan.health_ms / 1000)
        if not self._is_ready:
            raise Refused(503, "Loading model", "ServiceUnavailableError")
        if self._plan.health_status != 200:
            raise Refused(self._plan.health_status, "as planned", "InternalServerError")
        connection.respond(200, b'{"status":"ok"}')

    async def _models(self, _request: Request, connection: Connection) -> None:
        context = self._accelerator.options.context_length
        model = {"object": "model", "created": 0, "owned_by": "simulated", "max_model_len": context}
        models = [{**model, "id": self._model, "parent": None}]
        models += [{**model, "id": name, "parent": self._model} for name in self._adapters.names()]
        connection.respond(200, msgspec.json.encode({"object": "list", "data": models}))

    async def _metrics(self, _request: Request, connection: Connection) -> None:
        is_asleep = self._nap.is_asleep if self._nap.is_offered else None
        accelerator = self._accelerator
        page = metrics_page(self._model, accelerator.batch, accelerator.totals, self._cache, is_asleep=is_asleep)
        connection.respond(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _list_faults(self, _request: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(self._plan.listed()))

    async def _plan_faults(self, request: Request, connection: Connection) -> None:
        try:
            self._plan.replace(decode(request.body, list[Planned]))
        except ValueError as error:
            raise Refused(400, str(error)) from error
        moves = self._accelerator.moves
        if self._plan.is_stalled:
            moves.clear()
        else:
            moves.set()
        connection.respond(200, msgspec.json.encode(self._plan.listed()))
