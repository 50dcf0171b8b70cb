"""How long reconcile rounds take: from the look at the world until the last of their passes is done."""

from collections import deque

import msgspec

ROUNDS_KEPT = 512


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the last 512 rounds took, and of the one with the most passes among them."""

    rounds: int
    """Since the controller started."""
    p50_s: float
    p99_s: float
    max_s: float
    largest_passes: int
    """Endpoints that the largest of these rounds looked at closely."""
    largest_s: float


class Round:
    """One round that is under way."""

    __slots__ = ("_began_s", "_open", "_times", "passes")

    def __init__(self, times: "RoundTimes", began_s: float) -> None:
        self._times = times
        self._began_s = began_s
        self._open = 1  # the round itself
        self.passes = 0

    def pass_began(self) -> None:
        """Count a pass."""
        self.passes += 1
        self._open += 1

    def ended(self, now_s: float) -> None:
        """Note the end of a pass, or of the round's own work."""
        self._open -= 1
        if self._open == 0:
            self._times.took(self.passes, now_s - self._began_s)


class RoundTimes:
    """The last rounds."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=ROUNDS_KEPT)
        self._count = 0

    def __repr__(self) -> str:
        return f"<RoundTimes of {self._count} rounds>"

    def begin(self, now_s: float) -> Round:
        """Return a round that began now."""
        return Round(self, now_s)

    def took(self, passes: int, seconds: float) -> None:
        """Note a round that is over."""
        self._count += 1
        self._last.append((passes, seconds))

    def status(self) -> RoundStatus:
        """Return the figures."""
        seconds = sorted(one for _, one in self._last) or [0.0]
        largest = max(self._last, default=(0, 0.0))
        return RoundStatus(
            rounds=self._count,
            p50_s=round(seconds[len(seconds) // 2], 4),
            p99_s=round(seconds[int(len(seconds) * 0.99)], 4),
            max_s=round(seconds[-1], 4),
            largest_passes=largest[0],
            largest_s=round(largest[1], 4),
        )
