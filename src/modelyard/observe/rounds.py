"""How long the controller takes: its rounds, and its passes from the moment at which one was needed."""

from collections import deque
from collections.abc import Mapping

import msgspec

ROUNDS_KEPT = 512
PASSES_KEPT = 4096


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the last 512 rounds took: looking at the world and deciding who needs a pass.

    Passes run beside the rounds; the last 4096 are told of apart, each from the moment at which a round found that it
    was needed until it was done, waiting for its turn included.
    """

    rounds: int
    """Since the controller started."""
    p50_s: float
    p99_s: float
    max_s: float
    largest_passes: int
    """Endpoints that needed a pass in the round that found the most."""
    largest_s: float
    pass_p50_s: float
    pass_p99_s: float
    pass_max_s: float
    oldest_pass_s: float
    """How long the oldest pass is needed that is not done now; 0: all are done."""


class RoundTimes:
    """The last rounds and passes."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=ROUNDS_KEPT)
        self._count = 0
        self._passes: deque[float] = deque(maxlen=PASSES_KEPT)
        self._since: dict[str, float] = {}
        """By endpoint, since when a pass is needed that is not done."""

    def __repr__(self) -> str:
        return f"<RoundTimes of {self._count} rounds>"

    def took(self, passes: int, seconds: float) -> None:
        """Note a round in which ``passes`` endpoints needed one."""
        self._count += 1
        self._rounds.append((passes, seconds))

    def needed(self, endpoint_ids: set[str], now_s: float, *, running: frozenset[str]) -> Mapping[str, float]:
        """Note who needs a pass now, besides those ``running``; return since when, for each of them."""
        for endpoint_id in self._since.keys() - endpoint_ids - running:
            del self._since[endpoint_id]
        for endpoint_id in endpoint_ids:
            self._since.setdefault(endpoint_id, now_s)
        return self._since

    def passed(self, endpoint_id: str, now_s: float) -> None:
        """Note the end of a pass."""
        since_s = self._since.pop(endpoint_id, None)
        if since_s is not None:
            self._passes.append(now_s - since_s)

    def status(self, now_s: float) -> RoundStatus:
        """Return the figures."""
        seconds = sorted(one for _, one in self._rounds) or [0.0]
        passes = sorted(self._passes) or [0.0]
        largest = max(self._rounds, default=(0, 0.0))
        return RoundStatus(
            rounds=self._count,
            p50_s=_at(seconds, 0.5),
            p99_s=_at(seconds, 0.99),
            max_s=_at(seconds, 1.0),
            largest_passes=largest[0],
            largest_s=round(largest[1], 4),
            pass_p50_s=_at(passes, 0.5),
            pass_p99_s=_at(passes, 0.99),
            pass_max_s=_at(passes, 1.0),
            oldest_pass_s=round(now_s - min(self._since.values(), default=now_s), 4),
        )


def _at(ordered: list[float], share: float) -> float:
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 4)
