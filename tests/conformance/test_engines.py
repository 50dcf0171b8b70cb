"""Every engine keeps the contract of ``modelyard.engines``: the real process, started by the real local fleet.

Engines differ in what they say, so the tests look at forms, counts and ends,
never at the text of a model. ``test_guests.py`` has what they take in while
they run.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support import vllm
from tests.support.replicas import MODEL, SECRET, Replica, Running, chat, running_engine
from tests.support.waiting import eventually_async

from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine, EngineLoad, Options
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.engines.onnx import OnnxEngine
from modelyard.engines.simulated import SimulatedEngine
from modelyard.engines.vllm import VllmEngine

ENGINES: dict[str, tuple[Engine, Options]] = {
    "simulated": (SimulatedEngine(), {"slots": 2, "load_s": 0.3, "context_length": 4096, "itl_ms": 10}),
    "llamacpp": (LlamaCppEngine(), {"slots": 2, "context_length": 512, "embedding": True}),
    "vllm": (
        VllmEngine((vllm.COMMAND,)),
        {"slots": 2, "context_length": 512, "dtype": "bfloat16", "block_size": 32, "kv_blocks": 64},
    ),
    "llamacpp-adapters": (LlamaCppEngine(), {"slots": 2, "context_length": 512, "max_adapters": 2}),
    "onnx": (OnnxEngine(), {"slots": 2, "context_length": 256, "task": "embeddings"}),
}
RUNNING = [
    pytest.param(name, marks=[vllm.lane, pytest.mark.timeout(900)] if name == "vllm" else []) for name in ENGINES
]


@pytest.fixture(params=RUNNING, scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(*ENGINES[request.param], tmp_path_factory.mktemp("engines") / "replicas") as started:
        yield started


chats = pytest.mark.usefixtures("a_chat_model")


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

    await eventually_async(is_free, 20, "the slot is free")
    assert ((await replica.load()).generation_tokens_total or 0) - before < 400


@chats
async def test_an_answer_that_takes_long_does_not_look_like_a_hang(replica: Replica) -> None:
    """What the platform takes for progress goes on while one request runs, and not only at its end."""
    body = chat("Tell me a very long story", stream=True, max_tokens=400, ignore_eos=True)
    headers = {"authorization": f"Bearer {SECRET}"}
    async with replica.session.post(replica.url + "/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readline()
        first = await replica.load()
        assert first.running == 1

        async def has_moved() -> bool:
            load = await replica.load()
            assert load.running == 1, "the answer is over before anything moved"
            return load.progress_total != first.progress_total

        assert first.progress_total is not None
        await eventually_async(has_moved, 20, "a step is counted")
        response.close()


@chats
async def test_requests_beyond_the_slots_wait_and_are_counted(replica: Replica) -> None:
    body = chat("Tell me a very long story", max_tokens=100, ignore_eos=True)

    async def has_waiting() -> bool:
        load = await replica.load()
        return load.running == 2 and load.waiting == 1

    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(replica.call("/v1/chat/completions", body)) for _ in range(3)]
        await eventually_async(has_waiting, 20, "two run and one waits")
    assert [call.result()[1]["usage"]["completion_tokens"] for call in calls] == [100, 100, 100]


@chats
async def test_a_prompt_over_the_context_is_refused_with_an_error_object(replica: Replica) -> None:
    for stream in (False, True):
        status, body = await replica.call("/v1/chat/completions", chat("word " * 5000, max_tokens=1, stream=stream))
        assert status == 400
        assert "context" in body["error"]["message"]


@pytest.mark.parametrize(
    ("route", "wrong"),
    [
        ("/v1/chat/completions", chat("Hi", max_tokens="many")),
        ("/v1/embeddings", {"input": 5}),
        ("/v1/embeddings", {"model": MODEL, "input": {}}),
    ],
)
async def test_a_bad_request_is_refused_with_an_error_object(
    replica: Replica, route: str, wrong: dict[str, Any]
) -> None:
    status, body = await replica.call(route, wrong)
    if route in replica.engine.routes_for(replica.options):
        assert status == 400
        assert body["error"]["message"]
    else:
        # In whatever words: the gateway sends no engine what it does not serve.
        assert status in (400, 404, 501), "what these options do not serve is refused as well"


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
