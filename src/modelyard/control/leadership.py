"""At most one controller acts (F39): a lease in the store, and an epoch that fences whoever lost it.

A controller that starts waits until it leads. It takes over at once from one
that resigned or whose process is known to be gone, else when the leader has
not shown itself for ``lease_s`` on this controller's own monotonic clock: two
wall clocks are never compared. Every write to the store and every command to
the fleet carries the epoch; a leader that was stopped, replaced and woken up
is refused by both, and stands down.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from modelyard.clock import Clock
from modelyard.fleet import Fence
from modelyard.stores import Leader, LeaderStore, StoreUnavailableError

LOOK_S = 0.2
"""Pause between two looks of a controller that waits."""
BEATS_IN_LEASE = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who this process is among controllers. ``is_gone`` tells of a holder whether its process certainly ended."""

    holder: str
    is_gone: Callable[[str], bool]


class Leadership:
    """Gets and keeps the lead for one controller; ``fence`` learns the epoch."""

    def __init__(self, *, store: LeaderStore, candidate: Candidate, fence: Fence, clock: Clock, lease_s: float) -> None:
        self._store = store
        self._candidate = candidate
        self._fence = fence
        self._clock = clock
        self._lease_s = lease_s

    def __repr__(self) -> str:
        return f"<Leadership of epoch {self._fence.epoch or 'none'}>"

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until this controller leads; False when ``stop`` was set first."""
        seen: Leader | None = None
        since_s = self._clock.monotonic_s()
        while not stop.is_set():
            try:
                leader = await self._store.leader()
                if leader != seen:
                    if leader is not None and (seen is None or seen.epoch != leader.epoch):
                        _log.info("controller %s leads (epoch %d)", leader.holder or "(none)", leader.epoch)
                    seen, since_s = leader, self._clock.monotonic_s()
                if self._is_free(leader, since_s) and await self._take(leader):
                    return True
            except StoreUnavailableError as error:
                _log.warning("waiting for the store to learn who leads: %s", error)
            await asyncio.sleep(LOOK_S)
        return False

    async def keep(self, stop: asyncio.Event) -> None:
        """Show that this controller lives, until cancelled; set ``stop`` when another one leads."""
        epoch = self._fence.epoch
        while True:
            try:
                leads = await self._store.beat(epoch)
            except StoreUnavailableError as error:
                # Nobody else can take the lead in a store that cannot be written, and the fence holds.
                _log.warning("the lead cannot be renewed: %s", error)
            else:
                if not leads:
                    _log.error("another controller leads now; this one (epoch %d) stands down", epoch)
                    stop.set()
                    return
            await asyncio.sleep(self._lease_s / BEATS_IN_LEASE)

    async def resign(self) -> None:
        """Let the next controller lead at once."""
        if self._fence.epoch:
            try:
                await self._store.resign(self._fence.epoch)
            except StoreUnavailableError as error:
                _log.warning("the lead could not be given back, the next controller waits for it: %s", error)

    def _is_free(self, leader: Leader | None, since_s: float) -> bool:
        if leader is None or not leader.holder or self._candidate.is_gone(leader.holder):
            return True
        return self._clock.monotonic_s() - since_s >= self._lease_s

    async def _take(self, leader: Leader | None) -> bool:
        after = 0 if leader is None else leader.epoch
        if not await self._store.lead(self._candidate.holder, after=after):
            return False  # somebody was faster
        self._fence.epoch = after + 1
        if leader is not None and leader.holder:
            _log.info("took over from %s; this controller leads with epoch %d", leader.holder, after + 1)
        return True
