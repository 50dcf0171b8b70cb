"""A small world of endpoints and nodes for tests of who gets room: records and processes without a store or a fleet."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from modelyard.control.world import Demand, World
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Autoscale, Endpoint, Release, Scaling
from modelyard.domain.fleet import Replica, ReplicaState, replica_id
from modelyard.domain.nodes import Accelerator, Node, NodeSeen, Placement
from modelyard.fleet import Observed
from modelyard.policy.asks import Ask

GIB = 1024**3


def node(name: str, count: int = 1, *, memory_gib: int = 80, pool: str = "default") -> NodeSeen:
    accelerators = tuple(Accelerator(one, "h100", memory_gib * GIB) for one in range(count))
    return NodeSeen(node=Node(name, accelerators, pool=pool, is_simulated=True))


def version(name: str, digest: str = "sha256:a", **more: object) -> ModelVersion:
    plain = ModelVersion(f"ver-{name}", "ten-a", name, "v1", "simulated", Artifact("", digest), {}, 0)
    return msgspec.structs.replace(plain, **more)


def endpoint(name: str, *versions: str, floor: int = 0, **more: object) -> Endpoint:
    releases = tuple(Release(one, 100 if number == 0 else 0) for number, one in enumerate(versions))
    plain = Endpoint(
        id=f"ep-{name}",
        tenant_id="ten-a",
        name=name,
        releases=releases or (Release(f"ver-{name}"),),
        scaling=Scaling(min_replicas=floor, max_replicas=4, scale_to_zero=floor == 0),
        created_at=0,
        autoscale=Autoscale(),
    )
    return msgspec.structs.replace(plain, **more)


def replica(
    of: Endpoint, ordinal: int = 0, generation: int = 0, *, version_id: str = "", ready_at: float | None = 0.0
) -> Replica:
    version_id = version_id or of.releases[0].version_id
    state = ReplicaState.STARTING if ready_at is None else ReplicaState.READY
    id = replica_id(of.id, version_id, ordinal, generation)
    return Replica(id, of.id, version_id, ordinal, generation, state, 0.0, ready_at=ready_at)


def ask(memory_gib: float = 40, *, count: int = 1, pool: str = "default", tenant_id: str = "ten-a") -> Ask:
    return Ask(memory_bytes=int(memory_gib * GIB), count=count, pool=pool, tenant_id=tenant_id, may_be_simulated=True)


@dataclass
class Town:
    """What is true; ``look`` is what a round sees of it."""

    nodes: dict[str, NodeSeen] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    versions: dict[str, ModelVersion] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    demands: dict[str, Demand] = field(default_factory=dict)
    now_s: float = 1000.0

    def settle(self, *endpoints: Endpoint) -> None:
        """Add endpoints, and a version for each release that has none."""
        for one in endpoints:
            self.endpoints[one.id] = one
            for release in one.releases:
                self.versions.setdefault(release.version_id, version(release.version_id.removeprefix("ver-")))

    def run(self, one: Replica, placement: Placement | None = None) -> Replica:
        """Record a replica that runs."""
        one = msgspec.structs.replace(one, placement=placement) if placement else one
        self.replicas[one.id] = one
        self.running.add(one.id)
        return one

    def look(self) -> World:
        replicas: dict[str, list[Replica]] = defaultdict(list)
        processes: dict[str, list[Observed]] = defaultdict(list)
        for one in sorted(self.replicas.values(), key=lambda one: one.id):
            replicas[one.endpoint_id].append(one)
            if one.id in self.running:
                processes[one.endpoint_id].append(Observed(one.id, one.endpoint_id, "", 0, "", True, 0.0))
        return World(
            unix_s=self.now_s,
            monotonic_s=self.now_s,
            endpoints=dict(self.endpoints),
            versions=dict(self.versions),
            replicas=replicas,
            processes=processes,
            busy=frozenset(),
            reports={},
            known_to_drain=frozenset(),
            are_gateways_known=True,
            demands=dict(self.demands),
        )

    def taken_bytes(self, placements: Iterable[Placement]) -> dict[tuple[str, int], int]:
        """Return what is taken of each accelerator."""
        taken: dict[tuple[str, int], int] = defaultdict(int)
        for placement in placements:
            for part in placement.parts:
                for index in part.accelerators:
                    taken[part.node_id, index] += part.memory_bytes
        return taken
