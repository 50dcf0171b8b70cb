"""The contracts of events: an outbox that every cause may write to, and the webhooks that empty it."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from modelyard.domain.events import EventData, EventType
from modelyard.domain.webhooks import Delivery, DeliveryStatus, Due, Settled, SigningSecret, Webhook


class EventStore(Protocol):
    """Events of tenants. All methods raise ``StoreUnavailableError``.

    A cause that is a row of the same database adds its event in its own transaction (``sql/events.py``: ``append``).
    """

    async def add(self, tenant_id: str, kind: EventType, data: EventData, *, now: float, key: str = "") -> str:
        """Add an event and a delivery for each webhook of its tenant that wants it; return its id.

        With a ``key`` it is added once: a second time nothing happens, and the id is the same.
        """
        ...

    async def time_of(self, event_id: str, tenant_id: str) -> float | None:
        """Return when an event of a tenant happened, None where there is no such event (any more)."""
        ...

    async def forget_events(self, *, before: float, limit: int) -> int:
        """Delete up to ``limit`` events of before then that nobody is still to be told of; return how many."""
        ...


class Replayed(msgspec.Struct, frozen=True):
    """How many deliveries were made due, and the last of their events where there are more."""

    count: int
    last_event_id: str | None = None


class Backlog(msgspec.Struct, frozen=True):
    """How many deliveries wait, and when the oldest of them was made (unix seconds; None where none waits)."""

    count: int
    oldest_at: float | None = None


class WebhookStore(Protocol):
    """Webhooks and deliveries. All methods raise ``StoreUnavailableError``."""

    async def add_webhook(self, webhook: Webhook, *, most: int) -> bool:
        """Add one; say False, and add nothing, where its tenant has ``most`` already."""
        ...

    async def webhooks(self, *, tenant_id: str | None) -> list[Webhook]:
        """Return all of a tenant (or of all), oldest first."""
        ...

    async def webhook(self, webhook_id: str, *, tenant_id: str | None) -> Webhook | None:
        """Return the webhook of this id (of this tenant)."""
        ...

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook | None:
        """Replace a webhook by what ``change`` makes of it, in one step; None where there is none.

        ``change`` may be called twice. One that is disabled by it tells nothing more of what was pending.
        """
        ...

    async def remove_webhook(self, webhook_id: str) -> None:
        """Forget a webhook and its deliveries."""
        ...

    async def pending(self, *, tenant_id: str | None) -> dict[str, int]:
        """Return how many deliveries are pending, by webhook id, of those that have any."""
        ...

    async def backlog(self) -> Backlog:
        """Return what waits, of all tenants."""
        ...

    async def secret(self, tenant_id: str) -> SigningSecret:
        """Return what the secret of a tenant is derived from, which signs what goes to URLs of requests."""
        ...

    async def put_secret(self, tenant_id: str, secret: SigningSecret) -> None:
        """Replace it."""
        ...

    async def due(self, *, now: float, limit: int, of_lane: int, of_tenant: int, is_failing: bool = False) -> list[Due]:
        """Return deliveries that are due, the longest due first: those to receivers that fail, or the others.

        At most ``of_lane`` of one webhook and ``of_tenant`` of one tenant: a slow receiver delays nobody else's. A
        webhook that fails is left alone for a while.
        """
        ...

    async def next_due(self) -> float | None:
        """Return when the next delivery may be attempted, None if none may be."""
        ...

    async def settle(self, settled: Settled) -> None:
        """Store what an attempt came to, and what it says of its webhook, in one step.

        A success after a long time makes all that waits for the webhook due. One that is disabled tells nothing more
        of what was pending, and that is an event of its own. What is no longer pending only learns of a success.
        """
        ...

    async def add_test(self, webhook: Webhook, *, now: float, due_at: float) -> Due:
        """Add a test event and its one delivery, due at ``due_at`` for whoever finds it unsent; return it."""
        ...

    async def deliveries(
        self, webhook_id: str, *, status: DeliveryStatus | None, limit: int, after: Delivery | None
    ) -> list[Delivery]:
        """Return deliveries of a webhook older than ``after``, newest first."""
        ...

    async def delivery(self, delivery_id: str, *, webhook_id: str) -> Delivery | None:
        """Return the delivery of this id to this webhook."""
        ...

    async def redeliver(self, delivery_id: str, *, now: float) -> None:
        """Make a delivery due, with a new span of retries."""
        ...

    async def replay(
        self, webhook: Webhook, *, since: float, after: str | None, now: float, limit: int, delivered_too: bool
    ) -> Replayed:
        """Make due what happened since then, that the webhook wants and does not have: at most ``limit``, oldest first.

        ``delivered_too``: also what it has. ``after``: only events behind that one.
        """
        ...

    async def adopt(self, *, limit: int) -> int:
        """Take over webhooks of requests that a release before this one ended; return how many there were."""
        ...
