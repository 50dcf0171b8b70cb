"""How many lines of a batch may be with the gateway at once: as many as fill what is idle, and no more.

A *pace* is kept for each model of a tenant. It grows while answers come back
soon, since then there is room; it halves where a line waited long at the
gateway or was turned away, and shrinks by one for each that gave way to a
request in real time, since then others need the room. What was turned away says when to come again, and nothing is
sent before. News of one jam come with each line that was out in it: until all of these have ended, a pace never falls
below half of what it was. A fold without I/O; seconds are monotonic.
"""

from dataclasses import dataclass

START = 4.0
GROWN_BY = 1.0
"""Added for each answer, as long as nothing has been turned away; then for as many answers as are out at once."""
FEELING = 16
"""Rounds for one more, where it was too much before."""
FORGOTTEN = 2 * FEELING
"""Rounds without a jam after which that is long ago: one more a round again, since others may need less by now."""
SHRUNK_TO = 0.5
QUEUED_S_LONG = 2.0
"""A line that waited longer at the gateway was one too many."""
SHRINK_PAUSE_S = 1.0
"""Not smaller again before this: one jam turns many away."""
PAUSE_S_DEFAULT = 1.0
PAUSE_S_MAX = 60.0


@dataclass(slots=True)
class Pace:
    """The pace of one model of a tenant. ``running`` lines are out now, at most ``limit`` of them, and ``most``."""

    most: int
    limit: float = START
    running: int = 0
    paused_until_s: float = 0.0
    shrunk_at_s: float = float("-inf")
    ceiling: float = float("inf")
    """Where it was too much the last time: up to there it grows by one a round, and then only feels its way."""
    jam_left: int = 0
    """Lines that were out when it last was too much, and have not ended."""
    jam_limit: float = 1.0
    """It does not fall below this until they have."""
    calm: float = 0.0
    """Rounds since it last was too much."""
    is_used_up: bool = False
    """As many were out as may be, a moment ago; a batch with little to send says nothing of the room there is."""

    def __repr__(self) -> str:
        return f"<Pace {self.running}/{self.limit:.1f}>"

    def has_room(self, now_s: float) -> bool:
        """Say whether another line may be sent now."""
        return now_s >= self.paused_until_s and self.running < max(1, int(min(self.limit, self.most)))

    def sent(self) -> None:
        """Note that a line is on its way."""
        self.running += 1
        if self.running >= int(self.limit):
            self.is_used_up = True

    def answered(self, now_s: float, *, queued_s: float = 0.0, gave_way: bool = False) -> None:
        """Note an answer: how long its line waited at the gateway, and whether it had to begin again for others."""
        is_old = self._ended()
        if gave_way:
            # One too many, and that one is begun anew already: less by one, not by half.
            self._jammed(is_old=is_old)
            self.limit = max(self.jam_limit, self.limit - 1)
        elif queued_s > QUEUED_S_LONG:
            self._shrink(now_s, is_old=is_old)
        elif self.is_used_up:
            self.calm += 1 / self.limit
            self.limit = min(float(self.most), self.limit + self._step())
        if self.running <= self.limit / 2:
            self.is_used_up = False

    def turned_away(self, now_s: float, retry_after_s: float | None) -> None:
        """Note that there was no room, and when there may be."""
        self._shrink(now_s, is_old=self._ended())
        pause_s = PAUSE_S_DEFAULT if retry_after_s is None else min(retry_after_s, PAUSE_S_MAX)
        self.paused_until_s = max(self.paused_until_s, now_s + pause_s)

    def dropped(self) -> None:
        """Note a line that got no answer, which says nothing of room."""
        self._ended()

    def _ended(self) -> bool:
        """Give a line's place back; say whether it was out when it last was too much."""
        self.running -= 1
        if not self.jam_left:
            return False
        self.jam_left -= 1
        return True

    def _jammed(self, *, is_old: bool) -> None:
        """Note that it is too much."""
        self.calm = 0.0
        if not is_old:
            self.jam_left = self.running
            self.jam_limit = max(1.0, self.limit * SHRUNK_TO)

    def _step(self) -> float:
        """Return by how much an answer makes it grow."""
        if self.ceiling == float("inf"):
            return GROWN_BY
        is_safe = self.limit < self.ceiling - 1 or self.calm > FORGOTTEN
        return GROWN_BY / self.limit if is_safe else GROWN_BY / (FEELING * self.limit)

    def _shrink(self, now_s: float, *, is_old: bool) -> None:
        if now_s - self.shrunk_at_s >= SHRINK_PAUSE_S:
            self._jammed(is_old=is_old)
            self.ceiling = self.jam_limit / SHRUNK_TO
            self.limit = max(self.jam_limit, self.limit * SHRUNK_TO)
            self.shrunk_at_s = now_s
