"""OpenAI's chats in Anthropic's words and back, held against both vendors' own types."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.support.providers import OURS, THEIRS, dialect_of

from modelyard.engines.providers.anthropic_answer import AnthropicReader
from modelyard.engines.providers.dialect import Counted, Refused

ROUTE = "/v1/chat/completions"
PNG = "iVBORw0KGgo="
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def asked(messages: list[dict[str, Any]] | str, **more: Any) -> dict[str, Any]:
    """Return the request of a chat, after a look whether Anthropic's SDK knows every field of it."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    sent = dialect_of("anthropic").asked(ROUTE, {"model": OURS, "messages": messages, **more}).body
    check(sent)
    return sent


def check(sent: dict[str, Any]) -> None:
    """Hold a request against the SDK's types; without the SDK it is only JSON."""
    try:
        from anthropic.types import message_create_params as params
        from pydantic import TypeAdapter
    except ImportError:
        json.dumps(sent)
        return
    kind = params.MessageCreateParamsStreaming if sent.get("stream") else params.MessageCreateParamsNonStreaming
    known = set(kind.__annotations__) | set(params.MessageCreateParamsBase.__annotations__)
    assert sent.keys() <= known
    TypeAdapter(kind).validate_python(sent)


def test_instructions_move_and_turns_of_one_side_become_one() -> None:
    sent = asked(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": " "}]},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "begins "},
        ],
        max_tokens=7,
    )
    assert sent == {
        "model": THEIRS,
        "max_tokens": 7,
        "system": "Be kind.\n\nBe brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "begins"}]},
        ],
    }


def test_tools_and_their_answers() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    odd = {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "not json"}}
    sent = asked(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call, odd]},
            {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "bad"}]},
            {"role": "user", "content": "and now?"},
        ],
        tools=[
            {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}},
            {"type": "function", "function": {"name": "noop", "strict": True}},
        ],
    )
    assert [turn["role"] for turn in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"] == [
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
    ]
    assert [block["type"] for block in sent["messages"][2]["content"]] == ["tool_result", "tool_result", "text"]
    assert sent["tools"] == [
        {"name": "weather", "description": "d", "input_schema": WEATHER},
        {"name": "noop", "input_schema": {"type": "object", "properties": {}}, "strict": True},
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "wanted"),
    [
        (None, None, None),
        ("auto", None, {"type": "auto"}),
        ("none", False, {"type": "none"}),
        ("required", None, {"type": "any"}),
        ("required", False, {"type": "any", "disable_parallel_tool_use": True}),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        ({"type": "function", "function": {"name": "f"}}, None, {"type": "tool", "name": "f"}),
    ],
)
def test_choices_of_tools(choice: Any, parallel: bool | None, wanted: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    sent = asked("?", tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    assert sent.get("tool_choice") == wanted


def test_pictures_by_data_and_by_url() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}},
        {"type": "text", "text": "what?"},
    ]
    content = asked([{"role": "user", "content": parts}])["messages"][0]["content"]
    assert [block.get("source") for block in content] == [
        {"type": "base64", "media_type": "image/png", "data": PNG},
        {"type": "url", "url": "https://example.com/a.png"},
        None,
    ]


def test_sampling_limits_formats_and_what_has_no_word_there() -> None:
    sent = asked("x", temperature=1.7, top_p=0.5, stop="END", stream=True, seed=1, logit_bias={"1": 2}, user="u")
    assert sent == {
        "model": THEIRS,
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stop_sequences": ["END"],
        "stream": True,
    }
    older = dialect_of("anthropic", has_sampling=True)
    chat = {"messages": [{"role": "user", "content": "x"}], "top_p": 0.5}
    assert older.asked(ROUTE, chat).body["top_p"] == 0.5
    sent = older.asked(ROUTE, {**chat, "temperature": 1.7}).body
    assert (sent["temperature"], "top_p" in sent) == (1.0, False), "OpenAI's goes to 2, and it takes one of the two"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER, "strict": True}}
    assert asked("x", response_format=schema)["output_config"] == {"format": {"type": "json_schema", "schema": WEATHER}}
    assert "JSON" in asked("x", response_format={"type": "json_object"})["system"]
    assert "system" not in asked("x", response_format={"type": "text"})


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ([{"role": "user", "content": "x"}], {"logprobs": True}, "logprobs"),
        ([{"role": "user", "content": "x"}], {"n": 2}, "n"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], {}, "messages.0.content.0"),
        ([{"role": "system", "content": "x"}], {}, "messages"),
        ([{"role": "moon", "content": "x"}], {}, "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/bmp,x"}}]}], {}, None),
        ("x", {}, "messages"),
        ([{"role": "user", "content": "x"}], {"response_format": {"type": "json_schema"}}, None),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(messages: Any, more: dict[str, Any], param: str | None) -> None:
    with pytest.raises(Refused) as refused:
        dialect_of("anthropic").asked(ROUTE, {"messages": messages, **more})
    assert refused.value.status == 400
    assert param is None or refused.value.param == param


