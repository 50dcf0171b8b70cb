"""The stream relay: verbatim in the steady state, exact at every fragmentation, never a clean end without an end."""

import json

import pytest

from modelyard.gateway.relay import DONE, EVENT_BYTES_MAX, EngineStreamError, StreamRelay, _event_end, as_chunk
from modelyard.gateway.sse import Usage


def event(delta: dict | None = None, *, finish: str | None = None, usage: object = None, choices: bool = True) -> bytes:
    chunk: dict[str, object] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunk["choices"] = [{"index": 0, "delta": delta or {}, "finish_reason": finish}] if choices else []
    if usage is not None:
        chunk["usage"] = usage
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


ROLE = event({"role": "assistant", "content": ""})
TOKENS = [event({"content": text}) for text in ("Hello", " 你好", ' "error" "usage" [DONE]', "\n\n data: x")]
FINISH = event(finish="stop")
USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}, choices=False)
WHOLE = [ROLE, *TOKENS, FINISH, USAGE, DONE]


def relay_of(*, chunked: bool = True, usage: bool = False, chat: bool = True) -> StreamRelay:
    return StreamRelay(is_chunked=chunked, is_chat=chat, wants_usage=usage)


def payload(chunks: bytes) -> bytes:
    """Undo the chunk framing of what goes to the client."""
    out = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        out += rest[:length]
        chunks = rest[length + 2 :]
    return out


def run(relay: StreamRelay, reads: list[bytes]) -> bytes:
    out = b""
    for read in reads:
        out += relay.feed(read)
    return payload(out)


def test_a_read_of_whole_events_goes_out_as_the_very_same_bytes() -> None:
    relay = relay_of()
    relay.feed(as_chunk(ROLE) + as_chunk(TOKENS[0]))
    read = as_chunk(TOKENS[1]) + as_chunk(TOKENS[0])
    assert relay.feed(read) is read
    assert relay.tokens == 3


@pytest.mark.parametrize("chunked", [True, False])
def test_every_fragmentation_gives_the_same_answer(chunked: bool) -> None:
    wire = b"".join(as_chunk(part) if chunked else part for part in WHOLE) + (b"0\r\n\r\n" if chunked else b"")
    expected = b"".join([ROLE, *TOKENS, FINISH])
    for size in (1, 2, 3, 5, 7, 11, 64, 199, len(wire)):
        relay = relay_of(chunked=chunked)
        assert run(relay, [wire[at : at + size] for at in range(0, len(wire), size)]) == expected, size
        assert relay.is_done
        assert relay.usage is not None
        assert relay.usage.completion_tokens == 4
        assert relay.tokens == 4


def test_every_single_cut_gives_the_same_answer() -> None:
    wire = b"".join(as_chunk(part) for part in WHOLE) + b"0\r\n\r\n"
    expected = b"".join([ROLE, *TOKENS, FINISH])
    for cut in range(1, len(wire)):
        assert run(relay_of(), [wire[:cut], wire[cut:]]) == expected, cut


def test_usage_reaches_only_clients_that_asked() -> None:
    wire = [as_chunk(part) for part in WHOLE]
    assert USAGE not in run(relay_of(), wire)
    assert run(relay_of(usage=True), wire).endswith(FINISH + USAGE)


def test_usage_is_made_up_for_a_client_that_asked_when_the_engine_sent_none() -> None:
    relay = relay_of(usage=True)
    run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0], FINISH, DONE)])
    last = relay.finish(Usage(prompt_tokens=3, completion_tokens=1, total_tokens=4))
    assert last.endswith(DONE)
    chunk = json.loads(last.removesuffix(DONE).strip().removeprefix(b"data: "))
    assert chunk["choices"] == []
    assert chunk["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def test_usage_on_every_chunk_is_taken_off_and_the_last_one_counts() -> None:
    relay = relay_of()
    seen = [event({"content": str(n)}, usage={"prompt_tokens": 2, "completion_tokens": n}) for n in (1, 2, 3)]
    out = run(relay, [as_chunk(part) for part in (ROLE, *seen)])
    assert b"usage" not in out
    assert relay.usage is not None
    assert relay.usage.completion_tokens == 3


def test_nothing_goes_out_before_the_first_content() -> None:
    relay = relay_of()
    assert relay.feed(as_chunk(ROLE)) == b""
    assert not relay.has_begun
    assert payload(relay.feed(as_chunk(TOKENS[0]))) == ROLE + TOKENS[0]


def test_a_missing_role_is_added_to_the_first_chunk() -> None:
    out = run(relay_of(), [as_chunk(TOKENS[0]), as_chunk(TOKENS[1])])
    first, second = out.split(b"\n\n")[:2]
    assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert second + b"\n\n" == TOKENS[1]


@pytest.mark.parametrize(
    "form",
    [
        b'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n',
        b'event: error\ndata: {"code":400,"details":"boom"}\n\n',
        b'data: {"object":"error","message":"boom","type":"x","code":500}\n\n',
        b"data: {not json\n\n",
    ],
)
def test_all_forms_of_an_upstream_error_are_seen_and_not_passed_on(form: bytes) -> None:
    relay = relay_of()
    out = run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0], form, DONE)])
    assert relay.error is not None
    assert b"boom" not in out
    assert not relay.is_done


