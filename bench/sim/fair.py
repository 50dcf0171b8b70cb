"""Fairness between tenants, of tokens rather than requests: the bound of VTC, and isolation of who asks for little."""

import random
from collections import deque
from dataclasses import dataclass, field
from math import inf

import msgspec

from modelyard.domain.routing_table import ReplicaSnapshot
from modelyard.policy.admission import SAMPLES_OF_TENANT_MIN
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.policy.fairness import OUTPUT_WEIGHT
from modelyard.sim.comparison import Spread, spread
from modelyard.sim.gateway import Floor, Front, Gateway, Table
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import FrontFactory, World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

SPEED = Speed(0.0135, 6.4e-05, 3.8e-05, 4.9e-08)
"""Llama-3.1-8B on an RTX PRO 6000, fitted to real vLLM (``accuracy.vllm``)."""
SLOTS = 16
RULES = DispatchRules(places=1_000_000, bytes_max=1 << 50)
QUIET = "quiet"
LONG, SHORT = "long requests", "short requests"


@dataclass
class TakesTurns:
    """Tenants take turns, a request each, as llm-d's flow control does; one replica."""

    number: int
    floor: Floor
    chance: random.Random
    replica: tuple[str, str] = ("", "")
    running: int = 0
    lines: dict[str, deque[Request]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lines.values()))

    def take(self, table: Table, now_s: float) -> None:
        ((version_id, _, _, ((route, _),)),) = table
        self.replica = (route.id, version_id)

    def arrive(self, request: Request, now_s: float) -> None:
        self.lines.setdefault(request.arrival.tenant_id, deque()).append(request)
        self._serve()

    def began(self, request: Request, now_s: float) -> None:
        """A first token changes nothing here."""

    def grew(self, request: Request, tokens: int) -> None:
        """Nor does another."""

    def done(self, request: Request, now_s: float) -> None:
        self.running -= 1
        self._serve()

    def observe(self, snapshots: dict[str, ReplicaSnapshot]) -> None:
        """It counts by itself."""

    def sweep(self, now_s: float) -> None:
        """Its callers wait for as long as it takes."""

    def _serve(self) -> None:
        while self.running < SLOTS and self.waiting:
            tenant_id = next(name for name, line in self.lines.items() if line)
            line = self.lines.pop(tenant_id)
            request = line.popleft()
            self.lines[tenant_id] = line  # behind all others
            self.running += 1
            self.floor.start(request, *self.replica)


def takes_turns(number: int, floor: Floor, chance: random.Random) -> Front:
    """Return a gateway where tenants take turns."""
    return TakesTurns(number, floor, chance)


@dataclass(frozen=True)
class Shares:
    """What two tenants got while both had requests waiting, in tokens (an answer's count twice)."""

    seconds: float
    long: int
    short: int
    apart: int
    """The most that they differed by over any time within."""
    bound: int
    """Twice the cost of the largest request: what VTC promises where lengths are known."""


def world(front: FrontFactory | None, seed: int, *, slots: int = SLOTS, kept_share_max: float | None = None) -> World:
    """Return one replica of so many slots."""
    rules = RULES if kept_share_max is None else msgspec.structs.replace(RULES, kept_share_max=kept_share_max)
    spec = WorldSpec(
        releases=(ReleaseSpec(engine=EngineSpec(speed=SPEED, kv_blocks=30_000)),),
        slots=slots,
        rules=rules,
        queue_wait_s=1e9,
        uses_prefixes=False,
    )
    return World(spec, random.Random(seed), front=front)


def shares(front: FrontFactory | None, seed: int) -> Shares:
    """Let two tenants of equal weight flood a replica, one with requests ten times as long as the other's."""
    chance = random.Random(seed)
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=size + chance.randrange(size), output_tokens=size, tenant_id=tenant_id)
        for tenant_id, size, count in ((LONG, 500, 300), (SHORT, 50, 3000))
        for _ in range(count)
    ]
    chance.shuffle(arrivals)
    requests = world(front, seed).run(arrivals)
    # From the moment on at which all slots are taken and the answers of both are known, until one has no more to ask.
    begin_s, end_s = 0.0, inf
    for tenant_id in (LONG, SHORT):
        own = [one for one in requests if one.arrival.tenant_id == tenant_id]
        begin_s = max(begin_s, sorted(one.done_s for one in own)[SAMPLES_OF_TENANT_MIN])
        end_s = min(end_s, max(one.dispatched_s for one in own))
    got = {LONG: 0, SHORT: 0}
    high = low = 0
    for request in sorted(requests, key=lambda one: (one.dispatched_s, one.number)):
        if begin_s < request.dispatched_s <= end_s:
            got[request.arrival.tenant_id] += cost(request)
            high, low = max(high, got[LONG] - got[SHORT]), min(low, got[LONG] - got[SHORT])
    return Shares(end_s - begin_s, got[LONG], got[SHORT], high - low, 2 * max(map(cost, requests)))


