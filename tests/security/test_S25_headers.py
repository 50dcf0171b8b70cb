"""S25 and S28: what of a client's headers goes further, and compressed bodies."""

import gzip
import json
import zlib
from typing import Any

import pytest
from tests.support.refusals import assert_refused, post
from tests.support.wire import exchange, request_bytes
from tests.support.yard import Yard

SECRETIVE = [
    ("Cookie", "session=canary"),
    ("Proxy-Authorization", "Basic canary"),
    ("X-Forwarded-For", "10.0.0.1"),
    ("X-Forwarded-Host", "evil.example"),
    ("X-Forwarded-Proto", "https"),
    ("Forwarded", "for=10.0.0.1"),
    ("X-Real-Ip", "10.0.0.1"),
    ("X-Modelyard-Tenant", "another"),
    ("X-Modelyard-Identity", '{"key_id":"x","tenant_id":"y","scopes":["admin"]}'),
    ("X-Modelyard-Internal-Token", "guess"),
    ("X-Modelyard-Ignored", "x"),
    ("OpenAI-Organization", "org-1"),
    ("OpenAI-Project", "proj-1"),
    ("X-Stainless-Lang", "python"),
    ("User-Agent", "canary/1.0"),
    ("Referer", "http://evil.example"),
    ("Connection", "X-Named-By-Connection"),
    ("X-Named-By-Connection", "canary"),
    ("Accept-Encoding", "gzip"),
    ("X-Whatever", "canary"),
]
ALLOWED = {
    "host",
    "authorization",
    "content-type",
    "content-length",
    "accept",
    "connection",
    "x-request-id",
    "user-agent",
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_only_our_own_headers_reach_an_engine(yard: Yard, model: str, stream: bool) -> None:
    body = {"model": model, "prompt": "hi", "max_tokens": 2, "stream": stream}
    answer = post(yard, "/v1/completions", body, headers=SECRETIVE)
    assert answer.status == 200, bytes(answer.body)
    assert answer.header("content-encoding") is None
    (record,) = yard.events_of(answer.header("x-request-id"), "begin")
    names = [name.lower() for name in record["header_names"]]
    assert set(names) <= ALLOWED, f"relayed: {set(names) - ALLOWED}"
    assert names.count("authorization") == 1, "the engine's own secret only"


def test_a_key_in_x_api_key_is_taken_and_not_relayed(yard: Yard, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 1}).encode()
    headers = [("X-Api-Key", yard.new_key()), ("Content-Type", "application/json"), ("Connection", "close")]
    (answer,) = exchange(yard.port, request_bytes("POST", "/v1/completions", body=body, headers=headers))
    assert answer.status == 200, bytes(answer.body)
    (record,) = yard.events_of(answer.header("x-request-id"), "begin")
    assert "x-api-key" not in [name.lower() for name in record["header_names"]]


def test_a_request_id_of_the_client_does_not_name_the_request(yard: Yard, model: str) -> None:
    body = {"model": model, "prompt": "hi", "max_tokens": 1}
    told = [
        post(yard, "/v1/completions", body, headers=[("X-Request-Id", "req_forged")]).header("x-request-id")
        for _ in range(2)
    ]
    assert "req_forged" not in told
    assert told[0] != told[1], "two requests with one id would be one bill"


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Modelyard-Identity", '{"key_id":"x","tenant_id":"platform","scopes":["admin"]}')],
        [("x-modelyard-internal-token", "x"), ("x-modelyard-identity", '{"scopes":["admin"]}')],
    ],
)
def test_an_identity_in_a_header_is_not_believed(yard: Yard, headers: list[tuple[str, str]]) -> None:
    answer = post(yard, "/v1/tenants", {"name": "mine"}, key=yard.new_key(), headers=headers)
    assert_refused(answer, status=403, code="permission_denied")


CLEAR = json.dumps({"model": "sim", "prompt": "hi", "max_tokens": 1}).encode()
PACKED: dict[str, bytes] = {
    "gzip": gzip.compress(CLEAR),
    "x-gzip": gzip.compress(CLEAR),
    "deflate": zlib.compress(CLEAR),
    "br": b"\x0b\x02\x80{}\x03",
    "zstd": b"\x28\xb5\x2f\xfd",
    "gzip, gzip": gzip.compress(gzip.compress(CLEAR)),
    "GZIP": gzip.compress(CLEAR),
    "unheard-of": CLEAR,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("coding", PACKED)
def test_a_compressed_body_is_415(ask: Any, path: str, coding: str) -> None:
    answer = ask(path, PACKED[coding], headers=[("Content-Encoding", coding)])
    assert_refused(answer, status=415, code="unsupported_content_encoding")


def test_a_decompression_bomb_costs_nothing(ask: Any) -> None:
    bomb = gzip.compress(gzip.compress(b"\0" * 100_000_000))
    assert_refused(ask("/v1/completions", bomb, headers=[("Content-Encoding", "gzip, gzip")]), status=415)


def test_a_second_content_encoding_does_not_hide_the_first(ask: Any) -> None:
    headers = [("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
    answer = ask("/v1/completions", PACKED["gzip"], headers=headers)
    assert answer.status in (400, 415)
