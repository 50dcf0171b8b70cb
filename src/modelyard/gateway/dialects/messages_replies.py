"""What else Anthropic's clients are told in their own form: errors, limits, models, counts.

Statuses and texts stay the platform's own; only the shape and the names of the
kinds of errors differ. All of it is pure.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from modelyard.errors import ApiError
from modelyard.policy.limits import Allowance

PREFIX = "/v1/messages"
VERSION_HEADER = b"anthropic-version"
"""Who sends it wants Anthropic's form where a path is OpenAI's too."""

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_encode = msgspec.json.Encoder().encode


class _Detail(msgspec.Struct):
    type: str
    message: str


class _Error(msgspec.Struct, tag="error", tag_field="type"):
    error: _Detail
    request_id: str


class _Count(msgspec.Struct):
    input_tokens: int


class _Model(msgspec.Struct, tag="model", tag_field="type"):
    id: str
    display_name: str
    created_at: datetime
    lifecycle: str = "active"


class _ModelList(msgspec.Struct):
    data: list[_Model]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class ModelLike(Protocol):
    """A model as the platform lists it; ``created`` is in Unix seconds."""

    @property
    def id(self) -> str:
        """Return the name that requests give."""
        ...

    @property
    def created(self) -> int:
        """Return when it was made."""
        ...


def speaks_messages(path: str) -> bool:
    """Say whether refusals on ``path`` are to be in this form."""
    return path.startswith(PREFIX) and path[len(PREFIX) :][:1] in ("", "/")


# --- errors ---


def error_type(status: int) -> str:
    """Return Anthropic's kind of error for a status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return the body, or the data of the event, for ``error``. Paths are written as ``messages.0.content``."""
    message = error.message
    if error.param and "[" in error.param:
        message = message.replace(error.param, error.param.replace("[", ".").replace("]", ""), 1)
    return _encode(_Error(_Detail(error_type(error.status), message), request_id))


def request_id_line(request_id: str) -> bytes:
    """Return the header line in which the SDK looks for the request's id."""
    return b"request-id: %b\r\n" % request_id.encode()


# --- limits ---


def limit_lines(allowances: Iterable[Allowance], *, now_s: float, unix_s: float) -> bytes:
    """Return the ``anthropic-ratelimit-*`` header lines: of the key or its tenant, whichever has less left.

    ``reset`` is the time (RFC 3339) at which all of it will be there again; ``now_s`` is monotonic.
    """
    found: dict[bytes, tuple[int, float]] = {}
    for allowance in allowances:
        allowance.refill(now_s)
        for kind, limit, left in (
            (b"requests", allowance.requests_limit, allowance.requests_left),
            (b"tokens", allowance.tokens_limit, allowance.tokens_left),
        ):
            if limit is not None and (kind not in found or left < found[kind][1]):
                found[kind] = (limit, left)
    lines = b""
    for kind, (limit, left) in found.items():
        missing_s = max(0.0, limit - left) * 60 / limit if limit else 60.0
        reset = rfc3339(unix_s + missing_s)
        lines += b"anthropic-ratelimit-%b-limit: %d\r\nanthropic-ratelimit-%b-remaining: %d\r\n" % (
            kind, limit, kind, max(0.0, left),
        )  # fmt: skip
        lines += b"anthropic-ratelimit-%b-reset: %b\r\n" % (kind, reset.encode())
    return lines


def rfc3339(unix_s: float) -> str:
    """Return a time in whole seconds of UTC, rounded up: what it promises must be true by then."""
    return f"{datetime.fromtimestamp(math.ceil(unix_s), UTC):%Y-%m-%dT%H:%M:%SZ}"


# --- models and counts ---


def model_list(models: Sequence[ModelLike]) -> bytes:
    """Return ``GET /v1/models``; all models are on the one page."""
    data = [_model(model) for model in models]
    return _encode(_ModelList(data, data[0].id if data else None, data[-1].id if data else None))


def model_info(model: ModelLike) -> bytes:
    """Return ``GET /v1/models/{id}``."""
    return _encode(_model(model))


def _model(model: ModelLike) -> _Model:
    return _Model(model.id, model.id, datetime.fromtimestamp(model.created, UTC))


def count_body(input_tokens: int) -> bytes:
    """Return the answer of ``POST /v1/messages/count_tokens``."""
    return _encode(_Count(input_tokens))
