"""Every engine keeps the contract of ``modelyard.engines``: the real process, started by the real local fleet.

Engines differ in what they say, so the tests look at forms, counts and ends,
never at the text of a model.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support import vllm
from tests.support.peft import peft_adapter
from tests.support.smallmodels import minilm_onnx
from tests.support.waiting import eventually_async
from tools.smollm import ModelMissing, model_file

from modelyard.clock import SystemClock
from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine, EngineCall, EngineLoad, Guest, GuestKind, LaunchSpec, Options
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.engines.onnx import OnnxEngine
from modelyard.engines.simulated import SimulatedEngine
from modelyard.engines.vllm import VllmEngine
from modelyard.fleet import StartOrder
from modelyard.fleet.local import LocalFleet, stop_all

MODEL = "acme/tiny"
SECRET = "the-replica-secret"
ENGINES: dict[str, tuple[Engine, Options]] = {
    "simulated": (
        SimulatedEngine(),
        {"slots": 2, "load_s": 0.3, "context_length": 4096, "itl_ms": 5, "max_adapters": 2},
    ),
    "llamacpp": (LlamaCppEngine(), {"slots": 2, "context_length": 512, "embedding": True}),
    "vllm": (
        VllmEngine((vllm.COMMAND,)),
        {"slots": 2, "context_length": 512, "dtype": "bfloat16", "block_size": 32, "kv_blocks": 64},
    ),
    "llamacpp-adapters": (LlamaCppEngine(), {"slots": 2, "context_length": 512, "max_adapters": 2}),
    "onnx": (OnnxEngine(), {"slots": 2, "context_length": 256, "task": "embeddings", "guests": 2}),
}
READY_S = {"vllm": vllm.READY_S}
"""Longest start of those that take their time."""


@dataclass(slots=True)
class Running:
    """An engine's process, shared by the tests of this file."""

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
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def load(self) -> EngineLoad:
        status, page = await self.call(self.engine.load_path)
        assert status == 200
        return self.engine.read_load(page)

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


RUNNING = [
    pytest.param(name, marks=[vllm.lane, pytest.mark.timeout(900)] if name == "vllm" else []) for name in ENGINES
]


