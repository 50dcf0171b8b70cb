"""llama.cpp behind the gateway looks like any other engine: what is its own way is hidden, or refused in our words."""

import json
from pathlib import Path
from typing import Any

from tests.support.smollm import real_model
from tests.support.yard import Yard

SETTINGS = {
    "gateway.load_wait_s": 60,
    "gateway.first_token_timeout_s": 100,
    "gateway.total_timeout_s": 110,
    "control.hang_timeout_s": 60,
}
"""What is real computes, and on a busy machine for long."""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_llamacpp_behind_the_gateway_has_no_ways_of_its_own(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        order = {
            "model_name": "smol",
            "framework": "llamacpp",
            "model_artifact": real_model().as_uri(),
            "options": {"slots": 1, "context_length": 256},
        }
        assert yard.call("POST", "/v1/models/deploy", order).status == 202
        yard.wait_ready("smol", within_s=110)
        finishes_and_usage_are_openais(yard)
        what_does_not_fit_is_said_as_openai_says_it(yard)
        what_it_would_not_do_is_refused(yard)


def chat(yard: Yard, text: str = "Say hello", **more: Any) -> Any:
    body = {"model": "smol", "temperature": 0, "messages": [{"role": "user", "content": text}], **more}
    return yard.call("POST", "/v1/chat/completions", body, within_s=110)


def finishes_and_usage_are_openais(yard: Yard) -> None:
    short = chat(yard, max_tokens=2).json()
    assert (short["model"], short["choices"][0]["finish_reason"]) == ("smol", "length")
    assert short["usage"]["completion_tokens"] == 2
    whole = chat(yard, "Repeat after me: yes", max_tokens=100).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    raw = chat(yard, max_tokens=2, stream=True).body
    chunks = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"smol"}
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert not any(chunk.get("usage") for chunk in chunks), "nobody asked for it, though the engine was"


def what_does_not_fit_is_said_as_openai_says_it(yard: Yard) -> None:
    # More than a slot holds, which llama.cpp says; more than all of them, which it is not even asked.
    for words, stream in ((80, False), (80, True), (2000, False)):
        refused = chat(yard, "7 1 9 " * words, max_tokens=1, stream=stream)
        assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def what_it_would_not_do_is_refused(yard: Yard) -> None:
    for more, param in (
        ({"n": 2}, "n"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
    ):
        refused = chat(yard, max_tokens=2, **more)
        assert refused.status == 400
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("unsupported_parameter", param)
    assert chat(yard, max_tokens=2, tools=[TOOL], tool_choice="auto").status == 200
    body = {"model": "smol", "input": "hi"}
    assert yard.call("POST", "/v1/embeddings", body).json()["error"]["code"] == "route_unsupported"


def test_texts_to_embed_are_bounded_one_by_one_and_a_long_one_is_its_callers_fault(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        order = {
            "model_name": "vectors",
            "framework": "llamacpp",
            "model_artifact": real_model().as_uri(),
            "options": {"slots": 2, "context_length": 256, "embedding": True},
        }
        assert yard.call("POST", "/v1/models/deploy", order).status == 202
        yard.wait_ready("vectors", within_s=110)
        many = embed(yard, ["some words of a text " * 20] * 8)
        assert many.status == 200, "together they are longer than all slots, each fits one"
        assert len(many.json()["data"]) == 8
        for _ in range(6):
            refused = embed(yard, ["short", "some words of a text " * 200])
            assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert embed(yard, ["short"]).status == 200, "that speaks against no replica"
        (replica,) = yard.get("/v1/endpoints/vectors")["replicas"]
        assert replica["state"] == "ready"


def embed(yard: Yard, texts: list[str]) -> Any:
    return yard.call("POST", "/v1/embeddings", {"model": "vectors", "input": texts}, within_s=110)
