"""Streams of chat completions as messages: they say what the whole answer says, whatever an engine leaves out."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.messages import (
    REQUEST_ID,
    THINKING,
    USAGE,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    End,
    Error,
    ErrorDetail,
    Message,
    MessageDelta,
    Stop,
    Text,
    TextDelta,
    Tokens,
    ToolUse,
    call,
    chunk,
    joined,
    read,
    stream_of,
    translation,
    whole,
)

from modelyard import errors
from modelyard.gateway.dialects import StreamTranslation
from modelyard.gateway.relay import EngineStreamError

RECORDED = Path(__file__).parents[3] / "fixtures" / "recorded"


# --- streams ---


def test_a_stream_is_told_event_by_event() -> None:
    stream: StreamTranslation = translation().stream(REQUEST_ID)
    (start,) = read(stream.begin())
    assert start.message.id == "msg_abcdefghijkmnpqr00000001"
    assert start.message.usage.input_tokens >= 1
    assert stream.feed(chunk({"role": "assistant", "content": ""})) == b""
    opened, first = read(stream.feed(chunk({"content": "a"})))
    assert (opened, first) == (BlockStart(0, Text("")), BlockDelta(0, TextDelta("a")))
    assert stream.feed(chunk({"content": 'é"\n'})) == (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"\xc3\xa9\\"\\n"}}\n\n'
    )
    assert stream.feed(chunk({}, "stop")) == b""
    assert read(stream.finish(USAGE)) == [BlockStop(0), MessageDelta(End("end_turn", None), Tokens(6, 0, 4, 5)), Stop()]


def test_the_estimate_of_the_prompt_can_be_set() -> None:
    found = translation()
    found.input_tokens = 77
    (start,) = read(found.stream(REQUEST_ID).begin())
    assert start.message.usage.input_tokens == 77


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        # No role chunk, null content, a finish chunk with content.
        ([chunk({"content": "a"}), chunk({"content": None}), chunk({"content": "b"}, "stop")], [Text("ab")]),
        ([b'data:{"choices":[{"delta":{"content":"a"}}]}'], [Text("a")]),
        ([b'data: {"choices":\ndata: [{"delta":{"content":"a"}}]}'], [Text("a")]),
        ([b'id: 1\nevent: chunk\ndata: {"choices":[{"delta":{"content":"a"}}]}'], [Text("a")]),
        ([b'data: {"choices":[{"delta":null}]}', b'data: {"choices":[]}', b'data: {"choices":[{}]}'], []),
        # Calls given whole, all under number 0 or under none.
        (
            [chunk({"tool_calls": [call(n, "f", "{}", id="c1"), call(n, "g", '{"a":1}', id="c2")]}) for n in (0,)],
            [ToolUse("c1", "f", {}), ToolUse("c2", "g", {"a": 1})],
        ),
        ([chunk({"tool_calls": [call(None, "f", {"a": 1}, id="c1")]})], [ToolUse("c1", "f", {"a": 1})]),
        # The id and the name again with each piece; the name after the first arguments.
        (
            [chunk({"tool_calls": [call(0, "f", piece, id="c1")]}) for piece in ('{"a"', ":1}")],
            [ToolUse("c1", "f", {"a": 1})],
        ),
        (
            [
                chunk({"tool_calls": [call(0, None, '{"a"', id="c1")]}),
                chunk({"tool_calls": [call(0, "f", ":")]}),
                chunk({"tool_calls": [call(0, None, "1}", id="c9")]}),
            ],
            [ToolUse("c1", "f", {"a": 1})],
        ),
        # Text behind a call is a block of its own.
        (
            [chunk({"content": "a", "tool_calls": [call(0, "f", "", id="c")]}), chunk({"content": "b"})],
            [Text("a"), ToolUse("c", "f", {}), Text("b")],
        ),
    ],
)
def test_sloppy_engines_are_understood(chunks: list[bytes], expected: list[Block]) -> None:
    assert joined(stream_of(*chunks)).content == expected


def test_pieces_of_a_call_that_was_left_still_reach_it() -> None:
    pieces = [
        call(0, "f", '{"a"', id="c1"),
        call(1, "g", '{"b"', id="c2"),
        call(0, None, ":1}"),
        call(1, None, ":2}"),
    ]
    events = read(stream_of(*[chunk({"tool_calls": [piece]}) for piece in pieces]))
    for index, expected in ((0, '{"a":1}'), (1, '{"b":2}')):
        told = [e.delta.partial_json for e in events if isinstance(e, BlockDelta) and e.index == index]
        assert "".join(told) == expected


@pytest.mark.parametrize(
    "event", [b"data: {", b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}', b"data: " + b"[" * 9999]
)
def test_a_malformed_chunk_breaks_the_stream(event: bytes) -> None:
    stream = translation().stream(REQUEST_ID)
    with pytest.raises(EngineStreamError):
        stream.feed(event)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stream_that_broke_ends_with_an_error_event(has_begun: bool) -> None:
    stream = translation().stream(REQUEST_ID)
    if has_begun:
        stream.begin()
        stream.feed(chunk({"content": "a"}))
    (event,) = read(stream.fail(errors.engine_lost()))
    assert event == Error(ErrorDetail("api_error", errors.engine_lost().message), REQUEST_ID)


# --- any stream says what the whole answer says ---

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUE = st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT, lambda v: st.lists(v, max_size=3))
CALLS = st.lists(st.tuples(st.sampled_from("fgh"), st.dictionaries(TEXT, VALUE, max_size=3)), max_size=3)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Return ``text`` in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, object], list[dict[str, object]], str]:
    """Return a message, deltas that come to it, and a reason to stop."""
    reasoning, content, calls = draw(TEXT), draw(TEXT), draw(CALLS)
    is_wordy = draw(st.booleans())
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}] if draw(st.booleans()) else []
    deltas += [{"reasoning_content": piece} for piece in cut(draw, reasoning)]
    deltas += [{"content": piece, "reasoning_content": None} for piece in cut(draw, content)]
    named = []
    for index, (name, fields) in enumerate(calls):
        arguments = json.dumps(fields, ensure_ascii=draw(st.booleans()))
        named.append({"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}})
        first, *others = cut(draw, arguments)
        deltas.append({"tool_calls": [call(index, name, first, id=f"c{index}")]})
        repeated = {"id": f"c{index}"} if is_wordy else {}
        deltas += [{"content": None, "tool_calls": [call(index, None, piece, **repeated)]} for piece in others]
    message = {"content": content or None, "reasoning_content": reasoning, "tool_calls": named}
    return message, deltas, draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))


@settings(deadline=None, max_examples=60)
@given(answer=answers(), is_shown=st.booleans(), is_at_end=st.booleans())
def test_a_stream_in_any_pieces_says_what_the_whole_answer_says(
    answer: tuple[dict[str, object], list[dict[str, object]], str], is_shown: bool, is_at_end: bool
) -> None:
    message, deltas, finish = answer
    fields = {"thinking": THINKING} if is_shown else {}
    chunks = [chunk(delta) for delta in deltas[:-1]]
    # The last piece may come with the reason to stop, or before it.
    chunks += [chunk(deltas[-1], finish)] if is_at_end else [chunk(deltas[-1]), chunk({}, finish)]
    assert joined(stream_of(*chunks, **fields)) == whole(message, finish, **fields)


@pytest.mark.parametrize(("name", "reason"), [("simulated-text", "end_turn"), ("simulated-tools", "tool_use")])
def test_what_the_simulated_engine_said_is_translated(name: str, reason: str) -> None:
    events = (RECORDED / f"{name}.sse").read_bytes().split(b"\n\n")
    streamed = joined(stream_of(*[event for event in events if b'"choices":[{' in event]))
    chat = (RECORDED / f"{name}.json").read_bytes()
    answered = msgspec.json.decode(translation().answer(chat, USAGE, REQUEST_ID), type=Message)
    assert streamed.stop_reason == reason
    assert streamed.content
    # The two were recorded one after the other: the ids of their calls differ.
    for block in (*streamed.content, *answered.content):
        if isinstance(block, ToolUse):
            block.id = block.id.rstrip("0123456789")
    assert streamed == answered
