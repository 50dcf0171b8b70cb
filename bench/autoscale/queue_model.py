"""An endpoint in memory: requests wait in one line, replicas serve them by slots, sizes are decided as time goes by.

Ticks of a second. Slots of a replica are all alike; a load takes its time; a replica that must go finishes what it
has. Nothing of the platform runs here but what decides: ``Sizer`` is the production policy or a literal reading of
the source.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from modelyard.policy.engine_model import by_slots
from modelyard.policy.scaling import Seen

LATE_S = 5.0
_WINDOW_S = 60


class Sizer(Protocol):
    """Decides how many replicas there should be."""

    def size(self, seen: Seen) -> int:
        """Return the size to have from now on."""
        ...


@dataclass(frozen=True)
class World:
    """What a replica is like."""

    slots: int = 8
    service_s: float = 8.0
    load_s: float = 60.0
    begin: int = 1


@dataclass
class Outcome:
    """What came of it."""

    requests: int = 0
    late: int = 0
    gpu_hours: float = 0.0
    cold_starts: int = 0
    busy_s: float = 0.0
    largest: int = 0
    changes: int = 0

    @property
    def late_share(self) -> float:
        """Share of requests that waited for longer than five seconds."""
        return self.late / max(self.requests, 1)

    @property
    def utilization(self) -> float:
        """Share of the time of ready slots that served somebody."""
        return self.busy_s / max(self.gpu_hours * 3600, 1e-9)


@dataclass
class _State:
    ready: int
    loading: deque[float] = field(default_factory=deque)
    line: deque[float] = field(default_factory=deque)
    ends: deque[float] = field(default_factory=deque)
    """Ends of the requests that run; all take the same time, so that they end in their order."""
    waits: deque[tuple[float, float]] = field(default_factory=deque)
    arrived: deque[float] = field(default_factory=deque)
    asked_s: float = -math.inf
    target: int = 0


def replay(arrivals: Sequence[float], sizer: Sizer, world: World, *, until_s: float) -> Outcome:
    """Serve ``arrivals`` (seconds, in order) and return what callers and accelerators had of it."""
    state, outcome, at = _State(ready=world.begin, target=world.begin), Outcome(), 0
    for now_s in range(int(until_s)):
        while state.ends and state.ends[0] <= now_s:
            state.ends.popleft()
        while state.loading and state.loading[0] <= now_s:
            state.loading.popleft()
            state.ready += 1
        while at < len(arrivals) and arrivals[at] <= now_s:
            if state.ready == 0 and not state.line and not state.loading:
                outcome.cold_starts += 1
            state.line.append(arrivals[at])
            state.arrived.append(arrivals[at])
            at += 1
        _serve(state, world, outcome, now_s)
        _resize(state, sizer.size(_seen(state, world, now_s)), world, outcome, now_s)
        # One that loads, and one that must go but is not done, are paid as well.
        running = max(state.ready, math.ceil(len(state.ends) / world.slots))
        outcome.gpu_hours += (running + len(state.loading)) / 3600
        outcome.busy_s += len(state.ends) / world.slots
        outcome.largest = max(outcome.largest, running + len(state.loading))
    outcome.requests, outcome.late = at, outcome.late + sum(until_s - came > LATE_S for came in state.line)
    return outcome


def _serve(state: _State, world: World, outcome: Outcome, now_s: float) -> None:
    while state.line and len(state.ends) < state.ready * world.slots:
        came_s = state.line.popleft()
        waited_s = max(now_s - came_s, 0.0)
        outcome.late += waited_s > LATE_S
        state.waits.append((now_s, waited_s))
        state.ends.append(now_s + world.service_s)
    if state.line or state.ends:
        state.asked_s = now_s
    while state.waits and state.waits[0][0] < now_s - _WINDOW_S:
        state.waits.popleft()
    while state.arrived and state.arrived[0] < now_s - _WINDOW_S:
        state.arrived.popleft()


def _seen(state: _State, world: World, now_s: float) -> Seen:
    waits = sorted(waited_s for _, waited_s in state.waits)
    capacity = by_slots(world.slots, service_s=world.service_s)
    assert capacity is not None, "a replica serves something"
    drain = max(state.ready, 1) * capacity.requests_s
    return Seen(
        now_s=float(now_s),
        replicas=state.ready + len(state.loading),
        ready=state.ready,
        slots=world.slots,
        gateways=1,
        queued=len(state.line),
        in_flight=min(len(state.ends), state.ready * world.slots),
        idle_s=now_s - state.asked_s,
        is_proven=True,
        wait_s=len(state.line) / drain,
        ttft_p99_s=waits[int(0.99 * (len(waits) - 1))] if waits else None,
        requests_s=len(state.arrived) / _WINDOW_S,
        capacity=capacity,
        load_s=world.load_s,
    )


def _resize(state: _State, wanted: int, world: World, outcome: Outcome, now_s: float) -> None:
    outcome.changes += wanted != state.target
    state.target = wanted
    while state.ready + len(state.loading) < wanted:
        state.loading.append(now_s + world.load_s)
    while state.ready + len(state.loading) > wanted and state.ready:
        state.ready -= 1
