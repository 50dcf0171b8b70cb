"""Every engine that takes guests in keeps that part of the contract: adapters and whole models, while it serves.

What a guest is differs (a LoRA adapter of the base, a further model), and so do the ways to break one; what is asked of
engines is the same.
"""

from collections.abc import Iterator
from math import dist
from pathlib import Path

import pytest
from tests.support import vllm
from tests.support.peft import peft_adapter
from tests.support.replicas import MODEL, Replica, Running, chat, running_engine

from modelyard.engines import Engine, Guest, GuestKind, Options
from modelyard.engines.llamacpp import LlamaCppEngine
from modelyard.engines.onnx import OnnxEngine
from modelyard.engines.simulated import SimulatedEngine
from modelyard.engines.vllm import VllmEngine

HOSTS: dict[str, tuple[Engine, Options]] = {
    "simulated": (SimulatedEngine(), {"slots": 2, "max_adapters": 2, "hidden_size": 576}),
    "llamacpp": (LlamaCppEngine(), {"slots": 2, "context_length": 512, "max_adapters": 2}),
    "onnx": (OnnxEngine(), {"slots": 2, "context_length": 256, "task": "embeddings", "guests": 2}),
    "vllm": (
        VllmEngine((vllm.COMMAND,)),
        {"slots": 2, "context_length": 512, "dtype": "bfloat16", "block_size": 32, "kv_blocks": 64, "max_loras": 2},
    ),
}
RUNNING = [pytest.param(name, marks=[vllm.lane, pytest.mark.timeout(900)] if name == "vllm" else []) for name in HOSTS]
SAME, OTHER = 0.02, 0.1
"""How far answers of one may be, and of two must be, from each other."""
chats = pytest.mark.usefixtures("a_chat_model")


@pytest.fixture(params=RUNNING, scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(*HOSTS[request.param], tmp_path_factory.mktemp("hosts") / "replicas") as started:
        assert started.engine.guests is not GuestKind.NONE
        assert started.engine.guests_max(started.options) >= 2
        yield started


def guest(replica: Replica, folder: Path, name: str, seed: int) -> Guest:
    """Make what this engine takes in; another one for each seed."""
    place = folder / name.partition("@")[0]
    if replica.engine.guests is GuestKind.ADAPTER:
        return Guest(name, peft_adapter(place, seed))
    from tests.support.smallmodels import converted, tiny_bert

    source = tiny_bert(folder / f"{place.name}-source", "BertModel", seed=seed)
    return Guest(name, converted(source, place))


def broken(replica: Replica, folder: Path) -> dict[str, Path]:
    """Make what this engine must not take in, by what is wrong with it."""
    whole = guest(replica, folder, "whole@1", 1).artifact
    found = {"missing": folder / "nothing", "text": folder / "text", "empty": folder / "empty"}
    found["text"].write_text("This is neither an adapter nor a model.\n")
    found["empty"].mkdir()
    if replica.engine.guests is GuestKind.ADAPTER:
        narrow = {"self_attn.q_proj": (64, 64)}
        found["another-base"] = peft_adapter(folder / "another-base", 1, modules=tuple(narrow), shapes=narrow)
        found["cut"] = peft_adapter(folder / "cut", 1)
        cut = found["cut"] / "adapter_model.safetensors"
    else:
        (model,) = whole.glob("*.onnx")
        cut = found["cut"] = folder / "cut.onnx"
        cut.write_bytes(model.read_bytes())
    cut.write_bytes(cut.read_bytes()[:-100])
    return found


async def answer_of(replica: Replica, model: str) -> list[float]:
    """Return numbers that tell by which model they were computed: of an answer's first word, or of a text."""
    if replica.engine.guests is GuestKind.ADAPTER:
        body = chat("What is the capital of France?", max_tokens=1, logprobs=True) | {"model": model}
        status, answer = await replica.call("/v1/chat/completions", body)
        assert (status, answer["model"]) == (200, model)
        return [float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])]
    status, answer = await replica.call("/v1/embeddings", {"model": model, "input": "anna lives in new york"})
    assert (status, answer["model"]) == (200, model)
    return list(answer["data"][0]["embedding"])


def distance(one: list[float], other: list[float]) -> float:
    return dist(one, other) if len(one) == len(other) else 1.0


async def refusal_of(replica: Replica, model: str) -> tuple[int, str]:
    """Return how a request for a model that is not there is refused."""
    if replica.engine.guests is GuestKind.ADAPTER:
        status, answer = await replica.call("/v1/chat/completions", chat("Hi", max_tokens=1) | {"model": model})
    else:
        status, answer = await replica.call("/v1/embeddings", {"model": model, "input": "Hi"})
    return status, str(answer["error"]["message"])


