"""What is too much: 429, for limits, quotas and full lines."""

from collections.abc import Callable

from modelyard.errors.shape import ApiError


def rate_limited(kind: str, *, limit: int, retry_after_s: float, whose: str = "this key") -> ApiError:
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
        message=f"Rate limit of {whose} reached: {limit} {unit}. Please try again in {retry_after_s:.3g} s.",
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


def uploads_full(reason: str, fix: str) -> ApiError:
    """Return the error for an upload of a tenant that has as many, or as many bytes, as may be."""
    return ApiError(
        429,
        code="uploads_full",
        type="rate_limit_error",
        message=f"This tenant may upload no more: {reason}. {fix} (DELETE /v1/uploads/artifacts/{{id}}).",
        retry_after_s=60,
        should_retry=False,
    )


def files_full(reason: str) -> ApiError:
    """Return the error for a file of a tenant that has as many, or as many bytes, as may be."""
    return ApiError(
        429,
        code="files_full",
        type="rate_limit_error",
        message=f"This tenant may store no more files: {reason}. Delete some that you do not need "
        "(DELETE /v1/files/{id}), or ask your administrator for more.",
        retry_after_s=60,
        should_retry=False,
    )


def batches_full(limit: int) -> ApiError:
    """Return the error for a batch of a tenant that has as many under way as may be."""
    return ApiError(
        429,
        code="batches_full",
        type="rate_limit_error",
        message=f"{limit} batches of this tenant are not over yet, and no more may be. Wait for one, or cancel one "
        "(POST /v1/batches/{id}/cancel).",
        retry_after_s=60,
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


def quota_exhausted(  # noqa: PLR0913 - all that its sentence says
    kind: str,
    period: str,
    *,
    is_tenants: bool,
    retry_after_s: float,
    needed: int,
    left: int,
    limit: int,
    amount: Callable[[int], str],
    model: str = "",
    share_left: int | None = None,
    fits_no_share: bool = False,
) -> ApiError:
    """Return the error for a spent quota; ``kind`` is ``tokens`` or ``money``, ``period`` ``day`` or ``month``.

    ``needed``, ``left`` and ``limit`` are of the whole quota, which ``amount`` puts into words; ``model`` is the one
    that it is of, "" all. ``share_left`` is what a gateway worker has left of its part, ``fits_no_share``: the request
    is larger than the part of any.
    """
    whose = "the tenant's" if is_tenants else "this key's"
    what = ("token quota" if kind == "tokens" else "budget") + (f" for '{model}'" if model else "")
    part = _part(needed, left, share_left, amount)
    if needed > limit or (part and fits_no_share):
        wait = "It never fits" + (" a part" if needed <= limit else "")
    else:
        wait = f"It is renewed in {retry_after_s:.0f} s"
    return ApiError(
        429,
        code="insufficient_quota",
        type="insufficient_quota",
        message=f"This request may need up to {amount(needed)}; {amount(left)} of {amount(limit)} are left of {whose} "
        f"{what} of this {period}{part}. {wait}; a smaller 'max_tokens' or prompt needs less, and your "
        "administrator can raise it.",
        retry_after_s=retry_after_s,
        should_retry=False,
    )


def credit_exhausted(
    *, needed: int, left: int, amount: Callable[[int], str], share_left: int | None = None
) -> ApiError:
    """Return the error for a request that may cost more than the prepaid credit that is left; see above."""
    return ApiError(
        429,
        code="insufficient_quota",
        type="insufficient_quota",
        message=f"This request may cost up to {amount(needed)}; {amount(left)} of the prepaid credit is left"
        f"{_part(needed, left, share_left, amount)}. Add credit, or send a smaller 'max_tokens' or prompt.",
        should_retry=False,
    )


def elsewhere(error: ApiError) -> ApiError:
    """Return ``error``, of a quota whose part of this gateway worker is used while another worker has room."""
    error.message += " Another gateway worker still has room for it: send it again, on a new connection."
    error.retry_after_s, error.should_retry, error.is_of_worker = 1.0, True, True
    return error


def _part(needed: int, left: int, share_left: int | None, amount: Callable[[int], str]) -> str:
    """Say why what would fit the whole does not fit."""
    if share_left is None or needed > left:
        return ""
    return f", which the gateway's workers divide; {amount(share_left)} of it is this one's"


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
