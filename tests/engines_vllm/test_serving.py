"""vLLM on this machine's CPUs, deployed by the platform and asked through its gateway: what it is chosen for.

One server does all of it, since a start takes minutes: SmolLM2, converted from
its GGUF file, with a KV cache so small that requests throw one another out of
it, fewer places in its queue than the gateway sends it requests, n-gram
speculation and room for many adapters. Figures are printed and never judged.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from tests.support.engines import secret_of
from tests.support.guests import TOP, Fingerprint, Tenant, asks_for_fingerprint, distance, fingerprint_of
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.loras import shape_of, write_lora
from tests.support.vllm import COMMAND, SETTINGS, converted_smollm, deploy, lane, run_inside
from tests.support.waiting import eventually_async
from tests.support.yard import Yard

from modelyard.engines import EngineCall, EngineLoad
from modelyard.engines.vllm import VllmEngine

pytestmark = [lane, pytest.mark.timeout(1200)]
__all__ = ["SETTINGS"]
MODEL = "smol"
SLOTS, PLACES = 10, 5
"""The gateway sends up to ten at once, the engine takes five: running and waiting together."""
BLOCK, BLOCKS = 32, 40
TENANTS, LORAS = 6, 24
OPTIONS: dict[str, object] = {
    "slots": SLOTS, "max_queued": PLACES, "context_length": 1024, "block_size": BLOCK, "kv_blocks": BLOCKS,
    "dtype": "bfloat16", "speculative": "ngram", "max_loras": 4, "max_lora_rank": 8, "loras_held": LORAS,
}  # fmt: skip
LONG = " ".join(f"The {n}th rule of the house is to leave the {n}th door as it was found." for n in range(1, 41))
FINGERPRINT = "What is the capital of Italy?"
SEEN: list[Exchange] = []


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_smollm(tmp_path_factory.mktemp("converted") / "smollm")


@pytest.fixture(scope="module")
def model(yard: Yard, folder: Path) -> str:
    """Deploy the converted folder and wait until it serves."""
    deploy(yard, MODEL, folder, OPTIONS)
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
chat = [{"role": "user", "content": text}]
prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
numbers = {text: -1 if texts.count(text) > 1 else texts.index(text) for text in tokens if text in texts}

def fingerprint(model):
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, -1].float(), -1)
    return {text: logprobs[number].item() for text, number in numbers.items() if number >= 0}

found = {"": fingerprint(base)}
model = None
for key, place in adapters.items():
    model = PeftModel.from_pretrained(base, place, key) if model is None else model
    if key not in model.peft_config:
        model.load_adapter(place, key)
    model.set_adapter(key)
    found[key] = fingerprint(model)
print(json.dumps(found))
"""


class Bot(NamedTuple):
    """An adapter: whose it is, its name there, and its files."""

    tenant: Tenant
    name: str
    folder: Path

    @property
    def key(self) -> str:
        return f"{self.tenant.name}-{self.name}"


