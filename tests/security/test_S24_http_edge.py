"""S24 and S26: requests that different HTTP parsers read differently. One refusal each, never two answers."""

import pytest
from tests.support.refusals import error_of
from tests.support.wire import Answer, exchange
from tests.support.yard import Yard

HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
"""A second request that a lenient parser would find in the body or behind."""
GET = b"GET /healthz HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"

CASES: dict[str, bytes] = {
    "CL and TE": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE and CL": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n" + HIDDEN,
    "one length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello" + HIDDEN,
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc" + HIDDEN,
    "negative length": POST + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "signed length": POST + b"Content-Length: +5\r\n\r\nhello" + HIDDEN,
    "hexadecimal length": POST + b"Content-Length: 0x5\r\n\r\nhello" + HIDDEN,
    "no number": POST + b"Content-Length: five\r\n\r\nhello" + HIDDEN,
    "empty length": POST + b"Content-Length: \r\n\r\n" + HIDDEN,
    "endless length": POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n" + HIDDEN,
    "TE gzip": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + HIDDEN,
    "TE not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE misspelt": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE with a blank before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "bad chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "signed chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "chunk without its end": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n" + HIDDEN,
    "chunk size 0x5": POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "chunk size overflow": POST
    + b"Transfer-Encoding: chunked\r\n\r\n1"
    + b"0" * 16
    + b"5\r\nhello\r\n0\r\n\r\n"
    + HIDDEN,
    "blank before the chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "chunk that ends in LF": POST + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n" + HIDDEN,
    "LF in a chunk extension": POST + b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "folded header": GET + b"Host: x\r\nX-A: one\r\n two\r\n\r\n",
    "bare LF": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "bare LF between headers": GET + b"Host: x\nX-A: b\r\n\r\n",
    "bare CR for line ends": b"GET /healthz HTTP/1.1\rHost: x\r\r" + HIDDEN,
    "bare CR in a value": GET + b"Host: x\r\nX-A: b\rX-B: c\r\n\r\n",
    "NUL in a value": GET + b"Host: x\r\nX-A: b\0c\r\n\r\n",
    "NUL in a name": GET + b"Host: x\r\nX\0A: b\r\n\r\n",
    "blank in a name": GET + b"Host: x\r\nX A: b\r\n\r\n",
    "blank before the colon": GET + b"Host : x\r\n\r\n",
    "no colon": GET + b"Host: x\r\nnonsense\r\n\r\n",
    "no name": GET + b"Host: x\r\n: nonsense\r\n\r\n",
    "no Host": GET + b"X-A: b\r\n\r\n",
    "two Hosts": GET + b"Host: x\r\nHost: y\r\n\r\n",
    "one Host twice": GET + b"Host: x\r\nHost: x\r\n\r\n",
    "Host with a user": GET + b"Host: x@evil.example\r\n\r\n",
    "Host with a path": GET + b"Host: x/y\r\n\r\n",
    "Host with a list": GET + b"Host: x, y\r\n\r\n",
    "Host with markup": GET + b'Host: x"><script>\r\n\r\n',
    "absolute form": b"GET http://evil.example/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "authority form": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk form": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "at sign": b"GET @evil.example HTTP/1.1\r\nHost: x\r\n\r\n",
    "no slash": b"GET healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "blank in the path": b"GET /health z HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "huge length": POST + b"Content-Length: 99999999999\r\n\r\n" + HIDDEN,
    "no version": b"GET /healthz\r\nHost: x\r\n\r\n",
    "version 9": b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
    "another protocol": b"GET /healthz ICY/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
    "garbage": b"hello there\r\n\r\n",
    "lower-case method": b"get /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "70 KB header": GET + b"Host: x\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
    "70 KB path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "5,000 headers": GET + b"Host: x\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(5000)) + b"\r\n",
    "65 headers": GET + b"Host: x\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(65)) + b"\r\n",
    "20 MB header": GET + b"Host: x\r\nX-A: " + b"a" * 20_000_000,
}


@pytest.mark.parametrize("name", CASES)
def test_one_refusal_and_then_the_connection_is_closed(yard: Yard, name: str) -> None:
    answers = exchange(yard.port, CASES[name])
    assert len(answers) == 1, f"{[answer.status for answer in answers]}"
    assert_refused_at_the_edge(answers[0])


def assert_refused_at_the_edge(answer: Answer) -> None:
    assert answer.is_complete, answer
    error_of(answer)
    assert answer.status in (400, 413, 431, 501, 505), answer.status
    assert (answer.header("connection") or "").lower() == "close"


@pytest.mark.parametrize("size", ["header", "count"])
def test_too_much_head_is_431(yard: Yard, size: str) -> None:
    (answer,) = exchange(yard.port, CASES["70 KB header" if size == "header" else "5,000 headers"])
    assert answer.status == 431


def test_the_gateway_is_well_afterwards(yard: Yard, model: str) -> None:
    for name in ("CL and TE", "20 MB header", "TLS hello"):
        exchange(yard.port, CASES[name])
    assert yard.call("GET", "/healthz", key="").status == 200
    assert yard.gauges()
    assert not any(yard.gauges().values())


def test_two_honest_requests_on_one_connection_are_answered_in_order(yard: Yard) -> None:
    answers = exchange(yard.port, HIDDEN + HIDDEN.replace(b"/healthz", b"/v1/models"), count=2)
    assert [answer.status for answer in answers] == [200, 401]


def test_a_chunked_body_is_read(yard: Yard, model: str) -> None:
    body = b'{"model": "sim", "prompt": "hi", "max_tokens": 1}'
    head = POST + b"Authorization: Bearer " + yard.admin_key.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n"
    (answer,) = exchange(yard.port, head + chunks)
    assert answer.status == 200, bytes(answer.body)


@pytest.mark.parametrize(
    "trailer", [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Host: y", b"Authorization: x"]
)
def test_trailers_frame_nothing_and_prove_nothing(yard: Yard, trailer: bytes) -> None:
    body = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailer + b"\r\n\r\n"
    answers = exchange(yard.port, body + HIDDEN, count=2)
    # Either the trailer is ignored, and what follows is the next request; or all of it is refused.
    assert [answer.status for answer in answers] in ([401, 200], [400])


def test_what_follows_a_refusal_is_not_read(yard: Yard) -> None:
    for spoilt in (GET + b"Host: x\r\nHost: y\r\n\r\n", POST + b"Content-Length: x\r\n\r\n"):
        answers = exchange(yard.port, HIDDEN + spoilt + HIDDEN * 5)
        assert [answer.status for answer in answers][:2] in ([200, 400], [200])
        assert len(answers) <= 2


def test_a_chunked_body_without_a_length_is_capped_too(yard: Yard) -> None:
    head = POST + b"Authorization: Bearer " + yard.admin_key.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    (answer,) = exchange(yard.port, head + chunk * 34 + b"0\r\n\r\n")
    assert answer.status == 413, answer
    error_of(answer)


def test_a_head_that_never_ends_is_given_up(yard: Yard) -> None:
    answers = exchange(yard.port, GET + b"Host: x\r\nX-A: slow")
    assert [answer.status for answer in answers] in ([], [408], [400])


SETTINGS = {"gateway.header_read_timeout_s": 1}