@pytest.fixture(params=RUNNING, scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine, options = ENGINES[request.param]
    if why := engine.missing():
        pytest.skip(why)
    root = tmp_path_factory.mktemp("engines") / "replicas"
    fleet = LocalFleet(root, SystemClock())
    try:
        yield asyncio.run(started(fleet, engine, options, artifact_of(engine, root)))
        asyncio.run(fleet.stop("r-1", grace_s=5))
        assert asyncio.run(fleet.observe())[0].exit_reason == "stopped"
    finally:
        stop_all(root, 0.0)


@pytest.fixture
async def replica(running: Running) -> AsyncIterator[Replica]:
    # llama.cpp closes a connection some time after a stream; the next request must not race with that.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Replica(running.engine, running.options, session, running.url, running.saw_loading)


@pytest.fixture
def a_chat_model(replica: Replica) -> None:
    if "/v1/chat/completions" not in replica.engine.routes_for(replica.options):
        pytest.skip("it serves no chats")


chats = pytest.mark.usefixtures("a_chat_model")


async def started(fleet: LocalFleet, engine: Engine, options: Options, artifact: Path | None) -> Running:
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


async def order(replica: Replica, call: EngineCall, *, may_fail: bool = False) -> int:
    status, body = await replica.call(call.path, call.body)
    assert status == 200 or may_fail, body
    return status


async def logprob(replica: Replica, model: str) -> float:
    """Return how sure ``model`` is of the first word of an answer."""
    body = chat("What is the capital of France?", max_tokens=1, logprobs=True) | {"model": model}
    status, answer = await replica.call("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


async def guests_of(replica: Replica) -> frozenset[str]:
    """Return the guests that are listed; the test is skipped where there are none."""
    if not replica.engine.guests_max(replica.options):
        pytest.skip("it takes no guests in")
    if replica.engine.guests is not GuestKind.ADAPTER:
        pytest.skip("its guests are no adapters")
    async with replica.session.get(
        replica.url + "/v1/models", headers={"authorization": f"Bearer {SECRET}"}
    ) as response:
        return replica.engine.read_guests(await response.text())


def artifact_of(engine: Engine, root: Path) -> Path | None:
    if not engine.needs_artifact:
        return None
    if engine.name == "vllm":
        vllm.vllm_command()
        folder = vllm.converted_smollm(root.with_name("smollm"))
        engine.check_artifact(folder)
        return folder
    if engine.name == "onnx":
        folder = minilm_onnx()
        engine.check_artifact(folder)
        return folder
    try:
        file = model_file()
    except ModelMissing as error:
        pytest.skip(str(error))
    engine.check_artifact(file)
    return file


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

    await eventually_async(look, within_s, "ready")
    assert set(statuses) <= {200, 503}
    return 503 in statuses


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


@chats
async def test_it_loads_answers_and_counts(replica: Replica) -> None:
    assert replica.saw_loading, "until the model is loaded the ready path must not say 200"
    before = await replica.load()
    assert (before.running, before.waiting) == (0, 0)
    status, body = await replica.call("/v1/chat/completions", chat("Say hello to the whole world", max_tokens=4))
    assert status == 200
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    after = await replica.load()
    assert after.generation_tokens_total == (before.generation_tokens_total or 0) + 4
    assert after.prompt_tokens_total == (before.prompt_tokens_total or 0) + usage["prompt_tokens"]


@chats
async def test_a_chat_stream_has_role_text_finish_and_usage_in_order(replica: Replica) -> None:
    chunks, content_type = await replica.stream("/v1/chat/completions", chat("Count to five, please", max_tokens=4))
    assert content_type == "text/event-stream"
    assert {chunk["model"] for chunk in chunks} == {MODEL}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not chunks[0]["choices"][0]["delta"]["content"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    # vLLM ends with the last text, others behind it.
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finishes == [*[None] * (len(finishes) - 1), "length"]
    assert chunks[-2]["choices"][0]["index"] == 0
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@chats
async def test_completions_stream_text_and_usage(replica: Replica) -> None:
    body = {"model": MODEL, "prompt": "One two three four", "max_tokens": 3, "temperature": 0}
    chunks, _ = await replica.stream("/v1/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert finishes == ["length"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [3]


@chats
async def test_an_answer_is_continued_from_the_middle_where_the_engine_says_so(replica: Replica) -> None:
    """What mid-stream failover rests on: the same greedy answer, whoever generates its second half."""
    body = chat("What is the capital of France? Answer in one sentence.", max_tokens=12, temperature=0)
    chunks, _ = await replica.stream("/v1/chat/completions", body)
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    pieces = [piece for piece in pieces if piece]
    begun = "".join(pieces[: len(pieces) // 2])
    rest: dict[str, Any] = {**body, "messages": [*body["messages"], {"role": "assistant", "content": begun}]}
    if "continue_final_message" in replica.engine.request_extras:
        rest |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        assert "assistant_prefill" in replica.engine.request_extras
    rest["max_tokens"] = 12 - len(pieces) // 2
    chunks, _ = await replica.stream("/v1/chat/completions", rest)
    ended = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert begun + ended == "".join(pieces)


@chats
async def test_a_repeated_prompt_is_read_from_the_cache(replica: Replica) -> None:
    text = "This is a long sentence that will be asked for twice, to see that its beginning is not computed again. " * 3
    _, first = await replica.call("/v1/chat/completions", chat(text, max_tokens=2))
    _, second = await replica.call("/v1/chat/completions", chat(text, max_tokens=2))
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 16


@pytest.mark.parametrize("secret", ["", "wrong", SECRET[:-1], SECRET + "x"])
async def test_nothing_but_readiness_is_served_without_the_secret(replica: Replica, secret: str) -> None:
    before = await replica.load()
    for path, body in (
        ("/v1/chat/completions", chat("Hi")),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/models", None),
        (replica.engine.load_path, None),
        ("/slots", None),
        ("/sim/faults", None),
    ):
        status, answer = await replica.call(path, body, secret=secret)
        assert status == 401, path
        assert "error" in answer
    assert await replica.load() == before


@chats
async def test_a_client_that_leaves_frees_its_slot(replica: Replica) -> None:
    before = (await replica.load()).generation_tokens_total or 0
    body = chat("Tell me a very long story", stream=True, max_tokens=400, ignore_eos=True)
    headers = {"authorization": f"Bearer {SECRET}"}
    async with replica.session.post(replica.url + "/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readline()
        assert (await replica.load()).running == 1
        response.close()

    async def is_free() -> bool:
        return (await replica.load()).running == 0

    await eventually_async(is_free, 5, "the slot is free")
    assert ((await replica.load()).generation_tokens_total or 0) - before < 400


@chats
async def test_requests_beyond_the_slots_wait_and_are_counted(replica: Replica) -> None:
    body = chat("Tell me a very long story", max_tokens=60, ignore_eos=True)

    async def has_waiting() -> bool:
        load = await replica.load()
        return load.running == 2 and load.waiting == 1

    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(replica.call("/v1/chat/completions", body)) for _ in range(3)]
        await eventually_async(has_waiting, 10, "two run and one waits")
    assert [call.result()[1]["usage"]["completion_tokens"] for call in calls] == [60, 60, 60]


@chats
async def test_a_prompt_over_the_context_is_refused_with_an_error_object(replica: Replica) -> None:
    for stream in (False, True):
        status, body = await replica.call("/v1/chat/completions", chat("word " * 5000, max_tokens=1, stream=stream))
        assert status == 400
        assert "context" in body["error"]["message"]


async def test_a_bad_request_is_refused_with_an_error_object(replica: Replica) -> None:
    for route, wrong in (("/v1/chat/completions", chat("Hi", max_tokens="many")), ("/v1/embeddings", {"input": 5})):
        if route in replica.engine.routes_for(replica.options):
            status, body = await replica.call(route, wrong)
            assert status == 400
            assert body["error"]["message"]
    status, body = await replica.call("/v1/embeddings", {"model": MODEL, "input": {}})
    assert status == 400
    assert body["error"]["message"]


async def test_embeddings_have_equal_vectors_for_equal_texts(replica: Replica) -> None:
    if "/v1/embeddings" not in replica.engine.routes_for(replica.options):
        pytest.skip("it serves none with these options")
    status, body = await replica.call("/v1/embeddings", {"model": MODEL, "input": ["same", "other", "same"]})
    assert status == 200
    vectors = [item["embedding"] for item in body["data"]]
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-3)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)
    assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-3)
    assert body["usage"]["prompt_tokens"] > 0


@chats
async def test_a_schema_is_followed(replica: Replica) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    _, body = await replica.call("/v1/chat/completions", chat("Name a thing", response_format=wanted, max_tokens=60))
    found = json.loads(body["choices"][0]["message"]["content"])
    assert found["colour"] in ("red", "blue")
    assert isinstance(found["count"], int)


async def test_a_guest_is_listed_answers_under_its_name_and_is_forgotten(replica: Replica, tmp_path: Path) -> None:
    assert await guests_of(replica) == frozenset()
    base = await logprob(replica, MODEL)
    call = replica.engine.load_guest(Guest("a@1", peft_adapter(tmp_path / "a", 1)))
    assert call.timeout_s > 0
    await order(replica, call)
    try:
        assert await guests_of(replica) == {"a@1"}
        assert abs(await logprob(replica, "a@1") - base) > 0.1
        assert await logprob(replica, MODEL) == pytest.approx(base, abs=0.02), "the base is not changed by its guest"
        await order(replica, call)
        assert await guests_of(replica) == {"a@1"}, "asking again is no error"
        body = chat("Count to five, please", max_tokens=4) | {"model": "a@1"}
        chunks, _ = await replica.stream("/v1/chat/completions", body)
        assert {chunk["model"] for chunk in chunks} == {"a@1"}
        assert chunks[-1]["usage"]["completion_tokens"] == 4
    finally:
        await order(replica, replica.engine.unload_guest("a@1"))
    assert await guests_of(replica) == frozenset()
    status, body = await replica.call("/v1/chat/completions", chat("Hi") | {"model": "a@1"})
    assert status == 404
    assert "a@1" in body["error"]["message"]
    assert await logprob(replica, MODEL) == pytest.approx(base, abs=0.02)


async def test_a_broken_guest_is_refused_and_the_base_goes_on(replica: Replica, tmp_path: Path) -> None:
    before = await guests_of(replica)
    wrong_size = {"self_attn.q_proj": (64, 64)}
    wrong = peft_adapter(tmp_path / "wrong", 1, modules=tuple(wrong_size), shapes=wrong_size)
    cut = peft_adapter(tmp_path / "cut", 1)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, artifact in (("wrong@1", wrong), ("cut@1", cut), ("missing@1", tmp_path / "nothing")):
        status = await order(replica, replica.engine.load_guest(Guest(name, artifact)), may_fail=True)
        assert 400 <= status < 500, name
    assert await guests_of(replica) == before
    assert (await replica.call("/v1/chat/completions", chat("Hi", max_tokens=1)))[0] == 200


async def test_a_model_is_taken_in_and_forgotten_while_the_replica_runs(replica: Replica) -> None:
    engine, place = replica.engine, artifact_of(replica.engine)
    if engine.guests is not GuestKind.MODEL:
        pytest.skip("it takes no models in")
    assert engine.guests_max(replica.options) > 0
    assert place is not None
    loading = engine.load_guest(Guest("twin@1", place, replica.options))
    for _ in range(2):  # asking again is no error
        status, answer = await replica.call(loading.path, loading.body)
        assert status == 200, answer
    _, models = await replica.call("/v1/models")
    assert engine.read_guests(json.dumps(models)) == {"twin@1"}
    body = {"input": "the same text"}
    vectors = []
    for name in (MODEL, "twin@1"):
        status, answer = await replica.call("/v1/embeddings", {**body, "model": name})
        assert (status, answer["model"]) == (200, name)
        vectors.append(answer["data"][0]["embedding"])
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)
    bad = engine.load_guest(Guest("bad@1", Path(__file__)))
    status, answer = await replica.call(bad.path, bad.body)
    assert status == 400
    assert "not an ONNX file" in answer["error"]["message"]
    leaving = engine.unload_guest("twin@1")
    assert (await replica.call(leaving.path, leaving.body))[0] == 200
    _, models = await replica.call("/v1/models")
    assert engine.read_guests(json.dumps(models)) == set()
    assert (await replica.call("/v1/embeddings", {**body, "model": "twin@1"}))[0] == 404
    assert (await replica.call("/v1/embeddings", {**body, "model": MODEL}))[0] == 200


@pytest.mark.parametrize("name", list(ENGINES))
def test_what_a_page_does_not_say_is_none_and_never_zero(name: str) -> None:
    engine, _ = ENGINES[name]
    assert engine.read_load("") == EngineLoad()
    assert engine.read_load("some_other_metric 3\n") == EngineLoad()


@pytest.mark.parametrize("name", list(ENGINES))
def test_options_are_checked_strictly_and_by_name(name: str) -> None:
    engine, options = ENGINES[name]
    settings = engine.settings(options, artifact_bytes=98_000_000)
    assert (settings.slots, settings.context_length) == (options["slots"], options["context_length"])
    assert settings.memory_bytes > 98_000_000
    assert settings.load_s > 0
    for wrong in ({"no_such_option": 1}, {"slots": 0}, {"slots": "2"}, {"slots": True}, {"context_length": 1.5}):
        with pytest.raises(ValueError, match=f"'{next(iter(wrong))}'"):
            engine.settings(wrong, artifact_bytes=0)


@pytest.mark.parametrize("name", list(ENGINES))
def test_facts_of_the_model_are_optional_and_empty_ones_are_as_none(name: str) -> None:
    engine, options = ENGINES[name]
    estimated = engine.settings(options, artifact_bytes=98_362_432)
    assert engine.settings(options, artifact_bytes=98_362_432, facts=ModelFacts()) == estimated
    smol = ModelFacts(
        format="gguf", layers=30, heads=9, weights_bytes=96_576_768, kv_bytes_per_token=23_040, context_length=8192
    )
    exact = engine.settings(options, artifact_bytes=98_362_432, facts=smol)
    assert (exact.slots, exact.context_length) == (estimated.slots, estimated.context_length)
    if engine.needs_artifact:
        keeps_tokens = "/v1/chat/completions" in engine.routes_for(options)
        assert (exact.weights_bytes, exact.kv_bytes_per_token) == (96_576_768, 23_040 if keeps_tokens else 0)
        assert exact.memory_bytes > exact.weights_bytes + exact.kv_tokens * exact.kv_bytes_per_token


@pytest.mark.parametrize("name", list(ENGINES))
def test_routes_are_a_subset_and_the_name_is_the_key(name: str) -> None:
    engine, options = ENGINES[name]
    assert engine.name == name.partition("-")[0]
    assert engine.routes_for({}) <= engine.routes
    assert engine.routes_for(options) <= engine.routes


def guest_of(number: int, folder: Path) -> Guest:
    return Guest(f"bot-{number}@{number:012x}", folder)


async def test_a_guest_is_taken_in_answers_by_its_name_and_goes(replica: Replica, tmp_path: Path) -> None:
    engine = replica.engine
    if engine.guests is not GuestKind.ADAPTER or not engine.guests_max(replica.options) or engine.needs_artifact:
        pytest.skip("it takes no adapters in, or only such as its own tests make")

    async def names() -> frozenset[str]:
        async with replica.session.get(
            f"{replica.url}/v1/models", headers={"authorization": f"Bearer {SECRET}"}
        ) as page:
            return engine.read_guests(await page.text())

    async def ask(name: str) -> int:
        return (await replica.call("/v1/chat/completions", {**chat("Hello", max_tokens=1), "model": name}))[0]

    first, second = guest_of(1, tmp_path), guest_of(2, tmp_path)
    assert await names() == frozenset()
    assert await ask(first.name) == 404
    for guest in (first, second, first):  # again is no error
        call = engine.load_guest(guest)
        assert (await replica.call(call.path, call.body))[0] == 200
    assert await names() == {first.name, second.name}
    status, body = await replica.call("/v1/chat/completions", {**chat("Hello", max_tokens=1), "model": first.name})
    assert (status, body["model"]) == (200, first.name)
    call = engine.unload_guest(first.name)
    assert (await replica.call(call.path, call.body))[0] == 200
    assert await names() == {second.name}
    assert await ask(first.name) == 404
    assert await ask(second.name) == 200
    call = engine.unload_guest(second.name)
    await replica.call(call.path, call.body)
