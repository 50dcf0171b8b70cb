"""The routers of ``bench.routing`` before this simulator's finer engines: do they come in the same order?"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.routing.engine import BLOCK_TOKENS, CACHE_BLOCKS, Gauges
from bench.routing.engine import Request as Asked
from bench.routing.policies import PEERS, Policy
from modelyard.domain.routing_table import ReplicaSnapshot
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.sim.gateway import Floor, Front, Table
from modelyard.sim.report import Summary, summary
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import ReleaseSpec, World, WorldSpec

ENGINE = EngineSpec(
    speed=Speed(0.022, 0.00035, 1 / 9000),
    kv_blocks=CACHE_BLOCKS * BLOCK_TOKENS // 16,
    hash_tokens=BLOCK_TOKENS,
    ahead=0,
)
"""As ``bench.routing`` has it, in blocks of vLLM's size."""
RULES = DispatchRules(places=1_000_000, bytes_max=1 << 50)


@dataclass
class Routed:
    """A gateway that sends each request at once where another router's rule says."""

    floor: Floor
    policy: Policy
    is_fresh: bool
    """Whether gauges are read whenever a request comes."""
    replicas: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[Request, tuple[Asked, int]] = field(default_factory=dict)
    waiting: int = 0

    def take(self, table: Table, now_s: float) -> None:
        self.replicas = [(route.id, version_id) for version_id, _, _, routes in table for route, _ in routes]

    def arrive(self, request: Request, now_s: float) -> None:
        if self.is_fresh:
            assert isinstance(self.floor, World), "only a world can be looked at"
            self.observe(self.floor.pages())
        one = request.arrival
        asked = Asked(request.number, one.at_s, one.prompt_tokens, one.output_tokens, one.blocks)
        index = self.policy.pick(asked, now_s)
        assert index is not None, "these routers have no line"
        self.sent[request] = (asked, index)
        self.floor.start(request, *self.replicas[index])

    def began(self, request: Request, now_s: float) -> None:
        self.policy.begun(*self.sent[request], now_s)

    def grew(self, request: Request, tokens: int) -> None:
        """Nobody of them asks."""

    def done(self, request: Request, now_s: float) -> None:
        self.policy.done(*self.sent.pop(request), now_s)

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        pages = [snapshots[replica_id] for replica_id, _ in self.replicas]
        now = [Gauges(page.running or 0, page.waiting or 0, page.kv_usage or 0.0) for page in pages]
        self.policy.polled(now, 0.0)

    def sweep(self, now_s: float) -> None:
        """Nobody waits here."""


def routed(arrivals: list[Arrival], *, replicas: int, staleness_s: float, seed: int) -> dict[str, Summary]:
    """Return what callers saw, by router; gauges are read every ``staleness_s``, 0: for each request."""
    spec = WorldSpec(
        releases=(ReleaseSpec(engine=ENGINE, replicas=replicas),),
        rules=RULES,
        queue_wait_s=1e9,
        knows_kv=False,
        snapshot_s=staleness_s,
    )
    found = {}
    for kind in PEERS:

        def front(number: int, floor: Floor, chance: random.Random, kind: type = kind) -> Front:
            return Routed(floor, kind(replicas, chance), staleness_s == 0)

        world = World(spec, random.Random(seed), front=front)
        found[kind.name] = summary(world, world.run(arrivals))
    world = World(spec, random.Random(seed))
    found["modelyard: added seconds"] = summary(world, world.run(arrivals))
    return found
