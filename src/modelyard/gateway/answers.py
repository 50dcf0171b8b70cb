"""The bytes the gateway writes itself: heads of answers, health, metrics, models."""

from typing import TYPE_CHECKING

import msgspec

from modelyard import errors
from modelyard.domain.endpoints import Progress
from modelyard.domain.tenants import ApiKey, Identity, Scope
from modelyard.errors import ApiError
from modelyard.policy.dispatch import ReplicaLoad
from modelyard.policy.limits import Allowance

if TYPE_CHECKING:
    from modelyard.gateway.catalog import EndpointState, KeyState
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.server import ClientConnection, Request

_JSON = b"content-type: application/json\r\n"
_STREAM = (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache, no-transform\r\n"
    b"x-accel-buffering: no\r\n"
)
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


def identity_of(record: ApiKey) -> Identity:
    """Return who a key is."""
    return Identity(record.id, record.tenant_id, record.scopes)


# --- heads ---


def answer_headers(exchange: "Exchange") -> bytes:
    """Return the header lines of a JSON answer."""
    return _JSON + _common(exchange)


def stream_headers(exchange: "Exchange") -> bytes:
    """Return the header lines of a stream (``reference/api.md`` 1.3)."""
    return _STREAM + _common(exchange)


def exchange_error_headers(exchange: "Exchange", error: ApiError) -> bytes:
    """Return the header lines of an error of a request that was admitted."""
    return _JSON + _common(exchange) + _lines(error.headers())


def error_headers(error: ApiError, request_id: str) -> bytes:
    """Return the header lines of a refusal."""
    return b"%bx-request-id: %b\r\n%b" % (_JSON, request_id.encode(), _lines(error.headers() + error.limits))


def limit_headers(key: "KeyState") -> list[tuple[str, str]]:
    """Return OpenAI's ``x-ratelimit-*`` headers: of the key, or its tenant where only that is limited."""
    found = []
    for kind in ("requests", "tokens"):
        allowance = _limited(key, kind)
        if allowance is None:
            continue
        limit, left = _level(allowance, kind)
        found += [
            (f"x-ratelimit-limit-{kind}", str(limit)),
            (f"x-ratelimit-remaining-{kind}", str(max(0, int(left)))),
            (f"x-ratelimit-reset-{kind}", duration((limit - left) * 60 / limit if limit else 60.0)),
        ]
    return found


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: ``12ms``, ``1s``, ``6m0s``."""
    milliseconds = max(0, int(seconds * 1000 + 0.5))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest // 1000}s"


def engine_head(exchange: "Exchange", replica: ReplicaLoad, length: int) -> bytes:
    """Return the head of a request to an engine, from nothing but what the gateway knows (S25)."""
    route = replica.route
    return (
        b"POST %b HTTP/1.1\r\nhost: %b:%d\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n"
        b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n"
    ) % (
        exchange.route.encode(),
        route.host.encode(),
        route.port,
        route.secret.encode(),
        exchange.request_id.encode(),
        length,
    )


def loading_comment(progress: Progress) -> bytes:
    """Return the SSE comment for a stream that waits for a load: one line, one newline (``reference/api.md`` 1.3.3)."""
    parts = [f" {progress.percent} %" if progress.percent is not None else ""]
    if progress.eta_s is not None:
        parts.append(f"~{max(1, round(progress.eta_s))} s")
    parts.append(str(progress.stage))
    return (": loading" + ", ".join(part for part in parts if part or part is parts[0]) + "\n").encode()


def _common(exchange: "Exchange") -> bytes:
    lines = b"x-request-id: %b\r\n" % exchange.request_id.encode()
    key = exchange.key
    if _is_limited(key):
        now_s = exchange.gateway.clock.monotonic_s()
        for allowance in key.allowances:
            allowance.refill(now_s)
        lines += _lines(limit_headers(key))
    if exchange.call.ignored:
        # Names of unknown fields come from the caller; only plain ones may stand in a header.
        names = [name for name in exchange.call.ignored if name.isascii() and name.isprintable() and len(name) <= 64]
        lines += b"x-modelyard-ignored: %b\r\n" % ", ".join(names[:32]).encode()
    if exchange.attempts > 1:
        lines += b"x-modelyard-attempts: %d\r\n" % exchange.attempts
    return lines


def _is_limited(key: "KeyState") -> bool:
    return any(a.requests_limit is not None or a.tokens_limit is not None for a in key.allowances)


def _limited(key: "KeyState", kind: str) -> Allowance | None:
    """Return the allowance with the least left of ``kind``."""
    found = [a for a in key.allowances if (a.requests_limit if kind == "requests" else a.tokens_limit) is not None]
    return min(found, key=lambda allowance: _level(allowance, kind)[1], default=None)


def _level(allowance: Allowance, kind: str) -> tuple[int, float]:
    if kind == "requests":
        return allowance.requests_limit or 0, allowance.requests_left
    return allowance.tokens_limit or 0, allowance.tokens_left


def _lines(headers: list[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


# --- routes ---


def answer_probe(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``/healthz`` (the process lives), ``/readyz`` (it has a routing table) and ``/metrics``."""
    if request.method not in (b"GET", b"HEAD"):
        raise errors.method_not_allowed(request.method.decode("latin-1"), request.path)
    head = _JSON + b"x-request-id: %b\r\n" % request_id.encode()
    if request.path == "/healthz":
        client.respond(200, head, b'{"status":"ok"}')
    elif request.path == "/readyz":
        is_ready = gateway.catalog.table is not None
        client.respond(200 if is_ready else 503, head, b'{"status":"ready"}' if is_ready else b'{"status":"starting"}')
    else:
        if not gateway.has_public_metrics:
            gateway.authenticate(request, Scope.ADMIN)
        client.respond(
            200,
            b"content-type: text/plain; version=0.0.4; charset=utf-8\r\nx-request-id: %b\r\n" % request_id.encode(),
            gateway.metrics.render(),
        )


def answer_models(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``GET /v1/models``: what the key may use."""
    key = gateway.authenticate(request, Scope.INFERENCE)
    models = [_model(endpoint) for endpoint in gateway.catalog.visible(key)]
    client.respond(200, _JSON + b"x-request-id: %b\r\n" % request_id.encode(), _encode(ModelList(models)))


def answer_model(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer ``GET /v1/models/{id}``; names may hold a slash, raw or as ``%2F``."""
    from urllib.parse import unquote

    key = gateway.authenticate(request, Scope.INFERENCE)
    name = unquote(request.path.removeprefix("/v1/models/"))
    endpoint = gateway.catalog.endpoint(key, name)
    if endpoint is None:
        raise errors.model_not_found(name)
    client.respond(200, _JSON + b"x-request-id: %b\r\n" % request_id.encode(), _encode(_model(endpoint)))


def _model(endpoint: "EndpointState[Exchange]") -> ModelObject:
    route = endpoint.route
    return ModelObject(route.name, route.created_at, "platform" if route.is_shared else route.tenant_id)
