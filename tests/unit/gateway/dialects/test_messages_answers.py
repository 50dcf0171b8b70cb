"""Whole chat completions as messages."""

import json

import pytest
from tests.support.messages import (
    REQUEST_ID,
    THINKING,
    USAGE,
    Message,
    Text,
    Thinking,
    Tokens,
    ToolUse,
    chunk,
    joined,
    stream_of,
    translation,
    whole,
)

USAGE_KEYS = {
    "cache_creation",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "inference_geo",
    "input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
    "service_tier",
}

# --- whole answers ---


def test_a_whole_answer_is_a_message() -> None:
    assert whole({"content": "hello"}) == Message(
        "msg_abcdefghijkmnpqr00000001",
        "assistant",
        "asked",
        [Text("hello")],
        "end_turn",
        None,
        # What was cached is counted apart, unlike OpenAI's prompt_tokens.
        Tokens(6, 0, 4, 5),
    )


@pytest.mark.parametrize(
    ("finish", "told", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"matched_stop": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": "</s>"}, ("end_turn", None)),
        ("stop", {"stop_reason": 128009, "matched_stop": [1]}, ("end_turn", None)),
        ("length", {"stop_reason": None}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        (None, {}, ("end_turn", None)),
        ("eos", {}, ("end_turn", None)),
    ],
)
def test_why_it_stopped_is_told_in_both_forms(finish: object, told: dict[str, object], expected: object) -> None:
    answer = whole({"content": "a"}, finish, told=told, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == expected
    streamed = joined(stream_of(chunk({"content": "a"}), chunk({}, finish, **told), stop_sequences=["END"]))
    assert (streamed.stop_reason, streamed.stop_sequence) == expected


def test_calls_of_tools_become_blocks() -> None:
    calls = [{"id": "c1", "function": {"name": "f", "arguments": '{"a": [1.50]}'}}]
    answer = whole({"content": "let me see", "tool_calls": calls}, "tool_calls")
    assert answer.content == [Text("let me see"), ToolUse("c1", "f", {"a": [1.5]})]
    assert answer.stop_reason == "tool_use"
    # Some engines say "stop" after a call that was demanded.
    assert whole({"content": None, "tool_calls": calls}, "stop").stop_reason == "tool_use"
    assert whole({"content": None, "tool_calls": calls}, "length").stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ("", {}),
        (" ", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("rm -rf", {"INVALID_JSON": "rm -rf"}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
        ('{"a":' * 100_000, {"INVALID_JSON": '{"a":' * 100_000}),
    ],
)
def test_arguments_that_are_no_object_are_shown_and_never_dropped(arguments: object, expected: object) -> None:
    answer = whole({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]})
    assert answer.content == [ToolUse("c", "f", expected)]


def test_a_call_without_id_gets_one_and_one_without_name_is_none() -> None:
    calls = [{"function": {"name": "f"}}, {"id": "c", "function": None}, {"id": "", "function": {"name": "g"}}]
    first, second = whole({"tool_calls": calls}).content
    assert first.id.startswith("toolu_")
    assert second.id.startswith("toolu_")
    assert first.id != second.id


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (THINKING, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        ({**THINKING, "display": "omitted"}, False),
        ({"type": "disabled"}, False),
        (None, False),
    ],
)
def test_thinking_is_shown_to_those_who_asked_for_it(field: str, thinking: object, is_shown: bool) -> None:
    expected = [Thinking("hm", ""), Text("a")] if is_shown else [Text("a")]
    assert whole({field: "hm", "content": "a"}, thinking=thinking).content == expected
    streamed = stream_of(chunk({field: "h"}), chunk({field: "m"}), chunk({"content": "a"}, "stop"), thinking=thinking)
    assert joined(streamed).content == expected


def test_a_refusal_is_text_with_its_own_reason() -> None:
    answer = whole({"content": None, "refusal": "I cannot"})
    assert (answer.content, answer.stop_reason) == ([Text("I cannot")], "refusal")
    assert joined(stream_of(chunk({"refusal": "I "}), chunk({"refusal": "cannot"}), chunk({}, "stop"))) == answer


def test_every_key_that_anthropics_schema_requires_is_there() -> None:
    calls = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]
    said = {"content": "a", "tool_calls": calls}
    chat = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()
    answer = json.loads(translation().answer(chat, USAGE, REQUEST_ID))
    events = [
        json.loads(line[6:]) for line in stream_of(chunk(said, "stop")).decode().splitlines() if line[:5] == "data:"
    ]
    start, text, tool = events[0]["message"], events[1]["content_block"], events[4]["content_block"]
    stop = next(event["delta"] for event in events if event["type"] == "message_delta")
    for message in (answer, start):
        assert {"container", "stop_details", "stop_reason", "stop_sequence"} <= message.keys()
        assert message["usage"].keys() >= USAGE_KEYS
    for block in (answer["content"][0], text):
        assert block == {**block, "type": "text", "citations": None}
    for block in (answer["content"][1], tool):
        assert block == {**block, "type": "tool_use", "caller": {"type": "direct"}}
    assert stop == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None, "container": None}


def test_an_empty_answer_has_no_blocks() -> None:
    assert whole({"content": ""}).content == []
    assert joined(stream_of(chunk({"role": "assistant", "content": ""}), chunk({}, "stop"))).content == []


@pytest.mark.parametrize(
    "chat",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{}]}',
        b'{"choices":[{"message":{"content":1}}]}',
        b"[" * 9999,
    ],
)
def test_what_is_no_chat_completion_is_a_value_error(chat: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the texts are msgspec's
        translation().answer(chat, USAGE, REQUEST_ID)
