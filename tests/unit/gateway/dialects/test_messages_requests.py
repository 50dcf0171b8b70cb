"""Message requests as chat requests: everything said is passed on or refused by name."""

import json
from typing import Any

import msgspec
import pytest

from modelyard.errors import ApiError
from modelyard.gateway.dialects.messages import (
    CHAT_ROUTE,
    NEEDS_PREFILL,
    counted_length,
    decode_count,
    decode_message,
)
from modelyard.gateway.openai.call import REFUSED
from modelyard.gateway.openai.chat import decode_chat

PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PIXEL_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CALL = {"type": "function", "id": "t1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def result(content: object, **fields: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


def message(*turns: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": list(turns) or [user("hi")], **fields}).encode()


def sent(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(decode_message(body).request))
    return found


def refused(body: bytes, decoder=decode_message) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decoder(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([user("hi")], [user("hi")]),
        ([user([text("hi")])], [user("hi")]),
        ([user("")], [user("")]),
        ([user([text("a"), PIXEL])], [user([text("a"), PIXEL_PART])]),
        ([user("a"), user([text("b"), text("c")])], [user([text("a"), text("b"), text("c")])]),
        (
            [user("a"), assistant("b"), assistant([text("c")]), user("d")],
            [user("a"), assistant([text("b"), text("c")]), user("d")],
        ),
        (
            [user("a"), {"role": "system", "content": [text("be brief")]}, user("b")],
            [user("a"), {"role": "system", "content": "be brief"}, user("b")],
        ),
        (
            [user([{"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}])],
            [user("T\nbody")],
        ),
        (
            [
                user("a"),
                assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, text("b")]),
                assistant([{"type": "redacted_thinking", "data": "x"}]),
                user("c"),
            ],
            [user("a"), assistant("b"), user("c")],
        ),
        ([user("a"), assistant("")], [user("a")]),
    ],
)
def test_turns_become_chat_messages(turns: list[object], expected: list[object]) -> None:
    assert sent(message(*turns))["messages"] == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([result("12 °C")], [("12 °C", None)]),
        ([result([text("12")])], [("12", None)]),
        ([result([text("12"), text("13")])], [([text("12"), text("13")], None)]),
        ([result([])], [("", None)]),
        ([{"type": "tool_result", "tool_use_id": "t1"}], [("", None)]),
        ([result("no such city", is_error=True)], [("Error: no such city", None)]),
        ([result([], is_error=True)], [("Error", None)]),
        ([result("12"), text("and now?")], [("12", "and now?")]),
        ([text("and now?"), result("12")], [("12", "and now?")]),
        ([result([text("see"), PIXEL]), text("?")], [([text("see"), text("[image]")], [PIXEL_PART, text("?")])]),
    ],
)
def test_tool_results_come_right_behind_their_calls(
    blocks: list[object], expected: list[tuple[object, object]]
) -> None:
    ((tool, rest),) = expected
    messages = sent(message(user("hi"), assistant([text("let me see"), USE]), user(blocks), tools=[TOOL]))["messages"]
    assert messages[1]["content"] == "let me see"
    # The arguments are the caller's own text.
    assert messages[1]["tool_calls"] == [CALL]
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "content": tool}
    assert messages[3:] == ([user(rest)] if rest is not None else [])


def test_results_in_two_turns_still_come_before_what_the_user_said_with_them() -> None:
    uses = [USE, {**USE, "id": "t2"}]
    turns = [user("hi"), assistant(uses), user([result("1"), text("a")]), user([{**result("2"), "tool_use_id": "t2"}])]
    roles = [turn["role"] for turn in sent(message(*turns))["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "be kind"}, {"messages": [{"role": "system", "content": "be kind"}, user("hi")]}),
        (
            {"system": [text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}]},
            {"messages": [{"role": "system", "content": [text("a"), text("b")]}, user("hi")]},
        ),
        ({"system": []}, {}),
        ({"system": ""}, {}),
        ({"stream": True}, {"stream": True}),
        ({"temperature": 1, "top_p": 0.5, "top_k": 4}, {"temperature": 1.0, "top_p": 0.5, "top_k": 4}),
        ({"top_k": 0}, {}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop_sequences": []}, {}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [CHAT_TOOL], "tool_choice": "auto"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}, "max_tokens": 9000}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}, "max_tokens": 20000}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}, {}),
        ({"container": None, "mcp_servers": []}, {}),
    ],
)
def test_fields_become_those_of_a_chat_request(fields: dict[str, object], expected: dict[str, object]) -> None:
    limit = fields.get("max_tokens", 9)
    assert sent(message(**fields)) == {"model": "m", "messages": [user("hi")], "max_tokens": limit, **expected}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([text("x-anthropic-billing-header: cch=1;"), text("be kind")], "be kind"),
        ("x-anthropic-billing-header: cch=1;\nbe kind", "be kind"),
        ("be kind\nx-anthropic-billing-header: cch=1;", "be kind\nx-anthropic-billing-header: cch=1;"),
        ([text("x-anthropic-billing-header: cch=1;")], None),
    ],
)
def test_a_line_for_anthropics_books_does_not_spoil_the_prefix_cache(system: object, expected: object) -> None:
    first = sent(message(system=system))["messages"][0]
    assert first == ({"role": "system", "content": expected} if expected else user("hi"))


