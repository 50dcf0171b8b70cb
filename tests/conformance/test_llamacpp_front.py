"""llama.cpp with adapters, beyond the contract: what it cached for whom, loads beside requests, and how it ends.

llama.cpp's issue #26207 is held down here by logprobs: a slot's cache is read
by its tokens alone, so that a base after an adapter answers half as the adapter.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.llamas import MODEL, QUESTION, Llama, running
from tests.support.models import Tensor, gguf
from tests.support.peft import peft_adapter
from tests.support.smollm import real_model
from tests.support.waiting import eventually_async

from modelyard.engines.llamacpp.adapters import admit, read_base
from modelyard.engines.llamacpp.children import ChildError, start

STRENGTHS = {"a@1": 0.03, "c@1": 0.06, "d@1": 0.05, "e@1": 0.04}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that answer differently from the base and from each other."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: peft_adapter(folder / name, seed, spread=spread) for seed, (name, spread) in enumerate(STRENGTHS.items())
    }


@pytest.fixture
async def llama(tmp_path: Path) -> AsyncIterator[Llama]:
    async with running(tmp_path, {"slots": 2, "context_length": 512, "max_adapters": 4}) as started:
        yield started


async def streamed(llama: Llama, model: str, text: str, tokens: int) -> dict[str, Any]:
    """Return the usage of a stream that was read to its end."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with llama.session.post(f"{llama.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert {json.loads(name) for name in re.findall(rb'"model":("[^"]*")', raw)} == {model}
    usage: dict[str, Any] = json.loads(re.findall(rb"data: (\{.*\"usage\":.*\})", raw)[-1])["usage"]
    return usage


async def test_base_and_adapters_stay_apart_while_their_prompts_are_cached(
    llama: Llama, adapters: dict[str, Path]
) -> None:
    base = await llama.logprob()
    loads = await asyncio.gather(*(llama.load(name, adapters[name]) for name in ("a@1", "c@1")))
    assert [status for status, _ in loads] == [200, 200]
    fresh = {name: await llama.logprob(name) for name in (MODEL, "a@1")}
    assert fresh[MODEL] == pytest.approx(base, abs=0.02)
    for name in (MODEL, "a@1", MODEL, "a@1"):
        found, cached = await llama.first_word(name)
        assert cached > 16, "each has a slot of its own"
        assert found == pytest.approx(fresh[name], abs=0.02)
    third = await llama.logprob("c@1")
    assert min(abs(third - base), abs(third - fresh["a@1"]), abs(fresh["a@1"] - base)) > 0.1
    for name in (MODEL, "c@1", "a@1", MODEL, "c@1", "a@1"):
        expected = {**fresh, "c@1": third}[name]
        assert await llama.logprob(name) == pytest.approx(expected, abs=0.03), "three take turns on two slots"


async def test_more_adapters_than_slots_take_turns_and_answer_as_alone(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    async with running(tmp_path, {"slots": 1, "context_length": 512, "max_adapters": 4}) as llama:
        base = await llama.logprob()
        loads = await asyncio.gather(*(llama.load(name, artifact) for name, artifact in adapters.items()))
        assert [status for status, _ in loads] == [200] * 4
        names = [MODEL, *adapters]
        alone = {name: await llama.logprob(name) for name in names}
        assert alone[MODEL] == pytest.approx(base, abs=0.02)
        found = await asyncio.gather(*(llama.logprob(name) for name in reversed(names)))
        assert found == pytest.approx([alone[name] for name in reversed(names)], abs=0.03)
        _, samples = await llama.page()
        assert samples["modelyard:swaps"] <= 2, "loads that come together make one generation"
        assert samples["modelyard:slot_takeovers"] >= 8


_ALONE = """
import sys
import xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_parallel, p.n_ctx, p.n_gpu_layers, p.warmup, p.verbosity = sys.argv[1], 1, 512, 0, False, 0
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
p.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(sys.argv[2], float(sys.argv[3]))]
body = {"messages": [{"role": "user", "content": sys.argv[4]}], "max_tokens": 1, "temperature": 0, "logprobs": True}
answer = xllamacpp.Server(p).handle_chat_completions(body)
print("\\nlogprob", answer["choices"][0]["logprobs"]["content"][0]["logprob"])
"""


async def logprob_alone(adapter: Path, scale: float) -> float:
    """Return the first word's logprob of llama.cpp that was started with an adapter, without any of our own code."""
    command = [sys.executable, "-c", _ALONE, str(real_model()), str(adapter), str(scale), QUESTION]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    found = re.search(r"^logprob (\S+)$", done.stdout, re.MULTILINE)
    assert found, done.stderr[-500:]
    return float(found[1])


async def test_an_adapter_answers_as_in_llamacpp_that_was_started_with_it(
    llama: Llama, adapters: dict[str, Path], tmp_path: Path
) -> None:
    assert (await llama.load("c@1", adapters["c@1"]))[0] == 200
    file = admit("c@1", adapters["c@1"], read_base(real_model()), work_dir=tmp_path, rank_max=16).file
    assert await llama.logprob("c@1") == pytest.approx(await logprob_alone(file, 1.0), abs=0.03)
    base = await llama.logprob()
    assert base == pytest.approx(await logprob_alone(file, 0.0), abs=0.02)


async def test_loads_beside_requests_fail_none_of_them_and_restart_nothing(
    llama: Llama, adapters: dict[str, Path]
) -> None:
    first = llama.children()
    ended = asyncio.Event()
    usages: list[dict[str, Any]] = []

    async def ask(number: int) -> None:
        while not ended.is_set():
            usages.append(await streamed(llama, MODEL, f"Tell me story number {number}", 12))

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(ask(number))
        for name in ("a@1", "c@1"):
            assert (await llama.load(name, adapters[name]))[0] == 200
            usages.append(await streamed(llama, name, "Hello", 12))
        ended.set()
    assert [usage["completion_tokens"] for usage in usages] == [12] * len(usages)

    async def is_one() -> bool:
        return len(llama.children()) == 1

    await eventually_async(is_one, 30, "the generations before have ended")
    assert llama.children() != first
    load, samples = await llama.page()
    assert samples["modelyard:swaps"] == 2
    assert load.generation_tokens_total == 12 * len(usages), "counters go on over generations"
    assert (load.running, load.waiting) == (0, 0)
    assert (await llama.seen()).pid == llama.pid


async def test_what_llamacpp_itself_refuses_ends_only_the_process_that_tried(
    llama: Llama, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Our readers let it through, and llama.cpp does not: it wants a key that they do not ask for."""
    bad = tmp_path / "bad.gguf"
    pair = [Tensor("blk.0.attn_v.weight.lora_a", (576, 4)), Tensor("blk.0.attn_v.weight.lora_b", (4, 192))]
    bad.write_bytes(gguf({"general.architecture": "llama", "adapter.type": "lora"}, pair))
    (status, body), (good, _) = await asyncio.gather(llama.load("bad@1", bad), llama.load("a@1", adapters["a@1"]))
    assert (status, good) == (400, 200), "a bad one does not hold the good one up"
    assert "llama.cpp did not take the adapter" in body["error"]["message"]
    assert (await llama.page())[1]["modelyard:adapters"] == 1
    assert (await llama.seen()).is_running
    assert await llama.logprob("a@1") != await llama.logprob()


async def test_a_full_replica_says_so_and_an_unload_makes_room(tmp_path: Path, adapters: dict[str, Path]) -> None:
    async with running(tmp_path, {"slots": 1, "context_length": 256, "max_adapters": 1}) as llama:
        assert (await llama.load("a@1", adapters["a@1"]))[0] == 200
        status, body = await llama.load("c@1", adapters["c@1"])
        assert (status, "unload one first" in body["error"]["message"]) == (400, True)
        status, body = await llama.load("a@1", adapters["c@1"])
        assert (status, "stands for another adapter" in body["error"]["message"]) == (400, True)
        before = await llama.logprob("a@1")
        assert (await llama.unload("a@1"))[0] == 200
        assert (await llama.unload("a@1"))[0] == 404
        assert (await llama.chat("a@1"))[0] == 404
        assert (await llama.load("a@1", adapters["a@1"]))[0] == 200
        assert await llama.logprob("a@1") == pytest.approx(before, abs=0.02)
        assert (await llama.page())[1]["modelyard:swaps"] == 1, "what came back was still there"
        assert (await llama.unload("a@1"))[0] == 200
        assert (await llama.load("c@1", adapters["c@1"]))[0] == 200
        assert (await llama.load("a@1", adapters["a@1"]))[0] == 400


async def test_an_adapter_that_comes_back_while_another_is_loaded_is_there(
    llama: Llama, adapters: dict[str, Path]
) -> None:
    assert (await llama.load("a@1", adapters["a@1"]))[0] == 200
    answer = await llama.logprob("a@1")
    assert (await llama.unload("a@1"))[0] == 200
    before = llama.children()

    async def is_starting() -> bool:
        return bool(set(llama.children()) - set(before))

    loading = asyncio.create_task(llama.load("c@1", adapters["c@1"]))
    await eventually_async(is_starting, 30, "a process with the other one starts, without the first")
    assert (await llama.load("a@1", adapters["a@1"]))[0] == 200
    assert (await loading)[0] == 200
    assert await llama.logprob("a@1") == pytest.approx(answer, abs=0.03)
    assert (await llama.chat("c@1", max_tokens=1))[0] == 200


async def test_files_that_were_made_of_adapters_go_with_them(
    llama: Llama, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def files() -> set[Path]:
        return set((tmp_path / "replicas").rglob("adapters/*.gguf"))

    for name in ("a@1", "c@1"):
        assert (await llama.load(name, adapters[name]))[0] == 200
    both = files()
    assert len(both) == 2
    assert (await llama.unload("a@1"))[0] == 200
    assert (await llama.load("d@1", adapters["d@1"]))[0] == 200
    assert len(files()) == 2
    assert len(files() & both) == 1
    assert (await llama.load("a@1", adapters["a@1"]))[0] == 200
    assert len(files()) == 3
    assert await llama.logprob("a@1") != await llama.logprob("d@1")


async def test_a_process_that_cannot_be_started_is_an_answer_and_no_end(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="it cannot be started: Argument list too long"):
        await start(["x" * 4_000_000], [], slots=1, environment={})


async def test_requests_beyond_slots_and_queue_are_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, {"slots": 1, "context_length": 512, "max_adapters": 1}) as llama:
        # One runs and eight wait; the first goes on until the last was refused.
        calls = [asyncio.create_task(llama.chat(text="Tell me a story", max_tokens=400, ignore_eos=True))]

        async def waits(count: int) -> bool:
            load, _ = await llama.page()
            return (load.running, load.waiting) == (1, count)

        await eventually_async(lambda: waits(0), 30, "one runs")
        calls += [asyncio.create_task(llama.chat(text="Hi", max_tokens=1)) for _ in range(8)]
        await eventually_async(lambda: waits(8), 30, "eight wait")
        status, body = await llama.chat(text="Hi", max_tokens=1)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        # A caller that leaves while it waits makes room.
        calls.pop().cancel()
        await eventually_async(lambda: waits(7), 30, "seven wait")
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_the_fleet_sees_how_the_process_below_ended_and_nothing_is_left(llama: Llama) -> None:
    [child] = llama.children()
    os.kill(child, signal.SIGSEGV)

    async def is_gone() -> bool:
        return not (await llama.seen()).is_running

    await eventually_async(is_gone, 30, "the replica ended")
    assert (await llama.seen()).exit_reason == "killed by SIGSEGV"
    assert has_ended(child)


async def test_a_front_that_is_killed_leaves_no_process_behind(llama: Llama) -> None:
    [child] = llama.children()
    os.kill(llama.pid, signal.SIGKILL)

    await eventually_async(lambda: has_ended(child), 30, "the kernel ended it")
    assert (await llama.seen()).exit_reason == "killed by SIGKILL"


async def test_a_broken_model_ends_the_replica_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(real_model().read_bytes()[: 1024 * 1024])
    command = [sys.executable, "-m", "modelyard.engines.llamacpp.front", "--model", str(file), "--model-name", "m"]
    command += ["--port", "0", "--work-dir", str(tmp_path), "--max-adapters", "1", "--max-adapter-rank", "8"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=90, check=False, env={"ENGINE_SECRET": "s"}
    )
    assert done.returncode not in (0, None)
    assert "truncated" in done.stderr
    assert "Traceback" not in done.stderr


async def test_an_idle_replica_sleeps_and_wakes_with_its_adapters(tmp_path: Path, adapters: dict[str, Path]) -> None:
    options = {"slots": 1, "context_length": 512, "max_adapters": 1, "sleep_idle_s": 1}
    async with running(tmp_path, dict(options)) as llama:
        assert (await llama.load("c@1", adapters["c@1"]))[0] == 200
        before = await llama.logprob("c@1")

        async def is_alone() -> bool:
            return len(llama.children()) == 1

        await eventually_async(is_alone, 30, "the first generation has ended")
        [child] = llama.children()
        assert await llama.logprob("c@1") == pytest.approx(before, abs=0.02)
        awake = resident_bytes(child)  # right behind an answer: it sleeps after a second without a request
        await eventually_async(lambda: resident_bytes(child) < awake / 2, 20, "it gave its memory back")
        assert (await llama.call("/health"))[0] == 200
        assert await llama.logprob("c@1") == pytest.approx(before, abs=0.02)
        assert llama.children() == [child]


async def test_guessed_tokens_are_accepted_and_counted(tmp_path: Path) -> None:
    options = {"slots": 1, "context_length": 512, "speculative": "ngram", "draft_tokens": 4}
    async with running(tmp_path, dict(options)) as llama:
        text = "Repeat after me: one two three four five six seven, one two three four five six seven."
        assert (await llama.chat(text=text, max_tokens=40))[0] == 200
        load, _ = await llama.page()
        assert load.accepted_tokens_total
        assert load.draft_tokens_total is not None
        assert load.draft_tokens_total >= load.accepted_tokens_total


async def test_a_caller_that_leaves_stops_llamacpp_and_no_other_path_of_it_is_reached(llama: Llama) -> None:
    body = {"model": MODEL, "stream": True, "max_tokens": 450, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Tell me a story"}]}
    async with aiohttp.ClientSession(headers=llama.session.headers) as session:
        response = await session.post(f"{llama.url}/v1/chat/completions", json=body)
        for _ in range(4):
            await response.content.readline()
        response.close()

    async def is_free() -> bool:
        return (await llama.page())[0].running == 0

    await eventually_async(is_free, 20, "its slot is free")
    assert ((await llama.page())[0].generation_tokens_total or 0) < 450
    for path in ("/slots", "/props", "/lora-adapters", "/tokenize", "/v1/rerank", "/v1/embeddings"):
        for asked in (None, {}):
            status, answer = await llama.call(path, asked)
            assert status in (404, 405), answer


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def has_ended(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
