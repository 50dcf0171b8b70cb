"""Engines that crash and hang under load: what their requests feel, and how many are lost."""

import random
from dataclasses import dataclass

import msgspec

from modelyard.policy.breaker import Failure
from modelyard.policy.engine_model import Speed
from modelyard.sim import recovery
from modelyard.sim.faults import FaultRates, Kind, draw
from modelyard.sim.fleet.scenario import Faults
from modelyard.sim.gateway import Floor, Front, Gateway
from modelyard.sim.report import Summary, summary
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import FrontFactory, World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

SPEED = Speed(0.0135, 6.4e-05, 3.8e-05, 4.9e-08)
"""Llama-3.1-8B on an RTX PRO 6000, fitted to real vLLM (``accuracy.vllm``)."""
ENGINE = EngineSpec(speed=SPEED, max_num_seqs=64, kv_blocks=8000)
REPLICAS = 4
RATES = FaultRates(crashes_h=2.0, hangs_h=0.5)
"""Far more often than engines fail, so that an hour shows enough of it."""
SCENARIO_H = Faults().engine_per_day / 24
"""How often an engine fails in the fleet's scenario, an hour of one."""
NOT_TEXT = 0.1
"""Share of answers that are more than their text (tools, schemas), which nobody can go on with."""


class NoFailover(Gateway):
    """The same gateway, whose failed requests fail: replicas are ejected and probed, and nothing is tried elsewhere."""

    __slots__ = ()

    def lost(self, request: Request, now_s: float) -> None:
        self._give_up(request, Failure.UNREACHABLE, "lost", now_s)

    def unreachable(self, request: Request, now_s: float) -> None:
        self._give_up(request, Failure.UNREACHABLE, "unreachable", now_s)

    def silent(self, request: Request, now_s: float) -> None:
        self._give_up(request, Failure.SILENT, "silent", now_s)

    def _give_up(self, request: Request, kind: Failure, why: str, now_s: float) -> None:
        assert request.replica is not None, "failed by nobody"
        self.dispatcher.failed(request.replica, kind, why, now_s=now_s)
        recovery.fail(self, request, why, now_s)


def no_failover(number: int, floor: Floor, chance: random.Random) -> Front:
    """Return such a gateway."""
    return NoFailover(number, floor, WorldSpec(releases=()).rules, chance)


@dataclass(frozen=True)
class Failing:
    """What an hour of failing engines came to."""

    seen: Summary
    crashes: int
    hangs: int
    failed: int
    """Requests that failed because of them."""
    gone_on: int
    """Answers that another engine went on with."""
    slow: int
    """Requests that waited for more than 5 s for their first token."""

    @property
    def per_fault(self) -> float:
        """Return the requests lost with each engine that failed."""
        return self.failed / max(1, self.crashes + self.hangs)

    def availability(self, faults_h: float = 0.0) -> float:
        """Return the share of requests that did not fail; with ``faults_h``, if an engine failed as often an hour."""
        if not faults_h:
            return 1.0 - self.failed / self.seen.requests
        requests_h = self.seen.requests / (self.seen.span_s / 3600 * REPLICAS)
        return 1.0 - self.per_fault * faults_h / requests_h


def run(
    front: FrontFactory | None, seed: int, *, not_text: float = NOT_TEXT, seconds: float = 3600.0, rate: float = 10.0
) -> Failing:
    """Let ``rate`` requests a second come to four engines that fail by ``RATES``."""
    faults = draw(RATES, replicas=REPLICAS, seconds=seconds, chance=random.Random(seed))
    release = ReleaseSpec(engine=ENGINE, replicas=REPLICAS)
    spec = WorldSpec(releases=(release,), faults=faults, keeps=True, load_s=60.0)
    world = World(spec, random.Random(seed), front=front)
    requests = world.run(arrivals(seed, rate, seconds, not_text))
    happened = world.breakage.happened if world.breakage is not None else []
    crashes = sum(fault.kind is Kind.CRASH for fault in happened)
    return Failing(
        summary(world, requests),
        crashes,
        len(happened) - crashes,
        sum(bool(one.refusal) for one in requests),
        sum(one.told > 0 and one.is_done for one in requests),
        sum(one.is_done and one.ttft_s > 5.0 for one in requests),
    )


def arrivals(seed: int, rate: float, seconds: float, not_text: float) -> list[Arrival]:
    """Return chats, some of which nobody could go on with."""
    chance, at_s, came = random.Random(seed), 0.0, []
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        came.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=chance.randrange(100, 600),
                output_tokens=chance.randrange(50, 400),
                tenant_id=f"ten_{chance.randrange(5)}",
                can_resume=chance.random() >= not_text,
            )
        )
    return came


@dataclass(frozen=True)
class Filled:
    """An hour with, or without, a batch behind it."""

    seen: Summary
    lines: int
    """Lines that were answered."""
    line_tokens_s: float
    made_way: int


def fill(seed: int, *, lines: int, seconds: float = 900.0, rate: float = 12.0) -> Filled:
    """Let requests come to two engines that a batch of so many lines fills."""
    spec = WorldSpec(releases=(ReleaseSpec(engine=ENGINE, replicas=2),), uses_prefixes=False)
    world = World(spec, random.Random(seed))
    line = Arrival(at_s=0.0, prompt_tokens=400, output_tokens=250, tenant_id="ten_batch")
    chance = random.Random(seed)
    batch = [msgspec.structs.replace(line, output_tokens=chance.randrange(100, 400)) for _ in range(lines)]
    requests = world.run(arrivals(seed, rate, seconds, 0.0), lines=batch)
    seen = summary(world, requests)
    (front,) = world.fronts
    assert isinstance(front, Gateway), "nobody else makes way"
    done, tokens = (len(world.batch.done), world.batch.tokens) if world.batch is not None else (0, 0)
    return Filled(seen, done, tokens / seen.span_s, front.made_way)
