"""The routes beside chats, with OpenAI's SDK or plain HTTP, from the caller to the ledger."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.support.yard import Reply, Yard

MODEL = "sim"


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard) -> None:
    yard.deploy(MODEL, options={"slots": 8, "ttft_ms": 1, "itl_ms": 1, "embedding_dimensions": 16})


@pytest.fixture
def client(yard: Yard) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{yard.url}/v1", api_key=yard.new_key(), max_retries=0, timeout=30) as sdk:
        yield sdk


def post(yard: Yard, path: str, body: dict[str, Any]) -> Reply:
    return yard.call("POST", path, body)


def billed(yard: Yard, request_id: str | None) -> dict[str, Any]:
    return yard.row_of(request_id)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_ranking_is_billed_as_a_search_with_its_tokens(yard: Yard, path: str) -> None:
    documents = [{"text": "nothing of it"}, "the capital of France"]
    body = {"model": MODEL, "query": "capital of France", "documents": documents, "return_documents": True}
    reply = post(yard, path, body)
    assert reply.status == 200, reply.body
    found = reply.json()
    assert [entry["index"] for entry in found["results"]] == [1, 0]
    assert found["results"][0]["document"] == {"text": "the capital of France"}
    row = billed(yard, reply.headers["x-request-id"])
    assert (row["unit"], row["units_micro"], row["completion_tokens"]) == ("searches", 1_000_000, 0)
    assert row["prompt_tokens"] == found["usage"]["prompt_tokens"] > 0


def test_scores_classes_and_tensors_pass_through(yard: Yard) -> None:
    scores = post(yard, "/v1/score", {"model": MODEL, "text_1": "a b", "text_2": ["a", "b a"]})
    assert [entry["score"] for entry in scores.json()["data"]] == [0.5, 1.0]
    row = billed(yard, scores.headers["x-request-id"])
    assert (row["unit"], row["units_micro"]) == ("pairs", 2_000_000)
    assert row["prompt_tokens"] > 0, "the tokens that were read count beside the pairs"
    classes = post(yard, "/classify", {"model": MODEL, "input": ["a", "b"]})
    assert len(classes.json()["data"]) == 2
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.5, 2]}
    reply = post(yard, f"/v2/models/{MODEL}/infer", {"inputs": [tensor]})
    assert reply.status == 200, reply.body
    assert reply.json()["outputs"] == [tensor]
    row = billed(yard, reply.headers["x-request-id"])
    assert (row["cost_nanousd"], row["unit"], row["units_micro"]) == (0, "requests", 1_000_000)
    assert post(yard, "/v2/models/nobody/infer", {"inputs": [tensor]}).status == 404


def test_a_model_can_be_called_by_its_id_on_every_kind_of_route(yard: Yard, client: OpenAI) -> None:
    endpoint = yard.get("/v1/endpoints")["data"][0]["endpoint_id"]
    message: Any = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model=endpoint, messages=message).model == MODEL
    assert client.embeddings.create(model=endpoint, input="a").model == MODEL
    assert client.images.edit(model=endpoint, prompt="a dog", image=("cat.png", b"x")).data
    tensor = {"name": "x", "shape": [1], "datatype": "BOOL", "data": [True]}
    assert post(yard, f"/v2/models/{endpoint}/infer", {"inputs": [tensor]}).json()["model_name"] == MODEL


def test_the_sdk_reads_moderations(client: OpenAI) -> None:
    found = client.moderations.create(model=MODEL, input=["a lamb", "so much violence"])
    assert [result.flagged for result in found.results] == [False, True]
    assert found.results[1].categories.violence


def test_speech_comes_as_sound_and_is_heard_again(yard: Yard, client: OpenAI) -> None:
    spoken = client.audio.speech.with_raw_response.create(model=MODEL, voice="alloy", input="hello there")
    assert spoken.headers["content-type"] == "audio/wav"
    row = billed(yard, spoken.headers["x-request-id"])
    assert (row["unit"], row["units_micro"], row["prompt_tokens"]) == ("characters", 11_000_000, 0)
    sound = ("hello.wav", spoken.content)
    heard = client.audio.transcriptions.with_raw_response.create(model=MODEL, file=sound, language="en")
    assert heard.parse().text == "hello there"
    row = billed(yard, heard.headers["x-request-id"])
    assert (row["unit"], row["units_micro"]) == ("seconds", 1_000_000)
    text = client.audio.transcriptions.create(model=MODEL, file=sound, response_format="text")
    assert str(text).strip() == "hello there"
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert client.audio.translations.create(model=MODEL, file=sound).text == "hello there"


def test_pictures_are_billed_by_the_picture(yard: Yard, client: OpenAI) -> None:
    answer = client.images.with_raw_response.generate(model=MODEL, prompt="a cat", n=2, size="256x256")
    pictures = answer.parse().data or []
    first = base64.b64decode(pictures[0].b64_json or "")
    assert first.startswith(b"\x89PNG")
    row = billed(yard, answer.headers["x-request-id"])
    assert (row["unit"], row["units_micro"]) == ("images", 2_000_000)
    links = client.images.edit(model=MODEL, prompt="a dog", image=("cat.png", first), response_format="url").data or []
    assert (links[0].url or "").startswith("data:image/png;base64,")


def test_usage_sums_units_by_kind(yard: Yard, client: OpenAI) -> None:
    answer = client.images.with_raw_response.generate(model=MODEL, prompt="one more")
    billed(yard, answer.headers["x-request-id"])
    usage = yard.get("/v1/usage?group_by=model")
    assert {"images"} <= set(usage["total"]["units"])


def test_functions_are_answered_in_their_old_form(client: OpenAI) -> None:
    functions: Any = [{"name": "look_up", "parameters": {"type": "object"}}]
    asked: Any = [{"role": "user", "content": "please look_up this"}]
    [choice] = client.chat.completions.create(model=MODEL, messages=asked, functions=functions).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("look_up", "{}")
    stream = client.chat.completions.create(model=MODEL, messages=asked, functions=functions, stream=True)
    deltas = [chunk.choices[0].delta.function_call for chunk in stream]
    assert "".join(delta.arguments or "" for delta in deltas if delta is not None) == "{}"


def test_what_the_model_cannot_do_is_refused_by_its_parameter(client: OpenAI) -> None:
    for name, value in (("web_search_options", {}), ("prediction", {"type": "content", "content": "x"})):
        more: Any = {name: value}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], **more)
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(model=MODEL, voice="a", input="x", stream_format="sse")
    assert caught.value.param == "stream_format"


def test_logprobs_have_their_keys(client: OpenAI) -> None:
    message: Any = [{"role": "user", "content": "a b"}]
    answer = client.chat.completions.create(model=MODEL, messages=message, logprobs=True, top_logprobs=7)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == ["a", " b"]
    assert entries[0].top_logprobs[-1].logprob == -9999.0
    assert json.loads(answer.model_dump_json())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tokens_of_thought_and_of_sound_come_from_the_engine_to_the_books(
    yard: Yard, route: str, is_stream: bool
) -> None:
    """On every API that chats, streamed or not, in the row, in the sums and in OpenAI's usage."""
    text = "one two three four five six [[sim: tokens=9 reasoning=5 sound=3]]"
    asked = {"input": text} if route == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    length = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    reply = post(yard, route, {"model": MODEL, length: 50, "stream": is_stream, **asked})
    assert reply.status == 200, reply.body
    row = billed(yard, reply.headers["x-request-id"])
    found = [
        row[name] for name in ("completion_tokens", "reasoning_tokens", "audio_input_tokens", "audio_output_tokens")
    ]
    assert found == [9, 5, 3, 3]
    since = f"since={row['created_at'] - 0.001:.6f}&until={row['created_at'] + 0.001:.6f}"
    [entry] = yard.get(f"/v1/usage?group_by=route&{since}")["data"]
    assert (entry["route"], entry["reasoning_tokens"], entry["audio_input_tokens"]) == (route, 5, 3)
    second = int(row["created_at"])
    page = yard.get(f"/v1/organization/usage/completions?start_time={second}&end_time={second + 1}&bucket_width=1m")
    [result] = page["data"][0]["results"]
    assert result["output_reasoning_tokens"] >= 5
    assert result["input_audio_tokens"] >= 3