def test_comments_of_the_engine_stay_here() -> None:
    out = run(relay_of(), [as_chunk(part) for part in (b": ping\n\n", ROLE, TOKENS[0], b": ping\n\n", TOKENS[1])])
    assert out == ROLE + TOKENS[0] + TOKENS[1]


def test_crlf_events_become_plain_ones() -> None:
    wire = [as_chunk(part.replace(b"\n", b"\r\n")) for part in (ROLE, TOKENS[0], FINISH, DONE)]
    relay = relay_of()
    assert run(relay, wire) == ROLE + TOKENS[0] + FINISH
    assert relay.is_done


def test_a_finish_that_carries_text_counts_as_a_token() -> None:
    relay = relay_of()
    run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0], event({"content": "!"}, finish="length"))])
    assert relay.tokens == 2
    assert relay.has_finish


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    relay = relay_of(chunked=False)
    for _ in range(EVENT_BYTES_MAX // 65536):
        assert relay.feed(b"x" * 65536) == b""
    with pytest.raises(EngineStreamError, match="too long"):
        relay.feed(b"x")


def test_broken_chunk_framing_is_an_error() -> None:
    with pytest.raises(EngineStreamError, match="framing"):
        relay_of().feed(b"zz\r\nhello\r\n")


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nx-sum: 1\r\ny: 2\r\n\r\n"])
def test_a_stream_ends_with_the_last_byte_of_its_framing(end: bytes) -> None:
    wire = b"".join(as_chunk(part) for part in WHOLE)
    for cut in range(len(end)):
        relay = relay_of()
        relay.feed(wire + end[:cut])
        assert relay.is_done
        assert not relay.is_ended, cut
        assert relay.skip(end[cut:])
        assert relay.is_ended
        assert not relay.has_excess
    relay = relay_of()
    relay.feed(wire + end + b"HTTP/1.1 200 OK")
    assert relay.has_excess


@pytest.mark.parametrize("size", [b"-6", b"0x1", b"", b"1_0"])
def test_an_odd_chunk_size_is_an_error(size: bytes) -> None:
    with pytest.raises(EngineStreamError, match="framing"):
        relay_of().feed(size + b"\r\nhello\r\n")


@pytest.mark.parametrize(
    "usage",
    [b'{"prompt_tokens":-1}', b'{"prompt_tokens":1,"completion_tokens":99999999999999999999999}'],
)
def test_absurd_usage_is_garbage(usage: bytes) -> None:
    relay = relay_of()
    run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0], b'data: {"choices":[],"usage":' + usage + b"}\n\n")])
    assert relay.error is not None
    assert relay.usage is None


@pytest.mark.parametrize("extra", [b"id: 7\n", b"event: message\n", b"retry: 3000\n", b": hi\n"])
def test_only_data_lines_reach_the_client(extra: bytes) -> None:
    relay = relay_of()
    out = run(relay, [as_chunk(part) for part in (ROLE, extra + TOKENS[0], b"retry: 1\n\n", extra + TOKENS[1], FINISH)])
    assert out == ROLE + TOKENS[0] + TOKENS[1] + FINISH


def test_completion_chunks_count_their_text() -> None:
    chunk = b'data: {"object":"text_completion","choices":[{"index":0,"text":"hi","finish_reason":null}]}\n\n'
    relay = relay_of(chat=False)
    assert run(relay, [as_chunk(chunk), as_chunk(chunk)]) == chunk + chunk
    assert relay.tokens == 2


def test_an_empty_usage_on_each_chunk_is_only_for_clients_that_asked() -> None:
    chunks = [event({"content": text}).replace(b"}\n\n", b',"usage":null}\n\n') for text in "abc"]
    wire = [as_chunk(part) for part in (ROLE, *chunks)]
    assert b"usage" not in run(relay_of(), wire)
    relay = relay_of(usage=True)
    assert run(relay, wire) == ROLE + b"".join(chunks)
    assert relay.tokens == 3


def test_an_empty_usage_chunk_of_its_own_is_no_token() -> None:
    relay = relay_of(usage=True)
    empty = event(choices=False).replace(b"}\n\n", b',"usage":null}\n\n')
    out = run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0], empty, DONE)])
    assert relay.tokens == 1
    assert out == ROLE + TOKENS[0]


def test_an_error_event_behind_a_token_in_one_chunk_is_seen() -> None:
    relay = relay_of()
    run(relay, [as_chunk(part) for part in (ROLE, TOKENS[0])])
    out = payload(relay.feed(as_chunk(TOKENS[1] + b'event: error\ndata: {"code":400,"details":"boom"}\n\n')))
    assert relay.error is not None
    assert out == TOKENS[1]


def test_many_events_in_one_read_are_each_looked_at_once() -> None:
    class Buffer(bytearray):
        looked = 0

        def find(self, what: bytes, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
            place = super().find(what, start, len(self) if end is None else end)
            Buffer.looked += (place if place >= 0 else len(self) if end is None else end) - start
            return place

    buffer = Buffer(b'data: {"a":1}\n\n' * 1000)
    at = 0
    while (found := _event_end(buffer, at)) is not None:
        at = found[1]
    assert at == len(buffer)
    assert Buffer.looked < 4 * len(buffer)
