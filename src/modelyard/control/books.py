"""The books beside the ledger: sinks, replicas' hours; and who runs them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from modelyard.control.replica_book import ReplicaBook
from modelyard.control.tasks import boundary
from modelyard.metering.events import SinkStatus, UsageEvents
from modelyard.metering.stripe_reports import StripeReports
from modelyard.stores import BookStore

AGAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Books:
    """What keeps them. ``events`` and ``stripe`` are None where they are not configured."""

    store: BookStore
    replicas: ReplicaBook | None = None
    events: UsageEvents | None = None
    stripe: StripeReports | None = None

    def runs(self) -> list[Callable[[], Awaitable[None]]]:
        """Return what is to run for ever."""
        parts = (self.replicas, self.events, self.stripe)
        return [partial(_run, part.run, repr(part)) for part in parts if part is not None]

    def needed(self, source: str) -> str | None:
        """Return the first segment of a worker's journal that a sink still needs; None: none."""
        return self.events.needed(source) if self.events is not None else None

    def statuses(self) -> list[SinkStatus]:
        """Return how each sink stands."""
        return [sink.status() for sink in (self.events, self.stripe) if sink is not None]


async def _run(run: Callable[[], Awaitable[None]], name: str) -> None:
    """Run a part, and begin it again where it fails: a client of somebody else's must not take the controller along."""
    while True:
        with boundary(name):
            await run()
        await asyncio.sleep(AGAIN_S)
