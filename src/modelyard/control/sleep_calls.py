"""Engines are told to sleep and to wake, beside the loops; a call counts once the engine itself says the same."""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from modelyard.clock import Clock
from modelyard.control.dormitory import Able
from modelyard.control.engine_calls import EngineCallError, EngineCalls
from modelyard.control.observer import Observer
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy.sleepers import wake_s

SAY_S = 10.0
"""Longest time from the answer to a call until the engine's own page says the same."""
LOOK_S = 0.1
WAKE_MIN_S = 30.0
"""Least time that an engine gets to wake."""
WAKE_FACTOR = 10
"""Of the time that waking should take: callers wait, and another one can be started."""

_log = logging.getLogger(__name__)


class Told(NamedTuple):
    """How the last call to a replica ended, and the record it was made for; ``error`` "": well."""

    state: ReplicaState
    since: float
    error: str
    took_s: float


@dataclass(slots=True)
class SleepCalls:
    """Makes the calls, one at a time a replica, and remembers how each ended."""

    observer: Observer
    tasks: KeyedTasks
    clock: Clock
    calls: EngineCalls = field(default_factory=EngineCalls)
    _told: dict[str, Told] = field(default_factory=dict)

    def begin(self, one: Replica, able: Able) -> None:
        """Tell the engine of ``one`` to do what its record says; both may be told twice."""
        self.tasks.spawn(one.id, partial(self._tell, one, able))

    def told(self, one: Replica) -> Told | None:
        """Return how the call for this very record ended; None: it was not made, or is under way."""
        told = self._told.get(one.id)
        return told if told is not None and (told.state, told.since) == (one.state, one.state_since) else None

    def keep(self, living: frozenset[str]) -> None:
        """Forget what is gone."""
        self._told = {id: told for id, told in self._told.items() if id in living}

    async def close(self) -> None:
        """Give connections back."""
        await self.calls.close()

    async def _tell(self, one: Replica, able: Able) -> None:
        is_waking = one.state is ReplicaState.WAKING
        began_s, error, call = self.clock.monotonic_s(), "", able.wake if is_waking else able.sleep
        if is_waking:
            most_s = max(WAKE_MIN_S, WAKE_FACTOR * wake_s(able.weights_bytes))
            call = msgspec.structs.replace(call, timeout_s=min(call.timeout_s, most_s))
        try:
            await self.calls.make(one, call)
            await self._hear(one, is_sleeping=not is_waking)
        except EngineCallError as failed:
            error = str(failed)
            _log.warning("%s is not %s: %s", one.id, "awake" if is_waking else "asleep", error)
        self._told[one.id] = Told(one.state, one.state_since, error, self.clock.monotonic_s() - began_s)

    async def _hear(self, one: Replica, *, is_sleeping: bool) -> None:
        """Wait until the engine answers and says so itself.

        Raises:
            EngineCallError: it does not.
        """
        until_s = self.clock.monotonic_s() + SAY_S
        while True:
            load = await self.observer.ask(one.id)
            if load is not None and load.is_sleeping in (None, is_sleeping):
                return
            if self.clock.monotonic_s() >= until_s:
                awake = "it is awake" if is_sleeping else "it sleeps"
                said = f"says that {awake}" if load is not None else "does not answer"
                raise EngineCallError(f"{one.id} {said} {SAY_S:g} s after it was told otherwise")
            await asyncio.sleep(LOOK_S)
