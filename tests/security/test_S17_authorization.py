"""S13 and S17: who gets in, and what an ``Authorization`` header may look like."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.refusals import assert_refused, error_of, post
from tests.support.wire import Answer, exchange, request_bytes
from tests.support.yard import Yard

from modelyard.ids import new_api_key

PUBLIC = {"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/"}
"""Routes that answer without a key (/metrics while the gateway listens on loopback only)."""


def get(yard: Yard, path: str, *headers: tuple[str, str]) -> Answer:
    answers = exchange(yard.port, request_bytes("GET", path, headers=[*headers, ("Connection", "close")]))
    assert len(answers) == 1
    return answers[0]


GOOD: dict[str, Callable[[str], str]] = {
    "Bearer": lambda key: f"Bearer {key}",
    "bearer": lambda key: f"bearer {key}",
    "BEARER": lambda key: f"BEARER {key}",
    "space behind": lambda key: f"Bearer {key}  ",
}
BAD: dict[str, Callable[[str], str]] = {
    "empty": lambda key: "",
    "scheme only": lambda key: "Bearer",
    "scheme and blank": lambda key: "Bearer ",
    "no scheme": lambda key: key,
    "Basic": lambda key: "Basic bXk6a2V5",
    "Token": lambda key: f"Token {key}",
    "glued": lambda key: f"Bearer{key}",
    "two tokens": lambda key: f"Bearer {key} {key}",
    "comma": lambda key: f"Bearer {key}, Bearer {key}",
    "quotes": lambda key: f'Bearer "{key}"',
    "lower case": lambda key: f"Bearer {key.lower()}",
    "upper case": lambda key: f"Bearer {key.upper()}",
    "one less": lambda key: f"Bearer {key[:-1]}",
    "one more": lambda key: f"Bearer {key}x",
    "secret changed": lambda key: f"Bearer {key[:20]}{'A' if key[20] != 'A' else 'B'}{key[21:]}",
    "unknown": lambda key: f"Bearer {new_api_key()[0]}",
    "id of one, secret of another": lambda key: f"Bearer {key[:11]}{new_api_key()[0][11:]}",
    "SQL": lambda key: "Bearer my_' OR 1=1--_x",
    "SQL as long as a key": lambda key: "Bearer " + "my_' OR 1=1--_x".ljust(len(key), "x"),
    "non-ASCII": lambda key: f"Bearer my_é{key[4:]}",
    "12 KB": lambda key: f"Bearer {'x' * 12_000}",
    "null": lambda key: "Bearer null",
    "well-known": lambda key: "Bearer sk-1234",
    "newline escape": lambda key: f"Bearer {key}%0a",
}


@pytest.fixture(scope="module")
def key(yard: Yard) -> str:
    return yard.new_key()


@pytest.mark.parametrize("form", GOOD)
def test_the_scheme_is_case_insensitive(yard: Yard, key: str, form: str) -> None:
    assert get(yard, "/v1/models", ("Authorization", GOOD[form](key))).status == 200


@pytest.mark.parametrize("blank", ["  ", "\t", " \t "], ids=["two spaces", "tab", "mixed"])
def test_other_blanks_are_either_fine_or_refused(yard: Yard, key: str, blank: str) -> None:
    answer = get(yard, "/v1/models", ("Authorization", f"Bearer{blank}{key}"))
    assert answer.status in (200, 400, 401)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/endpoints"])
@pytest.mark.parametrize("form", BAD)
def test_any_other_form_is_401_and_not_echoed(yard: Yard, key: str, form: str, path: str) -> None:
    value = BAD[form](key)
    answer = get(yard, path, ("Authorization", value))
    assert_refused(answer, status=401, code="invalid_api_key")
    assert key not in bytes(answer.body).decode()
    assert len(value) < 12 or value[7:] not in bytes(answer.body).decode()


def test_a_megabyte_of_token_is_431(yard: Yard) -> None:
    answer = get(yard, "/v1/models", ("Authorization", f"Bearer {'x' * 1_000_000}"))
    assert_refused(answer, status=431)


@pytest.mark.parametrize("order", ["good first", "bad first", "twice the same"])
def test_two_authorization_headers_are_refused(yard: Yard, key: str, order: str) -> None:
    good, bad = ("Authorization", f"Bearer {key}"), ("Authorization", "Bearer sk-1234")
    headers = {"good first": [good, bad], "bad first": [bad, good], "twice the same": [good, good]}[order]
    answer = get(yard, "/v1/models", *headers)
    error_of(answer)
    assert answer.status in (400, 401)


@pytest.mark.parametrize("name", ["api_key", "key", "access_token", "token", "authorization"])
def test_a_key_in_the_query_string_is_not_taken(yard: Yard, key: str, name: str) -> None:
    assert_refused(get(yard, f"/v1/models?{name}={key}"), status=401)


def test_no_key_is_401_before_anything_is_parsed(yard: Yard) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        answers = exchange(yard.port, request_bytes("POST", path, body=b"{not json"))
        assert_refused(answers[0], status=401, code="invalid_api_key")


def test_a_key_without_the_scope_is_403(yard: Yard, key: str) -> None:
    for method, path, body in (
        ("POST", "/v1/keys", {"name": "more", "scopes": ["admin"]}),
        ("POST", "/v1/tenants", {"name": "mine"}),
        ("POST", "/v1/models/deploy", {"model_name": "mine", "framework": "simulated"}),
    ):
        reply = yard.call(method, path, body, key=key)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "permission_denied"), (path, reply)


def test_a_key_cannot_be_given_more_than_its_maker_has(yard: Yard) -> None:
    manager = str(yard.call("POST", "/v1/keys", {"name": "m", "scopes": ["manage"]}).json()["key"])
    reply = yard.call("POST", "/v1/keys", {"name": "more", "scopes": ["admin"]}, key=manager)
    assert reply.status in (400, 403), reply


def test_a_key_is_shown_once(yard: Yard) -> None:
    created = yard.call("POST", "/v1/keys", {"name": "once", "scopes": ["inference"]}).json()
    secret = created["key"].split("_")[2]
    for path in ("/v1/keys", f"/v1/keys/{created['id']}"):
        assert secret not in yard.call("GET", path).body.decode()


def routes(yard: Yard) -> list[tuple[str, str]]:
    """Return every (method, path) of the platform's own description."""
    found = json.loads(yard.call("GET", "/openapi.json").body)["paths"]
    return [(method.upper(), path) for path, methods in found.items() for method in methods]


