"""A model over two workers says what it says on one: vLLM's tensor parallel as the engine renders it."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.vllm import READY_S, converted_smollm, lane, tiny_llama, vllm_command
from tests.support.waiting import eventually_async

from modelyard.clock import SystemClock
from modelyard.domain.facts import ModelFacts
from modelyard.engines import LaunchSpec, Options
from modelyard.engines.vllm import VllmEngine
from modelyard.fleet import StartOrder
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.formats.folder import facts_of

pytestmark = [lane, pytest.mark.timeout(1300)]
SECRET = "the-replica-secret"
PROMPT = "A random model says nothing, but always the same."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    return tiny_llama(root / "tiny", converted_smollm(root / "smollm"))


def facts_in(folder: Path) -> ModelFacts:
    return facts_of({file.name: file for file in folder.iterdir()})


async def answer_of(folder: Path, root: Path, ways: int) -> tuple[str, list[float]]:
    """Start a replica over ``ways`` workers, ask it once, and end it."""
    engine = VllmEngine((str(vllm_command()),))
    options: Options = {"tensor_parallel": ways, "slots": 2, "context_length": 256, "dtype": "float32"}
    settings = engine.settings(options, artifact_bytes=1, facts=facts_in(folder))
    fleet = LocalFleet(root, SystemClock())
    address = await fleet.reserve("r-1")
    spec = LaunchSpec(
        "r-1", "tiny", folder, address.host, address.port, SECRET, settings.slots, settings.context_length, 2, options,
        Path(address.work_dir), kv_cache_bytes=settings.kv_tokens * settings.kv_bytes_per_token,
    )  # fmt: skip
    command = engine.command(spec)
    await fleet.start(StartOrder("r-1", "ep-1", address.host, address.port, SECRET, command))
    url = f"http://{address.host}:{address.port}"
    try:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {SECRET}"}) as session:
            await eventually_async(lambda: is_ready(fleet, session, url), READY_S, "vLLM is ready")
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice["text"], [float(value) for value in choice["logprobs"]["token_logprobs"]]
    finally:
        await asyncio.to_thread(stop_all, root, 10.0)


async def is_ready(fleet: LocalFleet, session: aiohttp.ClientSession, url: str) -> bool:
    if not (await fleet.observe())[0].is_running:
        log = [line async for line in fleet.log_lines("r-1", follow=False)]
        pytest.fail("vLLM ended:\n" + "\n".join(log[-40:]))
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectorError:
        return False


async def test_two_workers_say_what_one_says(folder: Path, tmp_path: Path) -> None:
    text, logprobs = await answer_of(folder, tmp_path / "one", 1)
    other_text, others = await answer_of(folder, tmp_path / "two", 2)
    far = max(abs(one - other) for one, other in zip(logprobs, others, strict=True))
    print(f"tensor parallel: {len(logprobs)} tokens, logprobs at most {far:.2g} apart")
    assert other_text == text
    assert far < 1e-3
