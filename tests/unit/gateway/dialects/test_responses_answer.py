"""A chat's answer becomes a response, whole or as events, that OpenAI's SDK takes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from modelyard import errors
from modelyard.clock import ManualClock
from modelyard.gateway.dialects.responses import ResponseTranslation, decode_response
from modelyard.gateway.relay import EngineStreamError
from modelyard.gateway.sse import Usage

RECORDED = Path(__file__).parents[3] / "fixtures" / "recorded"
USAGE = msgspec.json.decode(
    b'{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":4},'
    b'"completion_tokens_details":{"reasoning_tokens":2}}',
    type=Usage,
)
REQUEST_ID = "req_abcdefghijkmnpqr0000001f"
EVENT_TYPES = {
    kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}

# What OpenResponses' schema wants never to be null, beside what openai-python requires.
NEVER_NULL = (
    "id", "object", "created_at", "status", "model", "output", "parallel_tool_calls", "tool_choice", "tools",
    "metadata", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "truncation",
    "background", "service_tier", "text", "store",
)  # fmt: skip
NULLABLE = (
    "error", "incomplete_details", "instructions", "completed_at", "usage", "max_output_tokens", "max_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "user",
)  # fmt: skip


def translation(**fields: object) -> ResponseTranslation:
    call = decode_response(json.dumps({"model": "m", "input": "hi", **fields}, indent=1).encode(), ManualClock())
    assert isinstance(call.translation, ResponseTranslation)
    return call.translation


def checked(response: dict[str, Any]) -> dict[str, Any]:
    for key in NEVER_NULL:
        assert response[key] is not None, key
    for key in NULLABLE:
        assert key in response, key
    assert isinstance(response["created_at"], int)
    Response.model_validate(response)
    return response


def whole(message: dict[str, Any], finish_reason: str = "stop", **fields: Any) -> dict[str, Any]:
    logprobs = fields.pop("logprobs", None)
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
    chat = json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode()
    return checked(json.loads(translation(**fields).answer(chat, USAGE, REQUEST_ID)))


def chunk(delta: dict[str, Any] | None, finish_reason: str | None = None, **fields: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}]}).encode()
    )


def call_delta(index: int | None = 0, **fields: Any) -> dict[str, Any]:
    function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    call = {**({"index": index} if index is not None else {}), **fields, **({"function": function} if function else {})}
    return {"tool_calls": [call]}


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """Return the events, each of them checked: framing, number, and the SDK's own type."""
    assert stream.endswith(b"\n\n")
    found = []
    for number, event in enumerate(stream.decode().removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        assert said["sequence_number"] == number
        EVENT_TYPES[said["type"]].model_validate(said)
        found.append(said)
    return found


def streamed(chunks: Iterable[bytes], *, usage: Usage = USAGE, **fields: object) -> list[dict[str, Any]]:
    """Return the events for a chat's stream, after the SDK's own reading of them."""
    stream = translation(**fields).stream(REQUEST_ID)
    events = parsed(stream.begin() + b"".join(map(stream.feed, chunks)) + stream.finish(usage))
    checked(events[-1]["response"])
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(EVENT_TYPES[event["type"]].model_validate(event))
    return events


def texts(events: list[dict[str, Any]], kind: str) -> tuple[str, str]:
    """Return the text of ``kind`` by its deltas and by its ``done`` events, item by item."""
    key = {"output_text": "text", "reasoning_text": "text", "refusal": "refusal"}.get(kind, "arguments")
    by_item = sorted((event for event in events if "output_index" in event), key=lambda event: event["output_index"])
    deltas = [event["delta"] for event in by_item if event["type"] == f"response.{kind}.delta"]
    return "".join(deltas), "".join(event[key] for event in by_item if event["type"] == f"response.{kind}.done")


def said(response: dict[str, Any]) -> dict[str, str]:
    """Return what a response says, by kind of text."""
    found = {"output_text": "", "refusal": "", "reasoning_text": "", "function_call_arguments": ""}
    for item in response["output"]:
        for part in item.get("content", ()):
            found[part["type"]] += part.get("text", part.get("refusal"))
        found["function_call_arguments"] += item.get("arguments", "")
    return found


# --- the whole answer ---


def test_a_text_becomes_a_completed_response_that_repeats_its_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    response = whole(
        {"content": "yo"}, instructions="be kind", temperature=0, tools=[tool], metadata={"k": "v"},
        tool_choice={"type": "function", "name": "f"}, max_output_tokens=20, reasoning={"effort": "low"}, store=True,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, service_tier="flex",
        truncation="auto", parallel_tool_calls=False, safety_identifier="s", user="u",
    )  # fmt: skip
    expected = {
        "id": "resp_abcdefghijkmnpqr0000001f", "object": "response", "status": "completed", "model": "m",
        "created_at": 1_000_000, "completed_at": 1_000_000, "error": None, "incomplete_details": None,
        "instructions": "be kind", "temperature": 0.0, "top_p": 1.0, "metadata": {"k": "v"}, "max_output_tokens": 20,
        "tools": [{**tool, "description": None}], "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": None}, "store": False, "service_tier": "flex",
        "truncation": "disabled", "parallel_tool_calls": False, "safety_identifier": "s", "user": "u",
        "presence_penalty": 0.0, "background": False, "previous_response_id": None,
    }  # fmt: skip
    assert {key: response[key] for key in expected} == expected
    assert response["text"]["format"]["schema"] == {"type": "object"}
    assert response["output"] == [
        {
            "type": "message", "id": "msg_abcdefghijkmnpqr0000001f_0", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": []}],
        }
    ]  # fmt: skip
    assert response["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip


def test_thinking_text_refusal_and_calls_become_items_in_that_order() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "c3", "type": "function", "function": {"name": "h", "arguments": {"b": [2]}}},
    ]
    response = whole(
        {"role": "assistant", "content": "yo", "reasoning_content": "hm", "refusal": "no", "tool_calls": calls},
        "tool_calls",
    )
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", *["function_call"] * 3]
    assert said(response) == {
        "output_text": "yo", "refusal": "no", "reasoning_text": "hm", "function_call_arguments": '{"a":1}{}{"b": [2]}'
    }  # fmt: skip
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    assert [item.get("call_id") for item in response["output"][2:]] == ["c1", f"call_{REQUEST_ID[4:]}_3", "c3"]