def test_every_described_route_is_closed_without_a_key(yard: Yard) -> None:
    described = routes(yard)
    assert len(described) > 15
    for method, path in described:
        if path in PUBLIC:
            continue
        filled = path.replace("{", "x").replace("}", "x")
        body = b"{}" if method in ("POST", "PATCH", "PUT") else b""
        (answer,) = exchange(yard.port, request_bytes(method, filled, body=body, headers=[("Connection", "close")]))
        assert answer.status == 401, f"{method} {path} answers {answer.status} without a key"


DISGUISES = [
    "//v1/endpoints",
    "/v1//endpoints",
    "/v1/./endpoints",
    "/v1/x/../endpoints",
    "/v1/%65ndpoints",
    "/v1%2fendpoints",
]


@pytest.mark.parametrize(
    "path", [*DISGUISES, "/V1/endpoints", "/v1/endpoints/", "/v1/endpoints;x", "/healthz/../v1/endpoints"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
def test_no_disguise_of_a_path_opens_it(yard: Yard, method: str, path: str) -> None:
    received = exchange(yard.port, request_bytes(method, path, headers=[("Connection", "close")]))
    assert received, "no answer"
    assert received[0].status in (400, 401, 404, 405, 501), f"{method} {path}: {received[0].status}"


def test_a_revoked_key_stops_inference_too(yard: Yard, model: str) -> None:
    from tests.support.waiting import eventually

    created = yard.call("POST", "/v1/keys", {"name": "short", "scopes": ["inference"]}).json()
    body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 1}
    assert post(yard, "/v1/completions", body, key=created["key"]).status == 200
    yard.call("DELETE", f"/v1/keys/{created['id']}")
    eventually(lambda: post(yard, "/v1/completions", body, key=created["key"]).status == 401, 30, "the key is refused")
