"""Requests that stand in line, by deployment: how long each batch of them waits, who gives up, who is turned away.

Only deployments without room have a line, few at any time, so that these are plain queues beside the columns.
"""

from collections import deque


class Lines:
    """First come, first served. Counts are floats: a tick serves parts of requests."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[int, deque[list[float]]] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def waiting(self) -> dict[int, deque[list[float]]]:
        """The lines, each of [moment of arrival, how many]; read only."""
        return self._lines

    def join(self, deployment: int, at_s: float, number: float) -> None:
        """Stand ``number`` requests that came at ``at_s`` in line."""
        self._lines.setdefault(deployment, deque()).append([at_s, number])

    def serve(self, deployment: int, number: float) -> list[tuple[float, float]]:
        """Take ``number`` from the front; return when they came, and how many."""
        served: list[tuple[float, float]] = []
        line = self._lines.get(deployment)
        while line and number > 1e-9:
            came_s, there = line[0]
            taken = min(there, number)
            served.append((came_s, taken))
            number -= taken
            if there - taken <= 1e-6:
                line.popleft()
            else:
                line[0][1] = there - taken
        if line is not None and not line:
            del self._lines[deployment]
        return served

    def give_up(self, deployment: int, before_s: float) -> float:
        """Drop those that came before ``before_s``; return how many."""
        line, gone = self._lines.get(deployment), 0.0
        while line and line[0][0] < before_s:
            gone += line.popleft()[1]
        if line is not None and not line:
            del self._lines[deployment]
        return gone

    def turn_away(self, deployment: int, places: float) -> float:
        """Leave the first ``places``, drop those that came last; return how many."""
        line = self._lines.get(deployment)
        if not line:
            return 0.0
        over = sum(number for _, number in line) - places
        gone = 0.0
        while line and over > 1e-9:
            taken = min(line[-1][1], over)
            gone += taken
            over -= taken
            if line[-1][1] - taken <= 1e-6:
                line.pop()
            else:
                line[-1][1] -= taken
        if not line:
            del self._lines[deployment]
        return gone