@pytest.mark.parametrize(
    ("finish_reason", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_a_cut_answer_is_incomplete_and_so_is_its_last_item(finish_reason: str, reason: str) -> None:
    response = whole({"content": "yo", "reasoning": "hm"}, finish_reason)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None


def test_an_empty_answer_is_an_empty_message() -> None:
    assert whole({"content": None})["output"][0]["content"][0]["text"] == ""
    events = streamed([chunk({"role": "assistant", "content": ""}), chunk({}, "stop")])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_logprobs_get_the_bytes_that_clients_require() -> None:
    tokens = {
        "content": [{"token": "ü", "logprob": -1, "bytes": None, "top_logprobs": [{"token": "a", "logprob": -2}]}]
    }
    expected = [
        {"token": "ü", "logprob": -1.0, "bytes": [195, 188],
         "top_logprobs": [{"token": "a", "logprob": -2.0, "bytes": [97]}]}
    ]  # fmt: skip
    response = whole({"content": "ü"}, logprobs=tokens)
    assert response["output"][0]["content"][0]["logprobs"] == expected
    events = streamed([chunk({"content": ""}, logprobs=tokens), chunk({"content": "ü"}), chunk({}, "stop")])
    assert [event["logprobs"] for event in events if event["type"].startswith("response.output_text")] == [expected] * 2
    assert events[-1]["response"]["output"] == response["output"]


@pytest.mark.parametrize(
    "chat",
    [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":[{"message":{"content":5}}]}',
     b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"\\ud800"}}]}}]}'],
)  # fmt: skip
def test_what_is_no_chat_completion_is_an_error(chat: bytes) -> None:
    with pytest.raises(ValueError, match="chat"):
        translation().answer(chat, USAGE, REQUEST_ID)


# --- the stream ---


def test_a_text_streams_in_the_order_that_clients_insist_on() -> None:
    events = streamed(
        [chunk({"role": "assistant"}), chunk({"content": "y"}), chunk({"content": "o"}), chunk({}, "stop")]
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[-1]["response"] == whole({"content": "yo"})
    assert events[0]["response"] | {"output": 0, "status": 0, "usage": 0, "completed_at": 0} == (
        events[-1]["response"] | {"output": 0, "status": 0, "usage": 0, "completed_at": 0}
    )
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])


