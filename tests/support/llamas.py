"""A llama.cpp replica of the real local fleet, talked to without a gateway."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from modelyard.clock import SystemClock
from modelyard.engines import EngineLoad, Guest, LaunchSpec, Options
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.engines.pages import read_samples
from modelyard.fleet import Observed, StartOrder
from modelyard.fleet.local import LocalFleet, stop_all
from tests.support.smollm import real_model
from tests.support.waiting import eventually_async

MODEL = "acme/smol"
QUESTION = "What is the capital of France?"
_SECRET = "the-replica-secret"
_REPLICA = "r-1"


@dataclass(slots=True)
class Llama:
    """A running replica."""

    fleet: LocalFleet
    session: aiohttp.ClientSession
    url: str
    pid: int

    async def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and answer of a call."""
        async with self.session.request("GET" if body is None else "POST", self.url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def chat(self, model: str = MODEL, text: str = QUESTION, **more: Any) -> tuple[int, Any]:
        """Return status and answer of a chat."""
        messages = [{"role": "user", "content": text}]
        return await self.call("/v1/chat/completions", {"model": model, "messages": messages, "temperature": 0, **more})

    async def logprob(self, model: str = MODEL) -> float:
        """Return how sure a model is of its first word: what tells adapters apart."""
        return (await self.first_word(model))[0]

    async def first_word(self, model: str = MODEL) -> tuple[float, int]:
        """Return the logprob of an answer's first word, and how many tokens of the prompt came from a cache."""
        status, body = await self.chat(model, max_tokens=1, logprobs=True)
        assert status == 200, body
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return float(body["choices"][0]["logprobs"]["content"][0]["logprob"]), int(cached)

    async def load(self, name: str, artifact: Path) -> tuple[int, Any]:
        """Load an adapter; return status and answer."""
        call = LlamaCppEngine().load_guest(Guest(name, artifact))
        return await self.call(call.path, call.body)

    async def unload(self, name: str) -> tuple[int, Any]:
        """Unload an adapter; return status and answer."""
        call = LlamaCppEngine().unload_guest(name)
        return await self.call(call.path, call.body)

    async def page(self) -> tuple[EngineLoad, dict[str, float]]:
        """Return what its metrics say, as the platform reads them and by name."""
        status, page = await self.call("/metrics")
        assert status == 200
        return LlamaCppEngine().read_load(page), read_samples(page)

    async def seen(self) -> Observed:
        """Return what the fleet sees of it."""
        return (await self.fleet.observe())[0]

    def children(self) -> list[int]:
        """Return the processes below it."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(self.pid):
                    found.append(int(entry.name))
            except OSError:
                continue
        return sorted(found)


@asynccontextmanager
async def running(folder: Path, options: Options) -> AsyncIterator[Llama]:
    """Start a replica of SmolLM2 with ``options`` and stop it at the end."""
    engine, model = LlamaCppEngine(), real_model()
    root = folder / "replicas"
    fleet = LocalFleet(root, SystemClock())
    settings = engine.settings(options, artifact_bytes=model.stat().st_size)
    address = await fleet.reserve(_REPLICA)
    spec = LaunchSpec(
        replica_id=_REPLICA,
        model_name=MODEL,
        artifact=model,
        host=address.host,
        port=address.port,
        secret=_SECRET,
        slots=settings.slots,
        context_length=settings.context_length,
        threads=2,
        options=options,
        work_dir=Path(address.work_dir),
    )
    order = StartOrder(
        replica_id=_REPLICA,
        endpoint_id="ep-1",
        host=address.host,
        port=address.port,
        secret=_SECRET,
        command=engine.command(spec),
    )
    url = f"http://{address.host}:{address.port}"
    # llama.cpp closes a connection some time after a stream; the next request must not race with that.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    headers = {"authorization": f"Bearer {_SECRET}"}
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        await fleet.start(order)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            llama = Llama(fleet, session, url, (await fleet.observe())[0].pid)

            async def is_ready() -> bool:
                seen = await llama.seen()
                assert seen.is_running, seen
                return (await llama.call("/health"))[0] == 200

            is_up: bool = await eventually_async(is_ready, 60, "ready")
            assert is_up
            yield llama
    finally:
        stop_all(root, 1.0)
