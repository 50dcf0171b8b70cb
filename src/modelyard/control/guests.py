"""Guests of running replicas: taken in and let go while others are served, as ``policy/guests.py`` decides.

A pass over a host looks at who sits on its ready replicas, plans and acts.
What is about to be loaded is written down before the engine is told, and what
is let go is taken from gateways before it is: whoever is cut off when, the next
controller goes on from what is stored and from what engines say they have.

Calls to engines run beside the loops, one a seat. What they find is stored by
them, so that a guest answers as soon as it is loaded and not a round later.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.control.engine_calls import EngineCallError, EngineCalls
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.observer import Observer
from modelyard.control.supplies import Supplied, Supplies, SupplyError
from modelyard.control.tasks import KeyedTasks
from modelyard.control.world import World
from modelyard.domain.catalog import ModelVersion, VersionStatus, serves_as
from modelyard.domain.endpoints import Endpoint, EndpointStatus
from modelyard.domain.fleet import SEAT_NAME, GuestSeat, Replica, ReplicaState, SeatState, seat_id, without_others
from modelyard.engines import Engine, Engines, Guest, GuestKind, Options
from modelyard.policy import guests as policy
from modelyard.policy.adapter_bases import doubt_of_base
from modelyard.policy.guests import Key
from modelyard.policy.progress import Fetch
from modelyard.policy.rollouts import sizes
from modelyard.policy.signals import Signals
from modelyard.stores import ControlStore, Event, EventData

RATE_S = 60.0
PRELOAD_S = 30.0
"""Longest that a new replica of a host is kept from callers until guests of the ones that it replaces are on it."""
NOT_FOUND = 404
TOLD_S = 2.0
"""Longest that gateways take to tell that an engine has a guest again."""
NO_FILES = Path()
"""The artifact of a guest that has none: that of an engine which computes nothing."""
_NAME_MAX = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """How guests of one endpoint stand, besides their seats: what each version waits for, and what went wrong."""

    waits: Mapping[str, str] = field(default_factory=dict)
    troubles: Mapping[str, str] = field(default_factory=dict)
    fetch: Fetch | None = None

    @property
    def is_over(self) -> bool:
        """Nothing is under way."""
        return self.fetch is None and not self.troubles


NOTHING = Standing()


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    times: int
    retry_s: float
    """When it is tried there again, unix seconds."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A guest as it can be loaded."""

    endpoint: Endpoint
    version: ModelVersion
    supplied: Supplied | None
    base: ModelVersion | None = None


