"""What callers see of webhooks, and what they may ask of one."""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from modelyard.control.webhooks import keys_of, shown
from modelyard.domain.events import EventType
from modelyard.domain.webhooks import SigningSecret, Webhook
from modelyard.errors import invalid_value
from modelyard.policy.webhooks import is_pattern

DESCRIPTION_LENGTH_MAX = 300
TYPES_MAX = 32


class WebhookStatus(StrEnum):
    """How a webhook is."""

    ENABLED = "enabled"
    FAILING = "failing"
    """Its receiver took nothing since the last failure; deliveries are tried again."""
    DISABLED = "disabled"


class WebhookView(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook object of the API. Times are unix seconds."""

    id: str
    object: str = "webhook"
    tenant_id: str
    url: str
    description: str
    event_types: list[str]
    enabled: bool
    status: WebhookStatus
    why: str | None
    """Why it is failing or disabled, and what to do."""
    pending: int
    """Deliveries that are still to be made."""
    failing_since: int | None
    previous_secret_expires_at: int | None
    created_at: int
    secret: str | None
    """What its messages are signed with; shown when it is added or rotated, else null."""


class SecretView(msgspec.Struct, frozen=True):
    """The secret of the caller's tenant. ``previous_expires_at`` is unix seconds."""

    secret: str
    previous_expires_at: int | None = None
    object: str = "webhook.secret"


def webhook_view(webhook: Webhook, pending: int, *, now: float, pepper: bytes | None = None) -> WebhookView:
    """Return what its owner sees of a webhook; with the ``pepper`` its secret too."""
    status, why = _state(webhook)
    return WebhookView(
        id=webhook.id,
        tenant_id=webhook.tenant_id,
        url=webhook.url,
        description=webhook.description,
        event_types=list(webhook.types),
        enabled=webhook.is_enabled,
        status=status,
        why=why,
        pending=pending,
        failing_since=None if webhook.failing_since is None else int(webhook.failing_since),
        previous_secret_expires_at=_overlap_end(webhook.secret, now=now),
        created_at=int(webhook.created_at),
        secret=None if pepper is None else shown(keys_of(pepper, webhook.id, webhook.secret, now=now)[0]),
    )


def secret_view(tenant_id: str, secret: SigningSecret, pepper: bytes, *, now: float) -> SecretView:
    """Return the secret of a tenant."""
    return SecretView(shown(keys_of(pepper, tenant_id, secret, now=now)[0]), _overlap_end(secret, now=now))


def check_types(types: Sequence[str]) -> tuple[str, ...]:
    """Return the types of events of a webhook, each once.

    Raises:
        ApiError: 400, with the types that there are.
    """
    if not 1 <= len(types) <= TYPES_MAX:
        raise invalid_value("event_types", f"name 1 to {TYPES_MAX} types; '*' is all")
    for one in types:
        if not is_pattern(one):
            known = ", ".join(kind.value for kind in EventType if kind is not EventType.WEBHOOK_TEST)
            raise invalid_value("event_types", f"there is no '{one[:60]}'. There are: *, batch.* and the like, {known}")
    return tuple(dict.fromkeys(types))


def check_description(text: str) -> str:
    """Return a description.

    Raises:
        ApiError: 400; control and direction characters could forge a line of a listing.
    """
    if len(text) > DESCRIPTION_LENGTH_MAX or (text and not text.isprintable()):
        raise invalid_value("description", f"use at most {DESCRIPTION_LENGTH_MAX} printable characters")
    return text


def _state(webhook: Webhook) -> tuple[WebhookStatus, str | None]:
    if not webhook.is_enabled and webhook.disabled_reason:
        fix = "Repair the receiver, enable the webhook again, then replay what it missed"
        return WebhookStatus.DISABLED, f"The platform disabled it: {webhook.disabled_reason}. {fix}."
    if not webhook.is_enabled:
        return WebhookStatus.DISABLED, "Its owner disabled it."
    if webhook.failing_since is not None:
        since = datetime.fromtimestamp(webhook.failing_since, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        return WebhookStatus.FAILING, f"Its receiver took nothing since {since}; its deliveries say what it answers."
    return WebhookStatus.ENABLED, None


def _overlap_end(secret: SigningSecret, *, now: float) -> int | None:
    until = secret.previous_expires_at
    return None if until is None or until <= now else int(until)
