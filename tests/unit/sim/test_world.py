"""A simulated world serves or refuses every request once, equally every time, as the production policies say."""

from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import Scaling
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.sim.report import summary
from modelyard.sim.requests import Arrival, Request, faster
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

SPEED = Speed(0.02, 0.0003, 0.0001, 1e-7)
ENGINE = EngineSpec(speed=SPEED, max_num_seqs=32, kv_blocks=1000, hash_tokens=64)
PATIENT = DispatchRules(places=100_000)


def load(seed: int, count: int, rate: float, *, output_max: int = 0) -> list[Arrival]:
    chance, arrivals, at_s = Random(seed), [], 0.0
    for _ in range(count):
        at_s += chance.expovariate(rate)
        size, root = chance.randrange(20, 900), chance.randrange(5)
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=size,
                output_tokens=chance.randrange(1, 200),
                output_max=output_max,
                tenant_id=f"ten_{root}",
                blocks=tuple(100 * root + block for block in range(size // 64)),
            )
        )
    return arrivals


def one_release(replicas: int = 1, engine: EngineSpec = ENGINE, **fields: object) -> WorldSpec:
    return WorldSpec(releases=(ReleaseSpec(engine=engine, replicas=replicas),), **fields)  # type: ignore[arg-type]


def ends(requests: list[Request]) -> list[tuple[object, ...]]:
    return [(one.replica_id, one.dispatched_s, one.first_s, one.done_s, one.refusal, one.refused_s) for one in requests]


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([0, 3]),
    st.sampled_from([DispatchRules(places=4), PATIENT]),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_every_request_is_served_or_refused_once(
    seed: int, replicas: int, gateways: int, knows_kv: bool, slots: int, rules: DispatchRules, snapshot_s: float
) -> None:
    spec = one_release(
        replicas,
        gateways=gateways,
        knows_kv=knows_kv,
        slots=slots,
        rules=rules,
        snapshot_s=snapshot_s,
        queue_wait_s=5.0,
    )
    world = World(spec, Random(seed))
    requests = world.run(load(seed, 60, 10.0))
    for one in requests:
        served, refused = one.done_s < inf, bool(one.refusal)
        assert served != refused, one
        if served:
            assert one.arrival.at_s <= one.dispatched_s < one.first_s <= one.done_s
    for front in world.fronts:
        assert (front.waiting, front.in_flight, front.dispatcher.running) == (0, 0, 0)  # type: ignore[attr-defined]
        for replica in front.dispatcher.replicas:  # type: ignore[attr-defined]
            assert (replica.pending_tokens, replica.kv.reserved) == (0, 0)
    for real in world.replicas.values():
        assert (real.engine.running, real.engine.waiting, real.engine.cache.held) == (0, 0, 0)


def test_equal_seeds_give_equal_worlds_and_a_run_can_be_gone_on_with() -> None:
    spec, arrivals = one_release(3, gateways=2, snapshot_s=1.0, snapshot_age_s=0.3), load(3, 150, 12.0)
    first, again = World(spec, Random(7)), World(spec, Random(7))
    assert ends(first.run(arrivals)) == ends(again.run(arrivals))
    later = [msgspec.structs.replace(one, at_s=one.at_s + 1000) for one in arrivals]
    assert ends(first.run(later)) == ends(again.run(later))


def test_admission_by_memory_keeps_engines_from_computing_twice() -> None:
    engine = msgspec.structs.replace(ENGINE, kv_blocks=200, hash_tokens=0)
    arrivals = [msgspec.structs.replace(one, blocks=()) for one in load(5, 200, 20.0, output_max=400)]
    seen = {}
    for knows_kv in (False, True):
        world = World(one_release(1, engine, knows_kv=knows_kv, rules=PATIENT, queue_wait_s=1e6), Random(1))
        seen[knows_kv] = summary(world, world.run(arrivals))
    assert seen[False].preemptions > 20
    assert seen[True].preemptions <= seen[False].preemptions / 10
    assert seen[True].recomputed_tokens <= seen[False].recomputed_tokens / 10
    # The price of it where no more than a handful fit: room that is kept for answers that end sooner.
    assert seen[True].span_s < 1.25 * seen[False].span_s