@dataclass(slots=True)
class Guests:
    """Seats on the replicas of hosts. ``publish`` tells gateways what is stored."""

    store: ControlStore
    engines: Engines
    supplies: Supplies
    tasks: KeyedTasks
    loads: LoadTimes
    clock: Clock
    observer: Observer
    publish: Callable[[], Awaitable[None]]
    signals: Signals | None = None
    pauses_s: tuple[float, float] = (1.0, 60.0)
    rule: policy.Rule = policy.STANDARD
    calls: EngineCalls = field(default_factory=EngineCalls)
    _seats: dict[str, tuple[GuestSeat, ...]] = field(default_factory=dict)
    """Seats by replica as they are now, ahead of any look at the store."""
    _unstored: set[str] = field(default_factory=set)
    """Replicas of which a write failed: it may have arrived or not, and is made again. To believe an older look at the
    store instead would take their seats from those who sat down since."""
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    _failed: dict[tuple[str, Key], _Failed] = field(default_factory=dict)
    _loaded_s: dict[str, float] = field(default_factory=dict)
    """When a seat was loaded, by its id (monotonic): what an engine said before that says nothing of it."""
    _changed_s: dict[str, float] = field(default_factory=dict)
    """When the seats on a replica last changed (monotonic): what its engine said before that tells of no stray."""
    _waiting_since_s: dict[Key, float] = field(default_factory=dict)
    _standing: dict[str, Standing] = field(default_factory=dict)
    _used_at: dict[str, float] = field(default_factory=dict)
    """When each guest endpoint last had a request, unix seconds."""
    _preloading_since_s: dict[str, float] = field(default_factory=dict)

    def keep(self, world: World) -> None:
        """Forget what is gone."""
        living = {replica.id for replicas in world.replicas.values() for replica in replicas}
        for gone in self._seats.keys() - living:
            del self._seats[gone]
            self._turns.pop(gone, None)
            self._changed_s.pop(gone, None)
        self._unstored &= living
        self._failed = {at: failed for at, failed in self._failed.items() if at[0] in living}
        self._loaded_s = {id: at for id, at in self._loaded_s.items() if id.partition("/")[0] in living}
        self._preloading_since_s = {id: at for id, at in self._preloading_since_s.items() if id in living}
        for gone in self._standing.keys() - world.endpoints.keys():
            del self._standing[gone]
            self._used_at.pop(gone, None)
        self._waiting_since_s = {key: at for key, at in self._waiting_since_s.items() if key[0] in world.endpoints}

    def standing(self, endpoint_id: str) -> Standing:
        """Return how guests of an endpoint stand."""
        return self._standing.get(endpoint_id, NOTHING)

    def is_seated(self, endpoint_id: str) -> bool:
        """Say whether anything of an endpoint sits anywhere, or is on its way."""
        return any(seat.endpoint_id == endpoint_id for seats in self._seats.values() for seat in seats)

    async def close(self) -> None:
        """Give connections back."""
        await self.calls.close()

    # --- a pass over a host ------------------------------------------------------------

    async def tend(self, host: Endpoint, world: World, records: Iterable[Replica]) -> bool:
        """Bring the seats on a host's replicas one step closer to what they should be; say whether anything changed."""
        replicas = [one for one in records if one.state is ReplicaState.READY or self._preloads(one)]
        guests = world.guests.get(host.id, ())
        has_changed = await self._store_again(replicas)
        self._drop_strays(replicas)
        if not guests and not any(self._seats_on(one) for one in replicas):
            return has_changed
        now_s = world.unix_s
        for guest in guests:
            if math.isfinite(idle_s := _idle_s(world, guest.id)):
                self._used_at[guest.id] = now_s - idle_s
        seen = [host_seen for one in replicas if (host_seen := self._host_seen(one, world)) is not None]
        room = sum(max(0, one.capacity - len(one.seats)) for one in seen)
        candidates, wanted = self._wanted(guests, seen, room, world)
        planned = policy.plan(seen, wanted, now_s, self.rule)
        self._note_waits(guests, planned.waits, candidates)
        by_id = {one.id: one for one in replicas}
        for action in planned.actions:
            has_changed |= await self._do(action, by_id[action.replica_id], candidates)
        return has_changed

    def _host_seen(self, replica: Replica, world: World) -> policy.HostSeen | None:
        version = world.versions.get(replica.version_id)
        engine = self.engines.get(version.framework) if version is not None else None
        if version is None or engine is None or engine.guests is GuestKind.NONE:
            return None
        said, busy = self.observer.guests(replica.id), self.tasks.keys()
        seats = []
        for seat in self._seats_on(replica):
            id = seat_id(replica.id, seat.name)
            loaded_s = self._loaded_s.get(id, 0.0)
            is_lost = said is not None and said[0] > loaded_s and seat.name not in said[1]
            # What gateways met just before it was loaded again they tell a moment longer.
            is_lost |= self.observer.is_missing(id) and world.monotonic_s - loaded_s > TOLD_S
            seats.append(
                policy.SeatSeen(
                    seat=seat,
                    in_flight=world.in_flight(id) if seat.state is SeatState.DRAINING else 0,
                    is_busy=id in busy,
                    is_lost=is_lost,
                )
            )
        return policy.HostSeen(
            id=replica.id,
            capacity=guests_max(engine, version),
            bases=frozenset(bases_on(version, engine, world.versions)),
            seats=seats,
            not_before_s={key: one.retry_s for (on, key), one in self._failed.items() if on == replica.id},
        )

    def _wanted(
        self, guests: Iterable[Endpoint], seen: Sequence[policy.HostSeen], room: int, world: World
    ) -> tuple[dict[Key, _Candidate], list[policy.Wanted]]:
        """Return the guests that may be asked for; of those without a seat and a reason for one only what has room is
        got ready, for a host may have a thousand."""
        sitting = {one.seat.key for host in seen for one in host.seats}
        candidates: dict[Key, _Candidate] = {}
        found: list[policy.Wanted] = []
        troubled: dict[str, dict[str, str]] = {}
        fetches: dict[str, Fetch] = {}
        for guest in sorted(guests, key=lambda one: _idle_s(world, one.id)):
            if guest.is_deleted:
                continue
            for version_id, number in sizes(1, guest, world.unix_s).items():
                version = world.versions.get(version_id)
                if number <= 0 or version is None:
                    continue
                key = (guest.id, version_id)
                waited_s = self._waited_s(key, guest, world, is_seated=key in sitting)
                supplied: Supplied | None = None
                if key in sitting or waited_s is not None or room > 0:
                    room -= key not in sitting and waited_s is None
                    try:
                        supply = self.supplies.supply(version)
                    except SupplyError as error:
                        troubled.setdefault(guest.id, {})[version_id] = error.told
                    else:
                        if isinstance(supply, Fetch):
                            fetches[guest.id] = supply
                        else:
                            supplied = supply
                candidates[key] = _Candidate(guest, version, supplied, world.versions.get(version.base_id))
                demand = world.demand(guest.id)
                found.append(
                    policy.Wanted(
                        key=key,
                        name=guest.name,
                        base=version.base_id or _kind_of(version),
                        waited_s=waited_s,
                        in_flight=demand.in_flight,
                        idle_s=_idle_s(world, guest.id),
                        rate=self.signals.arrival_rate(guest.id, RATE_S) if self.signals is not None else 0.0,
                        is_supplied=supplied is not None,
                    )
                )
        for guest in guests:
            troubles = troubled.get(guest.id, {}) | self._failures(guest.id)
            self._standing[guest.id] = Standing({}, troubles, fetches.get(guest.id))
        return candidates, found

    def _waited_s(self, key: Key, guest: Endpoint, world: World, *, is_seated: bool) -> float | None:
        """Return how long somebody waits for a guest; one that was never ready is waited for by its owner."""
        is_asked = world.demand(guest.id).queued > 0
        if is_seated or not (is_asked or guest.status is EndpointStatus.PROVISIONING):
            self._waiting_since_s.pop(key, None)
            return None
        waited_s = world.monotonic_s - self._waiting_since_s.setdefault(key, world.monotonic_s)
        # Nobody whose requests are being answered must go for one that nobody asks.
        return waited_s if is_asked else min(waited_s, self.rule.patience_s / 2)

    def _failures(self, endpoint_id: str) -> dict[str, str]:
        return {key[1]: one.reason for (_, key), one in self._failed.items() if key[0] == endpoint_id}

    def _note_waits(
        self, guests: Iterable[Endpoint], waits: Mapping[Key, str], candidates: Mapping[Key, _Candidate]
    ) -> None:
        by_guest: dict[str, dict[str, str]] = {}
        for (endpoint_id, version_id), reason in waits.items():
            by_guest.setdefault(endpoint_id, {})[version_id] = reason
        for guest in guests:
            before = self._standing.get(guest.id, NOTHING)
            self._standing[guest.id] = Standing(by_guest.get(guest.id, {}), before.troubles, before.fetch)

    def _drop_strays(self, replicas: Iterable[Replica]) -> None:
        """Make engines forget what has no seat there: a load that was given up may have ended well after that, and it
        would take the room of another for good."""
        for replica in replicas:
            said = self.observer.guests(replica.id)
            if said is None or said[0] <= self._changed_s.setdefault(replica.id, self.clock.monotonic_s()):
                continue
            seated = {seat.name for seat in self._seats_on(replica)}
            for name in said[1] - seated:
                # What an operator may have given the engine at its start is none of ours.
                if SEAT_NAME.fullmatch(name):
                    self.tasks.spawn(seat_id(replica.id, name), partial(self._drop_stray, replica, name))

    # --- acting -----------------------------------------------------------------------------

    async def _do(self, action: policy.Action, replica: Replica, candidates: Mapping[Key, _Candidate]) -> bool:
        match action:
            case policy.Load():
                return await self._begin_load(action, replica, candidates[action.key])
            case policy.Drain(key=key):
                await self._change(replica, key, SeatState.DRAINING)
                await self._tell(key[0], "guest_draining", action.reason, replica.id)
                return True
            case policy.Unload(key=key):
                seat = self._seat(replica, key)
                if seat is not None:
                    work = partial(self._unload, replica, seat, action.reason)
                    self.tasks.spawn(seat_id(replica.id, seat.name), work)
                return False

    async def _begin_load(self, action: policy.Load, replica: Replica, candidate: _Candidate) -> bool:
        seat = self._seat(replica, action.key)
        if seat is None:
            seat = GuestSeat(*action.key, name=seat_name(candidate.endpoint, candidate.version), since=self._now())
            await self._put(replica, (*self._seats_on(replica), seat))
            await self._tell(seat.endpoint_id, "guest_loading", action.reason, replica.id)
        elif seat.state is not SeatState.LOADING:
            await self._change(replica, action.key, SeatState.LOADING)
            await self._tell(seat.endpoint_id, "guest_lost", action.reason, replica.id)
        self.tasks.spawn(seat_id(replica.id, seat.name), partial(self._load, replica, seat, candidate))
        return True

    async def _load(self, replica: Replica, seat: GuestSeat, candidate: _Candidate) -> None:
        """Let the engine take a guest in, and callers to it."""
        supplied = candidate.supplied
        assert supplied is not None, "only what is here is loaded"
        began_s = self.clock.monotonic_s()
        options = {} if candidate.version.base_id else candidate.version.options
        guest = Guest(seat.name, supplied.artifact or NO_FILES, options, supplied.version.facts)
        try:
            await self.calls.make(replica, supplied.engine.load_guest(guest))
        except EngineCallError as error:
            # Its name at the engine is ours alone; callers and owners know it by its own.
            told = without_others(str(error).replace(seat.name, candidate.endpoint.name), seat.name)
            await self._fail(replica, seat, told)
            return
        self._failed.pop((replica.id, seat.key), None)
        self._loaded_s[seat_id(replica.id, seat.name)] = self.clock.monotonic_s()
        await self._change(replica, seat.key, SeatState.READY)
        await self.publish()
        load_s = self.clock.monotonic_s() - began_s
        doubt = doubt_of_base(supplied.version.facts, candidate.base) if candidate.base is not None else ""
        reason = f"loaded in {load_s:.2g} s" + (f"; {doubt}" if doubt else "")
        await self._tell(seat.endpoint_id, "guest_ready", reason, replica.id, {"load_s": round(load_s, 3)})
        await self.loads.add(seat.version_id, load_s)
        version = self.supplies.known(candidate.version)
        if version.status is not VersionStatus.ACTIVE:
            await self.store.put_version(msgspec.structs.replace(version, status=VersionStatus.ACTIVE))

    async def _fail(self, replica: Replica, seat: GuestSeat, reason: str) -> None:
        """Give the seat up for now; it is tried there again after a growing pause, and elsewhere at once."""
        before = self._failed.get((replica.id, seat.key))
        times = before.times + 1 if before is not None else 1
        first_s, longest_s = self.pauses_s
        pause_s = min(first_s * 2.0 ** min(times - 1, 30), longest_s)
        self._failed[replica.id, seat.key] = _Failed(reason, times, self._now() + pause_s)
        await self._put(replica, tuple(one for one in self._seats_on(replica) if one.key != seat.key))
        await self._tell(seat.endpoint_id, "guest_failed", reason, replica.id, {"times": times})

    async def _unload(self, replica: Replica, seat: GuestSeat, reason: str) -> None:
        await self._forget(replica, seat.name)
        await self._put(replica, tuple(one for one in self._seats_on(replica) if one.key != seat.key))
        await self._tell(seat.endpoint_id, "guest_unloaded", reason, replica.id)

    async def _drop_stray(self, replica: Replica, name: str) -> None:
        await self._forget(replica, name)
        self._changed_s[replica.id] = self.clock.monotonic_s()
        _log.warning("%s had '%s' without a seat; it was let go", replica.id, name)

    async def _forget(self, replica: Replica, name: str) -> None:
        engine = await self._engine_of(replica)
        if engine is None:
            return
        try:
            await self.calls.make(replica, engine.unload_guest(name))
        except EngineCallError as error:
            said, loaded_s = self.observer.guests(replica.id), self._loaded_s.get(seat_id(replica.id, name), 0.0)
            # Not every engine says 404 of what it does not have; its list says it, too.
            is_gone = bool(error.status) and said is not None and said[0] > loaded_s and name not in said[1]
            if error.status != NOT_FOUND and not is_gone:
                raise

    async def _engine_of(self, replica: Replica) -> Engine | None:
        versions = {version.id: version for version in await self.store.versions()}
        version = versions.get(replica.version_id)
        return self.engines.get(version.framework) if version is not None else None

    # --- a new replica of a host ------------------------------------------------------------

    def holds_back(self, replica: Replica, host: Endpoint, world: World) -> bool:
        """Say whether a replica that answers is kept from callers, for guests of the ones that it replaces are not on
        it yet.

        Such a one is loaded beside the ready ones, and its readiness is told when that is done, or after a while.
        """
        others = [
            one
            for one in world.replicas.get(host.id, ())
            if (one.version_id != replica.version_id or one.id == replica.takes_over)
            and one.state is ReplicaState.READY
        ]
        there = {seat.key for one in others for seat in self._seats_on(one) if seat.state is SeatState.READY}
        here = {seat.key: seat.state for seat in self._seats_on(replica)}
        version = world.versions.get(replica.version_id)
        engine = self.engines.get(version.framework) if version is not None else None
        if version is None or engine is None or engine.guests is GuestKind.NONE:
            return False
        room = guests_max(engine, version)
        done = sum(state is SeatState.READY for state in here.values())
        failed = sum(on == replica.id and key in there for on, key in self._failed)
        since_s = self._preloading_since_s.setdefault(replica.id, world.monotonic_s)
        is_late = world.monotonic_s - since_s > PRELOAD_S
        return not is_late and done + failed < min(len(there), room)

    def _preloads(self, replica: Replica) -> bool:
        return replica.id in self._preloading_since_s and replica.state is ReplicaState.LOADING

    # --- seats ------------------------------------------------------------------------------

    def _seats_on(self, replica: Replica) -> tuple[GuestSeat, ...]:
        return self._seats.setdefault(replica.id, replica.guests)

    def _seat(self, replica: Replica, key: Key) -> GuestSeat | None:
        return next((one for one in self._seats_on(replica) if one.key == key), None)

    async def _change(self, replica: Replica, key: Key, state: SeatState) -> None:
        now = self._now()
        seats = tuple(
            msgspec.structs.replace(one, state=state, since=now) if one.key == key else one
            for one in self._seats_on(replica)
        )
        await self._put(replica, seats)

    async def _put(self, replica: Replica, seats: tuple[GuestSeat, ...]) -> None:
        """Store the seats on a replica; writes of the same one follow each other, the last with all that changed."""
        used = self._used_at
        seats = tuple(
            msgspec.structs.replace(one, used_at=max(one.used_at, used.get(one.endpoint_id, 0.0))) for one in seats
        )
        self._seats[replica.id] = seats
        self._changed_s[replica.id] = self.clock.monotonic_s()
        try:
            async with self._turns.setdefault(replica.id, asyncio.Lock()):
                stored = self._seats.get(replica.id, seats)
                await self.store.put_guests(replica.id, stored)
        except BaseException:
            self._unstored.add(replica.id)
            raise
        if self._seats.get(replica.id) is stored:
            self._unstored.discard(replica.id)

    async def _store_again(self, replicas: Iterable[Replica]) -> bool:
        """Make the writes again that failed; say whether there were any."""
        unstored = [replica for replica in replicas if replica.id in self._unstored]
        for replica in unstored:
            await self._put(replica, self._seats_on(replica))
        return bool(unstored)

    def _now(self) -> float:
        return self.clock.unix_s()

    async def _tell(
        self, endpoint_id: str, kind: str, reason: str, replica_id: str, data: EventData | None = None
    ) -> None:
        await self.store.add_event(Event(self._now(), endpoint_id, kind, reason, replica_id, data or {}))


