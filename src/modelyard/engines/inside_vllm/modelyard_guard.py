"""The door of a vLLM server: an ASGI middleware that vLLM is told to put around itself (``--middleware``).

vLLM's own key protects ``/v1`` and no more: metrics, tokenizer, sleep, and what
its developers' mode adds (``/collective_rpc`` calls any method of a worker)
answer whoever finds the port. Here nothing but readiness is answered without
the secret, and nothing at all that the platform does not use.

It also says what the platform's contract says of adapters: loading one that is
there, and forgetting one that is not, is done and no error; one that is broken,
or for another base, is refused (``modelyard_adapters.py``). And no work comes to
an engine that sleeps or was told to, from a gateway that has not heard of it.

It imports nothing beyond the standard library: it runs under vLLM's Python.
"""

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

if __package__:
    from modelyard.engines.inside_vllm.modelyard_adapters import AdapterError, Shapes, check_adapter, read_base
else:  # vLLM has this folder on its path, and nothing of the platform
    from modelyard_adapters import (  # type: ignore[import-not-found, no-redef]
        AdapterError,
        Shapes,
        check_adapter,
        read_base,
    )

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SLEEP, WAKE = "/sleep", "/wake_up"
READY = "/health"
METRICS = "/metrics"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OPEN_WITH_SECRET = frozenset(
    {
        READY, METRICS, LOAD, UNLOAD, "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings",
        "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify", "/pooling",
        "/tokenize", "/detokenize", "/version", "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused",
        "/reset_prefix_cache",
    }
)  # fmt: skip
"""Paths that are passed on; all others do not exist."""
WORK = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score",
        "/score", "/v1/classify", "/classify", "/pooling",
    }
)  # fmt: skip
"""Those of them that need weights."""
ELSEWHERE = {"/v1/classify": "/classify"}
"""Paths that vLLM has without their version: the same requests and answers, by another name."""
SECRET_VARIABLE = "ENGINE_SECRET"  # noqa: S105 - its name
BASE_VARIABLE = "MODELYARD_BASE"
"""The folder of the model that is served, which adapters must fit."""
BODY_TIMEOUT_S = 30.0

_SETTLED = {LOAD: (400, b"has already been loaded"), UNLOAD: (404, b"cannot be found")}
"""The status and the words of vLLM's refusals that mean that it is so already."""
_ANSWER_BYTES_MAX = _BODY_BYTES_MAX = 64 * 1024


class Guard:
    """The middleware; vLLM makes it with the application that it protects."""

    def __init__(self, app: App) -> None:
        secret = os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise RuntimeError(f"set {SECRET_VARIABLE}: what callers must send as 'Authorization: Bearer'")
        self.app = app
        self.expected = f"Bearer {secret}".encode()
        self.base = os.environ.get(BASE_VARIABLE, "")
        self.shapes: Shapes | None = None
        self.is_asleep = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A websocket that is closed before it was accepted is refused with 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"]
        if path == READY and scope["method"] == "GET":
            await self.app(scope, receive, send)
        elif not self._has_secret(scope):
            await _refuse(send, 401, "invalid_api_key", "Send 'Authorization: Bearer' with the replica's secret.")
        elif path not in OPEN_WITH_SECRET:
            await _refuse(send, 404, "not_found", f"There is no {path} here.")
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self.is_asleep and path in WORK:
            await _refuse(send, 503, "engine_asleep", "The engine sleeps; nothing is lost, send it elsewhere.")
        elif path in (SLEEP, WAKE):
            await self._turn(scope, receive, send)
        elif path == LOAD:
            await self._load(scope, receive, send)
        elif path == UNLOAD:
            await self.app(scope, receive, _Settled(send, *_SETTLED[path]))
        elif path in ELSEWHERE:
            place = ELSEWHERE[path]
            await self.app({**scope, "path": place, "raw_path": place.encode()}, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _turn(self, scope: Message, receive: Receive, send: Send) -> None:
        """Close before it is told to sleep, open once it says that it woke: in between nobody knows what it can do."""
        is_waking = scope["path"] == WAKE
        if not is_waking:
            self.is_asleep = True

        async def watched(message: Message) -> None:
            if is_waking and message["type"] == "http.response.start" and message["status"] == 200:
                self.is_asleep = False
            await send(message)

        await self.app(scope, receive, watched)

    async def _load(self, scope: Message, receive: Receive, send: Send) -> None:
        """Look at what is to be loaded first; what is no order of that is vLLM's to refuse."""
        try:
            messages = await asyncio.wait_for(_received(receive), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:  # noqa: UP041 - in Python 3.10 the two differ
            await _refuse(send, 408, "body_timeout", "The body did not come in time.")
            return
        if place := _place_in(messages):
            try:
                await asyncio.to_thread(self._check, place)
            except (AdapterError, OSError) as error:
                await _refuse(send, 400, "invalid_adapter", str(error))
                return

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, _Settled(send, *_SETTLED[LOAD]))

    def _check(self, place: Path) -> None:
        if self.shapes is None:
            self.shapes = read_base(Path(self.base)) if self.base else {}
        check_adapter(place, self.shapes)

    def _has_secret(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)


class _Settled:
    """Passes an answer on, unless it says in other words that what was asked for is so: then 200."""

    def __init__(self, send: Send, status: int, text: bytes) -> None:
        self.send = send
        self.status = status
        self.text = text
        self.held: Message | None = None
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == self.status:
            self.held = message
            return
        if self.held is None:
            await self.send(message)
            return
        self.body += message.get("body", b"")
        if message.get("more_body") and len(self.body) < _ANSWER_BYTES_MAX:
            return
        held, self.held = self.held, None
        if self.text in self.body:
            await _answer(self.send, 200, {"status": "as it was"})
            return
        await self.send(held)
        await self.send({**message, "body": self.body})


async def _received(receive: Receive) -> list[Message]:
    """Return a request's body as it came; of one that is too long, what of it is too long."""
    messages = [await receive()]
    size = len(messages[0].get("body", b""))
    while messages[-1].get("more_body") and size <= _BODY_BYTES_MAX:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    return messages


def _place_in(messages: list[Message]) -> Path | None:
    """Return where the adapter of an order lies; None when it says no such thing, or nothing is there."""
    try:
        place = Path(json.loads(b"".join(message.get("body", b"") for message in messages))["lora_path"])
        return place if place.is_absolute() and place.exists() else None
    except (ValueError, TypeError, KeyError, OSError, RecursionError):
        return None


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    await _answer(send, status, {"error": {"message": message, "type": "invalid_request_error", "code": code}})


async def _answer(send: Send, status: int, content: Message) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
