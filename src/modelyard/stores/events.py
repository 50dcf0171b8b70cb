"""The contracts of events: an outbox that every cause may write to, and the webhooks that empty it."""

from typing import Protocol

from modelyard.domain.events import EventData, EventType


class EventStore(Protocol):
    """Events of tenants. All methods raise ``StoreUnavailableError``.

    A cause that is a row of the same database adds its event in its own transaction (``sql/events.py``: ``append``).
    """

    async def add(self, tenant_id: str, kind: EventType, data: EventData, *, now: float, key: str = "") -> str:
        """Add an event and a delivery for each webhook of its tenant that wants it; return its id.

        With a ``key`` it is added once: a second time nothing happens, and the id is the same.
        """
        ...

    async def forget_events(self, *, before: float, limit: int) -> int:
        """Delete up to ``limit`` events of before then that nobody is still to be told of; return how many."""
        ...
