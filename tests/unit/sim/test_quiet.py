"""A world in which little happens: it ends when it is told to, and long pauses cost few looks and change little."""

import random

import pytest

from modelyard.domain.endpoints import Scaling
from modelyard.policy.engine_model import Speed
from modelyard.sim.requests import Arrival
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

HOUR_S = 3600.0


def world(most: int = 1, replicas: int = 1, **more: object) -> World:
    spec = WorldSpec(
        releases=(ReleaseSpec(engine=EngineSpec(speed=Speed(0.02, 1e-3, 1e-4)), replicas=replicas),),
        scaling=Scaling(0, most, scale_to_zero=True, idle_s=300),
        load_s=20.0,
        **more,  # type: ignore[arg-type]
    )
    return World(spec, random.Random(1))


def visits(hours: int) -> list[Arrival]:
    return [Arrival(at_s=hour * HOUR_S + 7.3, prompt_tokens=100, output_tokens=50) for hour in range(hours)]


def lived_s(world: World, until_s: float) -> float:
    replicas = [*world.replicas.values(), *world.gone]
    return sum(min(one.gone_s, until_s) - one.began_s for one in replicas)


def test_a_world_that_stays_goes_on_when_all_requests_have_ended() -> None:
    once, longer = world(), world()
    longer.stay(2 * HOUR_S)
    (one,), (other,) = once.run(visits(1)), longer.run(visits(1))
    assert once.events.now_s == one.done_s == other.done_s
    assert longer.events.now_s == 2 * HOUR_S
    assert not longer.replicas, "it went to sleep meanwhile"
    assert lived_s(longer, 2 * HOUR_S) == pytest.approx(other.done_s + 300, abs=5)


def test_long_pauses_take_few_looks_and_change_little() -> None:
    often, seldom = world(), world(idle_pass_s=20.0)
    for one in (often, seldom):
        one.stay(12 * HOUR_S)
    first, second = often.run(visits(12)), seldom.run(visits(12))
    assert seldom.events.happened < 0.4 * often.events.happened
    assert lived_s(seldom, 12 * HOUR_S) == pytest.approx(lived_s(often, 12 * HOUR_S), rel=0.05)
    for one, other in zip(first, second, strict=True):
        # Nobody waits for a look in the far future: the next one is two seconds away at most, as ever.
        assert other.ttft_s == pytest.approx(one.ttft_s, abs=2.0)


def test_what_sleeps_wakes_with_as_many_replicas_as_their_slots_are_needed_for() -> None:
    asleep = world(most=4, replicas=0)
    asleep.stay(1000.0)
    asleep.run([Arrival(at_s=500.1 + at / 100, prompt_tokens=100, output_tokens=50) for at in range(9)])
    assert asleep.scaler is not None
    assert [replicas for _, replicas, _ in asleep.scaler.decisions if replicas] == [1]
