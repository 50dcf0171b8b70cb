"""S31: every field with values of a wrong type, out of range or without bound; the answer names the field."""

from typing import Any

import pytest
from tests.support.refusals import assert_refused, post
from tests.support.yard import Yard

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "sim", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "sim", "prompt": "hi", "max_tokens": 4},
    EMBEDDINGS: {"model": "sim", "input": "hi"},
}
NOT_NUMBERS: list[Any] = ["1", True, [], {}, [1]]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 1.5]
HUGE: list[Any] = [2**63, 2**64, 10**30, 1e308]
NOT_BOOLEANS: list[Any] = ["true", 1, 0, [], {}]
NOT_TEXTS: list[Any] = [1, True, [], {}, 1.5]

SAMPLING: dict[str, list[Any]] = {
    "model": [*NOT_TEXTS, "", "x" * 5000, None],
    "temperature": [*NOT_NUMBERS, -0.1, -1, 2.1, 2**31, *HUGE],
    "top_p": [*NOT_NUMBERS, -0.1, 1.1, *HUGE],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1, *HUGE],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1, *HUGE],
    "n": [*NOT_INTEGERS, 0, -1, 9, 2**31, *HUGE],
    "max_tokens": [*NOT_INTEGERS, -1, 2**31, *HUGE],
    "stop": [1, True, {}, [1], [["a"]], [""], "", ["a"] * 5, ["x" * 65], "x" * 1000, ["a"] * 100_000],
    "seed": [*NOT_INTEGERS, *HUGE, -(2**63) - 1],
    "logit_bias": [1, "a", [], {"1": "x"}, {"1": 101}, {"1": -101}, {str(n): 1 for n in range(301)}],
    "stream": NOT_BOOLEANS,
    "stream_options": [1, "a", [], {"include_usage": "yes"}, {"include_usage": 1}],
    "user": [*NOT_TEXTS, "x" * 10_000],
    "top_k": [*NOT_INTEGERS, -2, 2**31 - 1, *HUGE],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "min_tokens": [*NOT_INTEGERS, -1, 2**31, *HUGE],
    "ignore_eos": NOT_BOOLEANS,
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, *HUGE],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **SAMPLING,
        "messages": [None, 1, "hi", {}, [], [1], ["hi"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}]],
        "max_completion_tokens": [*NOT_INTEGERS, -1, 2**31, *HUGE],
        "logprobs": [*NOT_BOOLEANS, 5],
        "top_logprobs": [*NOT_INTEGERS, -1, 21, *HUGE, 3],
        "tools": [1, "f", {}, [], [1], [{}], [{"type": "function"}], [{"type": "retrieval"}], [TOOL] * 129],
        "tool_choice": [1, True, [], {}, "sometimes", {"type": "function"}, "required"],
        "parallel_tool_calls": NOT_BOOLEANS,
        "response_format": [1, "json", [], {}, {"type": "yaml"}, {"type": "json_schema"}],
        "reasoning_effort": [1, [], {}, "enormous"],
        "metadata": [1, "a", [], {"k": 1}, {"k": None}, {"x" * 65: "v"}, {"k": "x" * 513}],
        "service_tier": [1, [], "first-class"],
        "store": NOT_BOOLEANS,
    },
    COMPLETIONS: {
        **SAMPLING,
        "prompt": [
            None,
            1,
            1.5,
            True,
            {},
            [],
            [1.5],
            [True],
            [{}],
            ["a", 1],
            [[]],
            [[-1]],
            [-1],
            [2**40],
            ["a"] * 5000,
        ],
        "echo": NOT_BOOLEANS,
        "logprobs": [*NOT_INTEGERS, -1, 6, *HUGE],
        "best_of": [*NOT_INTEGERS, 21, -1, *HUGE],
        "suffix": NOT_TEXTS,
    },
    EMBEDDINGS: {
        "model": [*NOT_TEXTS, "", None],
        "input": [None, 1, 1.5, True, {}, [], "", [""], [1.5], [True], [{}], ["a", 1], [[]], [[-1]], ["a"] * 2049],
        "encoding_format": [1, [], {}, "int8"],
        "dimensions": [*NOT_INTEGERS, 0, -1, *HUGE],
        "user": NOT_TEXTS,
    },
}
CASES = [
    (path, field, value) for path, fields in FIELDS.items() for field, values in fields.items() for value in values
]


def case_id(case: tuple[str, str, Any]) -> str:
    path, field, value = case
    return f"{path.rsplit('/', 1)[1]}-{field}-{str(value)[:24]}"


@pytest.mark.parametrize(("path", "field", "value"), CASES, ids=map(case_id, CASES))
def test_a_bad_value_is_400_and_named(ask: Any, path: str, field: str, value: Any) -> None:
    assert_refused(ask(path, {**BASES[path], field: value}), param=field)


MESSAGES: list[tuple[Any, str]] = [
    ({"role": "robot", "content": "hi"}, "messages[0]"),
    ({"role": "user", "content": 1}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "hologram"}]}, "messages[0].content"),
    ({"role": "user", "content": [1]}, "messages[0].content"),
    ({"role": "tool", "content": "hi"}, "messages[0]"),
    ({"role": "assistant", "content": None}, "messages[0]"),
    ({"role": "assistant", "tool_calls": [{"id": 1}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("message", "param"), MESSAGES)
def test_a_bad_message_is_400_and_its_place_is_named(ask: Any, message: Any, param: str) -> None:
    assert_refused(ask(CHAT, {"model": "sim", "messages": [message]}), param=param)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x.png", "https://example.com/x.png", "file:///etc/passwd", "ftp://x/y"]
)
def test_a_link_to_an_image_is_not_fetched(ask: Any, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "sim", "messages": [{"role": "user", "content": content}]}
    assert_refused(ask(CHAT, body), param="messages[0].content")


def test_more_messages_than_the_limit_are_400(ask: Any) -> None:
    message = {"role": "user", "content": "hi"}
    assert_refused(ask(CHAT, {"model": "sim", "messages": [message] * 2049}), param="messages")


@pytest.mark.parametrize("name", ["a b", "a.b", "", "x" * 65, "ü", "\na", "a\r\n"])
def test_a_function_name_that_is_none_is_400(ask: Any, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    assert_refused(ask(CHAT, {**BASES[CHAT], "tools": tools}), param="tools")


def test_a_function_name_with_a_line_end_is_400(yard: Yard, model: str) -> None:
    tools = [{"type": "function", "function": {"name": "a\n"}}]
    assert_refused(post(yard, CHAT, {**BASES[CHAT], "tools": tools}), param="tools")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a\0b", "%2e%2e", "model#/../../", "a\u202eb", "x" * 250, "'; DROP TABLE endpoints;--"]
)
@pytest.mark.parametrize("path", BASES)
def test_a_strange_model_name_is_just_unknown(ask: Any, path: str, name: str) -> None:
    assert_refused(ask(path, {**BASES[path], "model": name}), status=404, param="model", code="model_not_found")