def test_a_call_of_a_tool_that_never_was_can_be_told_again() -> None:
    turns = [user("hi"), assistant([{**USE, "name": "no such tool!"}]), user([result("x", is_error=True)])]
    assert sent(message(*turns))["messages"][1]["tool_calls"][0]["function"]["name"] == "no such tool!"


def test_a_call_is_filled_as_for_the_chat_request_that_it_is() -> None:
    body = message(user("hello"), system="abc", metadata={"user_id": "u1"}, service_tier="standard_only", stream=True)
    call = decode_message(body)
    plain = decode_chat(msgspec.json.encode(call.request))
    assert (call.model, call.text_length, call.output_tokens) == (plain.model, plain.text_length, plain.output_tokens)
    assert call.text_length == len("hello") + len("abc")
    assert (call.tier, call.user, call.is_stream, call.can_resume) == ("default", "u1", True, plain.can_resume)
    assert call.can_resume
    assert (call.engine_route, call.needs, call.wants_usage) == (CHAT_ROUTE, (), False)
    assert call.translation is not None


def test_unknown_fields_are_named_and_those_that_steer_an_engine_refused() -> None:
    assert decode_message(message(context_management={"edits": []}, made_up=1)).ignored == (
        "context_management",
        "made_up",
    )
    for name in REFUSED:
        assert refused(message(**{name: "x"})).param == name


def test_an_answer_begun_by_the_caller_needs_an_engine_that_goes_on_with_it() -> None:
    call = decode_message(message(user("hi"), assistant("The answer is")))
    assert call.needs == NEEDS_PREFILL
    assert not call.can_resume


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"temperature": 1.1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": ["a" * 65]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"system": 1}, "system"),
        ({"system": [PIXEL]}, "system[0].type"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"metadata": {"user_id": "u" * 513}}, "metadata.user_id"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "bad name"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": "x"}}}, "output_config.format.schema"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [assistant("")]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user([])]}, "messages[0].content"),
        ({"messages": [user("a"), user([text("b"), {"type": "text"}])]}, "messages[1].content[1].text"),
        ({"messages": [user([USE])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "server_tool_use"}])]}, "messages[0].content[0].type"),
        ({"messages": [user("a"), assistant([PIXEL])]}, "messages[1].content[0].type"),
        ({"messages": [user("a"), assistant([USE])]}, "messages[1]"),
        ({"messages": [user("a"), assistant([{**USE, "input": "x"}]), user("b")]}, "messages[1].content[0].input"),
        ({"messages": [user([{**result("x"), "tool_use_id": ""}])]}, "messages[0].content[0].tool_use_id"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(fields: dict[str, object], param: str) -> None:
    error = refused(message(**fields))
    assert error.param == param
    assert param in error.message


def test_the_platforms_own_caps_on_stop_sequences_are_named_as_such() -> None:
    assert "this platform takes at most 4, of 1 to 64" in refused(message(stop_sequences=["a"] * 5)).message


@pytest.mark.parametrize("link", [{"type": "url", "url": "http://169.254.169.254/"}, {"type": "file", "file_id": "f"}])
@pytest.mark.parametrize("kind", ["image", "document"])
def test_nothing_is_fetched(kind: str, link: dict[str, str]) -> None:
    block = {"type": kind, "source": link}
    assert refused(message(user("a"), user([text("b"), block]))).param == "messages[1].content[1].source"
    inside = [user("hi"), assistant([USE]), user([result([block])])]
    assert refused(message(*inside)).param == "messages[2].content[0].content[0].source"


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "x"},
        {"type": "content", "content": "x"},
        {"type": "text", "media_type": "text/html", "data": "x"},
    ],
)
def test_documents_that_no_engine_reads_are_refused(source: dict[str, str]) -> None:
    param = refused(message(user([{"type": "document", "source": source}]))).param
    assert param is not None
    assert param.startswith("messages[0].content[0].source")


def test_a_document_to_be_cited_is_refused() -> None:
    block = {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
    assert refused(message(user([block]))).param == "messages[0].content[0].citations"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"model":"m"}',
        message(user("hi"))[:-1],
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","max_tokens":NaN,"messages":[]}',
        b'{"model":"m","max_tokens":1,"messages":' + b"[" * 100_000,
        b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"n",'
        b'"input":{"a":"\xff"}}]},{"role":"user","content":"x"}]}',
    ],
)
def test_what_is_no_request_at_all_is_refused(body: bytes) -> None:
    refused(body)


def test_counting_takes_the_same_request_without_its_limit() -> None:
    fields = {"model": "m", "system": "abc", "messages": [user("hello")]}
    call = decode_count(json.dumps(fields).encode())
    assert counted_length(call) == call.text_length == 8
    assert refused(json.dumps(fields).encode()).param == "max_tokens"
    assert refused(json.dumps({**fields, "messages": []}).encode(), decode_count).param == "messages"


def test_counting_includes_tools_and_their_calls() -> None:
    turns = [user("hi"), assistant([USE]), user([result("12")])]
    without = decode_message(message(*turns))
    assert counted_length(without) == len("hi12") + len("weather") + len('{"city": "Oslo"}')
    with_tools = decode_message(message(*turns, tools=[TOOL]))
    assert counted_length(with_tools) - counted_length(without) == len("weather") + len("d") + len(json.dumps(SCHEMA))