@pytest.fixture(scope="module")
def bots(yard: Yard, model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Bot]:
    """Return the adapters of all tenants, none of them deployed; all tenants use the same names."""
    shape, root = shape_of(folder), tmp_path_factory.mktemp("loras")
    tenants = [Tenant(yard, f"renter-{number}") for number in range(TENANTS)]
    return [
        Bot(tenant, f"bot-{number}", write_lora(root / f"{at}-{number}", seed=100 * at + number, shape=shape))
        for at, tenant in enumerate(tenants)
        for number in range(LORAS // TENANTS)
    ]


async def fingerprints(load: Load, bots: list[Bot]) -> dict[str, Fingerprint]:
    """Ask all of them at once, each with its tenant's key."""
    asked = {
        bot.key: load.start(asks_for_fingerprint(bot.name, FINGERPRINT), key=bot.tenant.key, within_s=300)
        for bot in bots
    }
    await load.finish(300)
    assert {one.outcome for one in asked.values()} == {Outcome.COMPLETE}
    return {key: fingerprint_of(one.reader.answer.json()) for key, one in asked.items()}


async def test_two_dozen_adapters_of_six_tenants_on_one_base_are_told_apart_equal_peft_and_are_metered_apart(
    server: Server, load: Load, yard: Yard, folder: Path, bots: list[Bot]
) -> None:
    processes = yard.engines()
    uploaded = {bot.key: await asyncio.to_thread(bot.tenant.upload, bot.folder) for bot in bots}
    took_s: list[float] = []
    for bot in bots:
        began_s = time.monotonic()
        await asyncio.to_thread(bot.tenant.place, bot.name, uploaded[bot.key], f"{MODEL}@v1")
        body = chat(bot.name, "Hi", max_tokens=1)
        exchange = await load.send(body, key=bot.tenant.key, within_s=60)
        assert exchange.outcome is Outcome.COMPLETE, exchange
        took_s.append(time.monotonic() - began_s)
    assert yard.engines() == processes, "nothing was started for them"
    assert len(await server.guests()) == LORAS

    found = await fingerprints(load, bots)
    base = fingerprint_of(
        (await load.send(asks_for_fingerprint(MODEL, FINGERPRINT), within_s=300)).reader.answer.json()
    )
    tokens = sorted({token for one in (base, *found.values()) for token in one})
    places = json.dumps({bot.key: str(bot.folder) for bot in bots})
    expected = await asyncio.to_thread(run_inside, PEFT, str(folder), FINGERPRINT, places, json.dumps(tokens))
    own = {key: distance(one, expected[key]) for key, one in found.items()}
    others = {
        key: min(distance(one, theirs) for other, theirs in expected.items() if other != key)
        for key, one in found.items()
    }
    print(f"adapters: from deploy to first answer {min(took_s):.2f} to {max(took_s):.2f} s")
    print(f"adapters: the base is {distance(base, expected['']):.3f} away from PEFT's")
    print(f"adapters: at most {max(own.values()):.3f} from their own, at least {min(others.values()):.3f} from others")
    assert all(len(one.keys() & expected[key].keys()) > TOP // 2 for key, one in found.items())
    assert distance(base, expected[""]) < 0.15, "bfloat16 beside 32 bits"
    assert max(own.values()) < 0.2
    assert all(own[key] < others[key] / 2 for key in found)

    answered: Counter[tuple[str, str]] = Counter()
    for exchange in load.exchanges:
        usage, row = exchange.usage, await asyncio.to_thread(yard.row_of, exchange.request_id)
        assert usage is not None
        answered[row["customer_id"], row["model_name"]] += usage["prompt_tokens"] + usage["completion_tokens"]
    for bot in bots:
        billed = bot.tenant.usage()[bot.name]
        assert billed["requests"] == 2
        assert billed["prompt_tokens"] + billed["completion_tokens"] == answered[bot.tenant.id, bot.name]
        endpoint = bot.tenant.endpoint(bot.name)
        (row,) = yard.query(f"SELECT count(*) AS n FROM inference_requests WHERE endpoint_id = '{endpoint['id']}'")
        assert row["n"] == 2, "by endpoint, too"


async def test_what_another_tenant_put_there_does_not_exist(server: Server, load: Load, bots: list[Bot]) -> None:
    stranger = await asyncio.to_thread(Tenant, bots[0].tenant.yard, "stranger")
    for name in (bots[0].name, *sorted(await server.guests())[:2]):
        exchange = await load.send(chat(name, "Hi", max_tokens=1), key=stranger.key)
        assert (exchange.outcome, exchange.status) == (Outcome.REFUSED, 404)


async def test_beyond_the_seats_the_oldest_goes_and_comes_back_when_asked_without_a_restart(
    server: Server, load: Load, yard: Yard, bots: list[Bot]
) -> None:
    processes = yard.engines()
    before = await fingerprints(load, bots)
    first, last = bots[0], bots[-1]
    # Each in its turn, so that it is certain who was idle longest.
    for bot in bots:
        assert (await load.send(chat(bot.name, "Hi", max_tokens=1), key=bot.tenant.key)).outcome is Outcome.COMPLETE
    late = Bot(last.tenant, "late", last.folder)
    uploaded = await asyncio.to_thread(late.tenant.upload, late.folder)
    await asyncio.to_thread(late.tenant.place, late.name, uploaded, f"{MODEL}@v1")
    swapped = await fingerprints(load, [late])
    await eventually_async(lambda: first.name not in first.tenant.seated(), 10, "the first gave up its seat")
    assert len(await server.guests()) == LORAS
    began_s = time.monotonic()
    again = await fingerprints(load, [first])
    print(f"adapters: one that was let go answers after {time.monotonic() - began_s:.2f} s")
    assert distance(again[first.key], before[first.key]) < 0.15
    assert distance(swapped[late.key], before[last.key]) < 0.15, "the same files under another name"
    assert yard.engines() == processes
    await asyncio.to_thread(late.tenant.leave, late.name)


async def test_an_adapter_that_is_deleted_is_gone_and_its_neighbours_stay(
    server: Server, load: Load, bots: list[Bot]
) -> None:
    gone, kept = bots[-2], bots[-1]
    before = await server.guests()
    await asyncio.to_thread(gone.tenant.leave, gone.name)

    async def unloaded() -> frozenset[str]:
        return before - await server.guests()

    (name,) = await eventually_async(unloaded, 10, "it is unloaded")
    assert name.startswith(f"{gone.name}@")
    assert await server.tell(server.engine.unload_guest(name)) == 200, "it is gone: no error"
    status, answer = await server.post("/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 1})
    assert (status, "does not exist" in answer["error"]["message"]) == (404, True)
    exchange = await load.send(chat(gone.name, "Hi", max_tokens=1), key=gone.tenant.key)
    assert exchange.status == 404
    assert (await load.send(chat(kept.name, "Hi", max_tokens=1), key=kept.tenant.key)).outcome is Outcome.COMPLETE


async def test_what_is_streamed_when_the_endpoint_goes_is_streamed_to_its_end(
    yard: Yard, server: Server, load: Load
) -> None:
    """The platform drains: vLLM's own end at SIGTERM would leave the stream without one."""
    stream = load.start(chat(MODEL, "Tell me a story", max_tokens=60, ignore_eos=True, stream=True), within_s=300)
    await load.delivered(stream, 2, within_s=120)
    assert yard.call("DELETE", f"/v1/endpoints/{MODEL}?force=true").status in (200, 202, 204)
    await eventually_async(lambda: stream.outcome is not None, 300, "it ends")
    assert stream.outcome is Outcome.COMPLETE, stream
    await eventually_async(lambda: not yard.engines(), 120, "the replica is gone")
    for exchange in (*SEEN, *load.exchanges):
        if exchange.outcome is Outcome.COMPLETE and (usage := exchange.usage) is not None:
            row = await asyncio.to_thread(yard.row_of, exchange.request_id)
            assert row["prompt_tokens"] == usage["prompt_tokens"]
            assert row["completion_tokens"] == usage["completion_tokens"]
