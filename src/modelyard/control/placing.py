"""Where replicas go: the packer's cluster of one round, and what is promised between two of them.

A round brings the cluster up to what is recorded (``see``). A pass that places
a replica takes the room at once, and holds it while its artifact is fetched:
the promise is kept here until the record with the placement is stored, or the
pass does not ask for it again. What fits only where idle replicas are claims
their place: they are drained, and nobody else gets the room meanwhile. The same
where replicas move away first (``moving.py``), each to a place that is held for it.
One that sleeps holds next to nothing; to wake it takes its room again the same way,
and whoever is on it falls asleep first.

Nothing here is state that a crash could lose: a controller that starts anew
places what was not recorded once more. Every call is synchronous, so that two
passes never take one room.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from modelyard.control.beds import Beds
from modelyard.control.holding import holders, host_of, kinds_of, moved_from
from modelyard.control.promises import Need, Opener, Promise, Residents
from modelyard.control.world import World
from modelyard.domain.fleet import Replica
from modelyard.domain.nodes import NodeSeen, Placement
from modelyard.policy import accelerator_quota, eviction
from modelyard.policy.asks import STANDARD, Ask, NoRoom, Weights, refused
from modelyard.policy.cluster import CPU, Cluster
from modelyard.policy.fit import OVERHEAD_BYTES
from modelyard.policy.packing import find, place
from modelyard.policy.sleepers import MOST, Bed

REBUILD_S = 30.0
"""Longest time that a cluster is kept: what it counted wrong, and the packer's notes on it, go with it."""
CROWDED = "its context is in the way of one that is asked for"
LOADS_COUNT_S = 600.0
"""How long a start counts against its tenant's turn for scarce room."""


