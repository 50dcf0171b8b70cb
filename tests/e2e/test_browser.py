"""A page of another origin, as a browser asks; and OPTIONS, HEAD and HTTP/1.0 on every kind of route."""

import json
from typing import Any

import pytest
from tests.support.wire import Answer, exchange, request_bytes
from tests.support.yard import Yard

APP = "https://app.example.com"
SETTINGS = {"gateway.cors_origins": f"{APP}, http://localhost:3000"}


@pytest.fixture(scope="module")
def model(yard: Yard) -> str:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
    return "sim"


def ask(yard: Yard, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> Answer:
    raw = b"" if body is None else json.dumps(body).encode()
    sent = [*(headers or {}).items(), ("Connection", "close")]
    if body is not None:
        sent.append(("Content-Type", "application/json"))
    (answer,) = exchange(yard.port, request_bytes(method, path, body=raw, headers=sent))
    return answer


def authorized(yard: Yard, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {yard.admin_key}", **more}


def test_an_sdk_in_a_page_is_allowed_what_it_asks_for(yard: Yard) -> None:
    asked = "authorization,content-type,x-stainless-arch,x-stainless-os,openai-organization,anthropic-version,prefer"
    preflight = {"Origin": APP, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    for path in ("/v1/chat/completions", "/v1/keys", "/v1/models/sim"):
        answer = ask(yard, "OPTIONS", path, headers=preflight)
        assert answer.status == 204
        assert answer.header("access-control-allow-origin") == APP
        assert answer.header("access-control-allow-headers") == asked
        assert "POST" in (answer.header("access-control-allow-methods") or "")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/keys", None, 200),
        ("GET", "/v1/keys/unheard-of", None, 404),
        ("POST", "/v1/chat/completions", {"model": "none", "messages": []}, 400),
        ("POST", "/v1/completions", {"model": "sim", "prompt": "hi", "max_tokens": 2}, 200),
        ("POST", "/v1/completions", {"model": "sim", "prompt": "hi", "max_tokens": 2, "stream": True}, 200),
        ("GET", "/unheard-of", None, 404),
    ],
)
def test_every_answer_may_be_read(yard: Yard, model: str, method: str, path: str, body: Any, status: int) -> None:
    answer = ask(yard, method, path, body, headers=authorized(yard, Origin=APP))
    assert answer.status == status, bytes(answer.body)
    assert [value for name, value in answer.headers if name == "access-control-allow-origin"] == [APP]
    assert answer.header("access-control-expose-headers") == "*"
    assert "origin" in [value.lower() for name, value in answer.headers if name == "vary"]
    assert answer.header("access-control-allow-credentials") is None


def test_a_refusal_without_a_key_may_be_read_too(yard: Yard) -> None:
    answer = ask(yard, "POST", "/v1/chat/completions", {}, headers={"Origin": APP})
    assert answer.status == 401
    assert answer.header("access-control-allow-origin") == APP


@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{APP}:8443", "http://app.example.com"])
def test_another_page_may_read_nothing(yard: Yard, origin: str) -> None:
    for path in ("/v1/models", "/v1/keys"):
        answer = ask(yard, "GET", path, headers=authorized(yard, Origin=origin))
        assert answer.status == 200
        assert not [name for name, _ in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/v1/models", "/v1/keys", "/openapi.json", "/docs"]
)
def test_head_says_what_get_would_and_has_no_body(yard: Yard, path: str) -> None:
    got = ask(yard, "GET", path, headers=authorized(yard))
    lines = request_bytes("HEAD", path, headers=[*authorized(yard).items(), ("Connection", "close")])
    (answer,) = exchange(yard.port, lines)
    assert answer.status == got.status == 200
    assert not answer.body
    assert answer.header("content-type") == got.header("content-type")


@pytest.mark.parametrize("path", ["/v1/keys", "/openapi.json", "/v1/models", "/v1/completions"])
def test_http_1_0_gets_a_body_without_chunks(yard: Yard, model: str, path: str) -> None:
    headers = list(authorized(yard).items())
    request = request_bytes("GET", path, headers=headers)
    if path == "/v1/completions":
        body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 2, "stream": True}).encode()
        request = request_bytes("POST", path, body=body, headers=headers)
    (answer,) = exchange(yard.port, request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.status == 200
    assert answer.is_complete
    assert answer.header("transfer-encoding") is None
    if path == "/v1/completions":
        assert bytes(answer.body).startswith(b"data: {")
        assert bytes(answer.body).endswith(b"data: [DONE]\n\n")
    else:
        assert answer.json()
