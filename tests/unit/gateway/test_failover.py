"""The text that a client has, read from what was relayed to it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.gateway import failover
from modelyard.gateway.relay import as_chunk

ENCODERS = [
    lambda value: json.dumps(value, separators=(",", ":")),
    lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    json.dumps,
]


def event(delta: dict[str, Any], encode: Any, **more: Any) -> bytes:
    chunk = {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return f"data: {encode({**chunk, **more})}\n\n".encode("utf-8", "surrogatepass")


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=9),
    st.sampled_from(ENCODERS),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_text_is_exact_however_it_was_written(
    texts: list[str], encode: Any, is_chunked: bool, has_null_usage: bool
) -> None:
    more = {"usage": None} if has_null_usage else {}
    events = [event({"content": text}, encode, **more) for text in texts]
    raw = b"".join(as_chunk(one) if is_chunked else one for one in events)
    assert failover.text_of(raw) == "".join(texts)


def test_events_that_are_not_alike_are_read_too() -> None:
    plain = ENCODERS[0]
    raw = event({"role": "assistant", "content": "a"}, plain) + event({"content": 'b"c\\'}, plain) + event({}, plain)
    assert failover.text_of(raw) == 'ab"c\\'


def test_a_text_that_quotes_json_is_a_text() -> None:
    texts = ['"delta":{"content":"', '{"reasoning":"', '\n\ndata: {"choices":[]}', '"tool_calls":[{']
    raw = b"".join(event({"content": text}, ENCODERS[0]) for text in texts)
    assert failover.text_of(raw) == "".join(texts)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x", "reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_what_is_not_only_text_cannot_be_gone_on_with(delta: dict[str, Any]) -> None:
    for encode in ENCODERS:
        with pytest.raises(failover.NotResumableError):
            failover.text_of(event({"content": "a"}, encode) + event(delta, encode))
