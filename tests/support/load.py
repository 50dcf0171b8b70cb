"""A client that journals every byte it receives and how each request ended.

The journal is one of the three histories that ``check_ledger`` compares. The
client is raw sockets on purpose: SDKs hide how a stream ended, and that is
what the fault tests are about.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from tests.support.waiting import eventually_async
from tests.support.wire import AnswerReader, request_bytes

CHAT = "/v1/chat/completions"


class Outcome(StrEnum):
    """How a request ended, as the client saw it."""

    COMPLETE = "complete"
    """A whole 2xx answer; for a stream: finish_reason, then ``[DONE]``, then a clean end."""
    REFUSED = "refused"
    """A whole answer that is not 2xx."""
    ERROR_EVENT = "error_event"
    """A stream whose last event is an error object."""
    ABRUPT = "abrupt"
    """The connection broke before the answer was whole."""
    CUT_SHORT = "cut_short"
    """A stream that ended as if it were whole, without ``[DONE]`` and without an error. Never legal."""
    LEFT = "left"
    """This client closed the connection."""
    HUNG = "hung"
    """Nothing more came in time. Never legal."""
    NOT_CONNECTED = "not_connected"
    """The connection was refused."""


@dataclass(slots=True)
class Exchange:
    """One request and everything that came back."""

    label: str
    path: str
    asks_stream: bool
    received: bytearray = field(default_factory=bytearray)
    reader: AnswerReader = field(default_factory=AnswerReader)
    outcome: Outcome | None = None
    started_s: float = field(default_factory=time.monotonic)
    first_byte_s: float | None = None
    ended_s: float | None = None
    writer: asyncio.StreamWriter | None = None
    has_left: bool = False

    @property
    def status(self) -> int:
        """HTTP status, 0 before the head came."""
        return self.reader.answer.status

    @property
    def request_id(self) -> str | None:
        """The id that the server gave the request."""
        return self.reader.answer.header("x-request-id")

    def header(self, name: str) -> str | None:
        """Return the first header of this name (lower case)."""
        return self.reader.answer.header(name)

    @property
    def lines(self) -> list[str]:
        """Whole lines of a stream's body."""
        text = bytes(self.reader.answer.body).decode("utf-8", "replace")
        return [line.removesuffix("\r") for line in text.split("\n")[:-1]]

    @property
    def comments(self) -> list[str]:
        """Comment lines of a stream."""
        return [line for line in self.lines if line.startswith(":")]

    @property
    def data(self) -> list[str]:
        """The ``data:`` payloads of a stream, ``[DONE]`` too."""
        return [line[5:].lstrip(" ") for line in self.lines if line.startswith("data:")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON payloads of a stream."""
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def delivered(self) -> int:
        """Chunks that carry generated text or tool calls: the fewest tokens that reached the client."""
        return sum(1 for chunk in self.chunks for choice in chunk.get("choices") or [] if _carries_output(choice))

    @property
    def text(self) -> str:
        """The generated text, of a stream or a whole chat answer."""
        if self.reader.answer.is_stream:
            choices = [choice for chunk in self.chunks for choice in chunk.get("choices") or []]
            return "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in choices)
        choice = self.reader.answer.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def usage(self) -> dict[str, Any] | None:
        """Usage as told to the client, if it was."""
        if self.reader.answer.is_stream:
            told = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
            return told[-1] if told else None
        if self.outcome is not Outcome.COMPLETE:
            return None
        found = self.reader.answer.json()
        return found.get("usage") if isinstance(found, dict) else None

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal or of a stream's last event, or {}."""
        if self.reader.answer.is_stream:
            chunks = self.chunks
            return dict(chunks[-1].get("error") or {}) if chunks else {}
        with contextlib.suppress(ValueError):
            found = self.reader.answer.json()
            return dict(found.get("error") or {}) if isinstance(found, dict) else {}
        return {}

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end, or to now."""
        return (self.ended_s or time.monotonic()) - self.started_s

    def leave(self) -> None:
        """Close the connection at once, without a word."""
        self.has_left = True
        if self.writer is not None:
            self.writer.transport.abort()

    def judge(self) -> Outcome:
        """Say how the request ended, from the bytes alone."""
        answer = self.reader.answer
        if self.reader.broken or not answer.is_complete:
            return Outcome.LEFT if self.has_left else Outcome.ABRUPT
        if not 200 <= answer.status < 300:
            return Outcome.REFUSED
        if not answer.is_stream:
            return Outcome.COMPLETE
        data = self.data
        if data and data[-1] == "[DONE]" and not any('"error"' in item for item in data if '"choices"' not in item):
            return Outcome.COMPLETE
        return Outcome.ERROR_EVENT if self.error else Outcome.CUT_SHORT

    def __repr__(self) -> str:
        """Show what a failing test needs."""
        said = f" code={self.error.get('code')}" if self.status >= 400 or self.outcome is Outcome.ERROR_EVENT else ""
        return f"<{self.label} {self.request_id} {self.outcome} status={self.status}{said} bytes={len(self.received)}>"


def _carries_output(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content") or choice.get("text"))


class Load:
    """Sends requests, each on a connection of its own, and keeps their journal. Use as ``async with``."""

    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self.key = key
        self.exchanges: list[Exchange] = []
        self._tasks: list[asyncio.Task[Exchange]] = []

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *reason: object) -> None:
        """Drop what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(  # one keyword for each thing a test may vary
        self,
        body: dict[str, Any] | bytes,
        *,
        path: str = CHAT,
        key: str | None = None,
        headers: Iterable[tuple[str, str]] = (),
        label: str = "",
        within_s: float = 45.0,
    ) -> Exchange:
        """Begin a request and return at once; its ``Exchange`` fills as bytes arrive."""
        asks_stream = isinstance(body, dict) and bool(body.get("stream"))
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        exchange = Exchange(label or f"#{len(self.exchanges)}", path, asks_stream)
        self.exchanges.append(exchange)
        sent = [("Authorization", f"Bearer {key or self.key}"), ("Content-Type", "application/json"), *headers]
        request = request_bytes("POST", path, body=raw, headers=sent)
        self._tasks.append(asyncio.create_task(self._run(exchange, request, within_s)))
        return exchange

    async def send(self, body: dict[str, Any] | bytes, **options: Any) -> Exchange:
        """Send one request and wait for its end."""
        exchange = self.start(body, **options)
        return await self._tasks[-1] if exchange.outcome is None else exchange

    async def finish(self, within_s: float = 60.0) -> list[Exchange]:
        """Wait until every request has ended and return them all."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._tasks)
        return self.exchanges

    async def delivered(self, exchange: Exchange, tokens: int, within_s: float = 20.0) -> None:
        """Wait until a stream has brought at least this many tokens (or has ended)."""
        what = f"{tokens} tokens of {exchange!r}"
        await eventually_async(lambda: exchange.delivered >= tokens or exchange.outcome is not None, within_s, what)
        assert exchange.delivered >= tokens, f"ended early: {exchange!r} {bytes(exchange.received)[-300:]!r}"

    async def until_served(self, model: str, within_s: float = 30.0) -> Exchange:
        """Send small requests until one is answered, as a client does that is told to retry; all are kept."""

        async def once() -> Exchange | None:
            exchange = await self.send(chat(model, "hello"))
            assert exchange.status in (0, 200, 503, 504), exchange
            return exchange if exchange.status == 200 else None

        return await eventually_async(once, within_s, f"'{model}' is served again")

    async def _run(self, exchange: Exchange, request: bytes, within_s: float) -> Exchange:
        try:
            async with asyncio.timeout(within_s):
                await self._talk(exchange, request)
        except TimeoutError:
            exchange.outcome = Outcome.HUNG
        exchange.ended_s = time.monotonic()
        return exchange

    async def _talk(self, exchange: Exchange, request: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            exchange.outcome = Outcome.NOT_CONNECTED
            return
        exchange.writer = writer
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                answer = exchange.reader.answer
                while not exchange.has_left and not answer.is_complete and (data := await reader.read(65536)):
                    exchange.first_byte_s = exchange.first_byte_s or time.monotonic()
                    exchange.received += data
                    exchange.reader.feed(data)
            exchange.reader.end()
            exchange.outcome = exchange.judge()
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def chat(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request of one user message."""
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}
