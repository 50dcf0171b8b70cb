"""Webhooks that tenants register, and the deliveries of events to them or to the URL that came with a request."""

from enum import StrEnum

import msgspec

from modelyard.domain.events import EventType, TenantEvent


class DeliveryStatus(StrEnum):
    """Where the telling of an event is."""

    WAITING = "waiting"
    """The event has not happened yet."""
    PENDING = "pending"
    """To be sent, for the first time or again."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up; it can be sent again by hand."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to deliver: when (unix seconds), the status of the answer or why there was none."""

    at: float
    status_code: int | None
    error: str = ""
    took_ms: int = 0
    answer: str = ""
    """How the body of the answer begins."""
    retry_after_s: float = 0.0
    """For how long the receiver asked to be left alone; 0: it did not."""

    @property
    def is_accepted(self) -> bool:
        """Say whether the receiver took it."""
        return self.status_code is not None and 200 <= self.status_code < 300


class SigningSecret(msgspec.Struct, frozen=True):
    """What a secret is derived from; the one before signs too until ``previous_expires_at``."""

    salt: str = ""
    previous_salt: str | None = None
    previous_expires_at: float | None = None


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tenant wants to be told of its events. Times are unix seconds."""

    id: str
    tenant_id: str
    url: str
    types: tuple[str, ...]
    """``batch.completed``, ``batch.*`` or ``*``."""
    created_at: float
    description: str = ""
    is_enabled: bool = True
    disabled_reason: str = ""
    """Why the platform disabled it; "": its owner did."""
    secret: SigningSecret = SigningSecret()
    failing_since: float | None = None
    """The first failure since the last success."""
    failures: int = 0
    """How many since then."""
    quiet_until: float | None = None
    """Until when a receiver that fails is left alone."""


def well(webhook: Webhook) -> Webhook:
    """Return a webhook as if it had never failed."""
    return msgspec.structs.replace(webhook, disabled_reason="", failing_since=None, failures=0, quiet_until=None)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The telling of one event to one receiver. ``due_at`` and ``since`` (of the first attempt) are unix seconds.

    ``webhook_id`` None: to the ``url`` that came with a request; else the webhook's own of now holds.
    """

    id: str
    event_id: str
    event_type: EventType
    tenant_id: str
    created_at: float
    webhook_id: str | None = None
    url: str = ""
    status: DeliveryStatus = DeliveryStatus.PENDING
    due_at: float | None = None
    since: float | None = None
    tries: int = 0
    attempts: tuple[Attempt, ...] = ()
    """The last attempts, oldest first."""


class Due(msgspec.Struct, frozen=True):
    """A delivery that is to be attempted now, with all that an attempt needs."""

    delivery: Delivery
    event: TenantEvent
    url: str
    secret: SigningSecret
    failing_since: float | None

    @property
    def signer(self) -> str:
        """Whose secret signs it: the webhook's, or the tenant's."""
        return self.delivery.webhook_id or self.delivery.tenant_id


class Settled(msgspec.Struct, frozen=True):
    """What an attempt came to. ``disabled_reason`` "": its webhook stays as it is."""

    delivery: Delivery
    attempt: Attempt
    disabled_reason: str = ""


# --- what callers see -----------------------------------------------------------------------------------------------


class AttemptView(msgspec.Struct, frozen=True):
    """One attempt to deliver an event."""

    at: int
    status_code: int | None
    error: str | None
    took_ms: int
    response: str | None
    """How the body of the answer begins."""


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True):
    """The delivery of one event to one webhook. Times are unix seconds."""

    id: str
    object: str = "webhook.delivery"
    event_id: str
    event_type: str
    status: DeliveryStatus
    tries: int
    created_at: int
    next_attempt_at: int | None
    attempts: list[AttemptView]


def attempt_views(delivery: Delivery) -> list[AttemptView]:
    """Return what its owner sees of the attempts, oldest first."""
    return [
        AttemptView(int(one.at), one.status_code, one.error or None, one.took_ms, one.answer or None)
        for one in delivery.attempts
    ]


def next_attempt_at(delivery: Delivery) -> int | None:
    """Return when it is tried next, None if it is not."""
    is_pending = delivery.status is DeliveryStatus.PENDING and delivery.due_at is not None
    return int(delivery.due_at or 0) if is_pending else None


def delivery_view(delivery: Delivery) -> DeliveryView:
    """Return what its owner sees of a delivery."""
    return DeliveryView(
        id=delivery.id,
        event_id=delivery.event_id,
        event_type=delivery.event_type.value,
        status=delivery.status,
        tries=delivery.tries,
        created_at=int(delivery.created_at),
        next_attempt_at=next_attempt_at(delivery),
        attempts=attempt_views(delivery),
    )
