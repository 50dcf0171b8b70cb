"""The controller's loops, and the owner of every task in it.

A round looks at the world once and begins a pass for each endpoint that needs
one, each in a task of its own: an endpoint that is slow is left out of the next
rounds until it is done, and delays nobody. Where many need one at once they
take turns, first those that somebody waits for, then who waits longest. What passes change is pushed to
gateways by a loop of its own, the changes of many passes at once. Rounds come every ``pass_interval_s`` and at
once when something happens: a management call, a request for a sleeping
endpoint, a replica that became ready or got worse, the end of a long action.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from modelyard.clock import Clock
from modelyard.config import Config
from modelyard.control.artifacts import ArtifactStore
from modelyard.control.attention import Attention
from modelyard.control.bursts import Bursts
from modelyard.control.executor import Executor
from modelyard.control.fits import Fits
from modelyard.control.flow import run_pass
from modelyard.control.forecasts import Forecasts
from modelyard.control.guests import Guests, guests_max
from modelyard.control.loadtimes import LoadTimes
from modelyard.control.moving import moving_of, placer_of
from modelyard.control.observer import Observer, Target
from modelyard.control.passes import Passed, Tools
from modelyard.control.pools import Pools
from modelyard.control.sizing import Sizing
from modelyard.control.sleeping import sleeping_of
from modelyard.control.supplies import Supplies
from modelyard.control.table import TablePublisher
from modelyard.control.tasks import KeyedTasks, boundary
from modelyard.control.views import strays_of
from modelyard.control.world import World, look
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.fleet import THERE, Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen
from modelyard.domain.routing_table import EngineSpeed, Heartbeat, ReplicaSnapshot
from modelyard.engines import EngineLoad, Engines
from modelyard.fleet import Fleet
from modelyard.observe.rounds import RoundStatus, RoundTimes
from modelyard.policy import scaling
from modelyard.policy.costs import hourly_nanousd
from modelyard.policy.guests import Rule as GuestRule
from modelyard.policy.reconcile import Pace, Situation, plan
from modelyard.policy.signals import Signals
from modelyard.policy.speeds import Speeds
from modelyard.stores import ControlStore, StoreUnavailableError, TableFeed

BEAT_S = 1.0
PING_TIMEOUT_S = 1.0
ROUND_GAP_S = 0.01
"""Shortest pause between two rounds, so that a storm of events costs one round and not hundreds."""
ROUND_REST = 2.0
"""The same in times of what the last round took: two thirds of the time is for everything else."""
PASSES_AT_ONCE = 32
"""Passes that are begun and not done. Thousands at once would keep everybody else from the loop while they decide, and
queue as many writes before those of a management call."""
OBSERVE_TIMEOUT_S = 30.0

_WATCHED = THERE | {ReplicaState.LOADING, ReplicaState.DRAINING}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loops work with."""

    config: Config
    store: ControlStore
    fleet: Fleet
    engines: Engines
    artifacts: ArtifactStore
    feed: TableFeed
    publisher: TablePublisher
    clock: Clock
    signals: Signals
    forecasts: Forecasts | None = None
    fits: Fits | None = None
    gateways_settle_s: float = 3.0
    """Time that gateways get to connect to a controller that started, before their absence means anything."""


class _Watched(NamedTuple):
    """A replica to watch, and what its target was made of."""

    replica: Replica
    version: ModelVersion
    target: Target


