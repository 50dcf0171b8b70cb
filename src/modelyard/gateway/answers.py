"""The bytes the gateway writes itself: heads of answers, health, metrics, models."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from modelyard import errors
from modelyard.domain.endpoints import Progress
from modelyard.domain.tenants import Scope
from modelyard.errors import ApiError
from modelyard.gateway.dialects.messages_replies import (
    VERSION_HEADER,
    model_info,
    model_list,
    request_id_line,
    speaks_messages,
)
from modelyard.policy.limits import REFILL_S, Allowance

if TYPE_CHECKING:
    from modelyard.gateway.catalog import EndpointState
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.server import ClientConnection, Request

_JSON = b"content-type: application/json\r\n"
_STREAM = (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache, no-transform\r\n"
    b"x-accel-buffering: no\r\n"
)
QUEUED_S_MIN = 0.001
"""A wait in line below this is not worth a header."""
_encode = msgspec.json.Encoder().encode


class ModelObject(msgspec.Struct):
    """OpenAI's model object."""

    id: str
    created: int
    owned_by: str
    object: str = "model"


class ModelList(msgspec.Struct):
    """OpenAI's list of models."""

    data: list[ModelObject]
    object: str = "list"


# --- heads ---


def answer_headers(exchange: "Exchange", content_type: bytes = b"") -> bytes:
    """Return the header lines of a whole answer, JSON if nothing else is said."""
    if content_type:
        return b"content-type: %b\r\n%b" % (content_type, _common(exchange))
    return _JSON + _common(exchange)


def stream_headers(exchange: "Exchange") -> bytes:
    """Return the header lines of a stream (``reference/api.md`` 1.3)."""
    return _STREAM + _common(exchange)


def exchange_error_headers(exchange: "Exchange", error: ApiError) -> bytes:
    """Return the header lines of an error of a request that was admitted."""
    return _JSON + _common(exchange) + _lines(error.headers())


def error_headers(error: ApiError, request_id: str, path: str = "") -> bytes:
    """Return the header lines of a refusal."""
    return b"%bx-request-id: %b\r\n%b%b%b" % (
        _JSON, request_id.encode(), _other_id(path, request_id), _lines(error.headers()), error.limits,
    )  # fmt: skip


def json_headers(request: "Request", request_id: str) -> bytes:
    """Return the header lines of a JSON answer that no exchange gives."""
    return b"%bx-request-id: %b\r\n%b" % (_JSON, request_id.encode(), _other_id(request.path, request_id))


def _other_id(path: str, request_id: str) -> bytes:
    """Return the line in which another API's clients look for the id of their request."""
    return request_id_line(request_id) if speaks_messages(path) else b""


def limit_lines(allowances: Iterable[Allowance], now_s: float) -> bytes:
    """Return OpenAI's ``x-ratelimit-*`` header lines: of the key or its tenant, whichever has less left."""
    requests_limit: int | None = None
    tokens_limit: int | None = None
    requests_left = tokens_left = 0.0
    of_requests = of_tokens = None
    for allowance in allowances:
        if now_s - allowance.at_s >= REFILL_S:
            allowance.refill(now_s)
        limit = allowance.requests_limit
        if limit is not None and (requests_limit is None or allowance.requests_left < requests_left):
            requests_limit, requests_left, of_requests = limit, allowance.requests_left, allowance.whole
        limit = allowance.tokens_limit
        if limit is not None and (tokens_limit is None or allowance.tokens_left < tokens_left):
            tokens_limit, tokens_left, of_tokens = limit, allowance.tokens_left, allowance.whole
    lines = b""
    if requests_limit is not None:
        reset = b"0ms" if requests_left >= requests_limit else _reset(requests_limit, requests_left)
        # What is left is this worker's; the limit is what was agreed.
        shown = requests_limit if of_requests is None else of_requests[0]
        lines = _LIMIT_LINES[0] % (shown, requests_left > 0 and requests_left, reset)
    if tokens_limit is not None:
        reset = b"0ms" if tokens_left >= tokens_limit else _reset(tokens_limit, tokens_left)
        shown = tokens_limit if of_tokens is None else of_tokens[1]
        lines += _LIMIT_LINES[1] % (shown, tokens_left > 0 and tokens_left, reset)
    return lines


def _reset(limit: int, left: float) -> bytes:
    """Return when the bucket will be full again."""
    milliseconds = (limit - left) * 60_000 / limit if limit else 60_000.0
    if milliseconds < 999.5:
        return b"%dms" % (milliseconds + 0.5)  # nearly always: ``duration`` for half the price
    return duration(milliseconds / 1000).encode()


