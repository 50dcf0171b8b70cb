"""S13: every route is closed unless it is on a list of six; no method, disguise or lesser key opens one."""

import json

import pytest
from tests.support.wire import Answer, exchange, request_bytes
from tests.support.yard import Yard

PUBLIC = {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS"]
DISGUISES = [
    lambda path: path,
    lambda path: path + "/",
    lambda path: "/" + path,
    lambda path: path.replace("/v1/", "/v1//", 1),
    lambda path: path.replace("/v1/", "/v1/./", 1),
    lambda path: path.replace("/v1/", "/v1/%2e/", 1),
    lambda path: path.replace("/v1/", "/docs/../v1/", 1),
    lambda path: path.replace("/v1/", "/console/..%2fv1/", 1),
    lambda path: path.upper(),
    lambda path: path + ";x=y",
    lambda path: path + "?key=x",
    lambda path: path + "%00",
]


def paths(yard: Yard) -> list[str]:
    """Return every path of the platform's own description, with something in the place of its parameters."""
    described = json.loads(yard.call("GET", "/openapi.json").body)["paths"]
    return [path.replace("{", "x").replace("}", "x") for path in described if path not in PUBLIC]


def ask(yard: Yard, method: str, path: str, key: str | None) -> Answer | None:
    headers = [("Connection", "close"), ("Content-Type", "application/json")]
    if key is not None:
        headers.append(("Authorization", f"Bearer {key}"))
    body = b"{}" if method in ("POST", "PUT", "PATCH") else b""
    answers = exchange(yard.port, request_bytes(method, path, body=body, headers=headers))
    assert len(answers) <= 1, f"{len(answers)} answers to {method} {path}"
    return answers[0] if answers else None


@pytest.mark.parametrize("number", range(len(DISGUISES)))
def test_nothing_opens_without_a_key(yard: Yard, number: int) -> None:
    found = paths(yard)
    assert len(found) > 15
    for path in map(DISGUISES[number], found):
        for method in METHODS:
            answer = ask(yard, method, path, None)
            assert answer is not None, f"no answer to {method} {path}"
            if method == "OPTIONS" and answer.status == 204:
                assert not answer.body
                continue
            assert answer.status in (400, 401, 404, 405, 501), f"{method} {path} answers {answer.status}"


def test_a_key_for_inference_changes_nothing(yard: Yard) -> None:
    key = yard.new_key()
    before = yard.get("/v1/keys"), yard.get("/v1/endpoints")
    for path in paths(yard):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = ask(yard, method, path, key)
            assert answer is not None
            assert 400 <= answer.status < 500, f"{method} {path} answers {answer.status}"
    after = yard.get("/v1/keys"), yard.get("/v1/endpoints")
    for old, new in zip(before, after, strict=True):
        assert [item["id"] for item in old["data"]] == [item["id"] for item in new["data"]]


def test_a_page_of_another_site_gets_no_permission_and_no_cookie_helps(yard: Yard) -> None:
    for method in ("POST", "DELETE", "PATCH"):
        headers = [("Origin", "https://evil.example"), ("Cookie", "session=x"), ("Connection", "close")]
        (answer,) = exchange(yard.port, request_bytes(method, "/v1/keys", body=b"{}", headers=headers))
        assert answer.status == 401
        assert not [name for name, _ in answer.headers if name.startswith("access-control-")]
    headers = [("Origin", "https://evil.example"), ("Access-Control-Request-Method", "POST"), ("Connection", "close")]
    (answer,) = exchange(yard.port, request_bytes("OPTIONS", "/v1/keys", headers=headers))
    assert not [name for name, _ in answer.headers if name.startswith("access-control-")]