class Loops:
    """Reconciles, publishes and beats until ``stop`` is set."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._woken = asyncio.Event()
        self._health = Heartbeat(is_authoritative=False, reason="the controller has just started")
        self._begun_s = parts.clock.monotonic_s()
        self._is_published = False
        self._tools: Tools | None = None
        self.times = RoundTimes()
        self._attention: Attention | None = None
        self._world: World | None = None
        self._in_line: deque[str] = deque()
        """Endpoints that the last round found to need a pass, and that has not begun."""
        self._begun: set[str] = set()
        """Endpoints of which a pass began since the round looks: what it records the look may not show."""
        self._rests_until_s = 0.0
        self._news = asyncio.Event()
        """A pass changed something that gateways have not been told."""
        self._watched: dict[str, _Watched] = {}
        parts.feed.on_report(self._hear)

    def wake(self) -> None:
        """Start a round now."""
        self._woken.set()

    def health(self) -> Heartbeat:
        """Return what gateways are told of the store."""
        return self._health

    def rounds(self) -> RoundStatus:
        """Return how long rounds and passes take."""
        return self.times.status(self._parts.clock.monotonic_s())

    def snapshots(self) -> Sequence[ReplicaSnapshot]:
        """Return what engines said of their load since the last call."""
        return self._tools.observer.snapshots() if self._tools else ()

    def speeds(self) -> Sequence[EngineSpeed]:
        """Return how fast the engines of versions were seen to be."""
        if self._tools is None:
            return ()
        return [
            EngineSpeed(version_id, speed.step_s, speed.request_s, speed.prefill_token_s, speed.kv_token_s)
            for version_id, speed in self._tools.sizing.speeds.known()
        ]

    def size(self, endpoint_id: str) -> tuple[scaling.Seen, scaling.Decision] | None:
        """Return what the last pass saw of an endpoint and which size it decided; None before the first."""
        return self._tools.sizing.decisions.get(endpoint_id) if self._tools else None

    def price(self, replica: Replica) -> float:
        """Return the nano-dollars that a replica costs in an hour, 0 where its node has no price."""
        if self._tools is None:
            return 0.0
        nodes = {node_id: seen.node for node_id, seen in self._tools.placer.nodes.items()}
        return float(hourly_nanousd(replica.placement, nodes))

    def moves(self) -> Mapping[tuple[str, ...], int]:
        """Return how many replicas moved, or were to, by outcome."""
        return self._tools.moving.ended() if self._tools else {}

    def nodes(self) -> Mapping[str, NodeSeen]:
        """Return the fleet's nodes by id, as the last round saw them."""
        return self._tools.placer.nodes if self._tools else {}

    def latest(self, replica_id: str) -> tuple[float, EngineLoad] | None:
        """Return the last load of a replica and the (monotonic) moment at which its page was read."""
        return self._tools.observer.latest(replica_id) if self._tools else None

    def passed(self) -> Mapping[str, Passed]:
        """Return what the last pass over each endpoint came to, by endpoint id."""
        return self._tools.passed if self._tools else {}

    async def run(self, stop: asyncio.Event, *others: Callable[[], Awaitable[None]]) -> None:
        """Run the loops and ``others`` until ``stop`` is set; engines go on running.

        Raises:
            ExceptionGroup: a loop died of a bug; the supervisor starts the controller anew.
        """
        async with asyncio.TaskGroup() as group:
            actions = KeyedTasks(group, on_end=self.wake)
            self._tools = tools = self._make_tools(group, actions)
            passes = KeyedTasks(group, after=lambda: self._begin_more(tools, passes))
            running = [group.create_task(_run(other)) for other in others]
            running.append(group.create_task(self._reconcile(tools, actions, passes), name="reconcile"))
            running.append(group.create_task(self._push(), name="push"))
            running.append(group.create_task(self._ping(), name="ping"))
            running.append(group.create_task(self._beat(), name="beat"))
            try:
                await stop.wait()
                for task in running:
                    task.cancel()
                for keyed in (passes, actions):
                    keyed.cancel()
                tools.observer.watch([])
            finally:
                await tools.observer.close()
                await tools.guests.close()
                await tools.sleeping.close()

    def _make_tools(self, group: asyncio.TaskGroup, actions: KeyedTasks) -> Tools:
        parts, control = self._parts, self._parts.config.control
        loads = LoadTimes(parts.store)
        observer = Observer(group, parts.clock, hang_timeout_s=control.hang_timeout_s, wake=self.wake)
        placer = placer_of(control)
        speeds = parts.fits.speeds if parts.fits is not None else Speeds()
        sizing = Sizing(observer, parts.signals, parts.forecasts, speeds)
        supplies = Supplies(
            store=parts.store,
            engines=parts.engines,
            artifacts=parts.artifacts,
            tasks=actions,
            clock=parts.clock,
            pauses_s=(control.crash_backoff_s, control.crash_backoff_max_s),
        )
        executor = Executor(
            store=parts.store,
            fleet=parts.fleet,
            tasks=actions,
            loads=loads,
            clock=parts.clock,
            grace_s=control.replica_grace_s,
            threads=parts.config.fleet.threads,
            nodes=lambda: placer.nodes,
        )
        return Tools(
            store=parts.store,
            observer=observer,
            sizing=sizing,
            sleeping=sleeping_of(control, parts.engines, supplies, executor, observer, placer, actions, parts.clock),
            executor=executor,
            placer=placer,
            moving=moving_of(control, placer, sizing, parts.engines, parts.clock),
            bursts=Bursts(placer),
            pools=Pools(control.warm_pool_accelerators),
            supplies=supplies,
            guests=Guests(
                store=parts.store,
                engines=parts.engines,
                supplies=supplies,
                tasks=actions,
                loads=loads,
                clock=parts.clock,
                observer=observer,
                publish=parts.publisher.refresh_together,
                signals=parts.signals,
                pauses_s=(control.crash_backoff_s, control.crash_backoff_max_s),
                rule=GuestRule(drain_timeout_s=control.drain_timeout_s),
            ),
            loads=loads,
            publish=parts.publisher.refresh_together,
            pace=Pace(
                backoff_s=control.crash_backoff_s,
                backoff_max_s=control.crash_backoff_max_s,
                drain_timeout_s=control.drain_timeout_s,
            ),
        )

    # --- reconcile ------------------------------------------------------------------

    async def _reconcile(self, tools: Tools, actions: KeyedTasks, passes: KeyedTasks) -> None:
        while True:
            with boundary("a reconcile round"):
                if not self._is_published:  # gateways get what is stored before anything is changed
                    self._is_published = True
                    await self._publish()
                await self._round(tools, actions, passes)
            try:
                async with asyncio.timeout(self._parts.config.control.pass_interval_s):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(max(ROUND_GAP_S, self._rests_until_s - self._parts.clock.monotonic_s()))

    async def _round(self, tools: Tools, actions: KeyedTasks, passes: KeyedTasks) -> None:
        parts = self._parts
        self._woken.clear()
        began_s = parts.clock.monotonic_s()
        reports = parts.feed.reports()
        busy_endpoints, busy_replicas = passes.keys(), actions.keys()
        self._begun.clear()
        tools.pools.look_begins()
        async with asyncio.timeout(OBSERVE_TIMEOUT_S):
            world = await look(
                parts.store,
                parts.fleet,
                parts.clock,
                busy=busy_replicas,
                reports=reports,
                known_to_drain=parts.publisher.known_to_drain(reports.values()),
                are_gateways_known=parts.clock.monotonic_s() - self._begun_s >= parts.gateways_settle_s,
            )
            limits = {
                tenant.id: tenant.limits.accelerators
                for tenant in await parts.store.tenants()
                if tenant.limits.accelerators is not None
            }
            tools.pools.see(world, tools.loads.known())
            tools.placer.see(world, await parts.fleet.nodes(), limits)
        self._world = world
        tools.moving.see(world)
        tools.observer.watch(self._targets(world, tools))
        tools.sizing.keep(world)
        tools.guests.keep(world)
        tools.sleeping.keep(world)
        tools.bursts.keep(world.endpoints)
        self._begin_passes(world, tools, passes, busy_endpoints | self._begun, began_s)

    def _begin_passes(
        self, world: World, tools: Tools, passes: KeyedTasks, busy: frozenset[str], began_s: float
    ) -> None:
        """Put those that need a pass in line; the round is over then."""
        claimed = tools.placer.claimed_of(world) | tools.sleeping.pressing | tools.moving.endpoint_ids
        wanted = self._attention_of(tools).wanted(world, claimed) - busy
        since = self.times.needed(wanted, began_s, running=busy)

        def turn(endpoint_id: str) -> tuple[bool, float]:
            return not world.demand(endpoint_id).queued, since[endpoint_id]

        self._in_line = deque(sorted(tools.placer.in_turn(wanted), key=turn))
        self._begin_more(tools, passes)
        for endpoint_id in tools.memories.keys() - world.endpoints.keys() - busy:
            del tools.memories[endpoint_id]
            tools.passed.pop(endpoint_id, None)
        ended_s = self._parts.clock.monotonic_s()
        self.times.took(len(wanted), ended_s - began_s)
        self._rests_until_s = ended_s + ROUND_REST * (ended_s - began_s)

    def _begin_more(self, tools: Tools, passes: KeyedTasks) -> None:
        """Begin passes, as many as there may be."""
        free = PASSES_AT_ONCE - len(passes.keys())
        while free > 0 and self._in_line:
            endpoint_id = self._in_line.popleft()
            if passes.spawn(endpoint_id, partial(self._timed_pass, endpoint_id, tools)):
                self._begun.add(endpoint_id)
                free -= 1

    def _attention_of(self, tools: Tools) -> Attention:
        if self._attention is None:
            interval_s = self._parts.config.control.pass_interval_s
            self._attention = Attention(tools.observer, tools.guests.standing, pass_interval_s=interval_s)
        return self._attention

    async def _timed_pass(self, endpoint_id: str, tools: Tools) -> None:
        attention = self._attention_of(tools)
        try:
            # The newest look, which may be one that was taken while this waited for its turn.
            world = self._world
            assert world is not None, "passes begin after a look"
            has_changed = await self._pass(endpoint_id, world, tools)
            passed = tools.passed.get(endpoint_id)
            is_waiting = passed is not None and passed.is_waiting
            look_in_s = passed.look_in_s if passed is not None else None
            attention.passed(endpoint_id, world, has_changed=has_changed or is_waiting, look_in_s=look_in_s)
        except BaseException:
            attention.failed(endpoint_id)
            raise
        finally:
            self.times.passed(endpoint_id, self._parts.clock.monotonic_s())

    async def _pass(self, endpoint_id: str, world: World, tools: Tools) -> bool:
        endpoint = world.endpoints.get(endpoint_id)
        if endpoint is not None:
            has_changed = await run_pass(endpoint, world, tools)
        else:
            has_changed = await self._clear(endpoint_id, world, tools)
        if has_changed:
            self._news.set()
            self.wake()
        return has_changed

    async def _push(self) -> None:
        """Push what passes changed."""
        while True:
            await self._news.wait()
            self._news.clear()
            with boundary("a push of the routing table"):
                await self._publish()

    async def _publish(self) -> None:
        """Tell gateways what is stored; what could not be read is told in a later round."""
        try:
            await self._parts.publisher.refresh_together()
        except StoreUnavailableError:
            self._is_published = False
            raise

    async def _clear(self, endpoint_id: str, world: World, tools: Tools) -> bool:
        """End what runs of an endpoint that the store does not know."""
        situation = Situation(
            endpoint_id=endpoint_id, now_s=world.unix_s, wanted={}, strays=strays_of(endpoint_id, world)
        )
        has_changed = False
        for action in plan(situation, tools.pace):
            _log.warning("%s of an unknown endpoint: %s", endpoint_id, action)
            has_changed |= await tools.executor.carry_out(action, endpoint_id, {})
        return has_changed

    def _targets(self, world: World, tools: Tools) -> list[tuple[Target, bool]]:
        """Return the running replicas to watch."""
        targets: dict[str, _Watched] = {}
        for endpoint_id, replicas in world.replicas.items():
            running = {process.replica_id for process in world.processes.get(endpoint_id, ()) if process.is_running}
            for replica in replicas:
                version = world.versions.get(replica.version_id)
                if replica.state not in _WATCHED or replica.id not in running or version is None:
                    continue
                last = self._watched.get(replica.id)
                if last is not None and last.replica is replica and last.version is version:
                    targets[replica.id] = last
                elif (target := self._target(replica, version, tools)) is not None:
                    targets[replica.id] = _Watched(replica, version, target)
        self._watched = targets
        return [(one.target, one.replica.ready_at is not None) for one in targets.values()]

    def _target(self, replica: Replica, version: ModelVersion, tools: Tools) -> Target | None:
        if (engine := self._parts.engines.get(version.framework)) is None:
            return None
        settings = tools.supplies.settings(version)
        # Whoever waits for a cold model gives up after this long; a load that takes longer hangs, unless the engine
        # itself expects to need that long.
        limit_s = max(self._parts.config.gateway.load_wait_s, 5 * settings.load_s if settings else 0.0)
        has_guests = guests_max(engine, version) > 0
        return Target(replica.id, replica.host, replica.port, replica.secret, engine, limit_s, has_guests)

    # --- gateways and the store --------------------------------------------------------

    def _hear(self, gateway_id: str, report: Report) -> None:
        """A gateway reported: look at once when it is about something that cannot wait for the next round."""
        self._parts.signals.hear(gateway_id, report)
        if (tools := self._tools) is None:
            return
        if tools.observer.note(gateway_id, report.replicas):
            self.wake()
        for demand in report.endpoints:
            memory = tools.memories.get(demand.endpoint_id)
            is_down = (memory is not None and memory.replicas == 0) or demand.endpoint_id in tools.sleeping.dormant
            if (demand.queued or demand.in_flight) and is_down:
                self.wake()
                return

    async def _ping(self) -> None:
        """Find out, every second, whether the store can be written."""
        while True:
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self._parts.store.ping()
                health = Heartbeat(is_authoritative=True)
            except (StoreUnavailableError, TimeoutError) as error:
                reason = str(error) or f"it did not answer within {PING_TIMEOUT_S:g} s"
                health = Heartbeat(is_authoritative=False, reason=f"The database cannot be used: {reason}")
            if health != self._health:
                if health.is_authoritative != self._health.is_authoritative:
                    _log.info("store: %s", health.reason or "it can be written")
                self._health = health
                self._parts.feed.beat(health)
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        """Tell gateways that the controller lives."""
        while True:
            self._parts.feed.beat(self._health)
            await asyncio.sleep(BEAT_S)


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
