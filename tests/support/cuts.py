"""A controller that is cut off: from one call to its store or fleet on, nothing of what it does arrives any more."""

from collections.abc import Callable
from typing import Any

from modelyard.fleet import Fleet
from modelyard.stores import ControlStore, StoreUnavailableError

WRITES = frozenset(
    {
        "put_endpoint", "put_replica", "put_guests", "remove_replica", "put_outlook", "remove_endpoint", "put_version",
        "add_event", "add_observed_load", "reserve", "start", "stop", "forget",
    }
)  # fmt: skip


class CutError(Exception):
    """The controller is dead: nothing of what it does arrives any more."""


class Cut:
    """Counts the writes of a controller down and lets none pass after the last."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    @property
    def is_dead(self) -> bool:
        return self.left < 0

    def through(self, store: ControlStore, fleet: Fleet) -> tuple[Any, Any]:
        return Mortal(store, self), Mortal(fleet, self)

    def spend(self, name: str) -> None:
        self.left -= name in WRITES and not self.is_dead
        if self.is_dead and name == "ping":
            # The loop that asks whether the store is there may do so before the test looks: to it, it is away.
            raise StoreUnavailableError("cut off")
        if self.is_dead:
            raise CutError(f"cut off before {name}")


class Mortal:
    """Passes calls on while its controller lives."""

    def __init__(self, inner: Any, cut: Cut) -> None:
        self._inner = inner
        self._cut = cut

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        async def call(*args: Any, **names: Any) -> Any:
            self._cut.spend(name)
            return await method(*args, **names)

        return call
