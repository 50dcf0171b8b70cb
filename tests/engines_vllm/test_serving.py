"""vLLM on this machine's CPUs, deployed by the platform and asked through its gateway: what it is chosen for.

One server does all of it, since a start takes minutes: SmolLM2, converted from
its GGUF file, with a KV cache so small that requests throw one another out of
it, fewer places in its queue than the gateway sends it requests, n-gram
speculation and room for many adapters. Figures are printed and never judged.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.engines import secret_of
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.loras import shape_of, write_lora
from tests.support.vllm import COMMAND, READY_S, converted_smollm, lane, run_inside, vllm_command
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

from modelyard.engines import EngineCall, EngineLoad, Guest
from modelyard.engines.vllm import VllmEngine

pytestmark = [lane, pytest.mark.timeout(1200)]
SETTINGS = {
    "engines.vllm": COMMAND,
    "gateway.queue_wait_s": 300,
    "gateway.load_wait_s": READY_S,
    "gateway.first_token_timeout_s": 300,
    "gateway.token_timeout_s": 300,
    "gateway.total_timeout_s": 600,
    "control.hang_timeout_s": 120,
    "control.drain_timeout_s": 120,
    "fleet.threads": 2,
}
MODEL = "smol"
SLOTS, PLACES = 10, 5
"""The gateway sends up to ten at once, the engine takes five: running and waiting together."""
BLOCK, BLOCKS = 32, 40
LORAS = 24
OPTIONS: dict[str, object] = {
    "slots": SLOTS, "max_queued": PLACES, "context_length": 1024, "block_size": BLOCK, "kv_blocks": BLOCKS,
    "dtype": "bfloat16", "speculative": "ngram", "max_loras": 4, "max_lora_rank": 8, "loras_held": LORAS,
}  # fmt: skip
LONG = " ".join(f"The {n}th rule of the house is to leave the {n}th door as it was found." for n in range(1, 41))
FINGERPRINT = "The capital of France is Paris, and the capital of Italy is"
TOP = 20
"""Tokens whose logprobs tell one adapter from another."""
SEEN: list[Exchange] = []
Logprobs = dict[str, float]


class Server:
    """The running replica, past the gateway: as control sees it."""

    def __init__(self, yard: Yard, session: aiohttp.ClientSession) -> None:
        self.engine = VllmEngine((COMMAND,))
        (process,) = yard.engines(MODEL)
        self.url = f"http://127.0.0.1:{process.port}"
        self.session = session
        self.headers = {"authorization": f"Bearer {secret_of(yard, process)}"}

    async def get(self, path: str) -> str:
        async with self.session.get(self.url + path, headers=self.headers) as response:
            assert response.status == 200, path
            return await response.text()

    async def load(self) -> EngineLoad:
        return self.engine.read_load(await self.get(self.engine.load_path))

    async def metric(self, name: str) -> float:
        page = await self.get(self.engine.load_path)
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{"))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=self.headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def tell(self, call: EngineCall) -> int:
        return (await self.post(call.path, call.body))[0]

    async def guests(self) -> frozenset[str]:
        return self.engine.read_guests(await self.get("/v1/models"))

    async def fingerprint(self, model: str) -> Logprobs:
        """Return the logprobs of the likeliest next tokens of a text, by their ids."""
        body = {"model": model, "prompt": FINGERPRINT, "max_tokens": 1, "logprobs": TOP, "temperature": 0}
        status, answer = await self.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
        assert status == 200, answer
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {token.removeprefix("token_id:"): float(value) for token, value in top.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_command()
    return converted_smollm(tmp_path_factory.mktemp("converted") / "smollm")


@pytest.fixture(scope="module")
def model(yard: Yard, folder: Path) -> str:
    """Deploy the converted folder and wait until it serves."""
    order = {
        "model_name": MODEL,
        "framework": "vllm",
        "model_artifact": f"file://{folder}",
        "options": OPTIONS,
        "hardware": {"min_replicas": 1, "max_replicas": 1},
        "shared": True,
    }
    reply = yard.call("POST", "/v1/models/deploy", order, within_s=60)
    assert reply.status == 202, reply.body
    yard.wait_ready(MODEL, within_s=READY_S)
    return MODEL


@pytest.fixture
async def server(yard: Yard, model: str) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        yield Server(yard, session)


@pytest.fixture
async def load(yard: Yard, model: str) -> AsyncIterator[Load]:
    async with Load(yard.port, yard.admin_key) as load:
        yield load
        SEEN.extend(load.exchanges)


async def watched(server: Server, until: Callable[[], bool]) -> list[EngineLoad]:
    """Return what the engine said of its load until something became true."""
    looks: list[EngineLoad] = []

    async def look() -> bool:
        looks.append(await server.load())
        return until()

    await eventually_async(look, 500, "all have ended")
    return looks


def all_over(load: Load) -> Callable[[], bool]:
    return lambda: all(exchange.outcome is not None for exchange in load.exchanges)


async def test_requests_are_batched_as_they_come_and_end_when_they_are_done(server: Server, load: Load) -> None:
    lengths = (8, 16, 32, 48)
    for tokens in lengths:
        body = chat(MODEL, f"Tell me about the number {tokens}", max_tokens=tokens, ignore_eos=True, stream=True)
        load.start(body | {"stream_options": {"include_usage": True}}, within_s=300)
    looks = await watched(server, all_over(load))
    assert max(look.running or 0 for look in looks) > 1, "several at once"
    assert [exchange.usage["completion_tokens"] for exchange in load.exchanges if exchange.usage] == list(lengths)
    ends = [exchange.ended_s or 0.0 for exchange in load.exchanges]
    assert ends == sorted(ends), "the short ones did not wait for the long ones"
    print(f"batch: {max(look.running or 0 for look in looks)} at once, ends {[round(e - ends[0], 1) for e in ends]} s")


async def test_a_full_cache_and_a_full_queue_cost_time_and_no_answer(server: Server, load: Load, yard: Yard) -> None:
    """Requests wait in the engine for blocks, lose theirs and are computed again; what it refuses waits in our line."""
    # Short answers teach the gateway to expect short ones: else it would send no more than fits the cache.
    for number in range(24):
        load.start(chat(MODEL, f"{number}?", max_tokens=1), within_s=300)
    await watched(server, all_over(load))
    before, refused = await server.load(), await server.metric("vllm:admission_rejections_total")
    story = LONG[:400]
    wave = [
        load.start(chat(MODEL, f"{number}: {story}", max_tokens=200, ignore_eos=True), within_s=500)
        for number in range(12)
    ]
    looks = await watched(server, all_over(load))
    assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
    assert {exchange.usage["completion_tokens"] for exchange in wave if exchange.usage} == {200}, "each is whole"
    after = await server.load()
    preempted = (after.preemptions_total or 0) - (before.preemptions_total or 0)
    turned_away = await server.metric("vllm:admission_rejections_total") - refused
    usage = [look.kv_usage or 0.0 for look in looks]
    waiting = max(look.waiting or 0 for look in looks)
    assert max(usage) > 0.8
    assert min(usage) < 0.2
    assert waiting > 0, "the engine's own queue"
    assert preempted > 0
    assert turned_away > 0, "the engine refused some with 503, and nobody heard of it"
    print(
        f"cache: up to {max(usage):.0%}, {waiting} waiting, {preempted:g} preemptions, {turned_away:g} refused with 503"
    )


async def test_a_repeated_beginning_is_read_once_and_only_for_its_tenant(
    server: Server, load: Load, yard: Yard
) -> None:
    other = yard.new_tenant("other")
    before = await server.load()
    first_tokens: list[float] = []
    cached: list[int] = []
    for key, ending in ((None, "first"), (None, "second"), (None, "third"), (other, "fourth")):
        body = chat(MODEL, f"{LONG[:1800]} Which is the {ending}?", max_tokens=2, stream=True)
        exchange = await load.send(body | {"stream_options": {"include_usage": True}}, key=key, within_s=300)
        assert exchange.outcome is Outcome.COMPLETE
        assert exchange.usage is not None
        cached.append(exchange.usage["prompt_tokens_details"]["cached_tokens"])
        first_tokens.append((exchange.first_byte_s or 0) - exchange.started_s)
    after = await server.load()
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 300
    assert cached[3] == 0, "another tenant's beginning is not known to this one"
    assert (after.prefix_hits_total or 0) - (before.prefix_hits_total or 0) == cached[1] + cached[2]
    assert (after.prefix_queries_total or 0) > (before.prefix_queries_total or 0)
    print(f"prefix: {cached} cached, first token after {[round(s, 2) for s in first_tokens]} s")


async def test_speculation_guesses_tokens_that_the_model_agrees_to(server: Server, load: Load) -> None:
    before = await server.load()
    body = chat(MODEL, "Repeat this, word for word: one two three four one two three four one two three four")
    exchange = await load.send({**body, "max_tokens": 64, "temperature": 0, "ignore_eos": True}, within_s=300)
    assert exchange.outcome is Outcome.COMPLETE
    after = await server.load()
    drafted = (after.draft_tokens_total or 0) - (before.draft_tokens_total or 0)
    accepted = (after.accepted_tokens_total or 0) - (before.accepted_tokens_total or 0)
    assert 0 < accepted <= drafted
    print(f"speculation: {accepted:g} of {drafted:g} tokens accepted")


PEFT = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, adapters, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = tokenizer(text, return_tensors="pt").input_ids

def fingerprint(model):
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, -1].float(), -1)
    return {token: logprobs[int(token)].item() for token in tokens}

found = {"": fingerprint(base)}
model = None
for name, place in adapters.items():
    key = name.replace(".", "_")
    model = PeftModel.from_pretrained(base, place, key) if model is None else model
    if key not in model.peft_config:
        model.load_adapter(place, key)
    model.set_adapter(key)
    found[name] = fingerprint(model)
print(json.dumps(found))
"""


