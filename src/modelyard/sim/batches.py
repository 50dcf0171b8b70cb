"""A batch in a simulated world: its lines are sent as fast as ``policy.batch_pace`` says that there is room.

What ``batch/`` does with a line's answer: one that was answered counts, and
says how long it waited; one that was turned away comes again later. A batch
that is not through when everybody else is done stays where it is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from modelyard.policy.batch_pace import Pace
from modelyard.policy.queueing import BATCH_BAND
from modelyard.sim.events import Events
from modelyard.sim.requests import Arrival, Request

LOOK_S = 0.25
"""As often as a batch that has room or a pause looks whether it may send."""


class Batch:
    """The lines of one batch of one model. ``most``: that are out at once; ``arrive`` takes one to a gateway."""

    def __init__(
        self, lines: Sequence[Arrival], events: Events, arrive: Callable[[Request], None], *, most: int = 256
    ) -> None:
        self.pace = Pace(most)
        self.left = deque(lines)
        self.done: list[Request] = []
        self.turned_away = 0
        self._events = events
        self._arrive = arrive
        self._number = 0
        self._is_over = False
        events.after(0.0, self._look)

    def __repr__(self) -> str:
        return f"<Batch: {len(self.done)} done, {len(self.left)} left, {self.pace!r}>"

    def stop(self) -> None:
        """Send nothing more."""
        self._is_over = True

    def ended(self, line: Request) -> None:
        """Take the end of a line."""
        now_s = self._events.now_s
        if line.refusal:
            self.turned_away += 1
            self.left.appendleft(line.arrival)
            self.pace.turned_away(now_s, None)
        else:
            self.done.append(line)
            self.pace.answered(now_s, queued_s=line.waited_s, gave_way=line.gave_way > 0)
        # In a moment: whoever tells of this end has not given the slot back yet.
        self._events.after(0.0, self._send)

    def _look(self) -> None:
        self._send()
        if not self._is_over and (self.left or self.pace.running):
            self._events.after(LOOK_S, self._look)

    def _send(self) -> None:
        now_s = self._events.now_s
        while self.left and not self._is_over and self.pace.has_room(now_s):
            self._number -= 1
            arrival = msgspec.structs.replace(
                self.left.popleft(), at_s=now_s, band=BATCH_BAND, is_line=True, is_stream=False
            )
            self.pace.sent()
            self._arrive(Request(arrival, self._number))

    @property
    def tokens(self) -> int:
        """Return the tokens of the answers there are."""
        return sum(line.arrival.output_tokens for line in self.done if line.done_s < inf)
