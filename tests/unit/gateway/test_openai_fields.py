"""What becomes of the rarer fields of OpenAI's API: honoured, translated, dropped, or needed of the engine."""

import json
from typing import Any

import msgspec
import pytest

from modelyard.errors import ApiError, engine_lost
from modelyard.gateway.openai.call import Call, answer_type
from modelyard.gateway.openai.chat import decode_chat
from modelyard.gateway.openai.completions import decode_completion
from modelyard.gateway.openai.embeddings import decode_embedding
from modelyard.gateway.relay import EngineStreamError
from modelyard.gateway.sse import Usage

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "look_up", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look_up", "add", "erase")]
FUNCTION_CALL = {"name": "look_up", "arguments": "{}"}
USAGE = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)


def chat(**fields: object) -> Call:
    return decode_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: object) -> Call:
    return decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def embedding(**fields: object) -> Call:
    return decode_embedding(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def sent(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(call.request))
    return found


# --- limits and choices ---


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_may_be_asked_to_have_no_tokens(name: str) -> None:
    call = chat(**{name: 0})
    assert (call.output_tokens, sent(call)["max_tokens"]) == (0, 0)


def test_up_to_8_choices_are_counted_each() -> None:
    assert chat(n=8, max_tokens=2).output_tokens == 16


def test_the_best_of_several_is_counted_as_all_of_them_and_needs_an_engine_that_can() -> None:
    call = completion(best_of=3, n=2, max_tokens=5)
    assert (call.output_tokens, call.choices) == (15, 3)
    assert call.lacking(frozenset()) == "best_of"
    assert call.lacking(frozenset({"best_of"})) is None
    for same in (completion(best_of=1), completion(best_of=2, n=2), completion(best_of=0), completion(best_of=None)):
        assert same.needs == ()
        assert "best_of" not in sent(same)


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
def test_a_best_of_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(("name", "value"), [("suffix", "end"), ("echo", True)])
def test_what_some_engines_would_ignore_is_a_need(name: str, value: object) -> None:
    assert completion(**{name: value}).lacking(frozenset()) == name
    assert completion(**{name: None}).needs == ()


def test_dimensions_and_token_ids_are_needs_of_embeddings() -> None:
    assert embedding(dimensions=8).lacking(frozenset({"token_arrays"})) == "dimensions"
    for ids in ([1, 2], [[1], [2]]):
        assert embedding(input=ids).lacking(frozenset({"dimensions"})) == "input"
    assert embedding(input=["a", "b"]).needs == ()


# --- what few engines honour ---


@pytest.mark.parametrize("name", ["prediction", "web_search_options", "moderation"])
def test_fields_that_few_engines_honour_are_needs_and_null_is_absent(name: str) -> None:
    call = chat(**{name: {"type": "x"}})
    assert call.lacking(frozenset()) == name
    assert sent(call)[name] == {"type": "x"}
    assert name not in sent(chat(**{name: None}))
    assert chat(**{name: None}).needs == ()


def test_text_is_what_every_engine_answers_and_speech_is_not() -> None:
    call = chat(modalities=["text"], audio={"format": "wav", "voice": "x"})
    assert call.needs == ()
    assert set(sent(call)) == {"model", "messages"}
    assert chat(modalities=["text", "audio"]).lacking(frozenset()) == "modalities"


def test_null_is_absent_for_fields_nobody_listed_and_not_for_those_that_steer_an_engine() -> None:
    assert chat(made_up=None).ignored == ()
    with pytest.raises(ApiError):
        chat(cache_salt=None)


def test_hints_for_the_platform_do_not_reach_the_engine() -> None:
    call = chat(prompt_cache_options={"mode": "explicit", "ttl": "30m"}, prompt_cache_retention="24h", store=True)
    assert set(sent(call)) == {"model", "messages"}


@pytest.mark.parametrize("name", ["tools", "messages", "functions"])
def test_an_empty_list_is_refused_with_its_own_code(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: []})
    assert (caught.value.code, caught.value.param) == ("empty_array", name)


def test_metadata_that_is_no_text_is_refused_with_its_key() -> None:
    with pytest.raises(ApiError) as caught:
        chat(metadata={"good": "x", "bad": 1})
    assert (caught.value.code, caught.value.param) == ("invalid_type", "metadata.bad")


def test_metadata_comes_back_with_a_whole_answer_and_not_in_chunks() -> None:
    call = chat(metadata={"order": "17"}, functions=[FUNCTION])
    assert call.translation is not None
    tool_call = {"id": "c", "type": "function", "function": FUNCTION_CALL}
    whole = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": [tool_call]}}]}
    found = json.loads(call.translation.answer(json.dumps(whole).encode(), USAGE, "r"))
    assert found["metadata"] == {"order": "17"}
    assert found["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": FUNCTION_CALL,
    }
    assert chat(metadata={"order": "17"}, stream=True).translation is None
    assert chat(metadata={}).translation is None


# --- tools ---


def test_allowed_tools_are_the_only_ones_that_the_engine_learns_of() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    body = sent(chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add"]
    assert body["tool_choice"] == "required"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "other"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        },
    ],
)
def test_a_choice_of_a_tool_that_is_not_there_is_refused(choice: object) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=TOOLS, tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_a_choice_without_tools_is_dropped_where_it_says_nothing() -> None:
    assert "tool_choice" not in sent(chat(tool_choice="auto"))
    with pytest.raises(ApiError):
        chat(tool_choice="required")


