"""Fewer, larger writes: tokens of a stream that come close together go out in one.

For single tokens the relay's cost is two system calls each, here and at the
client. An endpoint may ask to hold tokens for some milliseconds
(``Serving.coalesce_ms``); the first token never waits.
"""

import asyncio
from collections.abc import Callable


class Coalescer:
    """Passes the first bytes to ``write`` at once, and holds others until ``hold_s`` have passed since those came."""

    __slots__ = ("_has_begun", "_held", "_hold_s", "_timer", "_write")

    def __init__(self, write: Callable[[bytes], None], hold_s: float) -> None:
        self._write = write
        self._hold_s = hold_s
        self._has_begun = False
        self._held: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, data: bytes) -> None:
        """Write ``data`` soon."""
        if not self._has_begun:
            self._has_begun = True
            self._write(data)
            return
        self._held.append(data)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._hold_s, self.flush)

    def flush(self) -> None:
        """Write what is held now; anything else for the client must come behind it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._write(data)

    def drop(self) -> None:
        """Forget what is held: nobody reads it any more."""
        self._held.clear()
        self.flush()
