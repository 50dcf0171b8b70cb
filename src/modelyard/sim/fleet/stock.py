"""The nodes of a simulated fleet, what runs on them, and where weights lie.

``policy/packing.py`` says where a replica goes. What is kept here is what a fleet of machines keeps: which replicas
are where, which accelerators somebody holds, which node has which weights on disk and in memory (least recently used
go first, as the fleet backends do it), and which nodes are gone.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Placement
from modelyard.policy.asks import STANDARD, Ask, Weights, crowded
from modelyard.policy.cluster import Cluster
from modelyard.policy.fit import OVERHEAD_BYTES
from modelyard.policy.fragmentation import Mix, Typical, mix_of
from modelyard.policy.hardware import KINDS
from modelyard.policy.packing import find
from modelyard.policy.sleepers import Sleeper, outgrown
from modelyard.sim.fleet.models import Profile
from modelyard.sim.fleet.scenario import Loading, Nodes

SPOT_DISCOUNT = 0.65
"""Off the price: the source says 60 to 70 %."""


class State(Enum):
    """Of a replica."""

    LOADING = auto()
    MOVING = auto()
    """It loads, and will take the place of another one."""
    READY = auto()
    WAKING = auto()
    ASLEEP = auto()
    """Its weights are in host memory, its accelerators are free for others."""
    DRAINING = auto()
    GONE = auto()


LIVE = frozenset({State.LOADING, State.READY, State.WAKING, State.ASLEEP})
AWAKE_RANK = {State.READY: 0, State.WAKING: 1, State.ASLEEP: 2, State.LOADING: 3}


@dataclass(slots=True, eq=False)
class Replica:
    """One running engine. ``since_s`` is when it got its state."""

    number: int
    deployment: int
    placement: Placement
    state: State
    since_s: float
    is_spot: bool
    load_s: float
    price: float
    """Dollars an hour, of all its accelerators."""


class WeightCache:
    """Weights on a node's disk, some of them in its memory too; least recently used go first."""

    __slots__ = ("_disk", "_disk_left", "_memory", "_memory_left")

    def __init__(self, loading: Loading) -> None:
        self._disk: OrderedDict[str, int] = OrderedDict()
        self._memory: OrderedDict[str, int] = OrderedDict()
        self._disk_left = loading.disk_bytes
        self._memory_left = loading.memory_bytes

    def tier(self, digest: str) -> str:
        """Return where weights are nearest: ``memory``, ``disk`` or ``remote``."""
        if digest in self._memory:
            return "memory"
        return "disk" if digest in self._disk else "remote"

    def put(self, digest: str, size: int) -> list[str]:
        """Take weights in, or note that they are used; return what is on the disk no more."""
        lost: list[str] = []
        self._disk_left -= _put(self._disk, digest, size)
        while self._disk_left < 0 and len(self._disk) > 1:
            gone, freed = self._disk.popitem(last=False)
            self._disk_left += freed
            self._memory_left += self._memory.pop(gone, 0)
            lost.append(gone)
        self._memory_left -= _put(self._memory, digest, size)
        while self._memory_left < 0 and len(self._memory) > 1:
            self._memory_left += self._memory.popitem(last=False)[1]
        return lost


def _put(held: "OrderedDict[str, int]", digest: str, size: int) -> int:
    if digest in held:
        held.move_to_end(digest)
        return 0
    held[digest] = size
    return size


