"""Batches fill what is idle in a simulated world and make way; shadow releases get copies that nobody feels."""

from random import Random

import pytest

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy.engine_model import Speed
from modelyard.sim.gateway import Gateway
from modelyard.sim.report import summary
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

ENGINE = EngineSpec(speed=Speed(0.02, 0.0003, 0.0001, 1e-7), max_num_seqs=12, kv_blocks=4000)


def arrivals(seed: int, count: int, rate: float) -> list[Arrival]:
    chance, at_s, came = Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate)
        came.append(
            Arrival(at_s=at_s, prompt_tokens=chance.randrange(50, 500), output_tokens=chance.randrange(20, 200))
        )
    return came


LINES = [Arrival(at_s=0.0, prompt_tokens=200, output_tokens=150, tenant_id="ten_batch")] * 3000


def gateway_of(world: World) -> Gateway:
    (front,) = world.fronts
    assert isinstance(front, Gateway)
    return front


def test_lines_fill_what_is_idle_and_make_way() -> None:
    spec = WorldSpec(releases=(ReleaseSpec(engine=ENGINE),))
    came = arrivals(1, 250, 1.5)
    without = World(spec, Random(1))
    alone = summary(without, without.run(came))
    world = World(spec, Random(1))
    beside = summary(world, world.run(came, lines=LINES))
    assert world.batch is not None
    assert beside.done == alone.done == len(came)
    assert len(world.batch.done) > 120
    assert beside.busy_share > alone.busy_share
    assert gateway_of(world).made_way > 10
    # Whoever came had a slot at once; only the fuller batch is slower.
    assert beside.waited_s.p99 < 0.05
    assert not gateway_of(world).lines or world.batch.pace.running >= len(gateway_of(world).lines)


@pytest.mark.parametrize("scales", [True, False])
def test_lines_start_replicas_only_where_they_count_as_demand(scales: bool) -> None:
    spec = WorldSpec(
        releases=(ReleaseSpec(engine=ENGINE),),
        scaling=Scaling(min_replicas=1, max_replicas=4),
        autoscale=Autoscale(batch_scales=scales),
    )
    world = World(spec, Random(1))
    requests = world.run(arrivals(1, 150, 0.5), lines=LINES)
    assert all(one.is_done for one in requests)
    assert world.scaler is not None
    sizes = {replicas for _, replicas, _ in world.scaler.decisions}
    assert (max(sizes) > 1) == scales, "everybody else fills one in part"


def test_a_line_that_gave_way_begins_anew_and_is_answered_once() -> None:
    world = World(WorldSpec(releases=(ReleaseSpec(engine=ENGINE),)), Random(1))
    world.run(arrivals(1, 250, 1.5), lines=LINES)
    assert world.batch is not None
    again = [line for line in world.batch.done if line.gave_way]
    assert again
    assert all(line.done_s - line.dispatched_s > 149 * ENGINE.speed.step_s for line in again)
    assert len({line.number for line in world.batch.done}) == len(world.batch.done)
    assert len(world.batch.done) + len(world.batch.left) + world.batch.pace.running == len(LINES)


def test_a_shadow_gets_its_copies_and_changes_no_answer() -> None:
    came = arrivals(2, 200, 3.0)
    stable = ReleaseSpec(engine=ENGINE, version_id="ver_1", replicas=2)
    shadow = ReleaseSpec(engine=ENGINE, version_id="ver_2", weight=0, shadow=50)
    world = World(WorldSpec(releases=(stable, shadow), uses_prefixes=False), Random(1))
    requests = world.run(came)
    assert all(one.is_done and one.version_id == "ver_1" for one in requests)
    assert 60 < gateway_of(world).shadowed < 140
    copied = [one.engine for one in world.replicas.values() if one.release.version_id == "ver_2"]
    assert copied[0].totals(world.now_s).generated > 0