_LIMIT_LINES = [
    b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n" % (kind, kind, kind)
    for kind in (b"requests", b"tokens")
]


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: ``12ms``, ``1s``, ``6m0s``."""
    milliseconds = max(0, int(seconds * 1000 + 0.5))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest // 1000}s"


def loading_comment(progress: Progress) -> bytes:
    """Return the SSE comment for a stream that waits for a load: one line, one newline (``reference/api.md`` 1.3.3)."""
    parts = [f" {progress.percent} %" if progress.percent is not None else ""]
    if progress.eta_s is not None:
        parts.append(f"~{max(1, round(progress.eta_s))} s")
    parts.append(str(progress.stage))
    return (": loading" + ", ".join(part for part in parts if part or part is parts[0]) + "\n").encode()


def queue_comment(position: int, wait_s: float | None) -> bytes:
    """Return the SSE comment for a stream that waits in line; ``position`` 0 is next."""
    expected = f", ~{max(1, round(wait_s))} s" if wait_s is not None else ""
    return f": queued, position {position + 1}{expected}\n".encode()


def error_event(exchange: "Exchange", error: ApiError) -> bytes:
    """Return the last event of a stream that broke, in the shape of the caller's API."""
    if exchange.reply is not None:
        return exchange.reply.fail(error)
    if exchange.call.translation is not None:
        return exchange.call.translation.stream(exchange.request_id).fail(error)
    return b"data: " + error.body() + b"\n\n"


def _common(exchange: "Exchange") -> bytes:
    lines = b"x-request-id: %b\r\n%b" % (
        exchange.request_id.encode(),
        limit_lines(exchange.reservation.allowances, exchange.gateway.clock.monotonic_s()),
    )
    if exchange.call.ignored:
        # Names of unknown fields come from the caller; only plain ones may stand in a header.
        names = [name for name in exchange.call.ignored if name.isascii() and name.isprintable() and len(name) <= 64]
        lines += b"x-modelyard-ignored: %b\r\n" % ", ".join(names[:32]).encode()
    if exchange.call.translation is not None:
        lines += _other_id(exchange.route, exchange.request_id)
    if exchange.queued_s >= QUEUED_S_MIN:
        lines += b"x-modelyard-queued-ms: %d\r\n" % (exchange.queued_s * 1000)
    if exchange.attempts > 1:
        lines += b"x-modelyard-attempts: %d\r\n" % exchange.attempts
    return lines


def _lines(headers: list[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


# --- routes ---


def answer_probe(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``/healthz`` (the process lives), ``/readyz`` (it knows whom to serve, and how much) and ``/metrics``."""
    if request.method not in (b"GET", b"HEAD"):
        raise errors.method_not_allowed(request.method.decode("latin-1"), request.path)
    head = _JSON + b"x-request-id: %b\r\n" % request_id.encode()
    if request.path == "/healthz":
        client.respond(200, head, b'{"status":"ok"}')
    elif request.path == "/readyz":
        is_ready = gateway.is_ready()
        client.respond(200 if is_ready else 503, head, b'{"status":"ready"}' if is_ready else b'{"status":"starting"}')
    else:
        if not gateway.has_public_metrics:
            gateway.authenticate(request, Scope.ADMIN)
        head = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\nx-request-id: %b\r\n" % request_id.encode()
        if gateway.siblings is not None:
            gateway.siblings.answer(client, head)
        else:
            client.respond(200, head, gateway.metrics.render())


def answer_models(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``GET /v1/models``: what the key may use."""
    key = gateway.authenticate(request, Scope.INFERENCE)
    models = [_model(endpoint) for endpoint in gateway.catalog.visible(key)]
    body = model_list(models) if request.header(VERSION_HEADER) else _encode(ModelList(models))
    client.respond(200, json_headers(request, request_id), body)


def answer_model(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``GET /v1/models/{id}``; names may hold a slash, raw or as ``%2F``."""
    from urllib.parse import unquote

    key = gateway.authenticate(request, Scope.INFERENCE)
    name = unquote(request.path.removeprefix("/v1/models/"))
    endpoint = gateway.catalog.endpoint(key, name)
    if endpoint is None:
        raise errors.model_not_found(name)
    model = _model(endpoint)
    body = model_info(model) if request.header(VERSION_HEADER) else _encode(model)
    client.respond(200, json_headers(request, request_id), body)


def _model(endpoint: "EndpointState[Exchange]") -> ModelObject:
    route = endpoint.route
    return ModelObject(route.name, route.created_at, "platform" if route.is_shared else route.tenant_id)
