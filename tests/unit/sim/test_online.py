"""What gateways and the controller learn while they work is what the simulated engine is: its true speed is known."""

from random import Random

import msgspec
import pytest

from modelyard.domain.signals import Window
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import EngineModel, Speed, capacity_of
from modelyard.policy.speeds import Speeds
from modelyard.sim.comparison import spread
from modelyard.sim.gateway import Gateway
from modelyard.sim.report import summary
from modelyard.sim.requests import Arrival
from modelyard.sim.scaler import page_of
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

SPEEDS = {
    "8B, RTX PRO 6000": Speed(0.0135, 6.4e-5, 3.8e-5, 4.9e-8),
    "32B, two of them": Speed(0.0265, 0.0, 1.6e-4, 2.4e-7),
    "70B, four H100": Speed(0.0278, 1.6e-4, 8.2e-5, 3.4e-7),
}
"""As fitted to real engines by ``python -m bench.sim accuracy``."""
PATIENT = DispatchRules(places=100_000)


def load(seed: int, count: int, rate: float) -> list[Arrival]:
    chance, arrivals, at_s = Random(seed), [], 0.0
    for _ in range(count):
        at_s += chance.expovariate(rate)
        arrivals.append(
            Arrival(at_s=at_s, prompt_tokens=chance.randrange(100, 1200), output_tokens=chance.randrange(20, 400))
        )
    return arrivals


def world_of(speed: Speed, seed: int) -> World:
    engine = EngineSpec(speed=speed, max_num_seqs=128, kv_blocks=30_000, hash_tokens=0)
    spec = WorldSpec(releases=(ReleaseSpec(engine=engine),), rules=PATIENT, queue_wait_s=1e9)
    return World(spec, Random(seed))


def learned(speed: Speed, rate: float, *, counts_iterations: bool, seed: int = 1) -> EngineModel:
    """Return what is learned from pages that are read every second for five minutes."""
    world, speeds = world_of(speed, seed), Speeds()

    def look() -> None:
        page = page_of(world.replicas["rep_000"].engine, world.events.now_s)
        speeds.take("rep_000", "ver_sim", page if counts_iterations else msgspec.structs.replace(page, iterations=None))
        if world.left:
            world.events.after(1.0, look)

    world.events.after(1.0, look)
    world.run(load(seed, int(300 * rate), rate))
    return speeds.models["ver_sim"]


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize(("counts_iterations", "within"), [(True, 0.03), (False, 0.15)])
def test_the_controller_learns_the_speed_of_an_engine_from_its_page(
    name: str, counts_iterations: bool, within: float
) -> None:
    true, found = SPEEDS[name], learned(SPEEDS[name], 2.0, counts_iterations=counts_iterations)
    assert found.is_known
    # Without a count of iterations what was seldom seen is not known as well.
    loads = ((2, 15, 1_000), (4, 30, 2_000), (8, 50, 5_000), (16, 100, 8_000), (32, 200, 16_000))
    for batch, prefill, kv in loads if counts_iterations else loads[:4]:
        assert found.iteration_s(batch, prefill, kv) == pytest.approx(true.iteration_s(batch, prefill, kv), rel=within)


@pytest.mark.parametrize("name", SPEEDS)
def test_the_size_of_an_endpoint_follows_from_what_a_full_engine_really_serves(name: str) -> None:
    model = learned(SPEEDS[name], 3.0, counts_iterations=True)
    world = world_of(SPEEDS[name], 2)
    flood = [msgspec.structs.replace(one, at_s=0.0) for one in load(2, 1500, 1.0)]
    requests = world.run(flood)
    # Of the middle of the flood: at its ends the engine is not full.
    middle = sorted(one.done_s for one in requests)[300:1200]
    served_s = len(middle) / (middle[-1] - middle[0])
    prompts = sum(one.prompt_tokens for one in flood)
    written = sum(one.output_tokens for one in flood)
    window = Window(seconds=60, requests=1500, prompt_tokens=prompts, completion_tokens=written, service_s=1.0)
    capacity = capacity_of(model, window, slots=128, kv_tokens=480_000)
    assert capacity is not None
    assert "measured speed" in capacity.source
    assert capacity.requests_s == pytest.approx(served_s, rel=0.10)


@pytest.mark.parametrize("name", SPEEDS)
def test_a_gateway_learns_how_long_first_tokens_take(name: str) -> None:
    world = world_of(SPEEDS[name], 3)
    requests = world.run(load(3, 400, 0.4))
    (gateway,) = world.fronts
    assert isinstance(gateway, Gateway)
    rate = gateway.dispatcher.model.prefill_tokens_per_s
    assert gateway.dispatcher.model.samples > 50
    late = [one for one in requests[200:] if one.arrival.prompt_tokens > 400]
    ratios = spread(one.arrival.prompt_tokens / rate / one.ttft_s for one in late)
    assert 0.7 < ratios.p50 < 1.3
    assert summary(world, requests).refused == {}
