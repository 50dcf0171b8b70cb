"""Engines that sleep, without processes: a town, a placer, and engines that say what a test lets them say."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from modelyard.clock import ManualClock
from modelyard.control.dormitory import Dormitory
from modelyard.control.engine_calls import EngineCallError
from modelyard.control.executor import Executor
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.placing import Placer
from modelyard.control.sleep_calls import SleepCalls
from modelyard.control.sleeping import Sleeping, Tended
from modelyard.control.tasks import KeyedTasks
from modelyard.control.views import size_of
from modelyard.control.world import Demand
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import Part, Placement
from modelyard.engines import EngineCall, EngineLoad
from modelyard.engines.simulated import SimulatedEngine
from tests.support.towns import GIB, Town, endpoint, node, replica, version

OPTIONS = {"sleep": True, "memory_gib": 60.0}
NODE = "n1"


@dataclass
class Engines:
    """What engines do when they are told: ``asleep`` has those that sleep; ``failing`` refuse to."""

    asleep: set[str] = field(default_factory=set)
    failing: set[tuple[str, str]] = field(default_factory=set)
    made: list[tuple[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: nobody answers yet."""

    def __post_init__(self) -> None:
        self.gate.set()

    async def make(self, one: Replica, call: EngineCall) -> None:
        path = call.path.partition("?")[0]
        self.made.append((one.id, path))
        await self.gate.wait()
        if (one.id, path) in self.failing:
            raise EngineCallError("the engine refused it (500)", 500)
        (self.asleep.add if path == "/sleep" else self.asleep.discard)(one.id)


class Ward:
    """Passes over endpoints of which engines sleep, one round after the other."""

    def __init__(self, group: asyncio.TaskGroup, *, memory_bytes: int = 0, nodes: int = 1) -> None:
        self.town = Town(nodes={f"n{number + 1}": node(f"n{number + 1}") for number in range(nodes)})
        self.engines = Engines()
        self.clock = ManualClock(1000.0)
        self.events: list[tuple[str, str]] = []
        self.in_flight: dict[str, int] = {}
        """Requests on replicas; of those that are not in it gateways say 0."""
        self.is_known = True
        self.has_way = False
        self._group = group
        self._memory_bytes = memory_bytes
        self.begin()

    def begin(self) -> None:
        """Begin to control: a controller that knows what is recorded and no more."""
        self.tasks, self.placer = KeyedTasks(self._group), Placer()
        settings = SimpleNamespace(weights_bytes=0, memory_bytes=60 * GIB)
        supplies = cast("Any", SimpleNamespace(settings=lambda _: settings))
        observer = cast("Any", SimpleNamespace(ask=self._ask, latest=self._latest))
        store = cast("Any", SimpleNamespace(put_replica=self._put, add_event=self._tell))
        executor = Executor(
            store=store,
            fleet=cast("Any", SimpleNamespace(stop=self._stop, forget=self._forget)),
            tasks=self.tasks,
            loads=LoadTimes(store),
            clock=self.clock,
            grace_s=0.0,
            threads=1,
        )
        simulated = cast("Any", {"simulated": SimulatedEngine()})
        self.sleeping = Sleeping(
            dormitory=Dormitory(simulated, supplies, lambda: self.placer.nodes, self._memory_bytes),
            executor=executor,
            observer=observer,
            placer=self.placer,
            tasks=self.tasks,
            calls=SleepCalls(observer, self.tasks, self.clock, cast("Any", self.engines)),
            clock=self.clock,
        )

    def kill(self) -> None:
        """End the controller anywhere; another one begins."""
        self.tasks.cancel()
        self.begin()

    def add(self, name: str, *, state: ReplicaState = ReplicaState.READY, on: str = NODE, **more: Any) -> Replica:
        """Add an endpoint with one replica, which has 60 of the 80 GiB of an accelerator."""
        known = self.town.endpoints.get(f"ep-{name}")
        of = known or msgspec.structs.replace(endpoint(name, **more), status=EndpointStatus.RUNNING)
        self.town.endpoints[of.id] = of
        self.town.versions[f"ver-{name}"] = version(name, options=OPTIONS)
        number = sum(one.endpoint_id == of.id for one in self.town.replicas.values())
        one = msgspec.structs.replace(replica(of, number), state=state)
        if state in (ReplicaState.ASLEEP, ReplicaState.FALLING_ASLEEP):
            self.engines.asleep.add(one.id)
        return self.town.run(one, Placement((Part(on, (0,), 60 * GIB),)))

    def ask(self, name: str, queued: int) -> None:
        self.town.demands[f"ep-{name}"] = Demand(queued, queued, 0.0)

    def idle(self, name: str, seconds: float) -> None:
        self.town.demands[f"ep-{name}"] = Demand(0, 0, seconds)

    def state(self, one: Replica) -> ReplicaState:
        return self.town.replicas[one.id].state

    async def round(self, *names: str) -> dict[str, Tended]:
        """Look, and make a pass over each of these endpoints, or over all."""
        self.clock.advance(0.1)
        self.town.now_s = self.clock.monotonic_s()
        falling = {one.id for one in self.town.replicas.values() if one.state is ReplicaState.FALLING_ASLEEP}
        reports = {"gateway": Report([], cast("Any", self._said()))}
        known = frozenset(falling if self.is_known else ())
        world = replace(self.town.look(), reports=reports, known_to_drain=known, busy=self.tasks.keys())
        self.placer.see(world, self.town.nodes.values(), {})
        self.sleeping.keep(world)
        tended = {}
        for endpoint_id in [f"ep-{name}" for name in names] or sorted(self.town.endpoints):
            of = self.town.endpoints[endpoint_id]
            tended[of.name] = await self._pass(of, world)
        return tended

    async def rounds(self, count: int = 6) -> dict[str, Tended]:
        """Make rounds, with time for engines in between."""
        tended: dict[str, Tended] = {}
        for _ in range(count):
            tended = await self.round()
            await self.let_engines()
        return tended

    async def let_engines(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def _pass(self, of: Endpoint, world: Any) -> Tended:
        records = {one.id: one for one in world.replicas.get(of.id, ())}
        recorded: list[str] = []
        self.placer.begin(of.id)
        try:
            return await self.sleeping.tend(
                of,
                world,
                records,
                size_of(of, world, slots=4),
                recorded=recorded,
                has_way=lambda _: self.has_way,
            )
        finally:
            self.placer.end(of.id, recorded)

    def _said(self) -> Sequence[object]:
        return [SimpleNamespace(replica_id=id, in_flight=number) for id, number in self.in_flight.items()]

    async def _ask(self, replica_id: str) -> EngineLoad:
        return EngineLoad(is_sleeping=replica_id in self.engines.asleep)

    def _latest(self, replica_id: str) -> tuple[float, EngineLoad]:
        return self.clock.monotonic_s(), EngineLoad(is_sleeping=replica_id in self.engines.asleep)

    async def _put(self, one: Replica) -> None:
        self.town.replicas[one.id] = one

    async def _tell(self, event: Any) -> None:
        self.events.append((event.kind, event.reason))

    async def _stop(self, replica_id: str, *, grace_s: float) -> None:
        self.town.running.discard(replica_id)

    async def _forget(self, replica_id: str) -> None:
        pass
