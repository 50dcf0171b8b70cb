"""Errors, limits, models and counts in Anthropic's form."""

import json
from datetime import UTC, datetime

import pytest

from modelyard import errors
from modelyard.domain.tenants import Limits
from modelyard.errors import ApiError
from modelyard.gateway.answers import ModelObject
from modelyard.gateway.dialects import messages_replies as replies
from modelyard.policy.limits import Allowance

NOON_S = datetime(2026, 5, 31, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.invalid_json("x"), "invalid_request_error"),
        (errors.invalid_api_key(), "authentication_error"),
        (ApiError(402, code=None, message="m"), "billing_error"),
        (errors.tenant_suspended(), "permission_error"),
        (errors.model_not_found("m"), "not_found_error"),
        (errors.method_not_allowed("GET", "/v1/messages"), "invalid_request_error"),
        (errors.conflict("m"), "invalid_request_error"),
        (errors.body_too_large(1), "request_too_large"),
        (errors.unsupported_content_encoding("gzip"), "invalid_request_error"),
        (errors.queue_full("m", retry_after_s=1), "rate_limit_error"),
        (errors.headers_too_large(1), "invalid_request_error"),
        (errors.internal_error("req_1"), "api_error"),
        (errors.engine_lost(), "api_error"),
        (errors.overloaded(retry_after_s=1), "overloaded_error"),
        (errors.total_timeout(1), "timeout_error"),
        (ApiError(529, code=None, message="m"), "overloaded_error"),
    ],
)
def test_each_status_has_its_kind_of_error(error: ApiError, kind: str) -> None:
    assert json.loads(replies.error_body(error, "req_1")) == {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": "req_1",
    }


def test_paths_are_written_with_dots() -> None:
    error = errors.invalid_value("messages[0].content[12].source", "no")
    assert json.loads(replies.error_body(error, "r"))["error"]["message"] == (
        "Invalid 'messages.0.content.12.source': no."
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/batches", True),
        ("/v1/messagesx", False),
        ("/v1/models", False),
        ("/v1/chat/completions", False),
    ],
)
def test_which_routes_speak_so(path: str, expected: bool) -> None:
    assert replies.speaks_messages(path) is expected


def lines_of(allowances: list[Allowance], now_s: float) -> dict[str, str]:
    lines = replies.limit_lines(allowances, now_s=now_s, unix_s=NOON_S + now_s).decode()
    assert lines == "" or lines.endswith("\r\n")
    return dict(line.split(": ") for line in lines.splitlines())


def test_limits_are_those_of_whichever_has_less_left() -> None:
    key = Allowance.full(Limits(requests_per_minute=60), now_s=0)
    tenant = Allowance.full(Limits(requests_per_minute=600, tokens_per_minute=1000), now_s=0)
    key.requests_left -= 30.5
    tenant.tokens_left -= 1100
    assert lines_of([key, tenant], 0.0) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "29",
        "anthropic-ratelimit-requests-reset": "2026-05-31T12:00:31Z",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-05-31T12:01:06Z",
    }


def test_limits_refill_and_an_unlimited_key_has_none() -> None:
    key = Allowance.full(Limits(requests_per_minute=60), now_s=0)
    key.requests_left = 0
    assert lines_of([key], 10.0)["anthropic-ratelimit-requests-remaining"] == "10"
    assert lines_of([Allowance.full(Limits(), now_s=0)], 0.0) == {}


def test_models_are_listed_in_one_page() -> None:
    models = [ModelObject("a/b", int(NOON_S), "platform"), ModelObject("c", 0, "t-1")]
    first = {
        "type": "model",
        "id": "a/b",
        "display_name": "a/b",
        "created_at": "2026-05-31T12:00:00Z",
        "lifecycle": "active",
    }
    found = json.loads(replies.model_list(models))
    assert found["data"][0] == first == json.loads(replies.model_info(models[0]))
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("a/b", "c", False)
    assert json.loads(replies.model_list([])) == {"data": [], "first_id": None, "last_id": None, "has_more": False}


def test_small_replies() -> None:
    assert replies.count_body(7) == b'{"input_tokens":7}'
    assert replies.request_id_line("req_1") == b"request-id: req_1\r\n"
