"""The form of a stream's chunks: what is passed on without a look is only ever text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.gateway.chunk_form import ChunkForm
from modelyard.gateway.relay import DONE, StreamRelay, as_chunk

HEAD = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"'
TAIL = b'"},"finish_reason":null}]}\n\n'
KNOWN = as_chunk(HEAD + b"Hello" + TAIL)


def form() -> ChunkForm:
    found = ChunkForm.of(KNOWN)
    assert found is not None
    return found


@pytest.mark.parametrize("text", [b"a", b" 12", "你好".encode(), b"usage", b"[DONE]", b"\\n"])
def test_a_chunk_with_another_text_fits(text: bytes) -> None:
    assert form().fits(as_chunk(HEAD + text + TAIL))


@pytest.mark.parametrize(
    "chunk",
    [
        as_chunk(HEAD + b'x"},"finish_reason":"stop"}],"usage":{"a":"' + TAIL),
        as_chunk(HEAD + b"a" + TAIL + HEAD + b"b" + TAIL),
        as_chunk(HEAD + b"a" + TAIL) * 2,
        as_chunk(HEAD + b"a" + TAIL + b": hi\n\n"),
        as_chunk(HEAD.replace(b'"c"', b'"d"') + b"a" + TAIL),
        as_chunk(HEAD + b"a" + TAIL.replace(b"null", b'"stop"')),
        as_chunk(HEAD + TAIL),
        as_chunk(HEAD[:-1] + TAIL),
        b"+" + as_chunk(HEAD + b"a" + TAIL),
        b"0" + as_chunk(HEAD + b"a" + TAIL),
        b"6" + as_chunk(HEAD + b"a" + TAIL)[1:],
        as_chunk(HEAD + b"a" + TAIL)[:-1],
        as_chunk(HEAD + b"a" + TAIL) + b"0\r\n\r\n",
        b"",
    ],
)
def test_a_chunk_that_differs_in_more_than_its_text_does_not_fit(chunk: bytes) -> None:
    assert not form().fits(chunk)


def test_a_chunk_without_a_text_has_no_form() -> None:
    assert ChunkForm.of(as_chunk(b'data: {"choices":[{"delta":{"tool_calls":[]}}]}\n\n')) is None


TEXTS = st.text(min_size=1, max_size=8) | st.sampled_from(
    ['"', "\\", '\\"', "\n", '"usage"', '"error"', "[DONE]", "\r\n\r\n"]
)
EXTRAS = st.sampled_from([{}, {}, {}, {"usage": None}, {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, EXTRAS, st.sampled_from([1, 1, 1, 1, 2])), min_size=1, max_size=40))
def test_a_stream_says_the_same_whether_its_chunks_come_whole_or_in_halves(
    parts: list[tuple[str, dict[str, object], int]],
) -> None:
    chunks = []
    for text, extra, created in parts:
        choices = [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]
        event = json.dumps({"id": "c", "created": created, "choices": choices, **extra}, separators=(",", ":"))
        chunks.append(as_chunk(b"data: " + event.encode() + b"\n\n"))
    chunks.append(as_chunk(DONE))
    whole, halves = (StreamRelay(is_chunked=True, is_chat=True, wants_usage=False) for _ in range(2))
    out = b"".join(whole.feed(chunk) for chunk in chunks)
    pieces = b"".join(halves.feed(half) for chunk in chunks for half in (chunk[:7], chunk[7:]))
    assert out == pieces
    assert (whole.tokens, whole.usage, whole.is_done, whole.error) == (
        halves.tokens, halves.usage, halves.is_done, halves.error,
    )  # fmt: skip
