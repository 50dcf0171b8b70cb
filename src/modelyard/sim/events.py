"""A calendar in virtual time: what happens next, and when.

Events of one moment happen in the order in which they were put in, so that a
run depends on nothing but what it was given: no clock, no chance, no hash.
Putting in and taking out cost O(log events); an event that was called off
stays where it is until its time comes, which is cheaper than finding it.
"""

import heapq
from collections.abc import Callable
from math import inf

Act = Callable[[], None]


class Event:
    """Something that is to happen at ``at_s``."""

    __slots__ = ("act", "at_s", "number")

    def __init__(self, at_s: float, number: int, act: Act | None) -> None:
        self.at_s = at_s
        self.number = number
        self.act = act

    def __repr__(self) -> str:
        return f"<Event {self.number} at {self.at_s:.6f}{'' if self.act else ', off'}>"

    def __lt__(self, other: "Event") -> bool:
        if self.at_s != other.at_s:
            return self.at_s < other.at_s
        return self.number < other.number

    def call_off(self) -> None:
        """Let it not happen. Calling off what has happened changes nothing."""
        self.act = None


class Events:
    """The calendar; ``now_s`` (seconds since some beginning) only grows."""

    __slots__ = ("_heap", "_number", "happened", "now_s")

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.happened = 0
        """How many have happened."""
        self._heap: list[Event] = []
        self._number = 0

    def __repr__(self) -> str:
        return f"<Events at {self.now_s:.3f} s: {self.happened} happened, {len(self._heap)} to come>"

    @property
    def next_s(self) -> float:
        """Return when the next event is due, infinite where there is none."""
        heap = self._heap
        while heap and heap[0].act is None:
            heapq.heappop(heap)
        return heap[0].at_s if heap else inf

    def at(self, at_s: float, act: Act) -> Event:
        """Let ``act`` happen at ``at_s``, which is not in the past; what it puts in for the same moment still comes."""
        assert at_s >= self.now_s, f"at {self.now_s} s something was to happen at {at_s} s"
        self._number = number = self._number + 1
        event = Event(at_s, number, act)
        heapq.heappush(self._heap, event)
        return event

    def after(self, delay_s: float, act: Act) -> Event:
        """Let ``act`` happen in ``delay_s``."""
        return self.at(self.now_s + delay_s, act)

    def step(self) -> bool:
        """Let the next event happen; say whether there was one."""
        heap = self._heap
        while heap:
            event = heapq.heappop(heap)
            if event.act is None:
                continue
            self.now_s = event.at_s
            self.happened += 1
            act, event.act = event.act, None
            act()
            return True
        return False

    def run(self, until_s: float = inf) -> None:
        """Let everything happen that is due by ``until_s``; it is then at least that late, unless that is infinite."""
        while self.next_s <= until_s and self.step():
            pass
        if until_s < inf:
            self.now_s = max(self.now_s, until_s)
