"""The bounded line before an endpoint: first come, first served.

Refusing early is kinder than a long line: a caller that is told "full, retry
in 2 s" can go elsewhere, one that waits behind 500 others only times out. The
line is a dict, since dicts keep insertion order and forget any member in
constant time: a thousand waiters may leave at once.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

W = TypeVar("W")


class WaitingLine(Generic[W]):
    """Waiters with their deadlines (seconds on the caller's clock)."""

    __slots__ = ("places", "waiters")

    def __init__(self, places: int) -> None:
        self.places = places
        self.waiters: dict[W, float] = {}
        """Deadline of each waiter, in order of arrival; read only. Asking it directly spares hot callers a call."""

    def __len__(self) -> int:
        return len(self.waiters)

    def __repr__(self) -> str:
        return f"<WaitingLine {len(self.waiters)}/{self.places}>"

    @property
    def is_full(self) -> bool:
        """Say whether the next one must be refused."""
        return len(self.waiters) >= self.places

    def join(self, waiter: W, *, deadline_s: float) -> None:
        """Stand at the end."""
        assert not self.is_full, "joined a full line"
        self.waiters[waiter] = deadline_s

    def leave(self, waiter: W) -> bool:
        """Go away; say whether the waiter stood here."""
        return self.waiters.pop(waiter, None) is not None

    def first(self) -> W | None:
        """Return who is next, without removing."""
        return next(iter(self.waiters), None)

    def expired(self, now_s: float) -> list[W]:
        """Return those whose deadline has passed, without removing."""
        return [waiter for waiter, deadline_s in self.waiters.items() if deadline_s <= now_s]

    def __iter__(self) -> Iterator[W]:
        return iter(list(self.waiters))
