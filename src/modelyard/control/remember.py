"""The end of a pass: what people are told of an endpoint, stored when it is news."""

from modelyard.domain.endpoints import Endpoint
from modelyard.policy import scaling
from modelyard.policy.announcements import STAGE
from modelyard.policy.progress import Outlook, View, outlook
from modelyard.stores import ControlStore, Event

PERCENT_STEP = 5
"""Smallest progress worth a write: a load of minutes is told in twenty steps."""


async def remember(
    endpoint: Endpoint,
    view: View,
    memory: scaling.Memory | None,
    decision: scaling.Decision,
    seen: scaling.Seen,
    store: ControlStore,
) -> bool:
    """Store status, progress and failure, and say so in an event; return whether any of it was news."""
    if endpoint.is_deleted:
        return False
    if memory is not None and decision.replicas != memory.replicas:
        reason, data = f"to {decision.replicas}: {decision.reason}", scaling.numbers(seen, decision.replicas)
        await store.add_event(Event(view.now_s, endpoint.id, "scaled", reason, data={"from": memory.replicas, **data}))
    return await tell_outlook(endpoint, outlook(endpoint, view), view.now_s, store)


async def tell_outlook(endpoint: Endpoint, told: Outlook, now_s: float, store: ControlStore) -> bool:
    """Store how an endpoint stands, and say so in an event; return whether it was news."""
    if not _is_news(endpoint, told):
        return False
    events = []
    if told.status is not endpoint.status:
        reason = told.failure or told.progress.reason or f"it is {told.status}"
        events.append(Event(now_s, endpoint.id, str(told.status), reason, data={STAGE: told.progress.stage.value}))
    await store.put_outlook(
        endpoint.id, status=told.status, progress=told.progress, failure=told.failure, events=events
    )
    return True


def _is_news(endpoint: Endpoint, told: Outlook) -> bool:
    before, now = endpoint.progress, told.progress
    if (endpoint.status, endpoint.failure, before.stage, before.reason) != (
        told.status,
        told.failure,
        now.stage,
        now.reason,
    ):
        return True
    if before.percent is None or now.percent is None:
        return before.percent is not now.percent
    return abs(now.percent - before.percent) >= PERCENT_STEP or (now.percent == 100) != (before.percent == 100)
