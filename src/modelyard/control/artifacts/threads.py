"""Blocking work in a thread that is never left behind.

A cancelled ``asyncio.to_thread`` returns while its thread goes on; with a
descriptor in its hands that its owner closes meanwhile, it would write into
whatever file gets the number next.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

# Not the loop's own pool: the hash of 100 GB would keep a query waiting there, and a few of them every query.
_BLOCKS = ThreadPoolExecutor(8, thread_name_prefix="artifact-block")
_HOST = ThreadPoolExecutor(8, thread_name_prefix="artifact-host")
_LONG = ThreadPoolExecutor(4, thread_name_prefix="artifact-file")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` in a thread; cancelling waits for its end."""
    return await _whole(_BLOCKS, lambda: work(*args, **kwargs), None)


async def abandonable(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` in a thread; cancelling leaves it there, as a file system that hangs would hold its caller, too."""
    return await asyncio.get_running_loop().run_in_executor(_HOST, lambda: work(*args, **kwargs))


async def stoppable(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run ``work(is_stopped)`` in a thread; cancelling makes ``is_stopped()`` true and waits for its end."""
    stop = threading.Event()
    return await _whole(_LONG, lambda: work(stop.is_set), stop)


async def _whole(pool: ThreadPoolExecutor, work: Callable[[], T], stop: threading.Event | None) -> T:
    running = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()
        raise
