"""S26, S27, S28: what is too big, too slow, too many or packed is refused early, cheaply, and closed."""

import contextlib
import gzip
import json
import socket
import time
from typing import Any

import pytest
from tests.support.refusals import assert_refused, error_of, post
from tests.support.waiting import eventually
from tests.support.wire import AnswerReader, exchange, request_bytes, split
from tests.support.yard import Yard

SETTINGS = {
    "gateway.header_read_timeout_s": 1,
    "gateway.body_bytes_per_s_min": 1000,
    "gateway.body_bytes_max": 4_000_000,
    "gateway.connections_max": 60,
}


def authorized(yard: Yard) -> tuple[str, str]:
    return ("Authorization", f"Bearer {yard.admin_key}")


def test_a_body_that_trickles_is_408(yard: Yard) -> None:
    head = request_bytes("POST", "/v1/completions", headers=[authorized(yard), ("Content-Length", "100000")])
    reader = AnswerReader()
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as peer:
        peer.sendall(head)
        peer.settimeout(0.2)
        for _ in range(50):  # a byte now and then, for longer than it may take
            peer.sendall(b" ")
            try:
                if data := peer.recv(65_536):
                    reader.feed(data)
                break
            except TimeoutError:
                continue
        peer.settimeout(30)
        with contextlib.suppress(ConnectionResetError):  # it was sent one more byte when it had closed
            while data := peer.recv(65_536):
                reader.feed(data)
    assert_refused(reader.answer, status=408, code="request_timeout")
    assert reader.answer.header("connection") == "close"


def test_a_body_over_a_slow_line_is_taken(yard: Yard, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode() + b" " * 30_000
    head = request_bytes("POST", "/v1/completions", headers=[authorized(yard), ("Content-Length", str(len(body)))])
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as peer:
        peer.sendall(head)
        reader = AnswerReader()
        for at in range(0, len(body), 1000):
            peer.sendall(body[at : at + 1000])
            time.sleep(0.1)  # the slow line
        while not reader.answer.is_complete and (data := peer.recv(65_536)):
            reader.feed(data)
    assert reader.answer.status == 200, bytes(reader.answer.body)
    assert time.monotonic() - started > 2, "longer than the grace"


def test_a_big_body_without_a_key_is_refused_before_it_is_read(yard: Yard) -> None:
    head = request_bytes("POST", "/v1/completions", headers=[("Content-Length", "3000000")])
    (answer,) = exchange(yard.port, head)
    assert_refused(answer, status=401, code="invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", "Bearer my_aaaaaaaa_wrong")], 401),
        ([("Content-Length", "999999999")], 413),
        ([("Content-Encoding", "gzip")], 415),
    ],
)
def test_a_client_that_asks_first_is_refused_before_it_sends(
    yard: Yard, headers: list[tuple[str, str]], status: int
) -> None:
    sent = [*headers, ("Expect", "100-continue")]
    if not any(name == "Content-Length" for name, _ in headers):
        sent.append(("Content-Length", "10"))
    (answer,) = exchange(yard.port, request_bytes("POST", "/v1/completions", headers=sent))
    assert_refused(answer, status=status)


def test_a_client_that_asks_first_and_may_is_asked_to_go_on(yard: Yard, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode()
    sent = [authorized(yard), ("Expect", "100-continue"), ("Content-Length", str(len(body))), ("Connection", "close")]
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as peer:
        peer.sendall(request_bytes("POST", "/v1/completions", headers=sent))
        assert peer.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(body)
        received = b""
        while data := peer.recv(65_536):
            received += data
    (answer,) = split(received)
    assert answer.status == 200


FIELDS = "&".join(f"field{number}=x" for number in range(100_000)).encode()
PARTS = (
    b"".join(b'--b\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n\r\n' % n for n in range(50_000)) + b"--b--\r\n"
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/keys", "/v1/models/deploy"])
@pytest.mark.parametrize("form", ["urlencoded", "multipart"])
def test_a_hundred_thousand_fields_are_refused_at_once(yard: Yard, path: str, form: str) -> None:
    body, kind = (
        (FIELDS, "application/x-www-form-urlencoded")
        if form == "urlencoded"
        else (PARTS, "multipart/form-data; boundary=b")
    )
    headers = [authorized(yard), ("Content-Type", kind), ("Connection", "close")]
    (answer,) = exchange(yard.port, request_bytes("POST", path, body=body, headers=headers), within_s=20)
    error_of(answer)
    assert answer.status in (400, 413, 415), answer.status


@pytest.mark.parametrize("ranges", [1, 700, 50_000])
@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/healthz"])
def test_ranges_are_not_looked_at(yard: Yard, path: str, ranges: int) -> None:
    value = "bytes=" + ",".join(f"{n}-{n + 1}" for n in range(ranges))
    headers = [authorized(yard), ("Range", value), ("If-Range", '"x"'), ("If-None-Match", "*"), ("Connection", "close")]
    (answer,) = exchange(yard.port, request_bytes("GET", path, headers=headers))
    assert answer.status == (431 if ranges == 50_000 else 200), answer
    assert answer.is_complete
    assert answer.header("content-range") is None


CLEAR = json.dumps({"name": "x", "scopes": ["inference"]}).encode()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/keys", "/v1/models/deploy", "/console/login", "/v1/unheard"]
)
@pytest.mark.parametrize(
    "coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip", "gzip;q=1", "GZip"]
)
def test_a_packed_body_is_refused_wherever_it_goes(yard: Yard, path: str, coding: str) -> None:
    members = gzip.compress(CLEAR) * 100
    answer = post(yard, path, members, headers=[("Content-Encoding", coding)])
    assert_refused(answer, status=415, code="unsupported_content_encoding")


def test_one_connection_too_many_is_503_and_the_others_are_served(yard: Yard) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(60):
            held.append(socket.create_connection(("127.0.0.1", yard.port), timeout=30))
        eventually(lambda: _refused_for_connections(yard), 30, "the limit is met")
        held[0].sendall(request_bytes("GET", "/healthz"))
        assert held[0].recv(65_536).startswith(b"HTTP/1.1 200 ")
    finally:
        for peer in held:
            peer.close()
    eventually(lambda: yard.call("GET", "/healthz", key="").status == 200, 30, "served again")


def _refused_for_connections(yard: Yard) -> bool:
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as peer:
        received = peer.recv(65_536)
    answers: list[Any] = split(received)
    return bool(answers) and answers[0].status == 503 and answers[0].json()["error"]["code"] == "server_is_overloaded"
