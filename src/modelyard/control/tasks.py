"""Long actions beside the loops, at most one a key.

A reconcile pass must not wait for a copy of 40 GB or for an engine that takes
its time to stop, and must not begin either of them twice. Each runs as a task
under a key, owned by the controller's task group.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from modelyard.fleet import FleetError
from modelyard.stores import StoreUnavailableError

_log = logging.getLogger(__name__)


class KeyedTasks:
    """Tasks by key, in ``group``; ``on_end`` is called after each that succeeded, ``after`` after each, at once."""

    __slots__ = ("_after", "_group", "_keys", "_on_end")

    def __init__(
        self,
        group: asyncio.TaskGroup,
        on_end: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._on_end = on_end
        self._after = after
        self._keys: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<KeyedTasks {sorted(self._keys)}>"

    def keys(self) -> frozenset[str]:
        """Return the keys that are running."""
        return frozenset(self._keys)

    def spawn(self, key: str, work: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Run ``work()`` unless something runs under ``key``; say whether it was begun."""
        if key in self._keys:
            return False
        self._keys[key] = self._group.create_task(self._run(key, work), name=key)
        return True

    def cancel(self) -> None:
        """End all of them; each is looked at again by the next controller."""
        for task in self._keys.values():
            task.cancel()

    async def _run(self, key: str, work: Callable[[], Coroutine[object, object, None]]) -> None:
        try:
            with boundary(key):
                await work()
                # What failed waits for the next tick: waking at once would try it again in a hot loop.
                asyncio.get_running_loop().call_soon(self._on_end)
        finally:
            del self._keys[key]
        self._after()


@contextmanager
def boundary(what: str) -> Iterator[None]:
    """Log what went wrong in ``what`` and go on: the next pass looks at what came of it and tries again."""
    try:
        yield
    except StoreUnavailableError as error:
        _log.warning("%s: put off, the store cannot be used: %s", what, error)
    except FleetError as error:
        _log.warning("%s: %s", what, error)
    except Exception:  # noqa: BLE001 - boundary: of one pass or one long action; every other endpoint goes on.
        _log.exception("%s failed; it is tried again", what)
