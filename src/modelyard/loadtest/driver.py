"""Many requests: a number of callers that wait for their answers, or arrivals at a rate that wait for nobody.

*Closed loop* (``concurrency``): each caller sends its next request when it has its answer, so a slow server is asked
less. *Open loop* (``rate``): requests are due at times fixed before, and latencies count from there, also where the
client was late: otherwise the slowest moments would be those with the fewest samples (coordinated omission).
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from modelyard.loadtest.client import Client, Sample
from modelyard.loadtest.workload import Ask

PROGRESS_S = 0.5
"""Between two calls of ``show``."""
_LAG_S = 0.02
OPEN_MAX = 20_000
"""Most requests at once of an open loop; beyond, the server is overloaded for good."""


class Level(msgspec.Struct, frozen=True):
    """One load: so many callers, or so many requests a second."""

    concurrency: int = 0
    rate: float = 0.0
    arrivals: str = "poisson"
    """Of a rate: ``poisson`` or ``constant``."""
    duration_s: float = 30.0
    """No request is sent later."""
    requests: int = 0
    """No more than so many; 0: as many as there is time for."""
    warmup: int = 0
    """Requests before, which do not count."""

    @property
    def name(self) -> str:
        """``16 at once`` or ``5/s``."""
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g}/s"


@dataclass
class Measured:
    """What a level came to, as far as it got."""

    level: Level
    samples: list[Sample] = field(default_factory=list)
    begun_s: float = 0.0
    issued_s: float = 0.0
    """When the last request was sent: from there on fewer and fewer run."""
    ended_s: float = 0.0
    in_flight: int = 0
    in_flight_max: int = 0
    cpu_s: float = 0.0
    """Of this process while it measured."""
    lags_s: list[float] = field(default_factory=list)
    """How much later than asked for it woke."""
    is_stopped: bool = False


class Driver:
    """Runs levels with one client. ``show`` is called now and then with what there is; ``stop`` ends it early."""

    def __init__(self, client: Client, asks: Iterator[Ask], *, seed: int = 0, progress_s: float = PROGRESS_S) -> None:
        self._client = client
        self._asks = asks
        self._random = random.Random(seed)
        self._progress_s = progress_s
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more, and wait for no answer."""
        self._stop.set()

    async def run(self, level: Level, show: Callable[[Measured], None] = lambda _: None) -> Measured:
        """Make the requests of a level and return what they came to."""
        await self._warm(level)
        found = Measured(level, begun_s=time.perf_counter())
        cpu_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(found, show))
            load = self._closed(found) if level.concurrency else self._open(found)
            found.is_stopped = not await self._until_stopped(load)
            watch.cancel()
        found.ended_s = time.perf_counter()
        found.issued_s = found.issued_s or found.ended_s
        found.cpu_s = time.process_time() - cpu_s
        return found

    async def _warm(self, level: Level) -> None:
        waiting = asyncio.Semaphore(level.concurrency or 8)

        async def one() -> None:
            async with waiting:
                await self._client.ask(next(self._asks))

        async def every() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(level.warmup):
                    group.create_task(one())

        await self._until_stopped(every())

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do ``work`` until it is done or everything is stopped; return whether it was done."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            stopped = group.create_task(self._stop.wait())
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            is_done = task.done()
            task.cancel()
            stopped.cancel()
        return is_done

    async def _closed(self, found: Measured) -> None:
        level, left = found.level, found.level.requests or -1
        until_s = found.begun_s + level.duration_s if not level.requests else float("inf")

        async def caller() -> None:
            nonlocal left
            while left and time.perf_counter() < until_s:
                left -= 1
                found.issued_s = time.perf_counter()
                await self._one(found, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(level.concurrency):
                group.create_task(caller())
        if not level.requests:
            found.issued_s = min(until_s, time.perf_counter())

    async def _open(self, found: Measured) -> None:
        level, sent = found.level, 0
        due_s = found.begun_s
        async with asyncio.TaskGroup() as group:
            while not level.requests or sent < level.requests:
                if not level.requests and due_s - found.begun_s > level.duration_s:
                    break
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                if found.in_flight < OPEN_MAX:
                    group.create_task(self._one(found, due_s))
                else:
                    found.samples.append(Sample(due_s=due_s, error=f"more than {OPEN_MAX:,} at once"))
                sent += 1
                found.issued_s = time.perf_counter()
                gap_s = 1 / level.rate
                due_s += self._random.expovariate(level.rate) if level.arrivals == "poisson" else gap_s

    async def _one(self, found: Measured, due_s: float | None) -> None:
        found.in_flight += 1
        found.in_flight_max = max(found.in_flight_max, found.in_flight)
        try:
            found.samples.append(await self._client.ask(next(self._asks), due_s=due_s))
        finally:
            found.in_flight -= 1

    async def _watch(self, found: Measured, show: Callable[[Measured], None]) -> None:
        """Notice how late this process wakes, and show how far it is."""
        shown_s = 0.0
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                asked_s = time.perf_counter()
                await asyncio.sleep(_LAG_S)
                now_s = time.perf_counter()
                found.lags_s.append(max(0.0, now_s - asked_s - _LAG_S))
                if now_s - shown_s >= self._progress_s:
                    shown_s = now_s
                    show(found)
