"""Requests with a few bytes changed: never an exception, never two answers to one request, closed after an error."""

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.test_server import CHUNKED, HEAD, KEY, Edge

SEEDS = [
    HEAD + b"\r\n",
    HEAD + b"Content-Length: 5\r\n\r\nhello",
    CHUNKED + b"5\r\nhello\r\n0\r\nX-A: b\r\n\r\n",
    HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
    b"GET /healthz?a=b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    b"OPTIONS /healthz HTTP/1.1\r\nHost: h\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"GET /x HTTP/1.0\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n",
]
SPICE = [
    *(b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"\t", b"-", b"0x", b"+", b",", b"\xff", b"HTTP/1.1", b"0\r\n\r\n"),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: i\r\n", b"Upgrade: x\r\n"),
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
]


@st.composite
def spoilt_requests(draw: st.DrawFn) -> tuple[list[bytes], int]:
    """Return pieces of a byte stream of one to three requests, some spoilt, and how many requests a reader may find."""
    stream = b"".join(draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(stream)))
        cut = draw(st.sampled_from([0, 0, 1, 2, 7]))
        stream = stream[:at] + draw(st.sampled_from(SPICE)) + stream[at + cut :]
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return pieces, len(re.findall(rb"HTTP/\d", stream))


@given(spoilt_requests())
@settings(deadline=None, max_examples=60)
def test_spoilt_requests_do_no_harm(given_: tuple[list[bytes], int]) -> None:
    pieces, requests = given_
    edge = Edge(cors_origins=("*",))
    for piece in pieces:
        edge.client.data_received(piece)
    answers = [status for status in edge.answers() if status != 100]
    assert len(answers) == len(edge.taken) + len(edge.refused) + edge.wire.sent.count(b"HTTP/1.1 204")
    assert len(edge.refused) <= 1
    assert len(answers) <= requests + 1  # garbage before or behind is refused as one more
    assert set(answers) <= {200, 204, 400, 401, 413, 415, 431}
    if edge.refused:
        assert answers[-1] >= 400, "nothing is answered behind a refusal"
        assert edge.wire.done == ["write_eof"]
        sent = edge.wire.sent
        edge.client.data_received(HEAD + b"\r\n")
        assert edge.wire.sent == sent


@given(spoilt_requests(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_an_answer_under_way_is_whole_or_cut_off_but_never_spoilt(
    given_: tuple[list[bytes], int], streams: bool
) -> None:
    edge = Edge()
    edge.client.data_received(b"GET /later HTTP/1.1\r\nHost: h\r\n\r\n")
    exchange: Any = edge.client.current
    if streams:
        edge.client.start_stream(b"")
    before = edge.wire.sent
    for piece in given_[0]:
        edge.client.data_received(piece)
        assert edge.wire.sent == before, "nothing is written into the answer of another request"
    assert len(edge.taken) == 1, "the next one waits"
    if "abort" in edge.wire.done:
        assert exchange.has_left, "its engine is told"
        assert edge.client.current is None
    else:
        assert edge.client.current is exchange
        assert set(edge.wire.done) <= {"pause"}