async def take_in(replica: Replica, one: Guest) -> None:
    call = replica.engine.load_guest(one)
    assert call.timeout_s > 0
    status, answer = await replica.order(call)
    assert status == 200, answer


async def forget(replica: Replica, name: str) -> None:
    status, answer = await replica.order(replica.engine.unload_guest(name))
    assert status == 200, answer


async def test_a_guest_is_taken_in_answers_by_its_name_and_is_forgotten(replica: Replica, tmp_path: Path) -> None:
    base = await answer_of(replica, MODEL)
    assert await replica.guests() == frozenset(), "the base is no guest"
    one = guest(replica, tmp_path, "a@1", 1)
    await take_in(replica, one)
    try:
        assert await replica.guests() == {"a@1"}
        own = await answer_of(replica, "a@1")
        assert distance(own, base) > OTHER
        assert distance(await answer_of(replica, MODEL), base) < SAME, "the base is not changed by its guest"
        await take_in(replica, one)
        assert await replica.guests() == {"a@1"}, "asking again is no error"
        assert distance(await answer_of(replica, "a@1"), own) < SAME
    finally:
        await forget(replica, "a@1")
    assert await replica.guests() == frozenset()
    status, told = await refusal_of(replica, "a@1")
    assert status == 404
    assert "a@1" in told
    assert distance(await answer_of(replica, MODEL), base) < SAME


@chats
async def test_a_guest_streams_under_its_name(replica: Replica, tmp_path: Path) -> None:
    await take_in(replica, guest(replica, tmp_path, "s@1", 1))
    try:
        body = chat("Count to five, please", max_tokens=4) | {"model": "s@1"}
        chunks, _ = await replica.stream("/v1/chat/completions", body)
    finally:
        await forget(replica, "s@1")
    assert {chunk["model"] for chunk in chunks} == {"s@1"}
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_guests_are_told_apart_and_go_one_by_one(replica: Replica, tmp_path: Path) -> None:
    base = await answer_of(replica, MODEL)
    for number in (1, 2):
        await take_in(replica, guest(replica, tmp_path, f"g{number}@1", number))
    try:
        assert await replica.guests() == {"g1@1", "g2@1"}
        first, second = await answer_of(replica, "g1@1"), await answer_of(replica, "g2@1")
        assert min(distance(first, second), distance(first, base), distance(second, base)) > OTHER
    finally:
        await forget(replica, "g1@1")
    try:
        assert await replica.guests() == {"g2@1"}
        assert (await refusal_of(replica, "g1@1"))[0] == 404
        assert distance(await answer_of(replica, "g2@1"), second) < SAME
    finally:
        await forget(replica, "g2@1")
    assert await replica.guests() == frozenset()


@chats
async def test_a_prefix_of_the_base_is_not_read_for_its_guest(replica: Replica, tmp_path: Path) -> None:
    body = chat("This is a long sentence that is asked for twice, first of the base, then of its guest. " * 3)
    body["max_tokens"] = 1
    await take_in(replica, guest(replica, tmp_path, "p@1", 1))
    try:
        cached = []
        for model in (MODEL, MODEL, "p@1"):
            status, answer = await replica.call("/v1/chat/completions", body | {"model": model})
            assert status == 200
            cached.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    finally:
        await forget(replica, "p@1")
    assert cached[1] > 16
    assert cached[2] == 0


async def test_a_broken_guest_is_refused_and_the_base_goes_on(replica: Replica, tmp_path: Path) -> None:
    base = await answer_of(replica, MODEL)
    for what, artifact in broken(replica, tmp_path).items():
        name = f"{what}@1"
        status, answer = await replica.order(replica.engine.load_guest(Guest(name, artifact)))
        assert 400 <= status < 500, f"{what}: {status} {answer}"
        assert answer["error"]["message"], what
        assert await replica.guests() == frozenset(), what
        assert (await refusal_of(replica, name))[0] == 404, what
        assert distance(await answer_of(replica, MODEL), base) < SAME, what
    await take_in(replica, guest(replica, tmp_path, "good@1", 2))
    await forget(replica, "good@1")


async def test_a_name_that_was_never_taken_in_does_not_exist(replica: Replica) -> None:
    status, told = await refusal_of(replica, "never@0")
    assert status == 404
    assert "never@0" in told