def distance(found: Logprobs, expected: Logprobs) -> float:
    """Return the mean difference of the logprobs of the tokens that were found."""
    return statistics.fmean(abs(logprob - expected[token]) for token, logprob in found.items())


async def test_two_dozen_adapters_of_one_base_are_told_apart_and_equal_peft(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    """Through the engine's contract: what control calls to load and to unload them."""
    shape = shape_of(folder)
    places = {f"cust-{n}@{n:016x}": write_lora(tmp_path / f"lora-{n}", seed=n, shape=shape) for n in range(LORAS)}
    assert server.engine.guests_max(dict.fromkeys(()) | {"max_loras": 4, "loras_held": LORAS}) == LORAS
    base = await server.fingerprint(MODEL)
    for name, place in places.items():
        assert await server.tell(server.engine.load_guest(Guest(name, place))) == 200
    assert await server.guests() == frozenset(places)
    first = next(iter(places))
    assert await server.tell(server.engine.load_guest(Guest(first, places[first]))) == 200, "it is there: no error"

    some = asyncio.Semaphore(PLACES - 1)

    async def one(name: str) -> Logprobs:
        async with some:
            return await server.fingerprint(name)

    found = dict(zip(places, await asyncio.gather(*map(one, places)), strict=True))
    tokens = sorted({token for one in (base, *found.values()) for token in one})
    adapters = json.dumps({name: str(place) for name, place in places.items()})
    expected = await asyncio.to_thread(run_inside, PEFT, str(folder), FINGERPRINT, adapters, json.dumps(tokens))
    own = {name: distance(found[name], expected[name]) for name in places}
    others = {
        name: min(distance(found[name], theirs) for other, theirs in expected.items() if other != name)
        for name in places
    }
    print(f"adapters: the base is {distance(base, expected['']):.3f} away from PEFT's")
    print(f"adapters: at most {max(own.values()):.3f} from their own, at least {min(others.values()):.3f} from others")
    assert distance(base, expected[""]) < 0.15, "bfloat16 beside 32 bits"
    assert max(own.values()) < 0.2
    assert all(own[name] < others[name] / 2 for name in places)
    assert distance(await server.fingerprint(MODEL), expected[""]) < 0.15, "the base is as it was"


async def test_an_adapter_that_is_unloaded_is_gone_and_its_neighbours_stay(server: Server) -> None:
    names = sorted(await server.guests())
    gone, kept = names[0], names[1]
    assert await server.tell(server.engine.unload_guest(gone)) == 200
    assert await server.tell(server.engine.unload_guest(gone)) == 200, "it is gone: no error"
    assert await server.guests() == frozenset(names[1:])
    status, answer = await server.post("/v1/completions", {"model": gone, "prompt": "Hi", "max_tokens": 1})
    assert (status, "does not exist" in answer["error"]["message"]) == (404, True)
    assert await server.fingerprint(kept)


async def test_what_is_streamed_when_the_endpoint_goes_is_streamed_to_its_end(
    yard: Yard, server: Server, load: Load
) -> None:
    """The platform drains: vLLM's own end at SIGTERM would leave the stream without one."""
    stream = load.start(chat(MODEL, "Tell me a story", max_tokens=60, ignore_eos=True, stream=True), within_s=300)
    await load.delivered(stream, 2, within_s=120)
    assert yard.call("DELETE", f"/v1/endpoints/{MODEL}").status in (200, 202, 204)
    await eventually_async(lambda: stream.outcome is not None, 300, "it ends")
    assert stream.outcome is Outcome.COMPLETE, stream
    await eventually_async(lambda: not yard.engines(), 120, "the replica is gone")
    for exchange in (*SEEN, *load.exchanges):
        if exchange.outcome is Outcome.COMPLETE and (usage := exchange.usage) is not None:
            row = await asyncio.to_thread(yard.row_of, exchange.request_id)
            assert row["prompt_tokens"] == usage["prompt_tokens"]
            assert row["completion_tokens"] == usage["completion_tokens"]
