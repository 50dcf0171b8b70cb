"""Waiting for something to become true, with a deadline.

No test sleeps: a fixed pause is too short on a loaded machine and too long on
every other. A check may return a falsy value or raise an ``AssertionError`` or
``OSError`` to say "not yet"; the last of those is shown when time is up.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_S = 0.02
NOT_YET = (AssertionError, OSError, LookupError)


def eventually(check: Callable[[], T | None], within_s: float, what: str) -> T:
    """Return the first truthy value of ``check``; fail with ``what`` after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        last: object
        try:
            value = check()
        except NOT_YET as error:
            last = error
        else:
            if value:
                return value
            last = value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:g} s; last: {last!r}")
        time.sleep(PAUSE_S)


async def eventually_async(check: Callable[[], T | Awaitable[T | None] | None], within_s: float, what: str) -> T:
    """Do as ``eventually`` does, without blocking the loop between tries; ``check`` may return an awaitable."""
    deadline = time.monotonic() + within_s
    while True:
        last: object
        try:
            found = check()
            value = await found if inspect.isawaitable(found) else found
        except NOT_YET as error:
            last = error
        else:
            if value:
                return value
            last = value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:g} s; last: {last!r}")
        await asyncio.sleep(PAUSE_S)
