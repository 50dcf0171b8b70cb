"""Anthropic's clients ask for models under OpenAI's paths; the header says whose answer they understand."""

import http.client
import json
from typing import Any

import pytest
from tests.support.yard import Yard


@pytest.fixture(scope="module", autouse=True)
def _deployed(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 2})


def ask(yard: Yard, path: str, *, key: str = "") -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", yard.port, timeout=30)
    connection.request("GET", path, headers={"x-api-key": key or yard.admin_key, "anthropic-version": "2023-06-01"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), answer.headers
    connection.close()
    return found


def test_models_are_listed_and_shown_in_their_form(yard: Yard) -> None:
    status, body, _ = ask(yard, "/v1/models")
    assert (status, body["first_id"], body["has_more"]) == (200, "sim", False)
    status, body, _ = ask(yard, "/v1/models/sim")
    assert (status, body["type"], body["id"]) == (200, "model", "sim")


def test_refusals_have_their_form_too(yard: Yard) -> None:
    status, body, headers = ask(yard, "/v1/models/nobody")
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert headers["request-id"] == body["request_id"]
    status, body, _ = ask(yard, "/v1/models", key="wrong")
    assert (status, body["error"]["type"]) == (401, "authentication_error")
