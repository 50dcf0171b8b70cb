"""Replicas that move to other accelerators while they serve, as ``policy/defragment.py`` says.

A move is meant, begun, and over. *Meant* it is only here: the room is held
(``placing.py``), and the next pass of its endpoint records and starts the
replica that takes over. From then on the two records are the move
(``policy/takeovers.py``), and reconcile takes it to its end whatever becomes
of this controller: what is lost with one is what was only meant. A move that
came to nothing is not tried again for a while, and for longer each time.

Everything here is synchronous and done in a round or a pass, so that what the
cluster says holds until the room is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from modelyard.clock import Clock
from modelyard.config import ControlConfig
from modelyard.control.placing import Placer
from modelyard.control.promises import Promise
from modelyard.control.sizing import Sizing
from modelyard.control.world import World
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.domain.nodes import NodeSeen
from modelyard.engines import Engines
from modelyard.policy import defragment
from modelyard.policy.asks import STANDARD, Ask, NoRoom, Weights
from modelyard.policy.defragment import EVERY_S, MOVES_MOST, PLACES, Move, Place, Placed, Plan
from modelyard.policy.eviction import Rule
from modelyard.policy.reconcile import LIVE
from modelyard.policy.takeovers import START_S, takeovers
from modelyard.policy.why import MAKING_ROOM

Mode = Literal["off", "room", "all"]
RETRY_S = 10.0
"""Pause between two looks for moves that open room for the same endpoint."""
LOOKING_S = 0.05
"""Once so much time of a round went into looks for room, nobody else looks: each goes through the whole cluster, and
nothing else happens meanwhile."""
PAUSE_S = 60.0
"""First pause of an endpoint after a move that came to nothing; it doubles up to ``PAUSE_MAX_S``."""
PAUSE_MAX_S = 3600.0
REST_S = 600.0
"""Pause of an endpoint that moved until it may move only to tidy up: what is asked of it may swing to and fro."""


@dataclass(frozen=True, slots=True)
class _Meant:
    """A move that has not begun. ``is_for_room``: somebody waits for what it opens."""

    replica_id: str
    endpoint_id: str
    reason: str
    since_s: float
    is_for_room: bool


@dataclass(frozen=True, slots=True)
class _Open:
    """A move that has begun: who takes over from whom. ``since_s``: when that was recorded, as far as it was seen."""

    old_id: str
    endpoint_id: str
    since_s: float = float("-inf")


@dataclass(slots=True)
class Moving:
    """Which replicas are to move: ``at_once`` in all, and none before it was ready for ``residency_s``."""

    placer: Placer
    sizing: Sizing
    engines: Engines
    clock: Clock
    mode: Mode = "off"
    at_once: int = MOVES_MOST
    residency_s: float = 60.0
    _world: World | None = None
    _meant: dict[str, _Meant] = field(default_factory=dict)
    """By the replica that moves."""
    _open: dict[str, _Open] = field(default_factory=dict)
    """By the replica that takes over."""
    _pauses: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Moves of an endpoint in a row that came to nothing, and until when none is tried (monotonic)."""
    _moved_s: dict[str, float] = field(default_factory=dict)
    """When one of an endpoint last moved (monotonic)."""
    _tried_s: dict[str, float] = field(default_factory=dict)
    """When room for an endpoint was last looked for."""
    _looking_s: float = 0.0
    """Time of this round that went into looks for room."""
    _ended: dict[tuple[str, ...], int] = field(default_factory=lambda: {("moved",): 0, ("given_up",): 0})
    """Moves that ended, by outcome."""
    _due_s: float | None = None
    """When ``tidy`` is due."""
    _found: tuple[dict[str, Placed], dict[Place, float]] | None = None
    """What may move as this round sees it, and what the others ask of accelerators."""

    def __post_init__(self) -> None:
        """Be asked for room before anybody is evicted."""
        if self.mode != "off":
            self.placer.opener = self.open

    # --- a round -------------------------------------------------------------------------

    def see(self, world: World) -> None:
        """Take what a round found as the truth: note how moves stand, and now and then mean some."""
        if self.mode == "off":
            return
        before_s = self._world.monotonic_s if self._world is not None else float("-inf")
        self._world, self._found, self._looking_s = world, None, 0.0
        now_s = world.monotonic_s
        self._note_open(world, before_s)
        self._drop_meant(world)
        for of in (self._pauses, self._moved_s, self._tried_s):
            for gone in of.keys() - world.endpoints.keys():
                del of[gone]
        if self._due_s is None:
            self._due_s = now_s + EVERY_S  # what is asked for is not known at once
        if self.mode == "all" and now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            movable, others = self._rested(*self._movable(), now_s)
            # One is left for whoever finds no room: he would have idle ones evicted else.
            most = self._room_for_more() - (self.at_once > 1)
            if movable and most > 0:
                defragment.tidy(self.placer.cluster, movable, self._mean, most=most, others=others)

    def ended(self) -> Mapping[tuple[str, ...], int]:
        """Return how many moves ended, by outcome: they moved, or were given up; none where nothing may move."""
        return self._ended if self.mode != "off" else {}

    @property
    def endpoint_ids(self) -> set[str]:
        """The endpoints that need a pass for a move that is meant."""
        return {one.endpoint_id for one in self._meant.values()}

    def because(self, endpoint_id: str) -> Mapping[str, str]:
        """Return which replicas of an endpoint are to move, and why."""
        return {id: one.reason for id, one in self._meant.items() if one.endpoint_id == endpoint_id}

    def begun(self, new: Replica) -> None:
        """Note that the replica which takes over is recorded, or was to be; the next round sees what came of it."""
        self._meant.pop(new.takes_over, None)
        self._open[new.id] = _Open(new.takes_over, new.endpoint_id, self.clock.monotonic_s())

    def give_up(self, endpoint_id: str) -> None:
        """Mean no move of an endpoint for a while: one came to nothing."""
        self._ended["given_up",] += 1
        times = self._pauses.get(endpoint_id, (0, 0.0))[0]
        pause_s = min(PAUSE_S * 2.0**times, PAUSE_MAX_S)
        self._pauses[endpoint_id] = times + 1, self.clock.monotonic_s() + pause_s
        for old_id in [id for id, one in self._meant.items() if one.endpoint_id == endpoint_id]:
            del self._meant[old_id]

    def _note_open(self, world: World, before_s: float) -> None:
        """Compare the moves that go on with those of before, and judge those that ended.

        ``before_s``: when the look before this one was over, so that this one shows all that was recorded by then.
        """
        now: dict[str, _Open] = {}
        for endpoint_id, replicas in world.replicas.items():
            if any(one.takes_over for one in replicas):
                now |= {new: _Open(old, endpoint_id) for new, old in takeovers(replicas).items()}
        for new_id, one in self._open.items() - now.items():
            if new_id in now:
                continue
            old, new = (self._state(world, one.endpoint_id, id) for id in (one.old_id, new_id))
            if one.since_s >= before_s:
                now[new_id] = one  # this look may have read the records before it was one
            elif old is ReplicaState.READY:
                self.give_up(one.endpoint_id)
            elif new is ReplicaState.READY and old is ReplicaState.DRAINING:
                now[new_id] = one  # if the new one crashes the old one is back
            elif new is ReplicaState.READY:
                self._ended["moved",] += 1
                self._pauses.pop(one.endpoint_id, None)
                self._moved_s[one.endpoint_id] = world.monotonic_s
        self._open = now

    def _drop_meant(self, world: World) -> None:
        """Forget what is not to be any more, and let go of the room."""
        leaving, opened = self.placer.leaving, {one.old_id for one in self._open.values()}
        for one in list(self._meant.values()):
            is_ready = self._state(world, one.endpoint_id, one.replica_id) is ReplicaState.READY
            endpoint = world.endpoints.get(one.endpoint_id)
            if world.monotonic_s - one.since_s >= START_S:
                self.give_up(one.endpoint_id)
            elif (
                endpoint is None
                or not self._may_move(endpoint, world)
                or not is_ready
                or one.replica_id in opened
                or (one.is_for_room and one.replica_id not in leaving)
            ):
                self._meant.pop(one.replica_id, None)
        stay = leaving - opened - self._meant.keys()
        if stay:
            stay &= {one.id for replicas in world.replicas.values() for one in replicas if one.state in LIVE}
        self.placer.drop_moves(self._meant.keys(), stay)

    @staticmethod
    def _state(world: World, endpoint_id: str, replica_id: str) -> ReplicaState | None:
        return next((one.state for one in world.replicas.get(endpoint_id, ()) if one.id == replica_id), None)

    # --- what may move -------------------------------------------------------------------

    def open(self, replica: Replica, ask: Ask, no_room: NoRoom) -> Promise | NoRoom | None:
        """Have others move away so that ``replica`` has room; return what it may claim, or why it may not.

        None where no move would help, or none may be.
        """
        plan = self.find(replica, ask)
        if plan is None:
            return None
        if over := self.placer.over_quota(ask.tenant_id, plan.placement):
            return NoRoom(over, ask.memory_bytes)
        for move in plan.moves:
            self._mean(move, is_for_room=True)
        whose = "a replica moves" if len(plan.moves) == 1 else f"{len(plan.moves)} replicas move"
        reason = f"{no_room.reason}; {whose} away from {plan.placement.node_id} {MAKING_ROOM}"
        leaving = frozenset(move.replica_id for move in plan.moves)
        return Promise(
            replica.id, replica.endpoint_id, ask.tenant_id, ask, plan.placement, reason=reason, leaving=leaving
        )

    def find(self, replica: Replica, ask: Ask) -> Plan | None:
        """Return the fewest moves after which ``ask`` has room, None where none may or would."""
        world, most = self._world, self._room_for_more()
        if world is None or most == 0 or self._looking_s >= LOOKING_S:
            return None
        if world.monotonic_s - self._tried_s.get(replica.endpoint_id, float("-inf")) < RETRY_S:
            return None
        self._tried_s[replica.endpoint_id] = world.monotonic_s
        began_s = self.clock.monotonic_s()
        movable = {id: one for id, one in self._movable()[0].items() if one.group != replica.endpoint_id}
        plan = defragment.moves(self.placer.cluster, ask, movable, most=min(most, MOVES_MOST)) if movable else None
        self._looking_s += self.clock.monotonic_s() - began_s
        return plan

    def _mean(self, move: Move, *, is_for_room: bool = False) -> None:
        world = self._world
        assert world is not None, "moves are found in a world"
        movable, _ = self._movable()
        placed = movable[move.replica_id]
        old = next(one for one in world.replicas[placed.group] if one.id == move.replica_id)
        meant = _Meant(old.id, placed.group, move.reason, world.monotonic_s, is_for_room)
        self._meant[old.id] = meant
        self.placer.hold_move(old, placed.ask, move.to)

    def _room_for_more(self) -> int:
        return max(self.at_once - len(self._meant) - len(self._open), 0)

    def _movable(self) -> tuple[dict[str, Placed], dict[Place, float]]:
        """Return the replicas that may move, as the last round saw them, and what the others ask of accelerators."""
        assert self._world is not None, "asked after a look"
        if self._found is None:
            self._found = self._look_through(self._world)
        movable, others = self._found
        # Since this round began some were meant to move, and of those some have begun to.
        busy = self.endpoint_ids | {one.endpoint_id for one in self._open.values()}
        bound = self.placer.claimed | self.placer.leaving
        return {id: one for id, one in movable.items() if one.group not in busy and id not in bound}, others

    def _rested(
        self, movable: dict[str, Placed], others: dict[Place, float], now_s: float
    ) -> tuple[dict[str, Placed], dict[Place, float]]:
        """Return both with those that moved a short while ago among the others."""
        rested, others = dict(movable), dict(others)
        for id, one in movable.items():
            if now_s - self._moved_s.get(one.group, float("-inf")) < REST_S:
                place = one.placement.places[0]
                others[place] = others.get(place, 0.0) + one.load
                del rested[id]
        return rested, others

    def _look_through(self, world: World) -> tuple[dict[str, Placed], dict[Place, float]]:
        movable: dict[str, Placed] = {}
        others: dict[Place, float] = {}
        nodes = self.placer.nodes
        for endpoint_id, replicas in world.replicas.items():
            endpoint = world.endpoints.get(endpoint_id)
            live = [one for one in replicas if one.state in LIVE and len(one.placement.parts) == 1]
            if endpoint is None or not live:
                continue
            load = self._load(endpoint_id)
            may_move = self._may_move(endpoint, world) and not self._has_spot(replicas)
            running = {one.replica_id for one in world.processes.get(endpoint_id, ()) if one.is_running}
            ready = [one for one in live if one.state is ReplicaState.READY]
            for one in live:
                part = one.placement.parts[0]
                seen = nodes.get(part.node_id)
                if seen is None or one.placement.is_exclusive:
                    continue
                is_able = one.state is ReplicaState.READY and one.id in running
                may_leave = may_move and is_able and self._may_leave(one, endpoint, world)
                ask = self._ask(endpoint, one, ready, seen, world) if may_leave else None
                if ask is not None:
                    movable[one.id] = Placed(one.placement, ask, load, endpoint_id)
                else:
                    place = one.placement.places[0]
                    others[place] = others.get(place, 0.0) + load
        return movable, others

    def _may_move(self, endpoint: Endpoint, world: World) -> bool:
        """Say whether replicas of an endpoint may move: nothing else is done to it, and no guests sit there."""
        if endpoint.is_deleted or endpoint.pool or endpoint.host_id or world.guests.get(endpoint.id):
            return False
        if endpoint.rollout is not None and endpoint.rollout.is_live:
            return False
        if self._pauses.get(endpoint.id, (0, 0.0))[1] > world.monotonic_s:
            return False
        return all(one.endpoint_id != endpoint.id for one in self._open.values())

    def _has_spot(self, replicas: list[Replica]) -> bool:
        """Say whether some are on nodes that may be taken away. The others stay then: of places the first are kept, and
        one that moved has a later one."""
        nodes = self.placer.nodes
        of = (part.node_id for one in replicas if one.state in LIVE for part in one.placement.parts)
        return any(nodes[id].node.is_spot for id in of if id in nodes)

    def _may_leave(self, replica: Replica, endpoint: Endpoint, world: World) -> bool:
        is_settled = world.unix_s - max(replica.ready_at or 0.0, replica.state_since) >= self.residency_s
        is_released = any(release.version_id == replica.version_id for release in endpoint.releases)
        return is_settled and is_released and not replica.guests and replica.id not in world.busy

    def _ask(
        self, endpoint: Endpoint, replica: Replica, ready: list[Replica], seen: NodeSeen, world: World
    ) -> Ask | None:
        """Return what takes over needs: a place like that of the old one, rather away from others of its version."""
        version = world.versions.get(replica.version_id)
        engine = self.engines.get(version.framework) if version is not None else None
        part, node = replica.placement.parts[0], seen.node
        kind = next((one.kind for one in node.accelerators if one.index == part.accelerators[0]), "")
        if version is None or engine is None or engine.is_remote or not kind:
            return None
        brothers = (one for one in ready if one is not replica and one.version_id == replica.version_id)
        return Ask(
            memory_bytes=part.memory_bytes,
            kinds=frozenset({kind}),
            digest=version.artifact.digest,
            pool=node.pool,
            may_be_simulated=node.is_simulated,
            avoid=frozenset(one.placement.node_id for one in brothers),
            tenant_id=endpoint.tenant_id,
            tier=endpoint.autoscale.tier,
        )

    def _load(self, endpoint_id: str) -> float:
        """Return what each replica of an endpoint asks of an accelerator's time, as far as it is known."""
        known = self.sizing.decisions.get(endpoint_id)
        if known is None:
            return 0.0
        seen = known[0]
        if seen.requests_s is not None and seen.capacity is not None and seen.capacity.requests_s > 0:
            return seen.requests_s / (seen.capacity.requests_s * max(seen.ready, 1))
        return seen.utilization or 0.0


def weights_of(settings: ControlConfig) -> Weights:
    """Return how places are chosen: where accelerators are emptied, few are held to begin with."""
    return PLACES if settings.moves == "all" else STANDARD


def placer_of(settings: ControlConfig) -> Placer:
    """Return who places as it is set."""
    rule = Rule(min_residency_s=settings.min_residency_s, patience_s=2 * settings.min_residency_s)
    return Placer(rule, weights_of(settings))


def moving_of(settings: ControlConfig, placer: Placer, sizing: Sizing, engines: Engines, clock: Clock) -> Moving:
    """Return who moves replicas as it is set."""
    return Moving(placer, sizing, engines, clock, settings.moves, settings.moves_at_once, settings.min_residency_s)
