"""Who may send the next line: a pace for each model of a tenant, and a bound for this process as a whole."""

import asyncio
from collections.abc import Callable

from modelyard.batch.gateways import Reply
from modelyard.clock import Clock
from modelyard.policy.batch_pace import Pace

LOOK_S = 0.1
"""How often whoever waits looks at the clock; a pause is over when it says so, and nobody tells."""

Key = tuple[str, str]
"""A tenant and the model that its lines ask for."""


class Room:
    """The paces of all models, and how many lines are out."""

    def __init__(self, *, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._paces: dict[Key, Pace] = {}
        self._changed = asyncio.Event()
        self.running = 0

    def __repr__(self) -> str:
        return f"<Room {self.running}/{self._most}>"

    async def take(self, key: Key, is_over: Callable[[], bool]) -> bool:
        """Wait until a line of ``key`` may be sent, and count it; False once ``is_over`` says that none will be."""
        while not is_over():
            pace = self._pace(key)
            if self.running < self._most and pace.has_room(self._clock.monotonic_s()):
                pace.sent()
                self.running += 1
                return True
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return False

    def answered(self, key: Key, reply: Reply) -> None:
        """Give the place of an answered line back."""
        now_s = self._clock.monotonic_s()
        self._pace(key).answered(now_s, queued_s=reply.queued_s, gave_way=reply.gave_way)
        self._give_back()

    def turned_away(self, key: Key, retry_after_s: float | None) -> None:
        """Give the place of a line back for which there was no room."""
        self._pace(key).turned_away(self._clock.monotonic_s(), retry_after_s)
        self._give_back()

    def dropped(self, key: Key) -> None:
        """Give the place of a line back that got no answer."""
        self._pace(key).dropped()
        self._give_back()

    def _pace(self, key: Key) -> Pace:
        pace = self._paces.get(key)
        if pace is None:
            idle = [one for one, known in self._paces.items() if not known.running]
            for one in idle if len(self._paces) >= 1000 else ():
                del self._paces[one]
            pace = self._paces[key] = Pace(self._most)
        return pace

    def _give_back(self) -> None:
        self.running -= 1
        assert self.running >= 0, "gave back more than was taken"
        self._changed.set()
