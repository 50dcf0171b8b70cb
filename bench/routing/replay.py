"""Replay a trace through a router and the simulator's engines (``modelyard.sim``).

An engine is ``sim.engine.Engine``: chunked prefill, blocks of 16 tokens, a
prefix cache of 2 million tokens, and iterations of 22 ms + 0.35 ms × batch +
prompt tokens read / 9,000 s (Splitwise's H100 measurements of Llama-2-70B on
four GPUs: 28.4 + 0.35 × batch ms, and 8.7 to 10.2 K tokens/s). Ours is the
world's own gateway, which is the production dispatcher; the others stand in
its place.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from bench.routing.policies import BLOCK_TOKENS, CACHE_BLOCKS, Asked, Base, Gauges
from bench.routing.seeing import seeing
from modelyard.domain.routing_table import ReplicaSnapshot
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.sim.comparison import spread
from modelyard.sim.gateway import Floor, Front, Table
from modelyard.sim.requests import Arrival, Request, faster
from modelyard.sim.tasks import BLOCK_TOKENS as KV_BLOCK_TOKENS
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.traces import mooncake
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

OURS = "modelyard: added seconds"
SPEED = Speed(0.022, 0.00035, 1 / 9000)
BATCH_MAX = 256
"""vLLM's default for ``max_num_seqs`` on most cards."""
RULES = DispatchRules(places=1_000_000, bytes_max=1 << 50)


@dataclass(frozen=True)
class Outcome:
    """What callers saw."""

    hit_rate: float
    p50_s: float
    p90_s: float
    p99_s: float
    within_5_s: float


@dataclass(frozen=True)
class Setting:
    """What a trace is replayed on. ``staleness_s``: how often gauges are read, 0: for each request.

    ``slots`` is what ours sends an engine at once, 0: all that the engine runs at once.
    """

    replicas: int = 8
    staleness_s: float = 0.0
    batch_max: int = BATCH_MAX
    slots: int = 0
    seed: int = 1

    def world(self, kind: type[Base] | None, *, sees: bool = False) -> World:
        """Return engines behind ours (None; one that ``sees`` into them), or behind another router."""
        engine = EngineSpec(
            speed=SPEED,
            max_num_seqs=self.batch_max,
            kv_blocks=CACHE_BLOCKS * BLOCK_TOKENS // KV_BLOCK_TOKENS,
            hash_tokens=BLOCK_TOKENS,
        )
        spec = WorldSpec(
            releases=(ReleaseSpec(engine=engine, replicas=self.replicas),),
            slots=self.slots,
            rules=RULES,
            queue_wait_s=1e9,
            knows_kv=False,
            snapshot_s=self.staleness_s,
        )
        if kind is None and not sees:
            return World(spec, random.Random(self.seed))

        def front(number: int, floor: Floor, chance: random.Random) -> Front:
            if kind is None:
                return seeing(number, floor, chance, RULES, BLOCK_TOKENS)
            return Routed(floor, kind(self.replicas, chance), is_fresh=not self.staleness_s)

        return World(spec, random.Random(self.seed), front=front)


@dataclass
class Routed:
    """A gateway that sends each request at once where another router's rule says."""

    floor: Floor
    policy: Base
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
        asked = Asked(request.number, request.arrival.prompt_tokens, request.arrival.blocks)
        index = self.policy.pick(asked)
        self.sent[request] = (asked, index)
        self.floor.start(request, *self.replicas[index])

    def began(self, request: Request, now_s: float) -> None:
        self.policy.begun(*self.sent[request])

    def grew(self, request: Request, tokens: int) -> None:
        """None of them asks."""

    def done(self, request: Request, now_s: float) -> None:
        self.policy.done(*self.sent.pop(request))

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot]) -> None:
        pages = [snapshots[replica_id] for replica_id, _ in self.replicas]
        self.policy.polled([Gauges(page.running or 0, page.waiting or 0, page.kv_usage or 0.0) for page in pages])

    def sweep(self, now_s: float) -> None:
        """Nobody waits here."""


def read(lines: Iterable[str], *, load: float = 1.0) -> list[Arrival]:
    """Return the requests of a Mooncake trace, ``load`` times as fast as they came."""
    return faster(mooncake(lines), load)


def read_file(path: Path, *, load: float = 1.0) -> list[Arrival]:
    """Return the requests of a trace file."""
    with path.open() as lines:
        return read(lines, load=load)


def replay(
    arrivals: Sequence[Arrival], kind: type[Base] | None, setting: Setting, *, sees: bool = False
) -> list[Request]:
    """Send every request when it comes; return what became of each."""
    return setting.world(kind, sees=sees).run(arrivals)


def outcome(requests: Sequence[Request]) -> Outcome:
    """Return hit rate by tokens, percentiles of the time to the first token, and the share within 5 s."""
    prompts = sum(request.arrival.prompt_tokens for request in requests)
    hit_rate = sum(request.cached_tokens for request in requests) / prompts
    return _outcome([request.ttft_s for request in requests], hit_rate)


def floor(arrivals: Sequence[Arrival], *, replicas: int) -> Outcome:
    """Return what nobody can beat by routing: each prompt read at once, alone, with one cache for all replicas."""
    cache: OrderedDict[int, None] = OrderedDict()
    waits, cached_tokens = [], 0
    for arrival in arrivals:
        held = 0
        for block in arrival.blocks:
            if block not in cache:
                break
            held += 1
        for block in reversed(arrival.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHE_BLOCKS * replicas:
            cache.popitem(last=False)
        cached = min(held * BLOCK_TOKENS, arrival.prompt_tokens - 1)
        cached_tokens += cached
        waits.append(reading_s(arrival.prompt_tokens - cached))
    return _outcome(waits, cached_tokens / sum(arrival.prompt_tokens for arrival in arrivals))


def reading_s(tokens: int) -> float:
    """Return how long an engine with nothing else to do reads a prompt."""
    return ceil(tokens / 2048) * SPEED.iteration_s(1, 0, 0) + SPEED.prefill_token_s * tokens


def unhindered(requests: Sequence[Request], hit_rate: float) -> Outcome:
    """Return what these requests would have seen where they went, if each had been read at once and alone."""
    return _outcome([reading_s(one.arrival.prompt_tokens - one.cached_tokens) for one in requests], hit_rate)


def _outcome(waits: list[float], hit_rate: float) -> Outcome:
    found = spread(waits)
    return Outcome(hit_rate, found.p50, found.p90, found.p99, sum(wait <= 5.0 for wait in waits) / len(waits))
