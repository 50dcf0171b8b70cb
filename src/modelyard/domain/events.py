"""What happens to what a tenant owns: the events that its webhooks are told of.

An event is one row, written in the transaction of its cause where that is in
the same database, and it keeps its id whatever becomes of its deliveries. It
holds ids to ask for and no prompts, answers or secrets: it leaves the house.
(What happened to an endpoint, with every reason, is ``stores.Event``; some of
those become events here, see ``policy/announcements.py``.)
"""

import hashlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from modelyard.ids import new_id

EventData = Mapping[str, object]
"""What an event is about, as JSON takes it; ``id`` names the object."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_LENGTH = 26


class EventType(StrEnum):
    """Every type of event; the part before the dot is what ``batch.*`` matches."""

    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    REQUEST_SUCCEEDED = "request.succeeded"
    REQUEST_FAILED = "request.failed"
    REQUEST_CANCELLED = "request.cancelled"
    DEPLOYMENT_READY = "deployment.ready"
    DEPLOYMENT_FAILED = "deployment.failed"
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"
    ROLLOUT_STARTED = "rollout.started"
    ROLLOUT_STEP = "rollout.step"
    ROLLOUT_PROMOTED = "rollout.promoted"
    BUDGET_THRESHOLD = "budget.threshold"
    BUDGET_EXCEEDED = "budget.exceeded"
    CREDIT_LOW = "credit.low"
    CREDIT_EXHAUSTED = "credit.exhausted"
    INVOICE_ISSUED = "invoice.issued"
    WEBHOOK_DISABLED = "webhook.disabled"
    WEBHOOK_TEST = "webhook.test"


class TenantEvent(msgspec.Struct, frozen=True):
    """One event. ``created_at`` is unix seconds; ``data`` is a JSON object as bytes, the same at every delivery."""

    id: str
    tenant_id: str
    type: EventType
    created_at: float
    data: bytes


class Envelope(msgspec.Struct, frozen=True):
    """An event as its receivers get it: the shape of OpenAI's webhooks, which their SDKs unwrap."""

    id: str
    type: str
    created_at: int
    data: msgspec.Raw
    object: str = "event"


_encode = msgspec.json.Encoder().encode


def new_event(tenant_id: str, kind: EventType, data: EventData, *, now: float, key: str = "") -> TenantEvent:
    """Return an event that happens ``now``.

    With a ``key`` its id is made of tenant, type and key, so that a cause that is told again after a crash (a batch
    that ended, a budget's threshold of a month) is still one event; without, it is new every time.
    """
    event_id = _derived_id(tenant_id, kind, key) if key else new_id("evt_")
    return TenantEvent(event_id, tenant_id, kind, now, _encode(dict(data)))


def envelope(event: TenantEvent) -> bytes:
    """Return the body of ``event``: the same bytes at every attempt."""
    return _encode(Envelope(event.id, event.type.value, int(event.created_at), msgspec.Raw(event.data)))


def _derived_id(tenant_id: str, kind: EventType, key: str) -> str:
    digest = hashlib.sha256(f"{tenant_id}\0{kind.value}\0{key}".encode()).digest()
    return "evt_" + "".join(_ALPHABET[byte & 31] for byte in digest[:_ID_LENGTH])
