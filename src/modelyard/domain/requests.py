"""Requests whose answer is kept: detached ones (``Prefer: respond-async``), and those with an ``Idempotency-Key``.

A gateway claims such a request at the controller before it runs, tells what
became of it, and the answer stays for a while. The second half are the
messages of that conversation, msgpack over the controller's unix socket.
"""

from enum import StrEnum

import msgspec


class RequestStatus(StrEnum):
    """Where a kept request is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Say whether nothing more will happen."""
        return self not in (RequestStatus.QUEUED, RequestStatus.RUNNING)


class WebhookStatus(StrEnum):
    """Where the message about a request's end is."""

    WAITING = "waiting"
    """The request is not over."""
    PENDING = "pending"
    """To be sent, for the first time or again."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up; it can be replayed."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to deliver: unix seconds, and the status of the answer or why there was none."""

    at: float
    status_code: int | None
    error: str = ""


class Webhook(msgspec.Struct, frozen=True):
    """Who is told of a request's end. ``due_at`` and ``since`` (of the first attempt) are unix seconds."""

    url: str
    event_id: str
    status: WebhookStatus = WebhookStatus.WAITING
    due_at: float | None = None
    since: float | None = None
    tries: int = 0
    attempts: tuple[Attempt, ...] = ()
    """The last attempts, oldest first."""


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request and, once it is over, its answer. Times are unix seconds.

    ``instance`` names the gateway process that runs it. ``fingerprint`` is a hash of route and body: the same
    ``idempotency_key`` with another one is a mistake of the caller. ``code`` says why there is no answer.
    """

    id: str
    tenant_id: str
    key_id: str
    instance: str
    route: str
    model: str
    fingerprint: str
    created_at: float
    expires_at: float
    is_detached: bool
    idempotency_key: str | None = None
    status: RequestStatus = RequestStatus.QUEUED
    finished_at: float | None = None
    http_status: int = 0
    content_type: str = ""
    answer: bytes = b""
    code: str = ""
    webhook: Webhook | None = None


class WebhookSecret(msgspec.Struct, frozen=True):
    """What a tenant's webhook secret is derived from; the one before stays valid until ``previous_expires_at``."""

    tenant_id: str
    salt: str = ""
    previous_salt: str | None = None
    previous_expires_at: float | None = None


# --- between gateway and controller ---------------------------------------------------------------------------------

CLAIM_PATH = "/internal/requests/claim"
FINISH_PATH = "/internal/requests/finish"
SYNC_PATH = "/internal/requests/sync"
"""Below ``/v1`` there is nothing of this: the gateway forwards no other path, so no client reaches it."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """May this request run? ``wait_s``: how long to wait for the end of one with the same idempotency key."""

    id: str
    tenant_id: str
    key_id: str
    instance: str
    route: str
    model: str
    fingerprint: str
    is_detached: bool
    idempotency_key: str | None = None
    webhook_url: str = ""
    wait_s: float = 0.0


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the claim. ``is_new``: the asker, it runs ``request``; else ``request`` came earlier."""

    request: KeptRequest
    is_new: bool


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a claimed request ended.

    One that ``is_released`` leaves its idempotency key to the next try; of one that ``is_dropped`` nothing stays.
    """

    id: str
    status: RequestStatus
    http_status: int = 0
    content_type: str = ""
    answer: bytes = b""
    code: str = ""
    is_released: bool = False
    is_dropped: bool = False


class Sync(msgspec.Struct, frozen=True):
    """A sign of life of a gateway that has claimed requests: all of them, and which an engine has begun meanwhile."""

    instance: str
    running: list[str]
    active: list[str]


class SyncReply(msgspec.Struct, frozen=True):
    """Which requests of this gateway were cancelled by their owner."""

    cancelled: list[str]


# --- what callers see -----------------------------------------------------------------------------------------------


class AnswerView(msgspec.Struct, frozen=True):
    """The answer of a request; ``body`` is null where it is not JSON, see ``GET /v1/requests/{id}/response``."""

    status_code: int
    content_type: str
    body: msgspec.Raw | None


class ErrorView(msgspec.Struct, frozen=True):
    """Why a request has no answer of its own."""

    code: str
    message: str


class AttemptView(msgspec.Struct, frozen=True):
    """One attempt to deliver a webhook."""

    at: int
    status_code: int | None
    error: str | None


class WebhookView(msgspec.Struct, frozen=True):
    """The webhook of a request."""

    url: str
    event_id: str
    status: WebhookStatus
    tries: int
    next_attempt_at: int | None
    attempts: list[AttemptView]


class RequestView(msgspec.Struct, frozen=True):
    """The request object of the API. Times are unix seconds."""

    id: str
    status: RequestStatus
    model: str
    route: str
    created_at: int
    finished_at: int | None
    expires_at: int
    response: AnswerView | None = None
    error: ErrorView | None = None
    webhook: WebhookView | None = None
    object: str = "request"


_REASONS = {
    "interrupted": "The gateway that ran it has stopped. What it had generated by then may be billed. Send it again.",
    "answer_too_large": "The answer was larger than what is kept. Send it without 'Prefer: respond-async'.",
}


def view(request: KeptRequest) -> RequestView:
    """Return what its owner sees of ``request``."""
    response = None
    if request.http_status and request.status.is_over:
        is_json = request.content_type.partition(";")[0].strip() == "application/json"
        body = msgspec.Raw(request.answer) if is_json and request.answer else None
        response = AnswerView(request.http_status, request.content_type, body)
    error = None
    if request.code and response is None:
        error = ErrorView(request.code, _REASONS.get(request.code, "The request ended without an answer."))
    return RequestView(
        id=request.id,
        status=request.status,
        model=request.model,
        route=request.route,
        created_at=int(request.created_at),
        finished_at=None if request.finished_at is None else int(request.finished_at),
        expires_at=int(request.expires_at),
        response=response,
        error=error,
        webhook=None if request.webhook is None else _webhook_view(request.webhook),
    )


def _webhook_view(webhook: Webhook) -> WebhookView:
    due = webhook.due_at if webhook.status is WebhookStatus.PENDING else None
    return WebhookView(
        url=webhook.url,
        event_id=webhook.event_id,
        status=webhook.status,
        tries=webhook.tries,
        next_attempt_at=None if due is None else int(due),
        attempts=[AttemptView(int(one.at), one.status_code, one.error or None) for one in webhook.attempts],
    )
