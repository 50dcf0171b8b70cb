"""What each replica took of accelerators, hour by hour, and what its engine counted.

Level-triggered like all that the controller does: it compares the replicas
that are stored with those in the book, so no way of starting or ending one can
be forgotten. Starts, readiness and ends are taken from the records, where they
stand to the millisecond; only *busy* is sampled. A controller that was away
books the time between as present and ready, because engines outlive it, and
as idle, because nobody looked. Between two looks of one controller no more is
booked than passed on the clock that never jumps: a wall clock that is set says
in which hour it was, and never how long. Of the time that an engine sleeps nothing
is booked: it holds no accelerator.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from modelyard.clock import Clock
from modelyard.domain.books import ReplicaHour, ReplicaLife
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState, replica_of
from modelyard.domain.nodes import Node, NodeSeen
from modelyard.engines import EngineLoad
from modelyard.policy.gpu_costs import HOUR_S, shares
from modelyard.stores import BookStore, ControlStore, StoreUnavailableError

INTERVAL_S = 10.0
WRITE_S = 60.0
"""Pause between two writes while nothing begins or ends: thousands of replicas are as many rows."""
TOGETHER = 200
"""Replicas that are looked at before others get a turn: some milliseconds."""
PAUSES_SEEN = 3
"""A replica that was looked at longer ago than so many pauses was not watched in between."""
STEP_S = 2.0
"""A wall clock that went so much further than the other one was set."""
OVER = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})

_log = logging.getLogger(__name__)
_NO_LOAD = EngineLoad()


class ReplicaBook:
    """Keeps the book. ``prices`` are nano-dollars of an accelerator's hour by kind, where its node has none."""

    def __init__(
        self,
        *,
        store: ControlStore,
        books: BookStore,
        nodes: Callable[[], Mapping[str, NodeSeen]],
        latest: Callable[[str], tuple[float, EngineLoad] | None],
        reports: Callable[[], Mapping[str, Report]],
        prices: Mapping[str, int],
        clock: Clock,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store = store
        self._books = books
        self._nodes = nodes
        self._latest = latest
        self._reports = reports
        self._prices = prices
        self._clock = clock
        self._interval_s = interval_s
        self._living: dict[str, ReplicaLife] | None = None
        self._lives: dict[str, ReplicaLife] = {}
        self._asleep: set[str] = set()
        """Those that slept at the last look."""
        self._hours: dict[tuple[int, str], ReplicaHour] = {}
        """Noted, and not written yet."""
        self._looked: tuple[float, float] | None = None
        """The monotonic and the wall clock at the last look."""
        self._written_s = clock.monotonic_s()

    def __repr__(self) -> str:
        return f"<ReplicaBook: {len(self._living or ())} replicas live>"

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            try:
                await self.note()
            except StoreUnavailableError as error:
                _log.warning("replicas' hours wait: %s", error)
            await asyncio.sleep(self._interval_s)

    async def note(self) -> None:
        """Book what was since the last look; write it down if something began or ended, else now and then.

        Raises:
            StoreUnavailableError: it cannot be read or written; a later look does that.
        """
        nodes = {id: seen.node for id, seen in self._nodes().items()}
        if not nodes:
            return  # nobody has looked at the fleet yet: what a replica costs is not known
        now_s, monotonic_s = self._clock.unix_s(), self._clock.monotonic_s()
        if self._living is None:
            found = await self._books.lives(since=now_s, until=now_s)
            self._living = {life.replica_id: life for life in found if life.ended_at is None}
        endpoints = {one.id: one for one in await self._store.endpoints()}
        replicas = {one.id: one for one in await self._store.replicas()}
        is_first = self._looked is None
        passed_s, shift_s = self._passed(now_s, monotonic_s)
        busy = self._busy(replicas)
        has_news = False
        for number, replica in enumerate(replicas.values()):
            if number % TOGETHER == TOGETHER - 1:
                await asyncio.sleep(0)
            before = self._living.get(replica.id)
            life = before or self._born(replica, endpoints.get(replica.endpoint_id), nodes)
            if life is not None:
                if is_first or before is None:
                    # What was seen by a clock that was ahead, and was set back while nobody looked.
                    life = msgspec.structs.replace(life, seen_at=min(life.seen_at, now_s))
                elif shift_s:
                    life = msgspec.structs.replace(life, seen_at=life.seen_at + shift_s)
                grown = self._note_life(self._grown(life, replica, endpoints.get(replica.endpoint_id), now_s))
                self._add(self._booked(life, grown, passed_s, replica, is_busy=replica.id in busy))
                has_news |= before is None or grown.ended_at is not None
        self._asleep = {id for id, one in replicas.items() if one.state is ReplicaState.ASLEEP}
        for life in [one for one in self._living.values() if one.replica_id not in replicas]:
            # Gone with its endpoint since the last look.
            self._note_life(msgspec.structs.replace(life, ended_at=max(life.seen_at, life.started_at)))
            has_news = True
        if has_news or self._clock.monotonic_s() - self._written_s >= WRITE_S:
            await self._write()

    def _passed(self, now_s: float, monotonic_s: float) -> tuple[float, float]:
        """Return how long ago the last look was, and by how much the wall clock was set since."""
        before, self._looked = self._looked, (monotonic_s, now_s)
        if before is None:
            return math.inf, 0.0
        passed_s = monotonic_s - before[0]
        shift_s = now_s - before[1] - passed_s
        if abs(shift_s) < STEP_S:
            return max(passed_s, now_s - before[1]), 0.0
        _log.warning("the wall clock was set by %+.0f s; replicas' time goes on by the other one", shift_s)
        return passed_s, shift_s

    def _note_life(self, life: ReplicaLife) -> ReplicaLife:
        assert self._living is not None, "read before anything is noted"
        self._lives[life.replica_id] = life
        if life.ended_at is None:
            self._living[life.replica_id] = life
        else:
            self._living.pop(life.replica_id, None)
        return life

    def _add(self, hours: Iterable[ReplicaHour]) -> None:
        for hour in hours:
            key = (hour.hour, hour.replica_id)
            before = self._hours.get(key)
            self._hours[key] = hour if before is None else _plus(before, hour)

    async def _write(self) -> None:
        """Write down what is noted; a life and its hours in one transaction, so that none is booked twice."""
        lives, hours = self._lives, self._hours
        await self._books.put_lives(list(lives.values()), list(hours.values()))
        self._lives, self._hours = {}, {}
        self._written_s = self._clock.monotonic_s()

    def _busy(self, replica_ids: Iterable[str]) -> set[str]:
        """Return the replicas that have requests."""
        sent = {
            replica_of(one.replica_id)
            for report in self._reports().values()
            for one in report.replicas
            if one.in_flight
        }
        looks = {id: look for id in replica_ids if (look := self._latest(id)) is not None}
        return sent | {id for id, (_, load) in looks.items() if load.running or load.waiting}

    def _born(self, replica: Replica, endpoint: Endpoint | None, nodes: Mapping[str, Node]) -> ReplicaLife | None:
        """Return the life of a replica that is new; None for one that has not begun, or was over before the book."""
        if replica.state in OVER or not replica.started_at:
            return None
        kind, count, hourly = shares(replica.placement, nodes, self._prices)
        return ReplicaLife(
            replica_id=replica.id,
            endpoint_id=replica.endpoint_id,
            owner_id=endpoint.tenant_id if endpoint else "",
            model=endpoint.name if endpoint else replica.model_name,
            version_id=replica.version_id,
            accelerator=kind or "cpu",
            accelerators=count,
            hourly_nanousd=hourly,
            started_at=replica.started_at,
            ready_at=None,  # it was not, when it began
            ended_at=None,
            seen_at=replica.started_at,
        )

    def _grown(self, life: ReplicaLife, replica: Replica, endpoint: Endpoint | None, now_s: float) -> ReplicaLife:
        """Return the life as it is now."""
        looked_s, load = self._latest(replica.id) or (self._clock.monotonic_s(), _NO_LOAD)
        ended_at = max(replica.state_since, life.started_at) if replica.state in OVER else None
        counted = {
            "prompt_tokens": _greater(life.prompt_tokens, load.prompt_tokens_total),
            "generation_tokens": _greater(life.generation_tokens, load.generation_tokens_total),
        }
        has_news = load.prompt_tokens_total is not None or load.generation_tokens_total is not None
        if endpoint is not None and (endpoint.id != life.endpoint_id or not life.owner_id):
            # One of a warm pool goes on under the endpoint that took it, and at its owner's cost.
            life = msgspec.structs.replace(
                life, endpoint_id=endpoint.id, owner_id=endpoint.tenant_id, model=endpoint.name
            )
        return msgspec.structs.replace(
            life,
            endpoint_id=replica.endpoint_id,
            ready_at=replica.ready_at,
            ended_at=ended_at,
            seen_at=max(life.seen_at, ended_at if ended_at is not None else now_s),
            counted_at=now_s - (self._clock.monotonic_s() - looked_s) if has_news else life.counted_at,
            **counted,
        )

    def _booked(
        self, before: ReplicaLife, now: ReplicaLife, passed_s: float, replica: Replica, *, is_busy: bool
    ) -> Iterable[ReplicaHour]:
        """Return the time between two looks, by hour; never more than passed."""
        until = now.ended_at if now.ended_at is not None else now.seen_at
        was_watched = until - before.seen_at <= PAUSES_SEEN * self._interval_s
        start, until = self._awake(replica, max(before.seen_at, until - passed_s), until)
        while start < until:
            hour = int(start // HOUR_S * HOUR_S)
            end = min(until, hour + HOUR_S)
            present = end - start
            ready = present if before.ready_at is not None else 0.0
            if before.ready_at is None and now.ready_at is not None:
                ready = min(present, max(0.0, end - max(start, now.ready_at)))
            yield ReplicaHour(
                hour=hour,
                replica_id=_row_id(replica),
                endpoint_id=now.endpoint_id,
                owner_id=now.owner_id,
                model=now.model,
                accelerator=now.accelerator,
                present_s=present,
                ready_s=ready,
                busy_s=ready if is_busy and was_watched else 0.0,
                accelerator_s=present * now.accelerators,
                cost_nanousd=round(now.hourly_nanousd * present / HOUR_S),
            )
            start = end

    def _awake(self, replica: Replica, start: float, until: float) -> tuple[float, float]:
        """Return the part of a time in which a replica held accelerators, by what it was at both ends."""
        turned = min(max(replica.state_since, start), max(start, until))
        if replica.state is ReplicaState.ASLEEP:
            return start, turned
        return (turned if replica.id in self._asleep else start), until


def _row_id(replica: Replica) -> str:
    """Return what a replica's hours stand under: one that was taken from a warm pool has hours of both owners."""
    return f"{replica.id}@{replica.endpoint_id}" if replica.model_name else replica.id


def _plus(one: ReplicaHour, other: ReplicaHour) -> ReplicaHour:
    amounts = ("present_s", "ready_s", "busy_s", "accelerator_s", "cost_nanousd")
    return msgspec.structs.replace(other, **{name: getattr(one, name) + getattr(other, name) for name in amounts})


def _greater(before: int | None, now: float | None) -> int | None:
    """Return a counter that never goes back: a page that came late must not undo a later one."""
    if now is None:
        return before
    return int(now) if before is None else max(before, int(now))