def test_thinking_ends_where_text_begins_and_text_where_a_call_does() -> None:
    events = streamed(
        [
            chunk({"reasoning_content": "hm"}), chunk({"content": "yo"}), chunk(call_delta(0, id="c1", name="f")),
            chunk(call_delta(0, arguments='{"a"')), chunk(call_delta(1, id="c2", name="g", arguments="")),
            chunk(call_delta(0, arguments=":1}")), chunk({}, "tool_calls"),
        ]
    )  # fmt: skip
    kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
    assert kinds == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    calls = events[-1]["response"]["output"][2:]
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("c1", "f", '{"a":1}'),
        ("c2", "g", "{}"),
    ]
    announced = [event["item"] for event in events if event["type"] == "response.output_item.added"][2:]
    assert [(item["status"], item["arguments"]) for item in announced] == [("in_progress", "")] * 2


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        ([call_delta(None, id="c1", name="f", arguments="{"), call_delta(None, arguments="}")], [("c1", "f", "{}")]),
        ([call_delta(None, id="c1", name="f", arguments="1"), call_delta(None, id="c2", name="g", arguments="2"),
          call_delta(None, id="c1", arguments="3")], [("c1", "f", "13"), ("c2", "g", "2")]),
        ([call_delta(0, id="c1", name="f", arguments="1"), call_delta(0, id="c2", name="g", arguments="2")],
         [("c1", "f", "1"), ("c2", "g", "2")]),
        ([call_delta(0, id="c1", name="f", arguments="1"), call_delta(0, id="x", arguments="2"),
          call_delta(0, id="y", name=None, arguments="3")], [("c1", "f", "123")]),
        ([call_delta(0, id="c1"), call_delta(0, arguments="1"), call_delta(0, name="f"), call_delta(0, arguments="2")],
         [("c1", "f", "12")]),
        ([call_delta(0, name="f", arguments={"a": 1})], [(f"call_{REQUEST_ID[4:]}_0", "f", '{"a": 1}')]),
        ([call_delta(0, id="c1", name="f"), call_delta(1, arguments="lost")], [("c1", "f", "{}")]),
    ],
)  # fmt: skip
def test_fragments_of_calls_are_joined_whatever_the_engine_leaves_out(
    deltas: list[dict[str, Any]], calls: list[tuple[str, str, str]]
) -> None:
    events = streamed([chunk(delta) for delta in deltas])
    output = events[-1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output] == calls
    assert texts(events, "function_call_arguments") == ("".join(call[2] for call in calls),) * 2


@pytest.mark.parametrize("finish_reason", ["length", "content_filter"])
def test_a_cut_stream_ends_incomplete_and_so_does_its_last_item(finish_reason: str) -> None:
    for chunks, statuses in (
        ([chunk({"content": "yo"}, finish_reason)], ["incomplete"]),
        ([chunk({"content": "yo"}), chunk(call_delta(0, name="f")), chunk({}, finish_reason)],
         ["completed", "incomplete"]),
        ([chunk(call_delta(0, name="f")), chunk({"content": "yo"}), chunk({}, finish_reason)],
         ["completed", "incomplete"]),
    ):  # fmt: skip
        last = streamed(chunks)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
        assert [item["status"] for item in last["response"]["output"]] == statuses


def test_a_refusal_is_a_part_behind_the_text() -> None:
    events = streamed(
        [chunk({"content": "I"}), chunk({"refusal": "no "}), chunk({"refusal": "way"}), chunk({}, "stop")]
    )
    assert texts(events, "refusal") == ("no way", "no way")
    assert [event["content_index"] for event in events if event["type"] == "response.refusal.delta"] == [1, 1]
    assert events[-1]["response"] == whole({"content": "I", "refusal": "no way"})


@pytest.mark.parametrize(
    "chunks",
    [[], [b"data: {}"], [b'data: {"choices":[]}'], [chunk(None)], [chunk({}), chunk(None, "stop")],
     [b'data: {"choices":\ndata: [{"delta":{"content":null}}]}'],
     [chunk({"content": "", "tool_calls": [], "reasoning": None, "refusal": ""})]],
)  # fmt: skip
def test_chunks_that_say_nothing_give_no_events(chunks: list[bytes]) -> None:
    stream = translation().stream(REQUEST_ID)
    assert [stream.feed(each) for each in chunks] == [b""] * len(chunks)


@pytest.mark.parametrize(
    "event",
    [
        b"data: x",
        b"data: [1]",
        b'data: {"choices":[{"delta":{"content":1}}]}',
        b"data: \xff",
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":{"\xff":1}}}]}}]}',
    ],
)
def test_what_is_no_chunk_is_an_error(event: bytes) -> None:
    with pytest.raises(EngineStreamError):
        translation().stream(REQUEST_ID).feed(event)


