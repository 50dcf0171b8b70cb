"""What every refusal must be: 4xx, OpenAI's error object, a request id, and nothing done."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.wire import Answer, exchange, request_bytes
from tests.support.yard import Yard

JSON = ("Content-Type", "application/json")
LEAKS = ("Traceback", "msgspec", 'File "', "sqlalchemy", "/src/", "127.0.0.1")
"""What tells how the platform is made; never in an answer."""


def post(
    yard: Yard, path: str, body: object, *, key: str | None = None, headers: Sequence[tuple[str, str]] = ()
) -> Answer:
    """POST bytes as they are, or a value as JSON, and return the one answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = [("Authorization", f"Bearer {key or yard.admin_key}"), JSON, ("Connection", "close"), *headers]
    if not raw:
        sent.append(("Content-Length", "0"))
    answers = exchange(yard.port, request_bytes("POST", path, body=raw, headers=sent), within_s=30)
    assert len(answers) == 1, f"{len(answers)} answers: {answers}"
    assert answers[0].is_complete, f"cut short: {answers[0]}"
    return answers[0]


def error_of(answer: Answer, *, host: str = "") -> dict[str, Any]:
    """Check the shape of an error answer and return its error object; it may name the ``host`` that was sent."""
    assert 400 <= answer.status < 600, f"no refusal: {answer.status} {bytes(answer.body)[:300]!r}"
    assert (answer.header("content-type") or "").startswith("application/json"), answer.headers
    assert answer.header("x-request-id"), answer.headers
    body = answer.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str), error
    assert error["param"] is None or isinstance(error["param"], str), error
    found = [leak for leak in LEAKS if leak in error["message"].replace(f"'{host}'", "")]
    assert not found, f"the message tells of the inside: {error['message']!r}"
    return error


def assert_refused(
    answer: Answer, *, status: int = 400, param: str | None = None, code: str | None = None, host: str = ""
) -> None:
    """Check that an answer is this refusal; ``param`` may be followed by a deeper path."""
    error = error_of(answer, host=host)
    assert answer.status == status, f"{answer.status} {error}"
    if param is not None:
        named = error["param"] or ""
        is_named = named == param or named.startswith((f"{param}[", f"{param}."))
        assert is_named, f"names {named!r} instead of {param!r}: {error['message']}"
    if code is not None:
        assert error["code"] == code, error


def begun(yard: Yard) -> int:
    """Return how many requests the engines have begun."""
    return sum(1 for record in yard.journal() if record["event"] == "begin")
