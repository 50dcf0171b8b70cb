"""A replica for the tests of the engine contract: an engine's real process, started by the real local fleet."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tools.smollm import ModelMissing, model_file

from modelyard.clock import SystemClock
from modelyard.engines import Engine, EngineCall, EngineLoad, LaunchSpec, Options
from modelyard.fleet import StartOrder
from modelyard.fleet.local import LocalFleet, stop_all
from tests.support import vllm
from tests.support.waiting import eventually_async

MODEL = "acme/tiny"
SECRET = "the-replica-secret"
READY_S = {"vllm": vllm.READY_S}
"""Longest start of those that take their time."""


@dataclass(slots=True)
class Running:
    """An engine's process, shared by the tests of a file."""

    engine: Engine
    options: Options
    url: str
    saw_loading: bool


@dataclass(slots=True)
class Replica:
    """A running engine and how to talk to it."""

    engine: Engine
    options: Options
    session: aiohttp.ClientSession
    url: str
    saw_loading: bool

    async def call(self, path: str, body: dict[str, Any] | None = None, secret: str = SECRET) -> tuple[int, Any]:
        """Return status and answer of a call: a JSON object, or the text."""
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def order(self, call: EngineCall) -> tuple[int, Any]:
        """Make a call of the contract."""
        return await self.call(call.path, call.body)

    async def load(self) -> EngineLoad:
        """Return its load, as the platform reads it."""
        status, page = await self.call(self.engine.load_path)
        assert status == 200
        return self.engine.read_load(page)

    async def guests(self) -> frozenset[str]:
        """Return the guests that it lists, as the platform reads them."""
        headers = {"authorization": f"Bearer {SECRET}"}
        async with self.session.get(f"{self.url}/v1/models", headers=headers) as response:
            assert response.status == 200
            return self.engine.read_guests(await response.text())

    async def stream(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return the chunks before ``[DONE]``, and the content type."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {SECRET}"}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
        events = re.split(rb"\r?\n\r?\n", raw)
        data = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]
        assert data[-1] == b"[DONE]"
        return [json.loads(item) for item in data[:-1]], response.content_type


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a greedy chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


@contextmanager
def running_engine(engine: Engine, options: Options, root: Path) -> Iterator[Running]:
    """Start an engine with a model that it can load, and stop it at the end; skipped where it cannot run."""
    if why := engine.missing():
        pytest.skip(why)
    fleet = LocalFleet(root, SystemClock())
    try:
        yield asyncio.run(started(fleet, engine, options, artifact_of(engine, root)))
        asyncio.run(fleet.stop("r-1", grace_s=5))
        assert asyncio.run(fleet.observe())[0].exit_reason == "stopped"
    finally:
        stop_all(root, 0.0)


async def started(fleet: LocalFleet, engine: Engine, options: Options, artifact: Path | None) -> Running:
    """Start an engine as the platform does and wait until it is ready."""
    address = await fleet.reserve("r-1")
    settings = engine.settings(options, artifact_bytes=artifact.stat().st_size if artifact else 0)  # noqa: ASYNC240 - a test
    spec = LaunchSpec(
        replica_id="r-1",
        model_name=MODEL,
        artifact=artifact,
        host=address.host,
        port=address.port,
        secret=SECRET,
        slots=settings.slots,
        context_length=settings.context_length,
        threads=2,
        options=options,
        work_dir=Path(address.work_dir),
        kv_cache_bytes=settings.kv_tokens * settings.kv_bytes_per_token,
    )
    command = engine.command(spec)
    assert not any(SECRET in word for word in command.argv), "arguments are visible to every user of the machine"
    order = StartOrder(
        replica_id="r-1", endpoint_id="ep-1", host=address.host, port=address.port, secret=SECRET, command=command
    )
    await fleet.start(order)
    url = f"http://{address.host}:{address.port}"
    async with aiohttp.ClientSession() as session:
        saw_loading = await ready(fleet, session, url + engine.ready_path, READY_S.get(engine.name, 60))
    return Running(engine, options, url, saw_loading)


async def ready(fleet: LocalFleet, session: aiohttp.ClientSession, url: str, within_s: float) -> bool:
    """Wait for 200; say whether 503 was seen before, or nobody listened yet."""
    statuses: list[int] = []

    async def look() -> bool:
        if not (await fleet.observe())[0].is_running:
            # Not an assertion, which would mean "not yet".
            pytest.fail("\n".join([line async for line in fleet.log_lines("r-1", follow=False)]))
        try:
            async with session.get(url) as response:
                statuses.append(response.status)
        except aiohttp.ClientConnectorError:
            statuses.append(503)
        return statuses[-1] == 200

    is_up: bool = await eventually_async(look, within_s, "ready")
    assert is_up
    assert set(statuses) <= {200, 503}
    return 503 in statuses


def artifact_of(engine: Engine, root: Path) -> Path | None:
    """Return a model that ``engine`` has looked at and can load; what is made for it is made beside ``root``."""
    if not engine.needs_artifact:
        return None
    place = _model_for(engine, root)
    engine.check_artifact(place)
    return place


def _model_for(engine: Engine, root: Path) -> Path:
    if engine.name == "vllm":
        vllm.vllm_command()
        return vllm.converted_smollm(root.with_name("smollm"))
    if engine.name == "onnx":
        from tests.support.smallmodels import minilm_onnx

        return minilm_onnx()
    try:
        return model_file()
    except ModelMissing as error:
        pytest.skip(str(error))