@dataclass(slots=True)
class Stock:
    """All nodes and replicas."""

    cluster: Cluster
    loading: Loading
    mix: Mix
    replicas: dict[int, Replica] = field(default_factory=dict)
    of_deployment: dict[int, list[Replica]] = field(default_factory=dict)
    on_node: dict[str, dict[int, Replica]] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    caches: dict[str, WeightCache] = field(default_factory=dict)
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    """Replicas by accelerator, where there are any."""
    in_use: dict[str, int] = field(default_factory=dict)
    """Accelerators that somebody holds, by kind."""
    usd_per_hour: float = 0.0
    started: int = 0
    slivers: float = 0.0
    """What engines that sleep keep of accelerators (their context), in accelerators."""
    asleep: dict[str, list[Replica]] = field(default_factory=dict)
    """Those that sleep on a node, the one that has slept for longest first."""
    places: Weights = STANDARD
    weights: list[int] = field(default_factory=list)
    """Bytes by deployment."""

    @classmethod
    def of(cls, kinds: tuple[Nodes, ...], loading: Loading, profiles: list[Profile], chance: random.Random) -> "Stock":
        """Return empty nodes; ``profiles`` tell what will typically be asked for."""
        nodes = []
        for group in kinds:
            for number in range(group.count):
                kind = KINDS[group.kind]
                parts = tuple(Accelerator(at, group.kind, kind.memory_bytes) for at in range(group.accelerators))
                is_spot = chance.random() < group.share_spot
                price = round(group.usd_per_hour * 1e9 * (1 - SPOT_DISCOUNT * is_spot))
                nodes.append(Node(f"{group.kind}-{number:04}", parts, is_spot=is_spot, price_nanousd=price))
        typical: dict[Typical, float] = {}
        for one in profiles:
            ask = Typical(one.memory_bytes, one.accelerators, frozenset({one.kind}))
            typical[ask] = typical.get(ask, 0.0) + 1.0
        stock = cls(Cluster.of(NodeSeen(node=node) for node in nodes), loading, mix_of(typical))
        stock.weights = [one.weights_bytes for one in profiles]
        stock.nodes = {node.id: node for node in nodes}
        stock.on_node = {node.id: {} for node in nodes}
        stock.caches = {node.id: WeightCache(loading) for node in nodes}
        stock.in_use = {group.kind: 0 for group in kinds}
        return stock

    @property
    def accelerators(self) -> int:
        """Those that somebody holds."""
        return sum(self.in_use.values())

    def start(self, deployment: int, one: Profile, digest: str, now_s: float) -> Replica | None:
        """Place another replica of a deployment; None: there is no room."""
        mine = self.of_deployment.setdefault(deployment, [])
        ask = Ask(
            memory_bytes=one.memory_bytes,
            count=one.accelerators,
            kinds=frozenset({one.kind}),
            digest=digest,
            # As ``control/asking.py`` has it: what others can replace may be on a node that is taken away.
            may_use_spot=any(other.state is State.READY and not other.is_spot for other in mine),
            avoid=crowded((other.placement for other in mine), self.nodes),
        )
        placement = find(ask, self.cluster, self.mix, self.places)
        return None if placement is None else self.put(deployment, one, placement, digest, now_s)

    def put(self, deployment: int, one: Profile, placement: Placement, digest: str, now_s: float) -> Replica:
        """Start a replica at a place that has room."""
        node = self.nodes[placement.node_id]
        price = node.price_nanousd / 1e9 * sum(_share(one, node) for _ in range(placement.accelerators))
        load_s = self._load_s(placement.node_id, digest, one.weights_bytes)
        self.started += 1
        replica = Replica(
            self.started, deployment, placement, State.LOADING, now_s, is_spot=node.is_spot, load_s=load_s, price=price
        )
        self._take(replica)
        self.of_deployment.setdefault(deployment, []).append(replica)
        return replica

    def stop(self, replica: Replica) -> None:
        """Free what a replica holds."""
        if replica.state is State.ASLEEP:
            self._rise(replica)
        else:
            self._free(replica)
        replica.state = State.GONE
        del self.replicas[replica.number]
        self.of_deployment[replica.deployment].remove(replica)
        for part in replica.placement.parts:
            self.on_node[part.node_id].pop(replica.number, None)

    def hand_over(self, replica: Replica, deployment: int, now_s: float) -> None:
        """Let a ready replica be another deployment's."""
        self.of_deployment[replica.deployment].remove(replica)
        replica.deployment, replica.since_s = deployment, now_s
        self.of_deployment.setdefault(deployment, []).append(replica)

    def sleep(self, replica: Replica, now_s: float, *, but: Replica | None = None) -> list[Replica]:
        """Free the accelerators of a replica that stays; return those that have no room beside it any more.

        ``but`` one that is about to wake.
        """
        self._free(replica)
        replica.state, replica.since_s = State.ASLEEP, now_s
        here = self.asleep.setdefault(replica.placement.node_id, [])
        here.append(replica)
        self.slivers += self._sliver(replica)
        kept = [
            Sleeper(str(one.number), self.weights[one.deployment], frozenset(one.placement.parts[0].accelerators))
            for one in here
        ]
        spared = () if but is None else (str(but.number),)
        return [self.replicas[int(id)] for id in outgrown(kept, self.loading.sleep_bytes, but=spared)]

    def wake(self, replica: Replica, now_s: float) -> None:
        """Take the accelerators of a replica again, which has room there."""
        self._rise(replica)
        replica.state, replica.since_s = State.WAKING, now_s
        self._hold(replica)

    def _rise(self, replica: Replica) -> None:
        self.asleep[replica.placement.node_id].remove(replica)
        self.slivers -= self._sliver(replica)

    def _sliver(self, replica: Replica) -> float:
        kind = self.nodes[replica.placement.node_id].accelerators[0]
        return replica.placement.accelerators * OVERHEAD_BYTES / kind.memory_bytes

    def _free(self, replica: Replica) -> None:
        self.cluster.give_back(replica.placement)
        for part in replica.placement.parts:
            for index in part.accelerators:
                key = part.node_id, index
                self.held[key] -= 1
                if not self.held[key]:
                    del self.held[key]
                    self.in_use[self.nodes[part.node_id].accelerators[0].kind] -= 1
        self.usd_per_hour -= replica.price

    def _take(self, replica: Replica) -> None:
        self.replicas[replica.number] = replica
        for part in replica.placement.parts:
            self.on_node[part.node_id][replica.number] = replica
        self._hold(replica)

    def _hold(self, replica: Replica) -> None:
        self.cluster.take(replica.placement)
        for part in replica.placement.parts:
            for index in part.accelerators:
                key = part.node_id, index
                self.held[key] = self.held.get(key, 0) + 1
                if self.held[key] == 1:
                    self.in_use[self.nodes[part.node_id].accelerators[0].kind] += 1
        self.usd_per_hour += replica.price

    def _load_s(self, node_id: str, digest: str, size: int) -> float:
        """Return the seconds until weights are on an accelerator of the node; they are in its caches from now on."""
        loading, cache = self.loading, self.caches[node_id]
        tier = cache.tier(digest)
        seconds = size / {"memory": loading.memory, "disk": loading.disk, "remote": loading.remote}[tier]
        cached = self.cluster.cached
        for lost in cache.put(digest, size):
            cached[lost] = cached.get(lost, frozenset()) - {node_id}
        if tier == "remote":
            cached[digest] = cached.get(digest, frozenset()) | {node_id}
        return seconds

    def surplus(self, deployment: int, number: int) -> Iterator[Replica]:
        """Yield the replicas to let go, so that ``number`` are left: in the order of ``policy/reconcile.py``.

        Those that load go before those that sleep, and these before those that serve; of equals the one that came last.
        """
        live = [one for one in self.of_deployment.get(deployment, ()) if one.state in LIVE]
        live.sort(key=lambda one: (AWAKE_RANK[one.state], one.number))
        yield from reversed(live[number:])

    def close(self, node_id: str, reason: str) -> list[Replica]:
        """Take a node away; return what ran there."""
        self.cluster.close(node_id, reason)
        return list(self.on_node[node_id].values())

    def open(self, node_id: str) -> None:
        """A node is there, with empty caches."""
        for digest, where in list(self.cluster.cached.items()):
            if node_id in where:
                self.cluster.cached[digest] = where - {node_id}
        self.caches[node_id] = WeightCache(self.loading)
        self.cluster.open(node_id)


def overlap(one: Replica, other: Replica) -> bool:
    """Say whether two replicas of one node are on the same accelerators."""
    mine, others = one.placement.parts[0].accelerators, other.placement.parts[0].accelerators
    return not set(mine).isdisjoint(others)


def _share(one: Profile, node: Node) -> float:
    return one.memory_bytes / node.accelerators[0].memory_bytes if one.accelerators == 1 else 1.0