class Placer:
    """Places replicas on the nodes of the fleet."""

    def __init__(self, rule: eviction.Rule = eviction.STANDARD, weights: Weights = STANDARD) -> None:
        self._rule = rule
        self._weights = weights
        self.opener: Opener = lambda *_: None
        self._cluster = Cluster()
        self._built_s = float("-inf")
        self._shown: Sequence[tuple[object, ...]] = []
        """What the cluster's nodes were like when it was built."""
        self._on: dict[str, Placement] = {}
        """What is placed on the cluster, by replica."""
        self._nodes: dict[str, NodeSeen] = {}
        self._kinds: frozenset[str] = frozenset()
        self._sizes: accelerator_quota.Sizes = {}
        self._limits: Mapping[str, int] = {}
        self._held: dict[str, tuple[str, Placement]] = {}
        """Recorded placements by replica, with their tenant."""
        self._beds = Beds()
        self.crowd: dict[str, str] = {}
        """Who sleeps in the way of others, found since somebody read it, and why: its context is all that is."""
        self._promised: dict[str, Promise] = {}
        self._claims: dict[str, Promise] = {}
        """Promises that wait for their victims to go. They are on the cluster beside those, so that nobody takes what
        is free there, or what the first victim leaves."""
        self._moves: dict[str, Promise] = {}
        """Room for replicas that take over, by the one that is to move; once begun it is promised to the new one."""
        self._moved_from: frozenset[str] = frozenset()
        """Replicas that others take over from, as recorded."""
        self._asked: dict[str, set[str]] = defaultdict(set)
        """Replica ids that the running pass of an endpoint asked for."""
        self._waiting: dict[str, eviction.Waiting] = {}
        self._loads: list[tuple[float, str]] = []
        self._now_s = 0.0

    def __repr__(self) -> str:
        return f"<Placer of {len(self._nodes)} nodes, {len(self._promised)} promises, {len(self._claims)} claims>"

    @property
    def nodes(self) -> Mapping[str, NodeSeen]:
        """The fleet's nodes by id, as last seen."""
        return self._nodes

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of accelerator that there are."""
        return self._kinds

    def see(self, world: World, nodes: Iterable[NodeSeen], limits: Mapping[str, int]) -> None:
        """Take what a round found as the truth, and what was promised since on top.

        ``limits`` are the accelerators that tenants may have, by id; one that is not named has no limit.
        """
        self._now_s = world.monotonic_s
        self._limits = limits
        self._nodes = {seen.node.id: seen for seen in nodes}
        self._kinds = kinds_of(self._nodes.values())
        self._sizes = accelerator_quota.sizes_of(self._nodes.values())
        self._held = dict(holders(world, host_of(self._nodes.values())))
        self._beds.see(world)
        self._moved_from = moved_from(world)
        for replica_id in self._held.keys() & self._promised.keys():
            del self._promised[replica_id]
        for claim in list(self._claims.values()):
            if not (claim.victims | claim.leaving) & self._held.keys():
                self._promised[claim.replica_id] = self._claims.pop(claim.replica_id)
        self._lay_out()
        self._loads = [load for load in self._loads if self._now_s - load[0] < LOADS_COUNT_S]
        self._waiting = {id: one for id, one in self._waiting.items() if id in world.endpoints}

    def _lay_out(self) -> None:
        """Bring the cluster up to what is held, promised and claimed; anew only where nodes differ: that is slow."""
        held = {replica_id: placement for replica_id, (_, placement) in self._held.items()}
        kept = {one.replica_id: one.placement for one in (*self._promised.values(), *self._claims.values())}
        kept |= {_room_of(old): one.placement for old, one in self._moves.items()}
        shown: list[tuple[object, ...]] = [
            (seen.node, seen.is_ready, seen.reason, seen.cached) for seen in self._nodes.values()
        ]
        is_old = self._now_s - self._built_s >= REBUILD_S
        # How much strangers use of a GPU is what is measured minus what is placed: that needs both of one time, and
        # nothing that is promised uses memory yet.
        if is_old or shown != self._shown or any(map(_is_measured, self._nodes.values())):
            self._cluster = Cluster.of(self._nodes.values(), held.values(), self._beds.all())
            self._built_s, self._shown, self._on = self._now_s, shown, held
        wanted = held | kept
        self._beds.follow(self._cluster, wanted)
        for replica_id, placement in list(self._on.items()):
            if wanted.get(replica_id) is not placement:
                self._take_off(replica_id)
        for replica_id, placement in wanted.items():
            if replica_id not in self._on:
                self._put_on(replica_id, placement)

    def _put_on(self, replica_id: str, placement: Placement) -> None:
        self._cluster.take(placement)
        self._on[replica_id] = placement

    def _take_off(self, replica_id: str) -> None:
        if (placement := self._on.pop(replica_id, None)) is not None:
            self._cluster.give_back(placement)

    def in_turn(self, endpoint_ids: Collection[str]) -> list[str]:
        """Return the endpoints in the order in which they may ask: those that wait for room first, in fair turns."""
        loads: dict[str, float] = defaultdict(float)
        for _, tenant_id in self._loads:
            loads[tenant_id] += 1.0
        waiting = [one for id, one in self._waiting.items() if id in endpoint_ids]
        first = [one.endpoint_id for one in eviction.turns(waiting, loads)]
        return [*first, *sorted(set(endpoint_ids) - set(first))]

    def claimed_of(self, world: World) -> set[str]:
        """Return the endpoints of which a replica must go."""
        victims = self.claimed
        return (
            {id for id, replicas in world.replicas.items() if any(one.id in victims for one in replicas)}
            if victims
            else set()
        )

    def evicted(self, replica_ids: Iterable[str], tenant_id: str) -> dict[str, str]:
        """Return which of these replicas must go, with the reason as their tenant may know it."""
        wanted = {victim: claim for claim in self._claims.values() if claim.ask is not None for victim in claim.victims}
        return {id: _reason_for(tenant_id, wanted[id]) for id in replica_ids if id in wanted}

    def lulled(self, replica_ids: Iterable[str], tenant_id: str) -> dict[str, str]:
        """Return which of these replicas are to sleep for others that wake, with the reason as ``evicted`` has it."""
        wanted = {victim: claim for claim in self._claims.values() if claim.ask is None for victim in claim.victims}
        return {id: _reason_for(tenant_id, wanted[id]) for id in replica_ids if id in wanted}

    @property
    def claimed(self) -> frozenset[str]:
        """The replicas that must go for others."""
        return frozenset(victim for claim in self._claims.values() for victim in claim.victims)

    def is_claiming(self, replica_id: str) -> bool:
        """Say whether somebody makes room for this replica right now."""
        return replica_id in self._claims

    def is_left_later(self, replica_id: str, ask: Ask) -> bool:
        """Say whether others move away for this replica, which takes as long as a load, while ``ask`` has room now."""
        claim = self._claims.get(replica_id)
        is_late = claim is not None and bool(claim.leaving)
        return is_late and find(ask, self._cluster, weights=self._weights) is not None

    def is_promised(self, replica_id: str, ask: Ask) -> bool:
        """Say whether room is held for exactly this."""
        promise = self._promised.get(replica_id)
        return promise is not None and promise.ask == ask

    def waited_s(self, endpoint_id: str) -> float:
        """Return how long an endpoint has found no room."""
        waiting = self._waiting.get(endpoint_id)
        return 0.0 if waiting is None else self._now_s - waiting.since_s

    def suits(self, ask: Ask, placement: Placement) -> bool:
        """Say whether what is placed so already is where ``ask`` may be."""
        ask = msgspec.structs.replace(ask, memory_bytes=0)
        return placement.accelerators == ask.count and all(
            any(
                set(part.accelerators) <= set(block.indices) and not refused(ask, block.shape)
                for block in self._cluster.blocks_of(part.node_id)
            )
            for part in placement.parts
        )

    def hand_over(self, replica: Replica, tenant_id: str) -> None:
        """Count a replica that runs as this tenant's from now on; the next round sees what is recorded."""
        self._held[replica.id] = (tenant_id, replica.placement)

    def begin(self, endpoint_id: str) -> None:
        """A pass over an endpoint begins: what it does not ask for again by ``end`` is not promised any more."""
        self._asked[endpoint_id] = set()

    def end(self, endpoint_id: str, recorded: Collection[str]) -> None:
        """The pass is over; ``recorded`` are the replicas whose placement is stored now, which the next round sees."""
        asked = self._asked.pop(endpoint_id, set()) | set(recorded)
        for promises in (self._promised, self._claims):
            for promise in [one for one in promises.values() if one.endpoint_id == endpoint_id]:
                if promise.replica_id not in asked:
                    self.give_up(promise.replica_id)
        if not asked - set(recorded):
            self._waiting.pop(endpoint_id, None)

    def place(self, replica: Replica, ask: Ask, need: Need, residents: Residents) -> Placement | NoRoom:
        """Return where ``replica`` goes, and hold the room; the same again while the same is asked.

        Where nothing fits, idle ``residents`` are claimed if that is worth it; the answer says so.
        """
        self._asked[replica.endpoint_id].add(replica.id)
        if replica.placement.parts:
            return replica.placement  # it was recorded with it and not started
        known = self._promised.get(replica.id) or self._claims.get(replica.id)
        if known is not None and known.ask == ask and self._is_there(known.placement):
            if replica.id not in self._claims:
                return known.placement
            # A move takes as long as a load and a drain do: what gets free elsewhere meanwhile is taken instead.
            if not known.leaving or find(ask, self._cluster, weights=self._weights) is None:
                return NoRoom(known.reason, ask.memory_bytes)
        self.give_up(replica.id)
        found = place(ask, self._cluster, weights=self._weights)
        if isinstance(found, NoRoom):
            return self._make_room(replica, ask, need, residents, found) if need.may_evict else found
        if over := self.over_quota(ask.tenant_id, found):
            return NoRoom(over, ask.memory_bytes)
        self._put_on(replica.id, found)
        self._promised[replica.id] = Promise(replica.id, replica.endpoint_id, ask.tenant_id, ask, found)
        self._loads.append((self._now_s, ask.tenant_id))
        return found

    def give_up(self, replica_id: str) -> None:
        """Let go of the room of a replica that is not started after all."""
        for promises in (self._claims, self._promised):
            if promises.pop(replica_id, None) is not None:
                self._take_off(replica_id)
                self._beds.lie_down(self._cluster, replica_id)

    # --- those that sleep ---

    def bed(self, replica: Replica, idle: Sequence[tuple[Replica, float]]) -> Bed:
        """Return how one that sleeps stands. ``idle`` could sleep too, with the seconds since they had a request."""
        return self._beds.bed(self._cluster, self._on, replica, idle)

    def crowding(self, replica: Replica) -> list[str]:
        """Return the sleepers who would have to go so that ``replica`` could wake; none where that is not enough."""
        return self._beds.crowding(self._cluster, replica)

    def _crowding(self, ask: Ask) -> list[str]:
        """Return the sleepers without whose contexts ``ask`` would find room; asked only where it could matter."""
        sizes = {one.memory_bytes for seen in self._nodes.values() for one in seen.node.accelerators}
        if not any(ask.memory_bytes <= size < ask.memory_bytes + MOST * OVERHEAD_BYTES for size in sizes):
            return []
        return self._beds.crowding_out(self._cluster, ask)

    def take_bed(self, replica: Replica, tenant_id: str, victims: Collection[str], reason: str) -> None:
        """Hold the room of one that sleeps: at once, or once ``victims`` sleep. It is to be asked for in each pass."""
        self._asked[replica.endpoint_id].add(replica.id)
        self._beds.rise(self._cluster, replica.id)
        self._put_on(replica.id, replica.placement)
        promise = Promise(
            replica.id, replica.endpoint_id, tenant_id, None, replica.placement, frozenset(victims), reason
        )
        (self._claims if victims else self._promised)[replica.id] = promise

    def has_left(self, replica: Replica) -> bool:
        """Say whether one that sleeps was seen asleep by a round: before that its room is counted as its own."""
        return self._beds.has(replica.id)

    def keeps_bed(self, replica: Replica) -> bool:
        """Say whether the room of one that sleeps is held for it, and hold it for another pass."""
        if replica.id not in self._promised and replica.id not in self._claims:
            return False
        self._asked[replica.endpoint_id].add(replica.id)
        return True

    def refuse(self, victim_id: str) -> None:
        """One that was to sleep for others is needed: they must look for another place."""
        for claim in list(self._claims.values()):
            if claim.ask is None and victim_id in claim.victims:
                self.give_up(claim.replica_id)

    def is_alone(self, replica: Replica) -> bool:
        """Say whether nobody else is awake on the accelerators of a replica."""
        known = (one for one in replica.placement.places if self._cluster.free_bytes(*one) is not None)
        return all(self._cluster.shares(*one) == 1 for one in known)

    @property
    def rising(self) -> frozenset[str]:
        """Those that wake once others sleep, or are gone."""
        promises = (*self._promised.values(), *self._claims.values())
        return frozenset(one.replica_id for one in promises if one.ask is None)

    def has_way(self, ask: Ask, need: Need, residents: Residents) -> bool:
        """Say whether ``ask`` would find room, or make some, anywhere."""
        placement = find(ask, self._cluster, weights=self._weights)
        if placement is None:
            found = self._evict(ask, need, residents, waiting_s=0.0)
            if isinstance(found, eviction.NoEviction):
                return False
            placement = found.placement
        return not self.over_quota(ask.tenant_id, placement)

    def _make_room(self, replica: Replica, ask: Ask, need: Need, residents: Residents, no_room: NoRoom) -> NoRoom:
        since = eviction.Waiting(replica.endpoint_id, ask.tenant_id, self._now_s, ask.tier)
        waiting = self._waiting.setdefault(replica.endpoint_id, since)
        if (opened := self.opener(replica, ask, no_room)) is not None:
            if isinstance(opened, Promise):
                self._claim(opened)
            return NoRoom(opened.reason, ask.memory_bytes)
        found = self._evict(ask, need, residents, waiting_s=self._now_s - waiting.since_s)
        if isinstance(found, eviction.NoEviction):
            self.crowd |= dict.fromkeys(self._crowding(ask), CROWDED)
            return NoRoom(no_room.reason, no_room.needed_bytes, helps=(found.reason, *no_room.helps))
        if over := self.over_quota(ask.tenant_id, found.placement):
            return NoRoom(over, ask.memory_bytes)
        told = f"`{need.name}` needs the room: {found.reason}"
        victims = frozenset(found.replica_ids)
        promise = Promise(replica.id, replica.endpoint_id, ask.tenant_id, ask, found.placement, victims, told)
        self._claim(promise)
        return NoRoom(f"{no_room.reason}; {found.reason}", no_room.needed_bytes)

    def _evict(
        self, ask: Ask, need: Need, residents: Residents, *, waiting_s: float
    ) -> eviction.Eviction | eviction.NoEviction:
        """Return who should go for ``ask``, of those on whom nobody else counts already."""
        bound = self.claimed | self.leaving | self._moves.keys() | self._moved_from
        candidates = [one for one in residents() if one.replica_id not in bound]
        wanted = eviction.Wanted(
            ask=ask, name=need.name, reload_s=need.reload_s, queued=need.queued, waiting_s=waiting_s
        )
        return eviction.evict(wanted, self._cluster, candidates, self._rule)

    def _claim(self, promise: Promise) -> None:
        self._put_on(promise.replica_id, promise.placement)
        self._claims[promise.replica_id] = promise
        self._loads.append((self._now_s, promise.tenant_id))

    # --- replicas that move ---------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """The nodes with all that is placed, promised and claimed; whoever looks for places leaves it as it was."""
        return self._cluster

    @property
    def leaving(self) -> frozenset[str]:
        """The replicas that somebody waits for to have moved away."""
        return frozenset(one for claim in self._claims.values() for one in claim.leaving)

    def hold_move(self, old: Replica, ask: Ask, to: Placement) -> None:
        """Hold the room of a replica that will take over from ``old``."""
        self._put_on(_room_of(old.id), to)
        # Of no tenant: until it is recorded the old one counts, and nobody's quota has a replica twice for a move.
        self._moves[old.id] = Promise("", old.endpoint_id, "", ask, to)

    def move(self, replica: Replica) -> Placement | None:
        """Return where one that takes over goes, and hold the room for it; None where none is held any more."""
        self._asked[replica.endpoint_id].add(replica.id)
        if replica.placement.parts:
            return replica.placement  # it was recorded with it and not started
        if (promise := self._moves.pop(replica.takes_over, None)) is not None:
            self._on[replica.id] = self._on.pop(_room_of(replica.takes_over))
            self._promised[replica.id] = replace(promise, replica_id=replica.id)
        known = self._promised.get(replica.id)
        return known.placement if known is not None and self._is_there(known.placement) else None

    def drop_moves(self, kept: Collection[str], stuck: Collection[str]) -> None:
        """Hold no room for moves but of those in ``kept``; nobody waits for those in ``stuck`` to move away."""
        for old in self._moves.keys() - kept:
            del self._moves[old]
            self._take_off(_room_of(old))
        for claim in [one for one in self._claims.values() if not one.leaving.isdisjoint(stuck)]:
            self.give_up(claim.replica_id)

    def over_quota(self, tenant_id: str, new: Placement) -> str:
        """Return why a tenant may not have ``new`` beside what it has, "" where it may."""
        limit = self._limits.get(tenant_id)
        if limit is None:
            return ""
        # What moves is there twice for a while; that is not its tenant's doing.
        mine = [held for id, (owner, held) in self._held.items() if owner == tenant_id and id not in self._moved_from]
        for promises in (self._promised, self._claims):
            mine += [one.placement for one in promises.values() if one.tenant_id == tenant_id]
        return accelerator_quota.refusal(limit, mine, new, self._sizes)

    def _is_there(self, placement: Placement) -> bool:
        return all(part.node_id in self._nodes and self._nodes[part.node_id].is_ready for part in placement.parts)


def _room_of(replica_id: str) -> str:
    """Return what the room of its successor is held under."""
    return f"after {replica_id}"


def _is_measured(seen: NodeSeen) -> bool:
    """Say whether it is known what strangers use of a node's accelerators besides its CPU."""
    others = {one.index for one in seen.node.accelerators if one.kind != CPU}
    return not others.isdisjoint(seen.used_bytes)


def _reason_for(tenant_id: str, claim: Promise) -> str:
    """Return why a replica of this tenant must go; other tenants' models are nobody else's business."""
    if claim.tenant_id == tenant_id:
        return claim.reason
    return f"a model of another tenant needs the room of idle ones on {claim.placement.node_id}"
