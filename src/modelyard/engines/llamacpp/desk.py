"""Which request runs where, and who waits: the front never sends a process more than it has slots.

State changes happen in two places, an arrival and a departure, and both end in
``_serve``. Nothing here awaits between looking and taking.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from modelyard.engines.llamacpp.children import Child
from modelyard.engines.llamacpp.slots import BASE, Grant


class QueueFullError(Exception):
    """As many requests wait as may."""


class AdapterGoneError(Exception):
    """The adapter of a request was unloaded while it waited."""


@dataclass(slots=True)
class Place:
    """Where a request runs. ``has_run`` is to be set once llama.cpp has begun to answer."""

    child: Child
    grant: Grant
    adapter: int | None
    has_run: bool = False


@dataclass(slots=True)
class _Waiter:
    owner: str
    prompt: bytes
    granted: asyncio.Future[Place]


class Desk:
    """Gives requests their places; ``queue_max`` may wait."""

    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._current: Child | None = None
        self._waiting: deque[_Waiter] = deque()
        self._left: dict[Child, asyncio.Event] = {}

    def __repr__(self) -> str:
        return f"<Desk {self._current!r}: {self.waiting} waiting, {len(self._left)} leaving>"

    @property
    def current(self) -> Child | None:
        """Return the process that new requests go to; None before the first is ready."""
        return self._current

    @property
    def waiting(self) -> int:
        """Return how many requests have no place yet."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, owner: str, prompt: bytes) -> AsyncIterator[Place]:
        """Wait for a place, and give it back at the end.

        Raises:
            QueueFullError: too many wait already.
            AdapterGoneError: the adapter was unloaded meanwhile.
        """
        if len(self._waiting) >= self._queue_max:
            raise QueueFullError
        waiter = _Waiter(owner, prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            place = await waiter.granted
        except asyncio.CancelledError:
            self._forget(waiter)
            raise
        try:
            yield place
        finally:
            self._leave(place)

    def switch(self, child: Child) -> Child | None:
        """Send new requests, and those that wait, to ``child``; return the one before, which only finishes."""
        before, self._current = self._current, child
        if before is not None:
            self._left[before] = asyncio.Event()
            self._tell_if_idle(before)
        self._serve()
        return before

    async def finished(self, child: Child) -> None:
        """Return when a process that was switched away from has answered all; its end bounds this wait."""
        await self._left[child].wait()
        del self._left[child]

    def _serve(self) -> None:
        child = self._current
        while self._waiting and child is not None:
            waiter = self._waiting[0]
            adapter = child.adapters.get(waiter.owner)
            if adapter is None and waiter.owner != BASE:
                self._waiting.popleft().granted.set_exception(AdapterGoneError())
                continue
            grant = child.slots.take(waiter.owner, waiter.prompt)
            if grant is None:
                return
            self._waiting.popleft().granted.set_result(Place(child, grant, adapter))

    def _forget(self, waiter: _Waiter) -> None:
        """Drop a request whose caller left, which may have been given a place in the same tick."""
        granted = waiter.granted
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            self._leave(granted.result())

    def _leave(self, place: Place) -> None:
        place.child.slots.release(place.grant, has_run=place.has_run)
        self._tell_if_idle(place.child)
        self._serve()

    def _tell_if_idle(self, child: Child) -> None:
        if child in self._left and child.slots.running == 0:
            self._left[child].set()