def test_several_gateways_fill_no_cache_over_together() -> None:
    engine = msgspec.structs.replace(ENGINE, kv_blocks=600, hash_tokens=0)
    arrivals = [msgspec.structs.replace(one, blocks=()) for one in load(5, 300, 20.0, output_max=400)]
    world = World(one_release(2, engine, gateways=4, rules=PATIENT, queue_wait_s=1e6), Random(1))
    seen = summary(world, world.run(arrivals))
    assert (seen.done, seen.preemptions) == (300, 0)


def test_prompts_go_where_they_are_cached() -> None:
    arrivals = load(6, 300, 15.0)
    by_prefix, blindly = (World(one_release(4, uses_prefixes=uses), Random(1)) for uses in (True, False))
    ours, others = (summary(world, world.run(arrivals)) for world in (by_prefix, blindly))
    assert ours.hit_rate > others.hit_rate + 0.05
    assert ours.ttft_s.mean < others.ttft_s.mean


def test_a_canary_gets_its_share_and_its_own_speed() -> None:
    slow = msgspec.structs.replace(ENGINE, speed=Speed(0.08, 0.0003, 0.0001, 1e-7))
    spec = WorldSpec(
        releases=(
            ReleaseSpec(engine=ENGINE, version_id="ver_old", weight=80, replicas=2),
            ReleaseSpec(engine=slow, version_id="ver_new", weight=20),
        )
    )
    requests = World(spec, Random(2)).run(load(8, 600, 6.0))
    canary = [one for one in requests if one.version_id == "ver_new"]
    stable = [one for one in requests if one.version_id == "ver_old"]
    assert 0.15 < len(canary) / len(requests) < 0.25
    mean = [sum(one.tpot_s for one in group) / len(group) for group in (stable, canary)]
    assert mean[1] > 2.5 * mean[0]


def test_sizes_follow_the_load_and_replicas_that_go_finish_first() -> None:
    engine = msgspec.structs.replace(ENGINE, max_num_seqs=4, speed=Speed(0.05))
    spec = one_release(1, engine, scaling=Scaling(1, 8), load_s=20.0, rules=PATIENT, queue_wait_s=600.0, pass_s=2.0)
    storm = load(9, 300, 2.0)
    calm = [msgspec.structs.replace(one, at_s=400 + 20 * number) for number, one in enumerate(load(10, 120, 1.0))]
    world = World(spec, Random(3))
    requests = world.run([*storm, *calm])
    assert all(one.done_s < inf for one in requests)
    assert world.scaler is not None
    sizes = [replicas for _, replicas, _ in world.scaler.decisions]
    assert max(sizes) >= 4
    assert sizes[-1] < max(sizes), "it never shrank"
    assert world.gone
    for replica in world.gone:
        assert replica.gone_s >= max((one.done_s for one in requests if one.replica_id == replica.id), default=0.0)


def test_snapshots_tell_of_load_that_is_not_from_here() -> None:
    world = World(one_release(2, gateways=2, snapshot_s=0.5, snapshot_age_s=0.1), Random(4))
    seen: list[int] = []
    front = world.fronts[0]
    for at_s in range(5, 20):
        world.events.at(
            float(at_s),
            lambda: seen.extend(one.running_elsewhere for one in front.dispatcher.replicas),  # type: ignore[attr-defined]
        )
    world.run(load(11, 250, 12.0))
    assert max(seen) > 3, "each gateway sees only its own"


def test_a_trace_can_be_played_faster() -> None:
    arrivals = load(1, 10, 1.0)
    assert [one.at_s for one in faster(arrivals, 2.0)] == pytest.approx([one.at_s / 2 for one in arrivals])