def cost(request: Request) -> int:
    """Return what a request is charged in the end."""
    return request.arrival.prompt_tokens + OUTPUT_WEIGHT * request.arrival.output_tokens


class AtOnce(Gateway):
    """The same gateway, which sends what the quiet tenant asks to the engine at once, whether there is a slot or not.

    No gateway can do better, as the flood's requests run by then.
    """

    __slots__ = ()

    def arrive(self, request: Request, now_s: float) -> None:
        if request.arrival.tenant_id != QUIET:
            return Gateway.arrive(self, request, now_s)
        (replica,) = self.dispatcher.replicas
        return self.floor.start(request, replica.route.id, replica.version_id)

    def began(self, request: Request, now_s: float) -> None:
        if request.arrival.tenant_id != QUIET:
            Gateway.began(self, request, now_s)

    def done(self, request: Request, now_s: float) -> None:
        if request.arrival.tenant_id != QUIET:
            Gateway.done(self, request, now_s)


def at_once(number: int, floor: Floor, chance: random.Random) -> Front:
    """Return a gateway that never lets the quiet tenant wait."""
    rules = msgspec.structs.replace(RULES, kept_share_max=0.0)
    return AtOnce(number, floor, rules, chance, queue_wait_s=1e9)


@dataclass(frozen=True)
class Isolation:
    """First tokens of a tenant that asks for little, in s: alone, and beside one that asks for 100 times as much."""

    alone: Spread
    beside: Spread
    tokens_s: float
    """Tokens of prompts and answers that the engine was through with beside the flood, a second."""


class Setting(msgspec.Struct, frozen=True):
    """How the quiet tenant is protected: ``front`` None is the production gateway. ``stream``: share of the flood's
    requests that are streams."""

    front: FrontFactory | None = None
    kept_share_max: float | None = None
    slots: int = SLOTS
    stream: float = 1.0


def isolation(setting: Setting, seed: int, *, rate: float = 0.3, seconds: float = 400.0) -> Isolation:
    """Return how a quiet tenant fares alone, and beside a flood."""
    chance = random.Random(seed + 2)
    quiet = _steady(QUIET, rate, seconds, random.Random(seed))
    flood = [
        msgspec.structs.replace(one, is_stream=chance.random() < setting.stream)
        for one in _steady("flood", 100 * rate, seconds, random.Random(seed + 1))
    ]

    def place() -> World:
        return world(setting.front, seed, slots=setting.slots, kept_share_max=setting.kept_share_max)

    alone = place().run(quiet)
    both = place().run(sorted([*quiet, *flood], key=lambda one: one.at_s))
    beside = [one for one in both if one.arrival.tenant_id == QUIET]
    assert all(one.first_s < inf for one in both), "somebody was not served"
    # As long as both ask: what the flood has left is served without anybody else.
    end_s = max(one.done_s for one in beside)
    tokens = sum(one.arrival.prompt_tokens + one.arrival.output_tokens for one in both if one.done_s <= end_s)
    first = (spread(one.ttft_s for one in group) for group in (alone, beside))
    return Isolation(*first, tokens / end_s)


def _steady(tenant_id: str, rate: float, seconds: float, chance: random.Random) -> list[Arrival]:
    arrivals, at_s = [], chance.expovariate(rate)
    while at_s < seconds:
        size = chance.randrange(100, 600)
        arrivals.append(
            Arrival(at_s=at_s, prompt_tokens=size, output_tokens=chance.randrange(50, 200), tenant_id=tenant_id)
        )
        at_s += chance.expovariate(rate)
    return arrivals
