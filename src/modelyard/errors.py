"""Every failure a caller can see, on one page.

An ``ApiError`` is what the caller did or what the platform cannot do now; it
becomes OpenAI's error object ``{"error": {message, type, param, code}}`` on
every route. The message says what is wrong and what to do; nothing internal
(paths, addresses, engine text, tracebacks) is ever put into it.
``docs/reference/errors.md`` lists the codes, and a test keeps it complete.
"""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object; all four keys are always present (OpenAI's schema ``Error``)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A refusal or failure to be shown to the caller.

    ``retry_after_s`` becomes ``retry-after`` (whole seconds, at least 1);
    ``should_retry=False`` becomes ``x-should-retry: false``, which stops the
    OpenAI SDKs from repeating what cannot succeed.
    """

    def __init__(
        self,
        status: int,
        *,
        code: str | None,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.limits = b""
        """``x-ratelimit-*`` header lines to send with it."""

    def body(self) -> bytes:
        """Return the JSON body."""
        return _encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that belong to this error, lower case."""
        found: list[tuple[str, str]] = []
        if self.retry_after_s is not None:
            found.append(("retry-after", str(max(1, round(self.retry_after_s + 0.499)))))
        if self.should_retry is not None:
            found.append(("x-should-retry", "true" if self.should_retry else "false"))
        return found


_encode = msgspec.json.Encoder().encode


# --- 400: the request itself ------------------------------------------------


def invalid_json(reason: str) -> ApiError:
    """Return the error for a body that is not one JSON object in UTF-8."""
    return ApiError(400, code="invalid_json", message=f"The request body is not valid JSON: {reason}.")


def invalid_value(param: str, reason: str, *, code: str = "invalid_value") -> ApiError:
    """Return the error for a field with a wrong type or value; ``param`` is a path like ``messages[0].role``."""
    return ApiError(400, code=code, param=param, message=f"Invalid '{param}': {reason}.")


def missing_parameter(param: str) -> ApiError:
    """Return the error for a required field that is absent."""
    return ApiError(
        400,
        code="missing_required_parameter",
        param=param,
        message=f"Missing required parameter: '{param}'.",
    )


def unsupported_parameter(param: str, reason: str) -> ApiError:
    """Return the error for a field that is known and cannot be honoured here."""
    return ApiError(
        400, code="unsupported_parameter", param=param, message=f"Unsupported parameter '{param}': {reason}."
    )


def bad_request(code: str, message: str, *, param: str | None = None) -> ApiError:
    """Return a 400 with a code of its own."""
    return ApiError(400, code=code, message=message, param=param)


def route_unsupported(model: str, route: str) -> ApiError:
    """Return the error for a model whose engine does not serve this API."""
    return ApiError(
        400,
        code="route_unsupported",
        param="model",
        message=f"The model '{model}' does not support {route}. Use a model that does; see GET /v1/models.",
    )


# --- 401, 403, 404, 405, 408, 409, 413, 415, 431 ----------------------------------


def invalid_api_key() -> ApiError:
    """Return the error for a missing, malformed, unknown, expired or revoked key; one text for all of them."""
    return ApiError(
        401,
        code="invalid_api_key",
        type="authentication_error",
        message="Missing or invalid API key. Send 'Authorization: Bearer <key>'; 'modelyard keys create' makes one.",
    )


def permission_denied(needed_scope: str) -> ApiError:
    """Return the error for a valid key that lacks a scope."""
    return ApiError(
        403,
        code="permission_denied",
        type="permission_error",
        message=f"This API key lacks the scope '{needed_scope}'. Use a key that has it, or ask your administrator.",
    )


def tenant_suspended() -> ApiError:
    """Return the error for a good key of a tenant that an operator has stopped."""
    return ApiError(
        403,
        code="tenant_suspended",
        type="permission_error",
        message="This tenant is suspended. Ask the operator of the platform.",
    )


def model_not_found(name: str) -> ApiError:
    """Return the error for a model that does not exist, or not for this key (the two look the same)."""
    return ApiError(
        404,
        code="model_not_found",
        param="model",
        message=f"The model '{name[:96]}' does not exist or you do not have access to it. See GET /v1/models.",
    )


def not_found(what: str) -> ApiError:
    """Return the error for a missing object; ``what`` is like ``endpoint 'ep-1'``."""
    return ApiError(404, code="not_found", message=f"No such {what}.")


def unknown_url(method: str, path: str) -> ApiError:
    """Return the error for a route that does not exist."""
    return ApiError(404, code="unknown_url", message=f"Invalid URL ({method} {path[:200]}). See /docs for the routes.")


def method_not_allowed(method: str, path: str) -> ApiError:
    """Return the error for a route that exists under another method."""
    return ApiError(405, code="method_not_allowed", message=f"{path[:200]} does not accept {method}. See /docs.")


def conflict(message: str, *, param: str | None = None) -> ApiError:
    """Return a 409; the SDKs retry 409, so they are told not to."""
    return ApiError(409, code="conflict", message=message, param=param, should_retry=False)


def idempotency_key_reused() -> ApiError:
    """Return the error for an Idempotency-Key that came with another request before."""
    return ApiError(
        400,
        code="idempotency_key_reused",
        param="Idempotency-Key",
        message="This Idempotency-Key was used with another route, body or 'Prefer: respond-async'. Use a new key for a "
        "new request.",
    )


def idempotency_key_in_use() -> ApiError:
    """Return the error for a repeated request whose first run took longer than the repetition waits."""
    return ApiError(
        409,
        code="idempotency_key_in_use",
        param="Idempotency-Key",
        message="The first request with this Idempotency-Key still runs. Ask again to get its answer.",
        retry_after_s=2,
        should_retry=True,
    )


def request_cancelled() -> ApiError:
    """Return the error for a caller that waited for a request which its owner cancelled meanwhile."""
    return ApiError(409, code="request_cancelled", message="The request was cancelled.", should_retry=False)


def request_timeout() -> ApiError:
    """Return the error for a client that sends its request too slowly."""
    return ApiError(
        408,
        code="request_timeout",
        message="The request was not received in time. Send it faster, or raise 'gateway.header_read_timeout_s'.",
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """Return the error for a body over the limit."""
    return ApiError(
        413,
        code="request_too_large",
        message=f"The request body is larger than {limit_bytes} bytes. Send less, or raise 'gateway.body_bytes_max'.",
    )


def headers_too_large(limit_bytes: int) -> ApiError:
    """Return the error for a request head over the limit."""
    return ApiError(431, code="headers_too_large", message=f"The request headers are larger than {limit_bytes} bytes.")


def unsupported_content_encoding(encoding: str) -> ApiError:
    """Return the error for a compressed request body (a bomb is 1,000 times its size, so none is taken)."""
    return ApiError(
        415,
        code="unsupported_content_encoding",
        message=f"Content-Encoding '{encoding[:40]}' is not accepted. Send the body uncompressed.",
    )


# --- 429: limits and full queues ----------------------------------------------


def rate_limited(kind: str, *, limit: int, retry_after_s: float) -> ApiError:
    """Return the error for a limit that time restores; ``kind`` is ``requests``, ``tokens`` or ``concurrency``."""
    unit = {"requests": "requests per minute", "tokens": "tokens per minute", "concurrency": "concurrent requests"}[
        kind
    ]
    if limit == 1:
        unit = unit.replace("requests", "request").replace("tokens", "token")
    return ApiError(
        429,
        code="rate_limit_exceeded",
        type="tokens" if kind == "tokens" else "requests",
        message=f"Rate limit reached: {limit} {unit}. Please try again in {retry_after_s:.3g} s.",
        retry_after_s=retry_after_s,
    )


def request_exceeds_token_limit(needed: int, limit: int) -> ApiError:
    """Return the error for a request that could never fit the key's tokens per minute."""
    return ApiError(
        429,
        code="rate_limit_exceeded",
        type="tokens",
        message=f"Request too large: about {needed} tokens, the limit is {limit} tokens per minute. "
        "Send a shorter prompt.",
        should_retry=False,
    )


def kept_requests_full(*, retry_after_s: float) -> ApiError:
    """Return the error for a request to be kept, of a tenant that has as many as may be."""
    return ApiError(
        429,
        code="kept_requests_full",
        type="rate_limit_error",
        message="Too many requests of this tenant are kept. Delete some (DELETE /v1/requests/{id}), or wait until the "
        "oldest expire.",
        retry_after_s=retry_after_s,
        should_retry=False,
    )


def queue_full(model: str, *, retry_after_s: float) -> ApiError:
    """Return the error for an endpoint whose waiting line is full."""
    return ApiError(
        429,
        code="queue_full",
        type="requests",
        message=f"The model '{model}' is saturated and its queue is full. Please try again in {retry_after_s:.3g} s.",
        retry_after_s=retry_after_s,
    )


def quota_exhausted(kind: str, period: str, *, is_tenants: bool, retry_after_s: float) -> ApiError:
    """Return the error for a spent quota; ``kind`` is ``tokens`` or ``money``, ``period`` ``day`` or ``month``."""
    whose = "the tenant's" if is_tenants else "this key's"
    what = "token quota" if kind == "tokens" else "budget"
    return ApiError(
        429,
        code="insufficient_quota",
        type="insufficient_quota",
        message=f"What is left of {whose} {what} of this {period} does not cover the request. It is renewed in "
        f"{retry_after_s:.0f} s; a smaller 'max_tokens' needs less, and 'modelyard keys' or your administrator can "
        "raise it.",
        retry_after_s=retry_after_s,
        should_retry=False,
    )


def overloaded(*, retry_after_s: float) -> ApiError:
    """Return the error for a request that the gateway itself sheds, since it cannot keep up."""
    return ApiError(
        503,
        code="server_is_overloaded",
        type="service_unavailable_error",
        message="The platform is overloaded and turned this request away at once. Please retry.",
        retry_after_s=retry_after_s,
    )


def no_capacity(model: str) -> ApiError:
    """Return the error for a request that no replica of the model could ever take."""
    return ApiError(
        503,
        code="no_capacity",
        type="service_unavailable_error",
        message=f"No replica of '{model}' has the memory for this request, however long it waited. "
        "Send a shorter prompt, ask for fewer tokens, or deploy it with a larger KV cache.",
        should_retry=False,
    )


def request_crashes_engine() -> ApiError:
    """Return the error for a request that took down the engines it was sent to (a "query of death")."""
    return ApiError(
        400,
        code="request_crashes_engine",
        message="This request crashed each engine that it was sent to and is not tried again. Change the request, and "
        "report it to the operator.",
        should_retry=False,
    )


def engine_busy(model: str, *, retry_after_s: float) -> ApiError:
    """Return the error for a request that its engine itself refused for load, after it was dispatched."""
    return ApiError(
        429,
        code="engine_busy",
        type="requests",
        message=f"The engine of '{model}' takes no more requests. Please try again in {retry_after_s:.3g} s.",
        retry_after_s=retry_after_s,
    )


def queue_timeout(model: str, waited_s: float, *, retry_after_s: float) -> ApiError:
    """Return the error for a request that waited as long as it may."""
    return ApiError(
        429,
        code="queue_timeout",
        type="requests",
        message=f"The model '{model}' stayed saturated for {waited_s:.0f} s. "
        f"Please try again in {retry_after_s:.3g} s.",
        retry_after_s=retry_after_s,
    )


# --- 5xx: the platform or an engine -------------------------------------------


def internal_error(request_id: str) -> ApiError:
    """Return the error for our own bug; the log has the rest under the id."""
    return ApiError(
        500,
        code="internal_error",
        type="server_error",
        message=f"The platform failed to handle the request. Report it with the request id {request_id}.",
    )


def bad_engine_response(reason: str) -> ApiError:
    """Return the error for an engine whose answer makes no sense."""
    return ApiError(
        502,
        code="bad_engine_response",
        type="server_error",
        message=f"The engine sent a malformed response ({reason}). Please retry.",
    )


def engine_unavailable(model: str, *, retry_after_s: float = 2) -> ApiError:
    """Return the error for a model whose replicas are gone or refuse connections."""
    return ApiError(
        503,
        code="engine_unavailable",
        type="service_unavailable_error",
        message=f"No replica of '{model}' can answer right now; it is being restarted. Please retry.",
        retry_after_s=retry_after_s,
    )


def model_loading(model: str, *, retry_after_s: float) -> ApiError:
    """Return the error for a cold model whose line of waiters is full, or whose load took too long."""
    return ApiError(
        503,
        code="model_loading",
        type="service_unavailable_error",
        message=f"The model '{model}' is still loading. Please try again in {retry_after_s:.0f} s.",
        retry_after_s=min(retry_after_s, 120),
    )


def model_failed(model: str, reason: str) -> ApiError:
    """Return the error for an endpoint that cannot start; ``reason`` is ours, never engine text."""
    return ApiError(
        503,
        code="model_failed",
        type="service_unavailable_error",
        message=f"The model '{model}' cannot start: {reason}. See 'modelyard endpoints {model}'.",
        retry_after_s=30,
    )


def auth_unavailable() -> ApiError:
    """Return the error for a key that cannot be judged, since the controller or its database is out of reach."""
    return ApiError(
        503,
        code="auth_unavailable",
        type="service_unavailable_error",
        message="This API key is not known here and cannot be checked right now. Please retry.",
        retry_after_s=5,
    )


def quota_unavailable(*, retry_after_s: float) -> ApiError:
    """Return the error for a request that a quota bounds, before a gateway that just began was told what is spent."""
    return ApiError(
        503,
        code="quota_unavailable",
        type="service_unavailable_error",
        message="This API key has a quota, and what is spent of it is not known here yet. Please retry.",
        retry_after_s=retry_after_s,
    )


def control_unavailable() -> ApiError:
    """Return the error for a management route while the controller is away."""
    return ApiError(
        503,
        code="control_unavailable",
        type="service_unavailable_error",
        message="The controller is not answering; inference goes on. Please retry.",
        retry_after_s=2,
    )


def storage_unavailable() -> ApiError:
    """Return the error for a write while the database is locked or gone."""
    return ApiError(
        503,
        code="storage_unavailable",
        type="service_unavailable_error",
        message="The database cannot be written right now; nothing was changed. Please retry.",
        retry_after_s=5,
    )


def storage_full() -> ApiError:
    """Return the error for work that could not be recorded, and so is not begun."""
    return ApiError(
        503,
        code="storage_full",
        type="service_unavailable_error",
        message="The usage journal cannot be written, so no new request is taken. Free disk space and retry.",
        retry_after_s=10,
    )


def shutting_down() -> ApiError:
    """Return the error for a request that arrives while the gateway drains."""
    return ApiError(
        503,
        code="shutting_down",
        type="service_unavailable_error",
        message="The gateway is shutting down. Please retry.",
        retry_after_s=1,
    )


def engine_connect_timeout(limit_s: float) -> ApiError:
    """Return the error for a replica whose host does not answer."""
    return ApiError(
        504,
        code="engine_connect_timeout",
        type="server_error",
        message=f"The engine accepted no connection within {limit_s:.3g} s. Please retry.",
    )


def first_token_timeout(limit_s: float) -> ApiError:
    """Return the error for an engine that began no answer in time."""
    return ApiError(
        504,
        code="engine_first_token_timeout",
        type="server_error",
        message=f"The engine gave no first token within {limit_s:.3g} s. Please retry.",
    )


def token_timeout(limit_s: float) -> ApiError:
    """Return the error for an engine that fell silent in the middle of a stream."""
    return ApiError(
        504,
        code="engine_token_timeout",
        type="server_error",
        message=f"The engine gave no further token within {limit_s:.3g} s. What was sent so far is billed.",
    )


def total_timeout(limit_s: float) -> ApiError:
    """Return the error for an answer that took longer than a request may."""
    return ApiError(
        504,
        code="engine_total_timeout",
        type="server_error",
        message=f"The answer was not complete within {limit_s:.3g} s. What was sent so far is billed; a smaller "
        "'max_tokens' is done sooner.",
    )


def engine_error() -> ApiError:
    """Return the error event for a stream in which the engine itself reported a failure."""
    return ApiError(
        502,
        code="engine_error",
        type="server_error",
        message="The engine failed in the middle of the answer. What was sent so far is billed; please retry.",
    )


def engine_lost() -> ApiError:
    """Return the error event for a stream whose engine died; HTTP status is already out."""
    return ApiError(
        502,
        code="engine_lost",
        type="server_error",
        message="The engine was lost in the middle of the answer. What was sent so far is billed; please retry.",
    )


class StartupError(Exception):
    """Why a command cannot start: one line that says what, why and the fix; exit code 1 or ``exit_code``."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
