"""Decoding inference requests: strict in, nothing unknown out, the parameter named."""

import json

import msgspec
import pytest

from modelyard.errors import ApiError
from modelyard.gateway.openai.call import EXTRAS, REFUSED, drop_extras
from modelyard.gateway.openai.chat import decode_chat as CHAT  # noqa: N812 - the subject of these tests
from modelyard.gateway.openai.completions import decode_completion as COMPLETION  # noqa: N812
from modelyard.gateway.openai.embeddings import decode_embedding as EMBEDDING  # noqa: N812


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def refused(body: bytes, decoder=CHAT) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decoder(body)
    assert caught.value.status == 400
    return caught.value


def test_only_known_fields_come_out_again() -> None:
    call = CHAT(chat(temperature=0.5, made_up={"a": 1}, user="u", metadata={"k": "v"}, store=True))
    sent = json.loads(msgspec.json.encode(call.request))
    assert sent == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    assert call.ignored == ("made_up",)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_steer_an_engine_are_refused_by_name(name: str) -> None:
    error = refused(chat(**{name: "x"}))
    assert error.param == name
    assert error.code == "unsupported_parameter"


def test_null_is_absent() -> None:
    call = CHAT(chat(temperature=None, tools=None, stop=None, stream=None, max_tokens=None))
    assert call.output_tokens is None
    assert not call.is_stream


def test_the_newer_name_of_the_output_limit_wins_and_counts_every_choice() -> None:
    call = CHAT(chat(max_tokens=5, max_completion_tokens=7, n=3))
    assert call.output_tokens == 21
    assert json.loads(msgspec.json.encode(call.request))["max_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a" * 65]}, "stop[0]"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"seed": 2**63}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"model": ""}, "model"),
        ({"model": 1}, "model"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(fields: dict[str, object], param: str) -> None:
    error = refused(chat(**fields))
    assert (error.param or "").startswith(param)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = json.loads(chat())
    del body[missing]
    error = refused(json.dumps(body).encode())
    assert (error.param, error.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model":"m","temperature":NaN}',
     b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
     b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', b'{"a":' * 5000 + b"1" + b"}" * 5000,
     b'{"model":"m","messages":' + b"[" * 5000],
)  # fmt: skip
def test_what_is_not_one_json_object_is_refused(body: bytes) -> None:
    refused(body)


def test_links_to_images_are_not_passed_to_an_engine_that_would_fetch_them() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
    error = refused(chat(messages=[{"role": "user", "content": parts}]))
    assert error.param == "messages[0].content[0].image_url.url"
    parts[0]["image_url"]["url"] = "data:image/png;base64,AA=="  # type: ignore[index]
    CHAT(chat(messages=[{"role": "user", "content": parts}]))


def test_schemas_of_tools_pass_as_they_came() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = CHAT(chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    assert json.loads(msgspec.json.encode(call.request))["tools"][0]["function"]["parameters"] == schema


def test_assistant_history_with_tool_calls_needs_no_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    CHAT(chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]))


def test_sampling_extras_reach_only_engines_that_know_them() -> None:
    call = CHAT(chat(top_k=5, min_p=0.1))
    assert drop_extras(call.request, frozenset({"top_k"})) == ["min_p"]
    assert json.loads(msgspec.json.encode(call.request))["top_k"] == 5
    assert set(EXTRAS) >= {"top_k", "min_p"}


def test_completions_default_to_sixteen_tokens_for_each_prompt() -> None:
    assert COMPLETION(b'{"model":"m","prompt":"hi","max_tokens":null}').output_tokens == 16
    assert COMPLETION(b'{"model":"m","prompt":["a","b"],"n":2}').output_tokens == 64


@pytest.mark.parametrize(
    ("prompt", "param"), [('""', "prompt"), ("[]", "prompt"), ('["a",1]', "prompt"), ('["a",""]', "prompt[1]"),
                          ("[[1],[]]", "prompt"), ("[-1]", "prompt"), ("{}", "prompt")]
)  # fmt: skip
def test_a_bad_prompt_is_refused(prompt: str, param: str) -> None:
    error = refused(b'{"model":"m","prompt":' + prompt.encode() + b"}", COMPLETION)
    assert (error.param or "").startswith(param)


def test_embeddings_take_texts_and_token_ids() -> None:
    for given in ('"a"', '["a","b"]', "[1,2]", "[[1],[2]]"):
        EMBEDDING(b'{"model":"m","input":' + given.encode() + b"}")
    assert refused(b'{"model":"m","input":[]}', EMBEDDING).param == "input"
    too_many = json.dumps({"model": "m", "input": ["x"] * 2049}).encode()
    assert refused(too_many, EMBEDDING).param == "input"
