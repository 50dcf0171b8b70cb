"""Engines that sleep and wake while their endpoint stands: a part of the pass over it.

``policy/sleepers.py`` decides how many are awake, and who has the accelerators; ``policy/scaling.py`` goes on deciding
how many there are. Each step is recorded before it is taken, in an order that survives being cut off anywhere:

* *falling asleep*: gateways send it nothing new; once all of them know that and nothing is in flight, its engine is
  told to sleep. It has its accelerators until its engine says that it sleeps.
* *asleep*: its accelerators are free. Only its process can wake it, and only there.
* *waking*: it has its accelerators again, and its engine is told to wake. It is ready once its engine says that it is.

Both calls may be made twice, so a controller that starts anew makes them again. What an engine says of itself comes
before what is recorded: one that is ready and sleeps is woken, one that sleeps and is awake is told again.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.dormitory import Able, Dormitory, floor_of, in_turn, is_falling, may_nap, ready_s
from modelyard.control.executor import Executor, Records
from modelyard.control.observer import Observer
from modelyard.control.placing import CROWDED, Placer
from modelyard.control.sleep_calls import SleepCalls, Told
from modelyard.control.supplies import Supplies
from modelyard.control.tasks import KeyedTasks
from modelyard.control.world import World
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import NAPPING, THERE, Replica, ReplicaState
from modelyard.engines import Engines
from modelyard.policy import scaling, sleepers
from modelyard.policy.actions import KillReplica, StopReplica
from modelyard.policy.rollouts import beside

RETRY_S = 60.0
"""Pause after a call to sleep that failed."""
LOOK_S = 0.1
"""Shortest pause until the next look at one that may be due to sleep."""
MEASURES_KEPT = 10
_ASLEEP = (ReplicaState.ASLEEP, ReplicaState.FALLING_ASLEEP)


class Tended(NamedTuple):
    """What became of the sleepers of an endpoint in a pass.

    ``waits``: why one that is needed does not wake yet; ``is_coming``: it will, once others sleep. ``look_in_s``: when
    one may be due to sleep; None: none will.
    """

    has_changed: bool = False
    waits: str = ""
    look_in_s: float | None = None
    is_coming: bool = False


@dataclass(slots=True)
class _Look:
    """One endpoint in one pass."""

    endpoint: Endpoint
    world: World
    records: Records
    able: Mapping[str, Able]
    recorded: MutableSequence[str]
    """Ids of replicas whose room is in a record from now on."""
    free: frozenset[str]
    """Replicas that run, and on which no action is under way."""

    def those(self, *states: ReplicaState) -> list[Replica]:
        """Return the replicas in these states that take turns, those that came first first."""
        versions = in_turn(self.endpoint) & self.able.keys()
        found = [one for one in self.records.values() if one.state in states and one.version_id in versions]
        return sorted(found, key=lambda one: (one.ready_at or 0.0, one.id))


@dataclass(slots=True)
class Sleeping:
    """Puts engines to sleep and wakes them."""

    dormitory: Dormitory
    executor: Executor
    observer: Observer
    placer: Placer
    tasks: KeyedTasks
    calls: SleepCalls
    clock: Clock
    dormant: set[str] = field(default_factory=set)
    """Endpoints of which something sleeps and nothing answers: a request for one cannot wait for the next round."""
    pressing: frozenset[str] = frozenset()
    """Endpoints of which a sleeper must go."""
    _spare_since_s: dict[str, float] = field(default_factory=dict)
    _turned_s: dict[str, float] = field(default_factory=dict)
    """When a replica was last recorded otherwise (monotonic): what its engine said before that says nothing of it."""
    _woke_s: dict[str, list[float]] = field(default_factory=dict)
    """What waking took of late, by version."""
    _outgrown: dict[str, str] = field(default_factory=dict)

    async def close(self) -> None:
        """Give connections back."""
        await self.calls.close()

    def keep(self, world: World) -> None:
        """Forget what is gone; find out for whom a node has no memory any more."""
        living = frozenset(one.id for replicas in world.replicas.values() for one in replicas)
        self.dormitory.keep(world, living)
        self.calls.keep(living)
        self._turned_s = {id: at for id, at in self._turned_s.items() if id in living}
        self._woke_s = {id: took for id, took in self._woke_s.items() if id in world.versions}
        self._spare_since_s = {id: at for id, at in self._spare_since_s.items() if id in world.endpoints}
        self.dormant &= world.endpoints.keys()
        asleep = [one for replicas in world.replicas.values() for one in replicas if one.state in _ASLEEP]
        asked = {one.id for one in asleep if world.demand(one.endpoint_id).queued}
        self._outgrown = self.dormitory.without_room(asleep, world, but=self.placer.rising | asked) if asleep else {}
        crowd, self.placer.crowd = self.placer.crowd, {}
        self._outgrown |= {one.id: crowd[one.id] for one in asleep if one.id in crowd.keys() - asked}
        self.pressing = frozenset(one.endpoint_id for one in asleep if one.id in self._outgrown)

    def outgrown(self, replica_ids: Iterable[str]) -> dict[str, str]:
        """Return which of these replicas must go since their node's memory is full, and why."""
        return {id: self._outgrown[id] for id in replica_ids if id in self._outgrown} if self._outgrown else {}

    def wake_s(self, version: ModelVersion | None) -> float:
        """Return how long an engine of a version takes to wake."""
        if version is None:
            return sleepers.WAKE_S
        if measured := self._woke_s.get(version.id):
            return statistics.median(measured)
        able = self.dormitory.able_of(version)
        return sleepers.wake_s(able.weights_bytes if able else 0)

    async def tend(
        self,
        endpoint: Endpoint,
        world: World,
        records: Records,
        seen: scaling.Seen,
        *,
        recorded: MutableSequence[str],
        has_way: Callable[[Replica], bool],
    ) -> Tended:
        """Bring the sleepers of ``endpoint`` one step closer to what they should be.

        ``has_way``: whether another one in place of a replica would find room elsewhere.
        """
        self.dormant.discard(endpoint.id)
        look = self._look_at(endpoint, world, records, recorded)
        if look is None:
            return Tended()
        has_changed = await self._drop_the_unable(look)
        for one in list(records.values()):
            if one.state in THERE and one.version_id in look.able and one.id in look.free:
                has_changed |= await self._settle(one, look)
        waits, look_in_s = "", None
        if seen.gateways and world.are_gateways_known:
            has_changed |= await self._make_room(look, seen)
            changed, waits, look_in_s = await self._turn(look, seen, has_way)
            has_changed |= changed
        if look.those(*_ASLEEP) and not look.those(ReplicaState.READY, ReplicaState.WAKING):
            self.dormant.add(endpoint.id)
        is_coming = any(self.placer.is_claiming(one.id) for one in look.those(ReplicaState.ASLEEP))
        return Tended(has_changed, waits, look_in_s, is_coming)

    def _look_at(
        self, endpoint: Endpoint, world: World, records: Records, recorded: MutableSequence[str]
    ) -> _Look | None:
        """Return what is to be tended; None for an endpoint whose engines never sleep, as most."""
        others = beside(endpoint)
        able: dict[str, Able] = {}
        has_sleepers = False
        for one in records.values():
            if one.state in THERE and one.version_id not in others:
                has_sleepers |= one.state in NAPPING
                found = self.dormitory.able_of(world.versions.get(one.version_id))
                if found is not None:
                    able[one.version_id] = found
        if endpoint.is_deleted or not (able or has_sleepers):
            self._spare_since_s.pop(endpoint.id, None)
            return None
        running = {process.replica_id for process in world.processes.get(endpoint.id, ()) if process.is_running}
        return _Look(endpoint, world, records, able, recorded, frozenset(running - world.busy - self.tasks.keys()))

    # --- what is under way ---------------------------------------------------------------

    async def _drop_the_unable(self, look: _Look) -> bool:
        """Let go of sleepers that nobody can wake, since their engine is not what it was."""
        gone = [one for one in look.records.values() if one.state in NAPPING and one.version_id not in look.able]
        for one in gone:
            action = StopReplica(one.id, "nobody can wake its engine any more")
            await self.executor.carry_out(action, look.endpoint.id, look.records)
        return bool(gone)

    async def _settle(self, one: Replica, look: _Look) -> bool:
        """Bring the record in line with what was done, and with what the engine says; go on with what was begun."""
        told = self.calls.told(one)
        if told is None or one.state not in (ReplicaState.FALLING_ASLEEP, ReplicaState.WAKING):
            return await self._go_on(one, look)
        if one.state is ReplicaState.WAKING:
            await self._woken(one, told, look)
        elif told.error:  # what it does is not known: waking it makes that sure
            self.dormitory.restless[one.id] = self.clock.monotonic_s() + RETRY_S
            await self._record(one, ReplicaState.WAKING, f"it could not be put to sleep: {told.error}", look)
        else:
            await self._record(one, ReplicaState.ASLEEP, one.reason, look)
        return True

    async def _woken(self, one: Replica, told: Told, look: _Look) -> None:
        if told.error:
            action = KillReplica(one.id, f"it did not wake: {told.error}")
            await self.executor.carry_out(action, look.endpoint.id, look.records)
            return
        self._woke_s[one.version_id] = [*self._woke_s.get(one.version_id, ()), told.took_s][-MEASURES_KEPT:]
        await self._record(one, ReplicaState.READY, f"awake: {one.reason}", look)

    async def _go_on(self, one: Replica, look: _Look) -> bool:
        """Go on with what an earlier controller began, and with what the engine says."""
        match one.state:
            case ReplicaState.FALLING_ASLEEP:
                if look.world.in_flight(one.id) == 0:
                    self.calls.begin(one, look.able[one.version_id])
                return False
            case ReplicaState.WAKING:
                self.calls.begin(one, look.able[one.version_id])
                return False
            case ReplicaState.ASLEEP if self._says(one) is False:
                await self._record(one, ReplicaState.FALLING_ASLEEP, "its engine is awake, and nobody woke it", look)
            case ReplicaState.READY if self._says(one):
                await self._record(one, ReplicaState.WAKING, "its engine sleeps, and nobody told it to", look)
            case _:
                return False
        return True

    def _says(self, one: Replica) -> bool | None:
        """Return whether an engine says that it sleeps; None: it said nothing since its record changed."""
        looked_s, load = self.observer.latest(one.id) or (-math.inf, None)
        return load.is_sleeping if load is not None and looked_s > self._turned_s.get(one.id, -math.inf) else None

    async def _record(self, one: Replica, state: ReplicaState, reason: str, look: _Look) -> None:
        await self.executor.turn(one, state, reason, look.records)
        self._turned_s[one.id] = self.clock.monotonic_s()
        if state is ReplicaState.WAKING:
            self.calls.begin(look.records[one.id], look.able[one.version_id])

    # --- how many are awake ------------------------------------------------------------

    async def _make_room(self, look: _Look, seen: scaling.Seen) -> bool:
        """Put to sleep who is in the way of others; who is needed meanwhile stays, and they look for another place."""
        ready = {one.id: one for one in look.those(ReplicaState.READY)}
        lulled = self.placer.lulled(look.records, look.endpoint.tenant_id)
        left = len(ready) - floor_of(look.endpoint, look.world)
        may = not _demand(look, seen) and may_nap(look.endpoint, look.world)
        has_changed = False
        for falling in look.those(ReplicaState.FALLING_ASLEEP):
            if not is_falling(falling, look.world.unix_s):
                self.placer.refuse(falling.id)
        for id, reason in lulled.items():
            one = ready.get(id)
            if one is not None and may and left > 0 and id in look.free and self._may(one, look):
                await self._record(one, ReplicaState.FALLING_ASLEEP, reason, look)
                has_changed, left = True, left - 1
            elif look.records[id].state is ReplicaState.READY:
                self.placer.refuse(id)
        return has_changed

    async def _turn(
        self, look: _Look, seen: scaling.Seen, has_way: Callable[[Replica], bool]
    ) -> tuple[bool, str, float | None]:
        endpoint, world = look.endpoint, look.world
        ready, asleep = look.those(ReplicaState.READY), look.those(*_ASLEEP)
        awake = len(ready) + len(look.those(ReplicaState.WAKING))
        rule, is_free = rule_of(endpoint), may_nap(endpoint, world)
        floor = floor_of(endpoint, world) if is_free else awake + len(asleep)
        idle_s = min(seen.idle_s, ready_s(ready, world.unix_s))
        decision = sleepers.decide(
            self._spare_since_s.get(endpoint.id),
            sleepers.Seen(
                now_s=world.monotonic_s,
                awake=awake,
                asleep=len(asleep),
                demand=_demand(look, seen),
                slots=seen.slots,
                load=seen.load,
                idle_s=idle_s,
                floor=floor,
            ),
            rule,
        )
        if decision.spare_since_s is None:
            self._spare_since_s.pop(endpoint.id, None)
        else:
            self._spare_since_s[endpoint.id] = decision.spare_since_s
        if decision.change > 0:
            has_changed, waits = await self._wake(decision, look, rule, has_way)
            return has_changed, waits, None
        has_changed = decision.change < 0 and await self._lull(decision, look)
        # One that its owner keeps, or that cannot sleep, is due to nothing: it is looked at as those that never nap.
        may_be_due = is_free and awake > floor and idle_s < rule.idle_s and any(self._may(one, look) for one in ready)
        return has_changed, "", max(rule.idle_s - idle_s, LOOK_S) if may_be_due else None

    async def _lull(self, decision: sleepers.Decision, look: _Look) -> bool:
        ready = [one for one in look.those(ReplicaState.READY) if one.id in look.free and self._may(one, look)]
        by_id = {one.id: one for one in ready}
        offered = [(one.id, self.placer.is_alone(one)) for one in ready]
        for id in (chosen := sleepers.spared(offered, -decision.change)):
            await self._record(by_id[id], ReplicaState.FALLING_ASLEEP, decision.reason, look)
        return bool(chosen)

    async def _wake(
        self, decision: sleepers.Decision, look: _Look, rule: sleepers.Rule, has_way: Callable[[Replica], bool]
    ) -> tuple[bool, str]:
        """Wake as many as are needed; return whether anything changed, and what the others wait for."""
        left, has_changed, waits = decision.change, False, ""
        for one in look.those(*_ASLEEP):
            if left <= 0 or one.id not in look.free:
                continue
            is_new = one.state is ReplicaState.ASLEEP and not self.placer.has_left(one)
            if one.state is ReplicaState.ASLEEP and not is_new and not self.placer.keeps_bed(one):
                continue
            left -= 1
            if is_new:  # it fell asleep in this very pass: until the next look its room is counted as taken
                continue
            if self.placer.is_claiming(one.id):
                waits = "it wakes once those on its accelerators sleep"
                continue
            await self._rise(one, decision.reason, look)
            has_changed = True
        for _ in range(left):
            rest = [one for one in look.those(ReplicaState.ASLEEP) if one.id in look.free]
            rest = [one for one in rest if self.placer.has_left(one) and not self.placer.is_claiming(one.id)]
            if not rest:
                break
            found = self._find_turn(rest, look, rule)
            is_taken, told = await self._take_turn(found, rest[0], decision.reason, look, has_way)
            has_changed, waits = has_changed or is_taken, told or waits
            if not is_taken:
                break
        return has_changed, waits

    def _find_turn(self, rest: Sequence[Replica], look: _Look, rule: sleepers.Rule) -> sleepers.Turn:
        """Return which of these wakes; who else is idle is asked only where there is no room."""
        beds = [self.placer.bed(one, ()) for one in rest]
        if all(bed.in_the_way is None for bed in beds):
            nodes = {part.node_id for one in rest for part in one.placement.parts}
            others = self.dormitory.idle_others(look.endpoint, look.world, nodes)
            beds = [self.placer.bed(one, others) for one in rest]
        return sleepers.turn(beds, rule)

    async def _take_turn(
        self, turn: sleepers.Turn, first: Replica, reason: str, look: _Look, has_way: Callable[[Replica], bool]
    ) -> tuple[bool, str]:
        """Take the room; return whether one wakes or will, or goes, and what it waits for."""
        endpoint = look.endpoint
        if turn.replica_id is None:
            if not has_way(first):
                if gone := self.placer.crowding(first):
                    self.placer.crowd |= dict.fromkeys(gone, CROWDED)
                    return False, "its engine sleeps, and contexts of others that sleep are in its way; they go"
                return False, f"its engine sleeps, and {turn.reason}"
            told = f"{turn.reason}: another one is started elsewhere"
            await self.executor.carry_out(StopReplica(first.id, told), endpoint.id, look.records)
            return True, ""
        one = look.records[turn.replica_id]
        if over := self.placer.over_quota(endpoint.tenant_id, one.placement):
            return False, over
        why = f"`{endpoint.name}` is asked for, and its engine sleeps on {one.placement.node_id}"
        self.placer.take_bed(one, endpoint.tenant_id, turn.instead_of, why)
        if turn.instead_of:
            return True, f"it wakes {turn.reason}, once those sleep"
        await self._rise(one, f"{reason}; {turn.reason}", look)
        return True, ""

    def _may(self, one: Replica, look: _Look) -> bool:
        return self.dormitory.may(one, look.able.get(one.version_id), self.clock.monotonic_s())

    async def _rise(self, one: Replica, reason: str, look: _Look) -> None:
        look.recorded.append(one.id)
        await self._record(one, ReplicaState.WAKING, reason, look)


def sleeping_of(
    config: ControlConfig,
    engines: Engines,
    supplies: Supplies,
    executor: Executor,
    observer: Observer,
    placer: Placer,
    tasks: KeyedTasks,
    clock: Clock,
) -> Sleeping:
    """Return who puts engines to sleep as ``config`` says."""
    return Sleeping(
        dormitory=Dormitory(engines, supplies, lambda: placer.nodes, config.sleepers_bytes),
        executor=executor,
        observer=observer,
        placer=placer,
        tasks=tasks,
        calls=SleepCalls(observer, tasks, clock),
        clock=clock,
    )


def rule_of(endpoint: Endpoint) -> sleepers.Rule:
    """Return when replicas of an endpoint sleep."""
    return msgspec.structs.replace(sleepers.STANDARD, idle_s=endpoint.autoscale.nap_s)


def _demand(look: _Look, seen: scaling.Seen) -> int:
    """Return the requests that want a slot now; lines of batches that scale nothing want one replica awake."""
    return max(seen.demand, int(look.world.demand(look.endpoint.id).has_lines))