def test_a_schema_on_many_lines_stays_in_one_line_of_an_event() -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "string", "description": "x\ny"}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    events = streamed([chunk({"content": "yo"})], tools=[tool])
    assert events[0]["response"]["tools"][0]["parameters"] == schema


def test_text_that_looks_like_a_template_or_an_event_stays_text() -> None:
    text = '%d %b %% \n\ndata: {"a"}\r\n\u2028 "\\'
    events = streamed([chunk({"content": text}), chunk(call_delta(0, id="%d", name="f", arguments=text))])
    assert texts(events, "output_text") == (text, text)
    assert texts(events, "function_call_arguments") == (text, text)


# --- a stream that breaks ---


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_broken_stream_ends_with_an_error_that_both_kinds_of_clients_see(*, has_begun: bool) -> None:
    stream = translation().stream(REQUEST_ID)
    out = b""
    if has_begun:
        out = stream.begin() + stream.feed(chunk({"content": "y"})) + stream.feed(chunk(call_delta(0, name="f")))
        out += stream.feed(chunk({"reasoning": "h"})) + stream.feed(chunk(call_delta(0, arguments="{")))
    events = parsed(out + stream.fail(errors.engine_lost()))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["param"]) == ("error", "engine_lost", None)
    # openai-python and openai-node raise what stands under this key; the AI SDK wants code and type in it to be texts.
    assert error["error"] == {"type": "server_error", "code": "engine_lost", "message": error["message"], "param": None}
    assert failed["type"] == "response.failed"
    response = checked(failed["response"])
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    if has_begun:
        assert said(response) | {"refusal": ""} == {
            "output_text": "y", "refusal": "", "reasoning_text": "h", "function_call_arguments": "{"
        }  # fmt: skip
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete", "incomplete"]


# --- recorded, and cut at will ---


@pytest.mark.parametrize("name", ["text", "tools"])
def test_a_recorded_stream_says_what_the_recorded_answer_says(name: str) -> None:
    recorded = (RECORDED / f"simulated-{name}.sse").read_bytes().split(b"\n\n")
    events = streamed(event for event in recorded if event.startswith(b"data: {") and b'"choices":[]' not in event)
    chat = (RECORDED / f"simulated-{name}.json").read_bytes()
    response = checked(json.loads(translation().answer(chat, USAGE, REQUEST_ID)))
    assert any(said(response).values())
    assert said(events[-1]["response"]) == said(response)
    for kind, text in said(response).items():
        assert texts(events, kind) == (text, text)


_TEXT = st.text(max_size=12)
_MESSAGES = st.fixed_dictionaries(
    {
        "reasoning_content": _TEXT,
        "content": _TEXT,
        "tool_calls": st.lists(st.tuples(st.sampled_from("fgh"), st.text(max_size=12)), max_size=3),
    }
)


def fragments(text: str, draw: st.DrawFn) -> list[str]:
    """Cut ``text`` anywhere, also into empty pieces."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_fragmentation_says_the_same_in_deltas_in_done_events_and_in_the_whole_answer(data: st.DataObject) -> None:
    message = data.draw(_MESSAGES)
    finish_reason = data.draw(st.sampled_from(["stop", "length", "tool_calls"]))
    deltas: list[dict[str, Any]] = []
    for key in ("reasoning_content", "content"):
        deltas += [{key: piece} for piece in fragments(message[key], data.draw)]
    opened, rest = [], []
    for index, (name, arguments) in enumerate(message["tool_calls"]):
        opened.append(call_delta(index, id=f"c{index}", type="function", name=name, arguments=""))
        rest.append([call_delta(index, arguments=piece) for piece in fragments(arguments, data.draw)])
    if data.draw(st.booleans()):
        # Calls one behind the other, or all at once.
        deltas += [delta for first, more in zip(opened, rest, strict=True) for delta in [first, *more]]
    else:
        deltas += opened
        while any(rest):
            deltas.append(data.draw(st.sampled_from([pieces for pieces in rest if pieces])).pop(0))
    chunks = [chunk(delta) for delta in deltas]
    if chunks and data.draw(st.booleans()):
        chunks[-1] = chunk(deltas[-1], finish_reason)
    else:
        chunks.append(chunk(data.draw(st.sampled_from([None, {}, {"content": ""}])), finish_reason))
    events = streamed(chunks)
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(message["tool_calls"])
    ]
    response = whole({**message, "tool_calls": calls}, finish_reason)
    assert events[-1]["response"] == response
    for kind, text in said(response).items():
        assert texts(events, kind) == (text, text)
