"""Time as an argument.

Policies never read a clock: they take ``now_s``. Everything else takes a
``Clock``, so that a test can move time by hand. Durations are always measured
on the monotonic clock; the wall clock only dates records, because it may jump.
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """What the platform may ask of time."""

    def monotonic_s(self) -> float:
        """Return seconds on a clock that never jumps; only differences mean something."""
        ...

    def unix_s(self) -> float:
        """Return seconds since 1970-01-01 UTC; may jump when the machine's clock is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    monotonic_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told; both readings start at ``start_s``."""

    start_s: float = 1_000_000.0
    elapsed_s: float = 0.0

    def monotonic_s(self) -> float:
        """Return the start plus all advances."""
        return self.start_s + self.elapsed_s

    def unix_s(self) -> float:
        """Return the same reading as a date."""
        return self.start_s + self.elapsed_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        assert seconds >= 0, "time does not run backwards"
        self.elapsed_s += seconds
