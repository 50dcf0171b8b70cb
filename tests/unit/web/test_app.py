"""The application around declared routes: who gets in, and what every failure looks like."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from modelyard.domain.tenants import IDENTITY_HEADER, INTERNAL_TOKEN_HEADER, Identity, Scope
from modelyard.errors import rate_limited
from modelyard.stores import StoreUnavailableError
from modelyard.web.app import BODY_BYTES_MAX, build_app
from modelyard.web.routes import Call, Empty, Route

TOKEN = "right"


class Thing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


async def echo(call: Call[Thing, Empty]) -> Thing:
    return Thing(f"{call.identity.tenant_id} {call.body.name} {call.path('thing')}")


async def fail(call: Call[Empty, Empty]) -> Thing:
    match call.path("how"):
        case "store":
            raise StoreUnavailableError("locked")
        case "limit":
            raise rate_limited("requests", limit=5, retry_after_s=2.2)
        case _:
            raise RuntimeError("secret detail /home/someone")


async def front(_: Request) -> Response:
    return PlainTextResponse("public")


APP = build_app(
    [
        Route("POST", "/v1/things/{thing:path}", Scope.MANAGE, "Echo", echo, Thing, Empty, Thing, 201),
        Route("GET", "/v1/fail/{how}", Scope.INFERENCE, "Fail", fail, Empty, Empty, Thing),
        Route("DELETE", "/v1/fail/{how}", Scope.ADMIN, "Fail", fail, Empty, Empty, Thing),
    ],
    internal_token=TOKEN,
    public={"/front": front},
)


@asynccontextmanager
async def asking(*scopes: Scope, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    found = {INTERNAL_TOKEN_HEADER: TOKEN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    if scopes:
        found[IDENTITY_HEADER] = msgspec.json.encode(Identity("key", "acme", scopes)).decode()
    transport = httpx2.ASGITransport(app=APP)
    async with httpx2.AsyncClient(transport=transport, base_url="http://yard", headers=found) as client:
        yield client


def error_of(answer: httpx2.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_handler_gets_decoded_values() -> None:
    async with asking(Scope.MANAGE, x_request_id="req_given") as client:
        answer = await client.post("/v1/things/a/b%2Fc", json={"name": "x"})
    assert answer.status_code == 201
    assert answer.json() == {"name": "acme x a/b/c"}
    assert answer.headers["x-request-id"] == "req_given"


async def test_nothing_is_answered_without_the_internal_token() -> None:
    for token in ("", "wrong", TOKEN + "x", TOKEN[:-1]):
        async with asking(Scope.ADMIN) as client:
            client.headers[INTERNAL_TOKEN_HEADER] = token
            for path in ("/front", "/v1/fail/x", "/nowhere"):
                answer = await client.get(path)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"


async def test_two_tokens_or_identities_are_none() -> None:
    identity = msgspec.json.encode(Identity("key", "acme", (Scope.ADMIN,))).decode()
    pair = [(INTERNAL_TOKEN_HEADER, TOKEN), (IDENTITY_HEADER, identity)]
    for headers, status in ((pair, 503), ([*pair, pair[0]], 401), ([*pair, pair[1]], 401)):
        transport = httpx2.ASGITransport(app=APP)
        async with httpx2.AsyncClient(transport=transport, base_url="http://yard", headers=headers) as client:
            assert (await client.get("/v1/fail/store")).status_code == status


async def test_scope_is_needed_and_told() -> None:
    async with asking() as client:
        assert (await client.post("/v1/things/a", json={"name": "x"})).status_code == 401
        assert (await client.get("/front")).text == "public"
    async with asking(Scope.INFERENCE) as client:
        answer = await client.post("/v1/things/a", content=b"not even JSON")
        assert answer.status_code == 403
        assert "'manage'" in str(error_of(answer)["message"])
    async with asking(Scope.INFERENCE, x_modelyard_identity="garbage") as client:
        client.headers[IDENTITY_HEADER] = "garbage"
        assert (await client.get("/v1/fail/limit")).status_code == 401


async def test_unknown_routes_and_methods_are_errors_in_json() -> None:
    async with asking(Scope.ADMIN) as client:
        for path in ("/", "/v1/nothing", "/V1/fail/x", "//v1/fail/x", "/v1/fail/x/", "/v1/%2e/fail/x"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert error_of(answer)["code"] == "unknown_url"
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "BREW"):
            answer = await client.request(method, "/v1/fail/x")
            assert answer.status_code == 405
            assert error_of(answer)["code"] == "method_not_allowed"
            assert {name.strip() for name in answer.headers["allow"].split(",")} == {"GET", "HEAD", "DELETE"}


async def test_failures_are_one_shape(caplog: pytest.LogCaptureFixture) -> None:
    async with asking(Scope.INFERENCE, x_request_id="req_1") as client:
        answer = await client.get("/v1/fail/store")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "storage_unavailable")
        answer = await client.get("/v1/fail/limit")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        with caplog.at_level(logging.ERROR):
            answer = await client.get("/v1/fail/bug")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
        assert "req_1" in str(error_of(answer)["message"])
        assert "secret" not in answer.text
        assert "secret detail" in caplog.text


async def test_bad_request_ids_are_replaced() -> None:
    async with asking(x_request_id="a b\tc") as client:
        assert (await client.get("/front")).headers["x-request-id"].startswith("req_")


async def test_big_and_compressed_bodies_are_refused() -> None:
    async with asking(Scope.MANAGE) as client:
        answer = await client.post("/v1/things/a", content=b" " * (BODY_BYTES_MAX + 1))
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
        answer = await client.post("/v1/things/a", content=b"{}", headers={"content-encoding": "gzip"})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_content_encoding")


async def test_absent_body_names_the_first_missing_field() -> None:
    async with asking(Scope.MANAGE) as client:
        assert error_of(await client.post("/v1/things/a"))["param"] == "name"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PUT", "/v1/nowhere", 404), ("PUT", "/v1/fail/x", 405), ("DELETE", "/v1/fail/x", 403)],
)
async def test_a_refusal_goes_out_at_once_and_ends_when_the_rest_of_the_body_was_read(
    method: str, path: str, status: int
) -> None:
    told: list[str | int] = []
    pieces = [b"x" * 1000] * 3

    async def receive() -> Message:
        told.append("read")
        pieces.pop()
        return {"type": "http.request", "body": b"", "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])
        else:
            told.append("more" if message.get("more_body") else "end")

    identity = msgspec.json.encode(Identity("key", "acme", (Scope.INFERENCE,)))
    headers = [
        (INTERNAL_TOKEN_HEADER.encode(), TOKEN.encode()),
        (IDENTITY_HEADER.encode(), identity),
        (b"content-length", b"3000"),
    ]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    await APP(scope, receive, send)
    assert told == [status, "more", "read", "read", "read", "end"]
