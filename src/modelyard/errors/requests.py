"""What is wrong with a request: 400 to 431."""

from modelyard.errors.shape import ApiError


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


def context_exceeded(model: str, prompt_tokens: int, context_length: int) -> ApiError:
    """Return the error for a prompt, with the answer it asks for, that does not fit the model's context."""
    return ApiError(
        400,
        code="context_length_exceeded",
        message=f"This does not fit the context of '{model}': it has about {prompt_tokens:,} tokens, and "
        f"{context_length:,} is the most that prompt and answer may have together.",
    )


def route_unsupported(model: str, route: str) -> ApiError:
    """Return the error for a model whose engine does not serve this API."""
    return ApiError(
        400,
        code="route_unsupported",
        param="model",
        message=f"The model '{model}' does not support {route}. Use a model that does; see GET /v1/models.",
    )


def invalid_api_key() -> ApiError:
    """Return the error for a missing, malformed, unknown, expired or revoked key; one text for all of them."""
    return ApiError(
        401,
        code="invalid_api_key",
        type="authentication_error",
        message="Missing or invalid API key. Send 'Authorization: Bearer <key>'; 'modelyard keys create' makes one.",
    )


def batch_key_gone() -> ApiError:
    """Return the error for a line of a batch whose key was revoked, has expired, or has no tenant any more."""
    return ApiError(
        401,
        code="invalid_api_key",
        type="authentication_error",
        message="The API key that made this batch was revoked or has expired, so this request was not run. "
        "Submit it again with a key that is good.",
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
        message="This Idempotency-Key was used with another route, body or 'Prefer: respond-async'. Use a new one "
        "for a new request.",
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


def file_too_large(limit_bytes: int, setting: str) -> ApiError:
    """Return the error for a file over the limit that ``setting`` sets."""
    return ApiError(
        413,
        code="request_too_large",
        param="file",
        message=f"The file is larger than {limit_bytes} bytes. Send it in smaller files, or raise '{setting}'.",
    )


def range_not_satisfiable(size_bytes: int) -> ApiError:
    """Return the error for a range that begins behind the end of a file."""
    return ApiError(
        416,
        code="range_not_satisfiable",
        param="Range",
        message=f"The range begins behind the end of the file, which has {size_bytes} bytes.",
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


def request_crashes_engine() -> ApiError:
    """Return the error for a request that took down the engines it was sent to (a "query of death")."""
    return ApiError(
        400,
        code="request_crashes_engine",
        message="This request crashed each engine that it was sent to and is not tried again. Change the request, and "
        "report it to the operator.",
        should_retry=False,
    )