@pytest.mark.parametrize("tool", [{"type": "custom", "custom": {"name": "x"}}, {"type": "retrieval"}])
def test_tools_that_are_no_functions_are_refused_by_their_type(tool: object) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=[tool])
    assert caught.value.param == "tools[0].type"


# --- functions, the deprecated form ---


def test_functions_are_asked_as_tools() -> None:
    body = sent(chat(functions=[FUNCTION], function_call={"name": "look_up"}))
    assert body["tools"] == [{"type": "function", "function": FUNCTION}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look_up"}}
    assert body["parallel_tool_calls"] is False
    assert "functions" not in body
    assert sent(chat(functions=[FUNCTION], function_call="none"))["tool_choice"] == "none"


def test_earlier_calls_and_results_become_those_of_tools() -> None:
    history = [
        USER,
        {"role": "assistant", "content": None, "function_call": FUNCTION_CALL},
        {"role": "function", "name": "look_up", "content": "found"},
    ]
    messages = sent(chat(messages=history))["messages"]
    assert messages[1]["tool_calls"][0]["function"] == FUNCTION_CALL
    assert "function_call" not in messages[1]
    assert messages[2] == {"role": "tool", "content": "found", "tool_call_id": messages[1]["tool_calls"][0]["id"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [FUNCTION], "tools": TOOLS},
        {"function_call": {"name": "look_up"}},
        {"functions": [FUNCTION], "function_call": {"name": "other"}},
    ],
)
def test_functions_that_contradict_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError):
        chat(**fields)


def test_an_answer_with_a_tool_call_is_given_back_as_a_function_call() -> None:
    translation = chat(functions=[FUNCTION]).translation
    assert translation is not None
    call = {"id": "c", "type": "function", "function": FUNCTION_CALL}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": {}}
    [choice] = json.loads(translation.answer(json.dumps(whole).encode(), USAGE, "req_1"))["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "function_call": FUNCTION_CALL}
    assert choice["finish_reason"] == "function_call"
    with pytest.raises(ValueError, match="choices"):
        translation.answer(b"{}", USAGE, "req_1")


def events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n") if b"{" in event]


def test_a_stream_with_a_tool_call_is_given_back_as_a_function_call() -> None:
    translation = chat(functions=[FUNCTION], stream=True, stream_options={"include_usage": True}).translation
    assert translation is not None
    stream = translation.stream("req_1")
    first = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    raw = stream.begin()
    for delta, finish in ((first, None), (more, None), ({}, "tool_calls")):
        chunk = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        raw += stream.feed(b"data: " + json.dumps(chunk).encode())
    raw += stream.finish(USAGE)
    found = events(raw)
    assert [chunk["choices"][0]["delta"] for chunk in found[:3]] == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": "{}"}},
        {},
    ]
    assert found[2]["choices"][0]["finish_reason"] == "function_call"
    assert (found[2]["usage"], found[3]["choices"], found[3]["usage"]["total_tokens"]) == (None, [], 5)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert b'"error"' in stream.fail(engine_lost())


# --- log probabilities of completions ---


def test_log_probabilities_in_the_form_of_a_chat_become_lists() -> None:
    translation = completion(logprobs=1).translation
    assert translation is not None
    entries = [
        {"token": " Paris", "logprob": -0.2, "bytes": [1], "top_logprobs": [{"token": " Paris", "logprob": -0.2}]},
        {"token": ".", "logprob": -0.3, "top_logprobs": []},
    ]
    choice = {"index": 0, "text": " Paris.", "logprobs": {"content": entries}}
    whole = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    expected = {
        "tokens": [" Paris", "."],
        "token_logprobs": [-0.2, -0.3],
        "top_logprobs": [{" Paris": -0.2}, {}],
        "text_offset": [0, 6],
    }
    assert json.loads(translation.answer(whole, USAGE, "r"))["choices"][0]["logprobs"] == expected
    stream = translation.stream("r")
    raw = b""
    for entry in entries:
        one = {"choices": [{"index": 0, "text": entry["token"], "logprobs": {"content": [entry]}}]}
        raw += stream.feed(b"data: " + json.dumps(one, separators=(",", ":")).encode())
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in events(raw)]
    assert offsets == [[0], [6]]
    plain = b'data: {"choices":[{"index":0,"text":"x","logprobs":null}]}'
    assert stream.feed(plain) == plain + b"\n\n"


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"tool_calls": [7]}},
        {"delta": {"tool_calls": "x"}},
        {"logprobs": {"content": [7]}},
        {"logprobs": {"content": [{"bytes": []}]}},
    ],
)
def test_what_an_engine_says_in_no_known_form_breaks_its_stream_and_nothing_else(choice: dict[str, Any]) -> None:
    event = b"data: " + msgspec.json.encode({"choices": [{"index": 0, **choice}]})
    call = chat(functions=[FUNCTION]) if "delta" in choice else completion(logprobs=1)
    assert call.translation is not None
    with pytest.raises(EngineStreamError):
        call.translation.stream("r").feed(event)
    with pytest.raises(ValueError, match="form that is known"):
        call.translation.answer(event.removeprefix(b"data: ").replace(b"delta", b"message"), USAGE, "r")


# --- answers that are no JSON ---


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"audio/mpeg", b"audio/mpeg"),
        (b"Audio/WAV; rate=8000", b"audio/wav"),
        (b"text/plain", b"text/plain; charset=utf-8"),
        (b"text/html", b"application/octet-stream"),
        (b"image/svg+xml", b"application/octet-stream"),
        (b"", b"application/octet-stream"),
    ],
)
def test_an_engine_cannot_make_the_gateway_serve_a_page(given: bytes, told: bytes) -> None:
    assert answer_type(given) == told
