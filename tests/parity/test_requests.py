"""The live gateway and the simulated world decide alike: who starts where and when, who waits, who is refused.

The same arrivals go through the gateway's own code, byte by byte (``live.py``), and through ``sim.world``. The
difference is 0: not small, none.
"""

from math import inf
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.parity.live import Live, blocks_of, prompt_of

from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.sim.faults import Fault, Kind
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

SPEED = Speed(0.02, 0.0003, 0.0001, 1e-7)
ENGINE = EngineSpec(speed=SPEED, max_num_seqs=16, hash_tokens=256)


def load(
    seed: int, count: int, rate: float, *, tenants: int = 3, longest: int = 1500
) -> tuple[list[Arrival], list[str]]:
    """Return requests of tenants of all plans, some of which begin alike."""
    chance = Random(seed)
    shared = [f"{root}" * 4 * chance.randrange(100, 900) for root in "abc"]
    arrivals, prompts, at_s = [], [], 0.0
    for number in range(count):
        at_s += chance.expovariate(rate)
        tenant = chance.randrange(tenants)
        begin = chance.choice(["", *shared])
        tokens = max(chance.randrange(20, longest), len(begin) // 4 + 5)
        output = chance.randrange(2, 300)
        prompt = prompt_of(begin, number, tokens)
        prompts.append(prompt)
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=tokens,
                output_tokens=output,
                output_max=chance.choice([output, output + 40, 500]),
                tenant_id=f"ten_{tenant}",
                weight=1.0 + tenant,
                band=tenant % 3,
                blocks=blocks_of(prompt, f"ten_{tenant}"),
            )
        )
    return arrivals, prompts


def flood(seed: int, count: int) -> tuple[list[Arrival], list[str]]:
    """Return requests of which nine in ten are a flood's, half of them no streams; the others' come now and then."""
    arrivals, prompts = load(seed, count, 9.0, tenants=1, longest=600)
    chance = Random(seed)
    for number, arrival in enumerate(arrivals):
        tenant_id = "ten_flood" if chance.random() < 0.95 else f"ten_quiet{chance.randrange(2)}"
        arrivals[number] = msgspec.structs.replace(
            arrival,
            tenant_id=tenant_id,
            band=1,
            is_stream=chance.random() < 0.5,
            blocks=blocks_of(prompts[number], tenant_id),
        )
    return arrivals, prompts


WORLDS = {
    "one replica, few slots, a long line": (WorldSpec(releases=(ReleaseSpec(engine=ENGINE),), slots=3), 120, 1.2),
    "four replicas and prompts that begin alike": (
        WorldSpec(releases=(ReleaseSpec(engine=ENGINE, replicas=4),)),
        250,
        9.0,
    ),
    "memory decides": (
        WorldSpec(releases=(ReleaseSpec(engine=EngineSpec(speed=SPEED, kv_blocks=400, hash_tokens=256), replicas=2),)),
        200,
        4.0,
    ),
    "a short line, and little patience": (
        WorldSpec(
            releases=(ReleaseSpec(engine=ENGINE, replicas=2),), slots=2, rules=DispatchRules(places=6), queue_wait_s=4.0
        ),
        150,
        4.0,
    ),
    "a canary beside the stable release": (
        WorldSpec(
            releases=(
                ReleaseSpec(engine=ENGINE, version_id="ver_1", weight=80, replicas=2),
                ReleaseSpec(engine=ENGINE, version_id="ver_2", weight=20),
            ),
            slots=4,
        ),
        150,
        5.0,
    ),
    "a shadow gets copies": (
        WorldSpec(
            releases=(
                ReleaseSpec(engine=ENGINE, version_id="ver_1", replicas=2),
                ReleaseSpec(engine=ENGINE, version_id="ver_2", weight=0, shadow=40),
            ),
            slots=6,
        ),
        150,
        4.0,
    ),
    "engines that crash, and come back": (
        WorldSpec(
            releases=(ReleaseSpec(engine=ENGINE, replicas=3),),
            slots=6,
            faults=(
                Fault(at_s=5.1, place=1, back_s=4.0),
                Fault(at_s=7.13, place=1, back_s=6.0),
                Fault(at_s=20.3, place=2, back_s=1.0),
                Fault(at_s=26.7, place=0, back_s=9.0),
            ),
        ),
        200,
        5.0,
    ),
    "an engine hangs": (
        WorldSpec(
            releases=(ReleaseSpec(engine=ENGINE, replicas=3),),
            slots=8,
            faults=(Fault(at_s=6.1, place=1, kind=Kind.HANG),),
            queue_wait_s=60.0,
        ),
        250,
        4.0,
    ),
    "a flood beside others": (WorldSpec(releases=(ReleaseSpec(engine=ENGINE, replicas=2),)), 500, 0.0),
    "a flood, and memory decides": (
        WorldSpec(releases=(ReleaseSpec(engine=EngineSpec(speed=SPEED, kv_blocks=700, hash_tokens=256)),)),
        350,
        0.0,
    ),
    "the only engine crashes": (
        WorldSpec(releases=(ReleaseSpec(engine=ENGINE),), slots=4, faults=(Fault(at_s=9.6, back_s=5.0),)),
        100,
        2.0,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_live_gateway_does_what_the_simulated_one_does(name: str, seed: int, tmp_path: Path) -> None:
    spec, count, rate = WORLDS[name]
    arrivals, prompts = load(seed, count, rate) if rate else flood(seed, count)
    world, gateway = World(spec, Random(seed)), Live(spec, tmp_path, seed)
    simulated, live = world.run(arrivals), gateway.run(arrivals, prompts)
    for ours, real in zip(simulated, live, strict=True):
        assert (ours.replica_id, ours.dispatched_s) == (real.replica_id, real.dispatched_s), ours
        assert (ours.first_s, ours.done_s) == (real.first_s, real.done_s), ours
        assert ours.refused_s == real.refused_s, ours
    assert gateway.asides == world.asides
    assert 30 < gateway.asides < 90 or "shadow" not in name, "few copies: this shows little"
    made_way = sum(one.gave_way for one in simulated)
    assert made_way > 3 or "flood beside" not in name, "nobody made way: this shows little"
    waited = sum(one.waited_s > 0.05 for one in simulated if one.dispatched_s < inf)
    refused = sum(one.refused_s < inf for one in simulated)
    assert waited > 10 or "alike" in name, "nobody had to wait: this shows little"
    assert refused > 10 or "patience" not in name, "nobody was refused: this shows little"
    gone_on = sum(one.told > 0 and one.is_done for one in simulated)
    assert gone_on > 2 or ("crash, and" not in name and "hangs" not in name), (
        "no answer had to be gone on with: this shows little"
    )
