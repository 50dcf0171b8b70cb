"""Who may start: by the source's "11 concurrent", by ``max_tokens``, by the prompt alone, and by what is predicted."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.policy.job import Job
from modelyard.sim.gateway import Floor, Front, Gateway
from modelyard.sim.report import Summary, summary
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

KV_TOKENS = 137_000
"""What 45 GB hold of a model with Llama-2-70B's grouped heads (0.33 MB a token)."""
SPEED = Speed(0.0278, 0.00016, 8.18e-05, 3.43e-07)
"""Llama-2-70B on four H100, fitted to Splitwise's measurements (``accuracy.measured``)."""
MAX_TOKENS = 4096
PATIENT = DispatchRules(places=1_000_000, bytes_max=1 << 50)


@dataclass(slots=True, eq=False)
class Reserving(Gateway):
    """The same gateway with another prediction: the most that a request may generate, or nothing at all."""

    predicts: Callable[[Job], int] = lambda job: job.output_max

    def job_of(self, arrival: Arrival) -> Job:
        job = Gateway.job_of(self, arrival)
        job.output_tokens = self.predicts(job)
        return job


def gateway(predicts: Callable[[Job], int]) -> Callable[[int, Floor, random.Random], Front]:
    """Return what makes such a gateway."""
    return lambda number, floor, chance: Reserving(number, floor, PATIENT, chance, queue_wait_s=1e9, predicts=predicts)


def rates(arrivals: list[Arrival], count: int, requests_s: float) -> list[Arrival]:
    """Return the first ``count`` requests so that ``requests_s`` of them come a second, each with a cap of its own."""
    kept = arrivals[:count]
    factor = len(kept) / requests_s / (kept[-1].at_s - kept[0].at_s)
    begin_s = kept[0].at_s
    return [
        msgspec.structs.replace(one, at_s=(one.at_s - begin_s) * factor, output_max=max(MAX_TOKENS, one.output_tokens))
        for one in kept
    ]


def ways(arrivals: list[Arrival], seed: int) -> dict[str, Summary]:
    """Return what each way to admit comes to on one replica."""
    engine = EngineSpec(speed=SPEED, kv_blocks=KV_TOKENS // 16)
    base = WorldSpec(releases=(ReleaseSpec(engine=engine),), rules=PATIENT, queue_wait_s=1e9, uses_prefixes=False)
    replace = msgspec.structs.replace
    worlds = {
        "11 at once (the source's formula)": World(replace(base, slots=11, knows_kv=False), random.Random(seed)),
        "all that come, the engine sorts it out": World(replace(base, knows_kv=False), random.Random(seed)),
        "KV: prompt + max_tokens": World(base, random.Random(seed), front=gateway(lambda job: job.output_max)),
        "KV: the prompt alone": World(base, random.Random(seed), front=gateway(lambda job: 0)),
        "KV: prompt + predicted output (ours)": World(base, random.Random(seed)),
    }
    return {name: summary(world, world.run(arrivals)) for name, world in worlds.items()}


def first_overload(seed: int, *, slots: int, is_known: bool) -> Summary:
    """Return what a minute of 20 requests/s comes to on a replica that served nothing before.

    ``is_known``: gateways were told the engine's speed.
    """
    chance, at_s, came = random.Random(seed), 0.0, []
    while (at_s := at_s + chance.expovariate(20.0)) < 60.0:
        came.append(
            Arrival(at_s=at_s, prompt_tokens=chance.randrange(100, 1500), output_tokens=chance.randrange(50, 500))
        )
    spec = WorldSpec(releases=(ReleaseSpec(engine=EngineSpec(speed=SPEED)),), slots=slots)
    world = World(spec, random.Random(seed))
    for front in world.fronts:
        if is_known and isinstance(front, Gateway):
            front.expect(SPEED, slots)
    return summary(world, world.run(came))
