"""The Responses API's request becomes a chat, or is refused by the path of what is wrong."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.clock import ManualClock
from modelyard.errors import ApiError
from modelyard.gateway.dialects.responses import decode_input_tokens, decode_response, input_tokens_answer
from modelyard.gateway.dialects.responses_request import NOT_HERE, ResponseRequest
from modelyard.gateway.openai.call import REFUSED

PICTURE = "data:image/png;base64,AA=="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in ("f", "g")]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("f", "g")
]
HI = [{"role": "user", "content": "hi"}]
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
CHAT_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}
NULLABLE = [name for name in ResponseRequest.__struct_fields__ if name not in ("model", "input")]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "input": "hi", **fields}).encode()


def chat(**fields: object) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(msgspec.json.encode(decode_response(body(**fields)).request))
    return sent


def refused(given: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_response(given)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", HI),
        ("", [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": "hi"}], HI),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}], HI),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE, "detail": "original"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]}],
        ),
        (
            [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, *HI],
            [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, *HI],
        ),
        (
            [
                *HI,
                {"id": "rs_1", "type": "reasoning", "summary": [], "content": [], "encrypted_content": None},
                {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": "commentary",
                 "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": []}]},
            ],
            [*HI, {"role": "assistant", "content": "yo"}],
        ),
        (
            [*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [*HI, {"role": "assistant", "content": "no"}],
        ),
        (
            [*HI, CALL, {**CALL, "call_id": "c2", "arguments": ""},
             {"type": "function_call_output", "call_id": "c1", "output": "one"},
             {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]}],
            [*HI,
             {"role": "assistant", "tool_calls": [
                 CHAT_CALL, {"type": "function", "id": "c2", "function": {"name": "f", "arguments": "{}"}}]},
             {"role": "tool", "content": "one", "tool_call_id": "c1"},
             {"role": "tool", "content": "two", "tool_call_id": "c2"}],
        ),
        (
            [*HI, {"role": "assistant", "content": "let me see"}, CALL,
             {"type": "function_call_output", "call_id": "c1", "output": "one"}],
            [*HI, {"role": "assistant", "content": "let me see", "tool_calls": [CHAT_CALL]},
             {"role": "tool", "content": "one", "tool_call_id": "c1"}],
        ),
        (
            [*HI, CALL, {"role": "assistant", "content": "wait"},
             {"type": "function_call_output", "call_id": "c1", "output": "one"}],
            [*HI, {"role": "assistant", "content": "wait", "tool_calls": [CHAT_CALL]},
             {"role": "tool", "content": "one", "tool_call_id": "c1"}],
        ),
    ],
)  # fmt: skip
def test_input_becomes_messages(given: object, messages: list[dict[str, Any]]) -> None:
    assert chat(input=given) == {"model": "m", "messages": messages}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"instructions": "be kind"}, {"messages": [{"role": "system", "content": "be kind"}, *HI]}),
        ({"max_output_tokens": 16, "temperature": 0.5}, {"max_tokens": 16, "temperature": 0.5}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"top_logprobs": 0, "include": ["reasoning.encrypted_content"]}, {}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
        ({"tools": TOOLS, "parallel_tool_calls": False}, {"tools": CHAT_TOOLS, "parallel_tool_calls": False}),
        ({"tools": [{"type": "function", "name": "f", "parameters": None}]},
         {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ({"tools": TOOLS, "tool_choice": "required"}, {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}},
         {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required",
                                          "tools": [{"type": "function", "name": "g"}]}},
         {"tools": CHAT_TOOLS[1:], "tool_choice": "required"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"store": True, "metadata": {"k": "v"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
          "service_tier": "priority", "truncation": "disabled", "max_tool_calls": 3, "background": False,
          "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}, {}),
        (dict.fromkeys(NULLABLE), {}),
    ],
)  # fmt: skip
def test_options_become_those_of_a_chat(fields: dict[str, object], expected: dict[str, Any]) -> None:
    assert chat(**fields) == {"model": "m", "messages": HI, **expected}


def test_the_call_knows_what_the_gateway_needs() -> None:
    call = decode_response(
        body(stream=True, max_output_tokens=20, service_tier="flex", prompt_cache_key="k", user="u", made_up=1)
    )
    assert (call.model, call.is_stream, call.output_tokens, call.text_length) == ("m", True, 20, 2)
    assert (call.tier, call.user, call.can_resume, call.choices) == ("flex", "k", True, 1)
    assert (call.engine_route, call.wants_usage, call.ignored) == ("/v1/chat/completions", False, ("made_up",))
    assert decode_response(body(tools=TOOLS)).can_resume is False


def test_a_wish_to_cut_the_input_is_named_as_ignored() -> None:
    assert decode_response(body(truncation="auto")).ignored == ("truncation",)
    assert decode_response(body(truncation="disabled")).ignored == ()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [*TOOLS, {"type": "custom", "name": "c"}]}, "tools[2].type", "unsupported_parameter"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters", "invalid_type"),
        ({"tools": [{"type": "function", "name": "f"}] * 129}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice.name", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice.tools", "empty_array"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}},
         "tool_choice.mode", "missing_required_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
         "tool_choice.tools[0].type", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"max_output_tokens": 15}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": "20"}, "max_output_tokens", "invalid_type"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}},
         "text.format.schema", "missing_required_parameter"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": 1}}}, "text.format.schema", "invalid_type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "invalid_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata", "invalid_type"),
        ({"safety_identifier": "x" * 65}, "safety_identifier", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"model": ""}, "model", "invalid_value"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_honoured_is_refused_with_its_path(
    fields: dict[str, object], param: str, code: str
) -> None:
    error = refused(body(**fields))
    assert (error.param, error.code) == (param, code)


def test_who_asks_for_work_in_the_background_is_told_how_to_get_it() -> None:
    assert "Prefer: respond-async" in str(refused(body(background=True)))


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        (1, "input", "invalid_type"),
        (None, "input", "invalid_type"),
        ({"role": "user", "content": "hi"}, "input", "invalid_type"),
        ([], "input", "empty_array"),
        ([1], "input[0]", "invalid_type"),
        ([None], "input[0]", "invalid_type"),
        (["x", "y"], "input[0]", "invalid_type"),
        ([{"role": "user", "content": "x"}] * 2049, "input", "invalid_value"),
        ([{}], "input[0].role", "missing_required_parameter"),
        ([*HI, {"role": "wizard", "content": "x"}], "input[1].role", "invalid_value"),
        ([*HI, {"role": "user"}], "input[1].content", "missing_required_parameter"),
        ([*HI, {"role": "user", "content": None}], "input[1].content", "invalid_type"),
        ([*HI, {"role": "user", "content": []}], "input[1].content", "empty_array"),
        ([*HI, *HI, {"role": "user", "content": [{"type": "input_text", "text": 1}]}],
         "input[2].content[0].text", "invalid_type"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "input[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}],
         "input[0].content[0].image_url", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}],
         "input[0].content[0].file_id", "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "input_image"}]}],
         "input[0].content[0].image_url", "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}],
         "input[0].content[0].type", "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "x"}]}],
         "input[0].content[1].type", "unsupported_parameter"),
        ([{"role": "system", "content": [{"type": "input_image", "image_url": PICTURE}]}],
         "input[0].content[0].type", "unsupported_parameter"),
        ([{"role": "assistant", "content": [{"type": "input_file"}]}],
         "input[0].content[0].type", "unsupported_parameter"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]", "unsupported_parameter"),
        ([{"id": "msg_1"}], "input[0]", "unsupported_parameter"),
        ([*HI, {"type": "web_search_call", "id": "ws_1"}], "input[1].type", "unsupported_parameter"),
        ([*HI, {"type": 5}], "input[1].type", "invalid_type"),
        ([{"type": "reasoning", "summary": []}], "input", "invalid_value"),
        ([*HI, {"type": "function_call", "name": "f", "arguments": "{}"}],
         "input[1].call_id", "missing_required_parameter"),
        ([*HI, {**CALL, "arguments": {}}], "input[1].arguments", "invalid_type"),
        ([*HI, {**CALL, "name": ""}], "input[1].name", "invalid_value"),
        ([*HI, {"type": "function_call_output", "call_id": "c9", "output": "x"}], "input[1].call_id", "invalid_value"),
        ([*HI, CALL, {"type": "function_call_output", "call_id": "c1", "output": []}],
         "input[2].output", "empty_array"),
        ([*HI, CALL, {"type": "function_call_output", "call_id": "c1",
                      "output": [{"type": "input_image", "image_url": PICTURE}]}],
         "input[2].output[0].type", "unsupported_parameter"),
    ],
)  # fmt: skip
def test_a_bad_item_is_refused_with_its_path(given: object, param: str, code: str) -> None:
    error = refused(body(input=given))
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize("name", sorted(REFUSED | set(NOT_HERE)))
def test_fields_that_steer_an_engine_or_belong_to_chats_are_refused_by_name(name: str) -> None:
    error = refused(body(**{name: "x"}))
    assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("missing", ["model", "input"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = json.loads(body())
    del fields[missing]
    error = refused(json.dumps(fields).encode())
    assert (error.param, error.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "given",
    [
        b"", b"{", b"[]", b"null", b'{"model":"m","input":"x","temperature":NaN}', b'{"model":"m","input":"\\ud800"}',
        b'{"model":"m","input":[{"role":"user","content":"\\ud800"}]}', b'{"model":"m","input":"\xff"}',
        b'{"model":"m","input":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","input":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"m","input":[{"type":"reasoning","x":' + b"[" * 5000 + b"]" * 5000 + b"}]}",
        b'{"model":"m","input":"x","tools":[{"type":"function","name":"f","parameters":{"a":\n'
        + b"[" * 5000 + b"]" * 5000 + b"}}]}",
    ],
)  # fmt: skip
def test_what_is_not_one_json_object_is_refused(given: bytes) -> None:
    refused(given)


_WORDS = st.sampled_from(
    ["type", "role", "content", "name", "text", "id", "call_id", "output", "arguments", "message", "user", "assistant",
     "function", "function_call", "function_call_output", "reasoning", "input_text", "input_image", "image_url",
     "refusal", "allowed_tools", "mode", "auto", "tools", "format", "schema", "json_schema", "effort", "high", PICTURE]
)  # fmt: skip
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(ResponseRequest.__struct_fields__), _ANYTHING, max_size=5))
def test_whatever_a_field_holds_it_is_decoded_or_refused(fields: dict[str, object]) -> None:
    try:
        call = decode_response(body(**fields))
    except ApiError:
        return
    json.loads(msgspec.json.encode(call.request))


def test_the_prompt_of_a_count_is_that_of_a_response() -> None:
    given = body(instructions="be kind", tools=TOOLS, stream=True)
    call, counted = decode_response(given, ManualClock()), decode_input_tokens(given)
    assert (counted.text_length, counted.model, counted.is_stream) == (call.text_length, "m", False)
    assert counted.translation is None
    assert json.loads(input_tokens_answer(7)) == {"object": "response.input_tokens", "input_tokens": 7}
