"""One request, and when each of its tokens came."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.loadtest.sse import EventReader
from modelyard.loadtest.workload import Ask

if TYPE_CHECKING:
    import ssl

    import aiohttp

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}
CONNECT_S = 10.0
REST_S = 1.0
"""Longest wait for the end of a body whose stream has ended."""
_ERROR_BYTES = 64 * 1024
_ANSWER_BYTES = 64 * 1024 * 1024


class Target(msgspec.Struct, frozen=True):
    """What is measured. ``certificate``: a file to trust, of a server with its own."""

    url: str
    model: str
    key: str = ""
    route: str = "chat"
    certificate: str = ""
    is_streamed: bool = True
    ignores_eos: bool = True
    """Ask for answers of exactly the length that is wanted, as vLLM, llama.cpp and others can."""
    timeout_s: float = 120.0


class Sample(msgspec.Struct):
    """What became of one request; times are of one monotonic clock. ``error`` is its kind, "" for a whole answer."""

    due_s: float
    """When it was to be sent."""
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: Any = None
    """Seconds between two pieces of the answer: ``array('d')``."""
    input_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = False
    """Tokens are what the server says, not the number of pieces."""
    error: str = ""
    detail: str = ""

    @property
    def pieces(self) -> int:
        """Pieces of the answer."""
        return len(self.gaps_s) + 1 if self.first_s else 0


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Client:
    """Makes requests over kept connections; ``async with Client(target) as client``."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        """Open it."""
        import aiohttp

        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "modelyard-bench"}
        if self.target.key:
            headers["authorization"] = f"Bearer {self.target.key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_trust(self.target.certificate)),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s, sock_connect=CONNECT_S),
            headers=headers,
            skip_auto_headers=("accept",),
        )
        return self

    async def __aexit__(self, *failed: object) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    def body_of(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request."""
        target = self.target
        if target.route == "embeddings":
            return {"model": target.model, "input": ask.content}
        name = "messages" if target.route == "chat" else "prompt"
        body: dict[str, Any] = {"model": target.model, name: ask.content, "temperature": 0}
        if ask.output_tokens:
            body["max_tokens"] = ask.output_tokens
            if target.ignores_eos:
                body["ignore_eos"] = True
        if target.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def ask(self, ask: Ask, *, due_s: float | None = None) -> Sample:
        """Make one request; whatever happens to it is in the sample."""
        import aiohttp

        assert self._session is not None, "used inside of its context"
        content = msgspec.json.encode(self.body_of(ask))
        now_s = time.perf_counter()
        sample = Sample(due_s=now_s if due_s is None else due_s, sent_s=now_s, gaps_s=array("d"))
        try:
            async with self._session.post(self.target.url + PATHS[self.target.route], data=content) as answer:
                if answer.status != 200:
                    sample.error, sample.detail = _refusal(answer.status, await answer.content.read(_ERROR_BYTES))
                elif "text/event-stream" in answer.headers.get("content-type", ""):
                    await _read_stream(answer.content, sample)
                    if not sample.error:
                        await _read_rest(answer.content)
                else:
                    await _read_whole(answer, sample)
        except TimeoutError:
            sample.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            sample.error, sample.detail = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            sample.error, sample.detail = "connection lost", f"{type(error).__name__}: {error}"
        except msgspec.MsgspecError as error:
            sample.error, sample.detail = "not OpenAI's form", str(error)
        sample.last_s = sample.last_s or time.perf_counter()
        return sample


async def _read_stream(content: "aiohttp.StreamReader", sample: Sample) -> None:
    reader, is_done = EventReader(), False
    while not is_done:
        piece = await content.readany()
        if not piece:
            sample.error = "stream cut"
            return
        now_s = time.perf_counter()
        for data in reader.feed(piece):
            if data == b"[DONE]":
                is_done = True
                break
            _take(_decode(data), sample, now_s)
            if sample.error:
                return
    if not sample.is_counted:
        sample.output_tokens = sample.pieces
    if not sample.first_s:
        sample.error = "empty answer"


async def _read_rest(content: "aiohttp.StreamReader") -> None:
    """Read what follows the end of a stream, which is the end of its body: only then the connection serves another
    request, and opening one (TCP, TLS) would be in the next one's times."""
    import aiohttp

    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(REST_S):
            while not content.at_eof():
                await content.readany()


def _take(event: _Event, sample: Sample, now_s: float) -> None:
    if event.error:
        sample.error, sample.detail = _fault(event.error, "in the stream")
        return
    if event.usage is not None:
        sample.input_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        sample.is_counted = True
    if not any(map(_has_content, event.choices)):
        return
    if sample.first_s:
        sample.gaps_s.append(now_s - sample.last_s)
    else:
        sample.first_s = now_s
    sample.last_s = now_s


def _has_content(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or delta.content or delta.tool_calls or delta.reasoning_content or delta.reasoning)


async def _read_whole(answer: "aiohttp.ClientResponse", sample: Sample) -> None:
    pieces: list[bytes] = []
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        if sum(map(len, pieces)) > _ANSWER_BYTES:
            sample.error = "answer too long"
            return
    sample.last_s = time.perf_counter()
    value: Mapping[str, Any] = msgspec.json.decode(b"".join(pieces), type=dict[str, Any])
    if value.get("error"):
        sample.error, sample.detail = _fault(value["error"], "with status 200")
        return
    usage = value.get("usage") or {}
    sample.input_tokens, sample.output_tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    sample.is_counted = bool(usage)


def _refusal(status: int, content: bytes) -> tuple[str, str]:
    try:
        found = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return f"HTTP {status}", content[:200].decode("utf-8", "replace")
    return _fault(found.get("error") or found, f"HTTP {status}")


def _fault(error: Any, where: str) -> tuple[str, str]:
    """Return the kind of an error object and its message."""
    if not isinstance(error, dict):
        return where, str(error)[:500]
    code = error.get("code") or error.get("type")
    return f"{where} {code}" if code else where, str(error.get("message", ""))[:500]


def _trust(certificate: str) -> "ssl.SSLContext | bool":
    """Return what servers are checked by: the system's authorities, or the certificate of a platform that is here."""
    if not certificate:
        return True
    import ssl

    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


async def settle(client: Client, ask: Ask) -> Sample:
    """Make a first request; where the server refuses ``ignore_eos``, the client leaves it out from now on."""
    async with asyncio.timeout(client.target.timeout_s + CONNECT_S):
        sample = await client.ask(ask)
        if sample.error.startswith("HTTP 4") and "ignore_eos" in sample.detail:
            client.target = msgspec.structs.replace(client.target, ignores_eos=False)
            sample = await client.ask(ask)
    return sample
