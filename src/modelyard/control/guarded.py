"""One writer at a time for the rows of endpoints.

The management API changes what is asked of an endpoint, the reconciler what is
told of it, and both replace the whole row. Without turns, a pass that read the
row just before a deletion would write it back undeleted just after. Each side
therefore writes under one lock, and the reconciler reads again inside it.
"""

import asyncio
from typing import Any, cast

from modelyard.domain.endpoints import Endpoint
from modelyard.stores import ControlStore


class _GuardedStore:
    """A control store whose ``put_endpoint`` waits its turn."""

    __slots__ = ("_lock", "_store")

    def __init__(self, store: ControlStore, lock: asyncio.Lock) -> None:
        self._store = store
        self._lock = lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_endpoint(self, endpoint: Endpoint) -> None:
        async with self._lock:
            await self._store.put_endpoint(endpoint)


def guarded(store: ControlStore, lock: asyncio.Lock) -> ControlStore:
    """Return ``store`` for those who change endpoints from outside the reconciler."""
    return cast("ControlStore", _GuardedStore(store, lock))
