"""One stream from the logs of many replicas, also of those that start meanwhile."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from modelyard.fleet import Fleet
from modelyard.stores import StoreUnavailableError

READ_TIMEOUT_S = 20.0
_LOOK_INTERVAL_S = 1.0
"""Pause between two looks for new replicas."""
_LINES_WAITING_MAX = 1000
"""A client that reads slowly stops the reading of logs here, not memory."""

Look = Callable[[], Awaitable[list[str]]]


async def written(fleet: Fleet, replica_id: str, tail: int) -> tuple[list[str], int]:
    """Return the last ``tail`` lines of a replica's log, and how many there are in all."""
    kept: deque[str] = deque(maxlen=tail)
    count = 0
    async with asyncio.timeout(READ_TIMEOUT_S), _closing(fleet.log_lines(replica_id, follow=False)) as lines:
        async for line in lines:
            kept.append(line)
            count += 1
    return list(kept), count


def follow(fleet: Fleet, look: Look, tail: int) -> AsyncGenerator[str]:
    """Yield the last ``tail`` lines of each replica that ``look`` finds now, and all that come, until closed."""
    return _from_task(lambda waiting: _read_all(fleet, look, tail, waiting))


def follow_one(fleet: Fleet, replica_id: str, tail: int) -> AsyncGenerator[str]:
    """Yield the last ``tail`` lines of one replica and all that come, until closed or the replica's log has ended."""
    return _from_task(lambda waiting: _read(fleet, replica_id, tail, waiting, {replica_id}))


async def _from_task(read: Callable[[asyncio.Queue[str]], Coroutine[None, None, None]]) -> AsyncGenerator[str]:
    """Yield what ``read`` puts into its queue, until it is done or we are closed.

    Reading is a task of its own, because the consumer may ask for each line from another task.
    """
    waiting: asyncio.Queue[str] = asyncio.Queue(_LINES_WAITING_MAX)
    reading = asyncio.create_task(read(waiting))
    upcoming: asyncio.Task[str] | None = None
    try:
        while not (reading.done() and waiting.empty()):
            upcoming = asyncio.create_task(waiting.get())
            await asyncio.wait({upcoming, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done() and waiting.empty():
                break
            yield await upcoming
        reading.result()
    finally:
        tasks = [task for task in (upcoming, reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_all(fleet: Fleet, look: Look, tail: int, waiting: asyncio.Queue[str]) -> None:
    known: set[str] = set()
    first = True
    async with asyncio.TaskGroup() as readers:
        while True:
            try:
                found = await look()
            except StoreUnavailableError:
                found = []
            for replica_id in found:
                if replica_id not in known:
                    known.add(replica_id)
                    # What a later replica wrote before we saw it is new to the reader, so all of it is shown.
                    readers.create_task(_read(fleet, replica_id, tail if first else None, waiting, known))
            first = False
            await asyncio.sleep(_LOOK_INTERVAL_S)


async def _read(fleet: Fleet, replica_id: str, tail: int | None, waiting: asyncio.Queue[str], known: set[str]) -> None:
    skipped = 0
    if tail is not None:
        _, count = await written(fleet, replica_id, 0)
        skipped = max(0, count - tail)
    async with _closing(fleet.log_lines(replica_id, follow=True)) as lines:
        async for line in lines:
            if skipped:
                skipped -= 1
                continue
            await waiting.put(f"{replica_id}: {line}" if len(known) > 1 else line)


@asynccontextmanager
async def _closing(lines: AsyncIterator[str]) -> AsyncIterator[AsyncIterator[str]]:
    try:
        yield lines
    finally:
        close = getattr(lines, "aclose", None)
        if close is not None:
            await close()