def seat_name(endpoint: Endpoint, version: ModelVersion) -> str:
    """Return what an engine calls a guest: a name for this content of this endpoint and for nothing else, ever.

    No endpoint can be called so, for the sign in it: callers cannot ask for it.
    """
    content = f"{endpoint.id}:{version.id}:{version.artifact.digest or version.artifact.uri}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return f"{endpoint.name.replace('/', '.')[:_NAME_MAX]}@{digest}"


def guests_max(engine: Engine, version: ModelVersion) -> int:
    """Return how many guests a replica of ``version`` holds."""
    return seats_in(engine, version.options)


def seats_in(engine: Engine, options: Options) -> int:
    """Return how many guests a replica with ``options`` holds."""
    try:
        return engine.guests_max(options)
    except ValueError:
        return 0


def bases_on(version: ModelVersion, engine: Engine, versions: Mapping[str, ModelVersion]) -> Iterable[str]:
    """Yield what can be loaded onto a replica of ``version``: adapters of these bases, or models of its engine."""
    if engine.guests is GuestKind.MODEL:
        yield _kind_of(version)
    else:
        yield from (one.id for one in versions.values() if not one.base_id and serves_as(version, one))


def _kind_of(version: ModelVersion) -> str:
    return f"engine {version.framework}"


def _idle_s(world: World, endpoint_id: str) -> float:
    idle_s = world.demand(endpoint_id).idle_s
    return math.inf if idle_s is None else idle_s
