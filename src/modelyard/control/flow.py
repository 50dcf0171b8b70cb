"""The life of a deployment: one pass over one endpoint, in one sitting.

observe → decide how many → plan → act → remember. A pass may fail at any line
and be run again: it starts from what is, not from what an earlier one meant to
do. Policies decide (``policy/scaling.py``, ``policy/reconcile.py``), this file
only carries answers from one to the next.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from modelyard.control.asking import ask_of, residents_of
from modelyard.control.guest_pass import run_guest_pass
from modelyard.control.passes import Passed, Tools
from modelyard.control.promises import Need
from modelyard.control.remember import remember
from modelyard.control.sleeping import Tended
from modelyard.control.supplies import Offer, SupplyError
from modelyard.control.views import holding_back, is_proven, situation_of, with_moves
from modelyard.control.world import World
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.engines import Settings
from modelyard.policy import scaling
from modelyard.policy.actions import Action, StartReplica, Wait
from modelyard.policy.asks import Ask, NoRoom, crowded
from modelyard.policy.eviction import Resident
from modelyard.policy.progress import Fetch, View
from modelyard.policy.reconcile import LIVE, crashes, plan
from modelyard.policy.releases import main_release
from modelyard.policy.rollouts import beside, carriers, sizes, spares
from modelyard.policy.takeovers import settled, takeovers, told


async def run_pass(endpoint: Endpoint, world: World, tools: Tools) -> bool:
    """Bring what runs of ``endpoint`` one step closer to what should; say whether anything changed."""
    if endpoint.host_id:
        return await run_guest_pass(endpoint, world, tools)
    memory = tools.memories.get(endpoint.id)
    settings = settings_of(endpoint, world, tools)
    load_s = await tools.loads.expected_s(main_release(endpoint).version_id, settings.load_s) if settings else 0.0
    seen = tools.sizing.look(endpoint, world, settings, load_s, memory)

    decision = scaling.decide(endpoint.scaling, memory, seen, endpoint.autoscale)
    if endpoint.pool:
        decision = tools.pools.decide(endpoint, decision)
    recorded = world.replicas.get(endpoint.id, ())
    ids = [replica.id for replica in recorded]
    evicted = tools.placer.evicted(ids, endpoint.tenant_id) | tools.sleeping.outgrown(ids)
    if going := counted(recorded, evicted, endpoint):
        decision = without(decision, endpoint, seen, going, evicted[going[0]])
    tools.sizing.note(endpoint.id, seen, decision)
    wanted = sizes(decision.replicas, endpoint, world.unix_s)
    situation = situation_of(
        endpoint,
        wanted,
        decision.reason,
        world,
        tools.observer,
        is_first=memory is None,
        evicted=evicted.keys(),
        taken=tools.pools.taken_from(endpoint.id) if endpoint.pool else (),
    )
    situation = holding_back(situation, partial(tools.guests.holds_back, host=endpoint, world=world))
    situation = with_moves(situation, tools.moving.because(endpoint.id))
    actions = plan(situation, tools.pace)

    records = {seen.record.id: seen.record for seen in situation.replicas}
    were_ready = {id for id, record in records.items() if record.state is ReplicaState.READY}
    starts = Starts(endpoint, world, tools, records, seen)
    has_changed = await act(actions, starts)
    if not endpoint.pool:
        has_changed |= await tools.guests.tend(endpoint, world, records.values())

    for version_id in {record.version_id for record in records.values() if record.state is ReplicaState.READY}:
        await tools.executor.activate(tools.supplies.known(world.versions[version_id]))

    if any(record.state is ReplicaState.READY and id not in were_ready for id, record in records.items()):
        # Gateways know of a replica before anybody is told that it is ready. Of the rest they hear after the pass.
        await tools.publish()
    view = view_of(starts, actions, decision, wanted, load_s)
    tools.passed[endpoint.id] = passed_of(endpoint, decision.replicas, starts, view, tools.passed.get(endpoint.id))
    has_changed |= await remember(endpoint, view, memory, decision, seen, tools.store)
    tools.memories[endpoint.id] = decision.memory
    return has_changed


async def act(actions: Sequence[Action], starts: "Starts") -> bool:
    """Carry out ``actions``, starts where there is room and supply; say whether anything changed."""
    endpoint, tools = starts.endpoint, starts.tools
    touched = touched_by(actions) if endpoint.pool else frozenset()
    tools.pools.touch(touched)
    tools.placer.begin(endpoint.id)
    has_changed = False
    try:
        for action in actions:
            if isinstance(action, StartReplica):
                has_changed |= await starts.try_start(action)
            else:
                has_changed |= await tools.executor.carry_out(action, endpoint.id, starts.records)
        has_changed |= await starts.turn_sleepers()
    finally:
        tools.placer.end(endpoint.id, starts.recorded)
        tools.pools.let_go(touched)
    return has_changed


def view_of(
    starts: "Starts", actions: Sequence[Action], decision: scaling.Decision, wanted: Mapping[str, int], load_s: float
) -> View:
    """Return what is to be told of an endpoint after its pass."""
    endpoint, world, records = starts.endpoint, starts.world, starts.records
    version = world.versions.get(main_release(endpoint).version_id) if endpoint.releases else None
    return View(
        now_s=world.unix_s,
        wanted=sum(number for version_id, number in wanted.items() if version_id not in beside(endpoint)),
        replicas=settled(list(records.values())),
        moving=told(list(records.values())),
        load_s=load_s,
        is_proven=is_proven(endpoint) or decision.memory.is_proven,
        size_reason=decision.reason,
        wake_s=starts.tools.sleeping.wake_s(version) if endpoint.releases else 0.0,
        waiting=next((action.reason for action in actions if isinstance(action, Wait)), "") or starts.tended.waits,
        is_coming=starts.tended.is_coming,
        troubles={version_id: error.told for version_id, error in starts.troubles.items()},
        no_room=no_room_of(endpoint, starts.no_room, records.values()),
        fetch=starts.fetch,
    )


def passed_of(endpoint: Endpoint, replicas: int, starts: "Starts", view: View, before: Passed | None) -> Passed:
    """Return what a pass came to, after the one ``before``."""
    return Passed(
        replicas,
        starts.troubles,
        has_rollout=endpoint.rollout is not None and endpoint.rollout.is_live and not endpoint.is_deleted,
        no_room=starts.no_room,
        is_waiting=bool(starts.troubles or starts.no_room or starts.fetch or view.waiting),
        awake_at=before.awake_at if before is not None and before.replicas else view.now_s,
        look_in_s=starts.tended.look_in_s,
    )


def no_room_of(endpoint: Endpoint, no_room: Mapping[str, str], replicas: Iterable[Replica]) -> str:
    """Return why the endpoint has no room; that a shadow has none is told once somebody answers, for nobody waits."""
    others = beside(endpoint)
    is_served = any(one.state is ReplicaState.READY and one.version_id not in others for one in replicas)
    told = sorted(no_room, key=lambda version_id: version_id in others)
    return next((no_room[one] for one in told if is_served or one not in others), "")


def touched_by(actions: Iterable[Action]) -> frozenset[str]:
    """Return the replicas that ``actions`` are about."""
    return frozenset(action.replica_id for action in actions if hasattr(action, "replica_id"))


def counted(replicas: Iterable[Replica], evicted: Collection[str], endpoint: Endpoint) -> list[str]:
    """Return the evicted replicas that the size still counts: what drains is out of it, what is spare never was in."""
    spare = spares(endpoint)
    return [one.id for one in replicas if one.id in evicted and one.state in LIVE and one.version_id not in spare]


def without(
    decision: scaling.Decision, endpoint: Endpoint, seen: scaling.Seen, going: Collection[str], reason: str
) -> scaling.Decision:
    """Return the size without replicas that must go for others; it grows again when somebody asks.

    Counted from what runs and not from the last decision: a pass that is repeated takes nothing off twice.
    """
    left = max(seen.replicas - len(going), 0)
    if left < len(carriers(endpoint)):
        left = 0  # a release without a replica would refuse its share, so all of them sleep
    least = 0 if endpoint.pool else endpoint.scaling.floor
    replicas = min(decision.replicas, max(left, least))
    return scaling.Decision(replicas, reason, msgspec.structs.replace(decision.memory, replicas=replicas))


@dataclass(slots=True)
class Starts:
    """The starts of one pass: what each waits for, and which were recorded."""

    endpoint: Endpoint
    world: World
    tools: Tools
    records: dict[str, Replica]
    seen: scaling.Seen
    troubles: dict[str, SupplyError] = field(default_factory=dict)
    """Why nothing of a version can start at all, by its id."""
    no_room: dict[str, str] = field(default_factory=dict)
    """Why there is no room for a version, by its id."""
    fetch: Fetch | None = None
    recorded: list[str] = field(default_factory=list)
    tended: Tended = field(default_factory=Tended)
    """What became of replicas that sleep or may."""

    async def turn_sleepers(self) -> bool:
        """Wake and put to sleep what is due; say whether anything changed."""
        self.tended = await self.tools.sleeping.tend(
            self.endpoint, self.world, self.records, self.seen, recorded=self.recorded, has_way=self._has_way
        )
        return self.tended.has_changed

    async def try_start(self, action: StartReplica) -> bool:
        """Place, supply and start; say whether it was started. What is missing is noted, and asked for by supply."""
        tools, replica = self.tools, action.replica
        version = self.world.versions[replica.version_id]
        # One whose old one is gone meanwhile is a replica like any.
        is_new = bool(replica.takes_over) and not replica.placement.parts
        if is_new or replica.id in takeovers(self.records.values()):
            return await self._try_move(action, version)
        try:
            offer = tools.supplies.offer(version)
            ask = self._ask(replica, offer)
            if await self._take(replica, version, ask):
                return True
            placed = tools.bursts.place(
                replica,
                ask,
                self._need(offer),
                self._residents,
                self.endpoint.autoscale,
                now_s=self.world.monotonic_s,
            )
            if isinstance(placed, NoRoom):
                self.no_room[version.id] = placed.text
                return False
            supply = tools.supplies.supply(version)
        except SupplyError as error:
            self.troubles[version.id] = error
            tools.placer.give_up(replica.id)  # nobody else must wait for the room of what cannot start
            return False
        if isinstance(supply, Fetch):
            self.fetch = supply
            return False
        if placed.reason:
            action = StartReplica(replica, f"{action.reason}; {placed.reason}")
        await tools.executor.start(action, self.endpoint, supply, placed.placement, self.records)
        self.recorded.append(replica.id)
        return True

    async def _try_move(self, action: StartReplica, version: ModelVersion) -> bool:
        """Start a replica that takes over where room is held for it; what is missing ends the move, and no more."""
        tools, replica = self.tools, action.replica
        if (placement := tools.placer.move(replica)) is None:
            return False
        try:
            supply = tools.supplies.supply(version)
        except SupplyError:
            if not replica.placement.parts:  # a record that is not started is dropped in time, and given up then
                tools.moving.give_up(self.endpoint.id)
            return False
        if isinstance(supply, Fetch):
            return False
        try:
            await tools.executor.start(action, self.endpoint, supply, placement, self.records)
        finally:
            tools.moving.begun(replica)
        self.recorded.append(replica.id)
        return True

    def _has_way(self, asleep: Replica) -> bool:
        """Say whether one that is started in place of ``asleep`` would find room elsewhere."""
        try:
            offer = self.tools.supplies.offer(self.world.versions[asleep.version_id])
        except SupplyError:
            return False
        return self.tools.placer.has_way(self._ask(asleep, offer), self._need(offer), self._residents)

    def _ask(self, replica: Replica, offer: Offer) -> Ask:
        """Return what a replica of the endpoint needs at its place."""
        return ask_of(
            self.endpoint,
            offer,
            self.tools.placer.kinds,
            failed=self._failed(replica),
            crowded=self._crowded(replica),
            is_spare=replica.ordinal >= max(self.endpoint.scaling.floor, 1),
        )

    def _need(self, offer: Offer) -> Need:
        demand = self.world.demand(self.endpoint.id)
        queued, wait_s = demand.queued, demand.wait_s
        if not self.endpoint.autoscale.batch_scales:
            # Lines that run on what is idle push nobody out, and rent nothing.
            queued = max(queued - demand.batch_queued, 0)
            wait_s = wait_s if queued else 0.0
        return Need(
            name=self.endpoint.name,
            queued=queued,
            reload_s=offer.settings.load_s,
            ready=sum(record.state is ReplicaState.READY for record in self.records.values()),
            wait_s=wait_s,
            may_evict=not self.endpoint.pool,
        )

    async def _take(self, replica: Replica, version: ModelVersion, ask: Ask) -> bool:
        """Take a replica of a warm pool where nothing of the endpoint answers; say whether there was one."""
        tools, endpoint = self.tools, self.endpoint
        others = beside(endpoint)
        is_cold = not any(
            record.state is ReplicaState.READY and record.version_id not in others for record in self.records.values()
        )
        if endpoint.pool or not is_cold or replica.placement.parts or version.id in others:
            return False

        def suits(one: Replica) -> bool:
            return one.id not in tools.placer.claimed and tools.placer.suits(ask, one.placement)

        found = tools.pools.take(endpoint, version, self.world.versions, replica, suits)
        if found is None:
            return False
        taken, reason = found
        if tools.placer.over_quota(endpoint.tenant_id, taken.placement):
            tools.pools.give_back(taken)
            return False
        tools.placer.hand_over(taken, endpoint.tenant_id)
        try:
            await tools.executor.adopt(taken, reason, self.records)
        except BaseException:
            tools.pools.give_back(taken)
            raise
        return True

    def _residents(self) -> list[Resident]:
        return residents_of(self.world, self.tools.loads.known(), but=self.endpoint.id)

    def _crowded(self, replica: Replica) -> frozenset[str]:
        """Return the nodes where replicas of the same version share accelerators, which more of it would slow down."""
        others = [
            one.placement
            for one in self.records.values()
            if one.version_id == replica.version_id and one.id != replica.id and one.state in LIVE
        ]
        known = self.tools.placer.nodes
        where = {one.node_id for one in others}
        return crowded(others, {node_id: known[node_id].node for node_id in where if node_id in known})

    def _failed(self, replica: Replica) -> list[Replica]:
        """Return the crash history of a replica's place."""
        return crashes(self.records.values()).get((replica.version_id, replica.ordinal), [])


def settings_of(endpoint: Endpoint, world: World, tools: Tools) -> Settings | None:
    """Return what the engine of the release with the most traffic makes of it, None when it cannot say."""
    version = world.versions.get(main_release(endpoint).version_id) if endpoint.releases else None
    return tools.supplies.settings(version) if version else None