# --- answers -----------------------------------------------------------------------------

USAGE = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5, "output_tokens": 12}


def message(*content: dict[str, Any], reason: str = "end_turn") -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": THEIRS,
        "content": list(content),
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("model_context_window_exceeded", "length"),
        ("something_new", "stop"),
    ],
)
def test_a_whole_message_is_a_completion(reason: str, told: str) -> None:
    blocks = (
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
    )
    raw, counted = dialect_of("anthropic").answered(ROUTE, json.dumps(message(*blocks, reason=reason)).encode())
    found = ChatCompletion.model_validate_json(raw, strict=True)
    assert (found.model, found.choices[0].finish_reason, found.choices[0].message.content) == (OURS, told, "ab")
    [call] = found.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"x":1}')
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (100, 12, 112)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 90
    assert counted == Counted(100, 12)
    assert THEIRS not in raw.decode()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"type":"message"}', b'{"type":"error"}'])
def test_what_is_no_message_is_no_answer(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"no|not"):
        dialect_of("anthropic").answered(ROUTE, body)


def events_of(*blocks: tuple[dict[str, Any], list[dict[str, Any]]], reason: str = "end_turn") -> list[dict[str, Any]]:
    """Return the events of a stream as Anthropic documents them."""
    start = {**message(), "stop_reason": None, "usage": {**USAGE, "output_tokens": 1}}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, (block, deltas) in enumerate(blocks):
        found.append({"type": "content_block_start", "index": index, "content_block": block})
        found += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        found.append({"type": "content_block_stop", "index": index})
    end = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 12}}
    return [*found, end, {"type": "message_stop"}]


def read(events: list[dict[str, Any]]) -> tuple[AnthropicReader, list[ChatCompletionChunk]]:
    reader = AnthropicReader(OURS, 1)
    raw = b"".join(reader.feed(event["type"], json.dumps(event).encode()) for event in events)
    *chunks, done, end = raw.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return reader, [ChatCompletionChunk.model_validate_json(one.removeprefix(b"data: "), strict=True) for one in chunks]


def test_a_stream_of_text_and_calls_is_one_of_chunks() -> None:
    reader, chunks = read(
        events_of(
            ({"type": "thinking", "thinking": ""}, [{"type": "thinking_delta", "thinking": "hm"}]),
            ({"type": "text", "text": ""}, [{"type": "text_delta", "text": one} for one in ("hel", "lo")]),
            (
                {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
                [{"type": "input_json_delta", "partial_json": one} for one in ("", '{"x"', ":1}")],
            ),
            ({"type": "tool_use", "id": "t2", "name": "g", "input": {}}, []),
            reason="tool_use",
        )
    )
    assert reader.is_done
    assert reader.counted == Counted(100, 12)
    assert {(one.id, one.model, one.object) for one in chunks} == {("chatcmpl-1", OURS, "chat.completion.chunk")}
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "hello"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    told = {
        index: "".join(c.function.arguments or "" for c in calls if c.index == index and c.function) for index in (0, 1)
    }
    assert told == {0: '{"x":1}', 1: "{}"}
    assert [(call.id, call.function and call.function.name) for call in calls if call.id] == [("t1", "f"), ("t2", "g")]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "tool_calls"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


@given(st.lists(st.text(max_size=12), max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_text_of_a_stream_is_exact(texts: list[str]) -> None:
    _, chunks = read(events_of(({"type": "text", "text": ""}, [{"type": "text_delta", "text": one} for one in texts])))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == "".join(texts)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded_error", 503), ("rate_limit_error", 429), ("api_error", 500), ("invalid_request_error", 500)],
)
def test_an_error_in_a_stream_is_raised(kind: str, status: int) -> None:
    with pytest.raises(Refused) as refused:
        AnthropicReader(OURS, 1).feed("error", json.dumps({"type": "error", "error": {"type": kind}}).encode())
    assert refused.value.status == status


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    body = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 5 maximum"}}
    refused = dialect_of("anthropic").refusal(400, body)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "index", "delta", "usage", "message", "content_block", "text", "error"]),
                x,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=150, deadline=None)
def test_no_event_whatever_its_shape_breaks_the_reader(event: Any) -> None:
    reader = AnthropicReader(OURS, 1)
    for kind in ("message_start", "content_block_start", "content_block_delta", "message_delta", "error", "x"):
        shaped = {**event, "type": kind} if isinstance(event, dict) else event
        try:
            reader.feed(kind, json.dumps(shaped).encode())
        except (Refused, ValueError):
            continue
