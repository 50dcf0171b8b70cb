"""Whatever a caller or an engine sends, it is a 400, a broken answer, or something whole: never a failure of ours."""

import contextlib
import copy
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.messages import REQUEST_ID, THINKING, USAGE, Message, read, translation

from modelyard.errors import ApiError
from modelyard.gateway.dialects.messages import counted_length, decode_message
from modelyard.gateway.openai.chat import ChatRequest
from modelyard.gateway.relay import EngineStreamError

REQUEST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [
                        {"type": "text", "text": "c"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                    ],
                },
                {"type": "document", "source": {"type": "text", "data": "d"}, "citations": {"enabled": False}},
            ],
        },
    ],
    "stop_sequences": ["x"],
    "stream": True,
    "temperature": 0.5,
    "top_k": 3,
    "tools": [{"name": "f", "description": "g", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": THINKING,
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}
CHUNK: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "b",
                "refusal": None,
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
}
VALUES = st.sampled_from(
    [None, True, -1, 0, 2**70, 1.5, 1e308, "", "x" * 300, "\x00\u2028", [], [None], [[]], {}, {"type": "text"}]
    + [{"type": kind} for kind in ("image", "document", "tool_use", "tool_result", "auto", "any", "enabled", "zzz")]
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a document."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [found for key, child in inner for found in [(*path, key), *places(child, (*path, key))]]


@st.composite
def spoilt(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """Return ``document`` with a few values replaced, dropped or doubled."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(found) or [("model",)]))
        parent: Any = found
        for key in path[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "drop", "double"])):
            case "replace":
                parent[path[-1]] = copy.deepcopy(draw(VALUES))
            case "drop":
                parent.pop(path[-1], None) if isinstance(parent, dict) else parent.pop(path[-1])
            case _ if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[path[-1]]))
    return json.dumps(found).encode()


def test_the_request_that_is_spoilt_below_is_good() -> None:
    assert len(decode_message(json.dumps(REQUEST).encode()).request.messages) == 5


@settings(deadline=None, max_examples=60)
@given(body=spoilt(REQUEST))
def test_any_request_is_refused_with_400_or_is_a_good_chat_request(body: bytes) -> None:
    refusal = None
    try:
        call = decode_message(body)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        return
    assert counted_length(call) >= call.text_length >= 0
    sent = json.loads(msgspec.json.encode(call.request))
    assert {message["role"] for message in sent["messages"]} <= {"system", "user", "assistant", "tool"}
    assert sent.keys() <= {field.encode_name for field in msgspec.structs.fields(ChatRequest)}


@settings(deadline=None, max_examples=60)
@given(chunks=st.lists(spoilt(CHUNK), max_size=4))
def test_any_chunk_breaks_the_stream_or_leaves_it_whole(chunks: list[bytes]) -> None:
    stream = translation(thinking=THINKING).stream(REQUEST_ID)
    out = stream.begin()
    with contextlib.suppress(EngineStreamError):
        for body in chunks:
            out += stream.feed(b"data: " + body)
    assert read(out + stream.finish(USAGE))


@settings(deadline=None, max_examples=60)
@given(body=spoilt({"choices": [{"message": CHUNK["choices"][0]["delta"], "finish_reason": "stop"}]}))
def test_any_answer_is_a_message_or_a_value_error(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        msgspec.json.decode(translation().answer(body, USAGE, REQUEST_ID), type=Message)
