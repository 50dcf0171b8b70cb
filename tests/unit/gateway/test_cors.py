"""Browsers: a page may read an answer only if its origin is named, and never brings cookies along."""

from typing import Any

import pytest
from tests.unit.gateway.test_server import HEAD, Edge

from modelyard.errors import StartupError
from modelyard.gateway.cors import check_origins

APP = b"https://app.example.com"
ORIGIN = b"Origin: " + APP + b"\r\n"
PREFLIGHT = b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAccess-Control-Request-Method: POST\r\n"


def lines_of(edge: Edge) -> list[bytes]:
    head: bytes = edge.wire.sent.partition(b"\r\n\r\n")[0]
    return head.split(b"\r\n")[1:]


def named(*origins: str) -> Edge:
    return Edge(cors_origins=origins)


@pytest.mark.parametrize(("origins", "allowed"), [(("https://other.example", APP.decode()), APP), (("*",), b"*")])
def test_a_preflight_is_answered_without_a_key(origins: tuple[str, ...], allowed: bytes) -> None:
    edge = named(*origins)
    asked = b"authorization, content-type,x-stainless-os , x-my-own"
    edge.client.data_received(PREFLIGHT + ORIGIN + b"Access-Control-Request-Headers: " + asked + b"\r\n\r\n")
    assert edge.answers() == [204]
    lines = lines_of(edge)
    assert b"access-control-allow-origin: " + allowed in lines
    assert b"access-control-allow-headers: " + asked in lines
    assert b"access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS" in lines
    assert b"access-control-max-age: 7200" in lines
    assert b"vary: origin" in lines
    assert not any(b"credentials" in line for line in lines)
    assert not edge.taken


@pytest.mark.parametrize("asked", [b"x-a; evil", b"a" * 5000, b"(x)", b", ,", b"x-a\tx-b"])
def test_what_is_no_list_of_names_is_not_repeated(asked: bytes) -> None:
    edge = named("*")
    edge.client.data_received(PREFLIGHT + ORIGIN + b"Access-Control-Request-Headers: " + asked + b"\r\n\r\n")
    assert edge.answers() == [204]
    assert b"allow-headers" not in edge.wire.sent


@pytest.mark.parametrize(
    "origin", [b"https://evil.example", b"null", b"https://app.example.com.evil.example", APP.upper()]
)
def test_a_page_that_is_not_named_gets_no_permission(origin: bytes) -> None:
    edge = named(APP.decode())
    edge.client.data_received(PREFLIGHT + b"Origin: " + origin + b"\r\n\r\n")
    assert edge.answers() == [204]
    assert b"access-control" not in edge.wire.sent
    assert b"vary: origin" in lines_of(edge)


def test_without_named_origins_nothing_of_it_is_sent() -> None:
    edge = Edge()
    edge.client.data_received(PREFLIGHT + ORIGIN + b"\r\n" + HEAD + ORIGIN + b"\r\n")
    assert b"access-control" not in edge.wire.sent
    assert b"vary" not in edge.wire.sent


@pytest.mark.parametrize("kind", ["answer", "stream", "refusal at the edge"])
def test_every_answer_may_be_read_by_a_named_page(kind: str) -> None:
    edge = named(APP.decode())
    path = b"/later" if kind == "stream" else b"/x"
    end = b"Content-Length: 999999999\r\n\r\n" if kind.startswith("refusal") else b"\r\n"
    edge.client.data_received(HEAD.replace(b"/x", path) + ORIGIN + end)
    if kind == "stream":
        edge.client.start_stream(b"x-a: b\r\n")
    lines = lines_of(edge)
    assert b"access-control-allow-origin: " + APP in lines
    assert b"access-control-expose-headers: *" in lines
    assert b"vary: origin" in lines


def test_a_request_without_an_origin_gets_none_of_it() -> None:
    edge = named("*")
    edge.client.data_received(HEAD + b"\r\n")
    assert b"access-control" not in edge.wire.sent


@pytest.mark.parametrize(
    "origin",
    ["https://app.example.com/", "app.example.com", "https://App.example.com", "https://*.example.com", "", "null"],
)
def test_what_no_browser_sends_as_its_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(StartupError, match="cors_origins"):
        check_origins((origin,))


def test_origins_as_browsers_write_them_are_taken() -> None:
    good: Any = ("*", "https://app.example.com", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc")
    check_origins(good)
