"""What the platform or an engine cannot do now: 500 to 504."""

from modelyard.errors.shape import ApiError

PROVIDER_REFUSED = "provider_refused"


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


def provider_refused(model: str, reason: str, *, retry_after_s: float = 2) -> ApiError:
    """Return the error for an external provider that refuses the platform's key, account or model; the operator's
    to mend. ``reason`` is in our words."""
    return ApiError(
        503,
        code="provider_refused",
        type="service_unavailable_error",
        message=f"The provider of '{model}' refused: {reason}. Tell its operator; 'modelyard why {model}' says more.",
        retry_after_s=retry_after_s,
    )


def model_not_loaded(model: str) -> ApiError:
    """Return the error for a question that only a running engine answers, and that wakes none."""
    return ApiError(
        503,
        code="model_not_loaded",
        type="service_unavailable_error",
        message=f"The model '{model}' is not loaded, and only its engine can say that. A request to it loads it.",
        retry_after_s=5,
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
        message=f"The model '{model}' cannot start: {reason.rstrip('.')}. See 'modelyard endpoints {model}'.",
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


def content_missing(file_id: str) -> ApiError:
    """Return the error for a file that is known, and whose bytes are not in the data directory any more."""
    return ApiError(
        500,
        code="content_missing",
        type="server_error",
        message=f"The content of '{file_id}' is missing on the platform, though the file is known: its data directory "
        "lost it. Ask your administrator to restore it, or send the file again.",
        should_retry=False,
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


def upload_storage_full(*, needed: int, free: int) -> ApiError:
    """Return the error for an upload that the disk cannot take; what had come of it is as it was."""
    return ApiError(
        507,
        code="storage_full",
        type="server_error",
        message=f"The disk of the platform cannot take this upload: it needs up to {needed} bytes, {free} are free for "
        "it. Delete what is not needed, or ask your administrator for space; parts that are here stay.",
        retry_after_s=60,
        should_retry=False,
    )


def file_storage_full(*, needed: int, free: int) -> ApiError:
    """Return the error for a file that the disk cannot take; nothing of it is kept."""
    return ApiError(
        507,
        code="storage_full",
        type="server_error",
        message=f"The disk of the platform cannot take this file: it needs up to {needed} bytes, {free} are free for "
        "it. Nothing of it was kept. Delete files that you do not need, or ask your administrator for space.",
        retry_after_s=60,
        should_retry=False,
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
