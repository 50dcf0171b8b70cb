"""The sweep of the ledger's rows.

Rows are kept for a time, roll-ups for good. Removing goes on in small steps, each
a transaction of its own with a pause behind it, so that whoever writes waits for
one step at most. Two things keep a wrong clock from doing harm: the sweep goes
forward by a day an hour at most, however far the clock has leapt; and it does
not go on while anything waits in the journals, because what it leaves behind is
never billed again.
"""

import asyncio
import logging
from collections.abc import Callable

from modelyard.clock import Clock
from modelyard.stores import StoreUnavailableError, UsageStore

HOUR_S = 3600
DAY_S = 86_400
INTERVAL_S = 3600.0
"""Pause between two sweeps; one goes forward by a day at most."""
STEP_ROWS = 500
"""Rows of one transaction: some ten milliseconds."""
STEP_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class Retention:
    """Removes rows of the ledger that are older than ``keep_days``; 0 keeps them for good.

    ``backlog`` tells the bytes of the journals that are not delivered.
    """

    def __init__(self, store: UsageStore, clock: Clock, backlog: Callable[[], int], *, keep_days: int) -> None:
        self._store = store
        self._clock = clock
        self._backlog = backlog
        self._keep_days = keep_days

    def __repr__(self) -> str:
        return f"<Retention: rows of {self._keep_days} days>" if self._keep_days else "<Retention: of all rows>"

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while self._keep_days:
            await asyncio.sleep(INTERVAL_S)
            try:
                removed = await self.sweep()
            except StoreUnavailableError as error:
                _log.warning("old rows of the ledger stay for now, the store cannot be used: %s", error)
            else:
                if removed:
                    _log.info("removed %d rows of the ledger that were older than %d days", removed, self._keep_days)

    async def sweep(self) -> int:
        """Remove what is too old, as far as one sweep goes; return how many rows.

        Raises:
            StoreUnavailableError: what was removed until then stays so.
        """
        before = await self._goal()
        removed = 0
        while before is not None and not self._backlog():
            step = await self._store.forget_rows(before=before, limit=STEP_ROWS)
            removed += step
            if step < STEP_ROWS:
                break
            await asyncio.sleep(STEP_PAUSE_S)
        return removed

    async def _goal(self) -> int | None:
        """Return the hour before which rows go, None if none does."""
        oldest = await self._store.oldest_row()
        if oldest is None:
            return None
        wanted = int((self._clock.unix_s() - self._keep_days * DAY_S) // HOUR_S * HOUR_S)
        begun = max(await self._store.kept_since(), int(oldest // HOUR_S * HOUR_S))
        goal = min(wanted, begun + DAY_S)
        return goal if goal > oldest else None
