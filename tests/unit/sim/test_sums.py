"""What must hold of every world, whatever it is given: requests, hours, money and time add up."""

from math import inf
from random import Random

import pytest

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.sim import runs
from modelyard.sim.report import summary
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.runs import GROUPS_MAX, Price, Variant, figures_of, run_all, run_one
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.timeline import Timeline
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

CASES = 12


def some_world(chance: Random) -> WorldSpec:
    """Return a world of any kind: small caches and lines, one version or two, sizes that change or do not."""
    speed = Speed(0.01 * chance.uniform(0.5, 3), 1e-4, 4e-5, 5e-8)
    engine = EngineSpec(speed=speed, max_num_seqs=chance.choice([2, 8, 64]), kv_blocks=chance.choice([256, 1024, 8192]))
    releases = [ReleaseSpec(engine=engine, version_id="a", weight=70, replicas=chance.randrange(1, 3))]
    if chance.random() < 0.4:
        releases.append(ReleaseSpec(engine=engine, version_id="b", weight=30))
    grows = chance.random() < 0.6
    return WorldSpec(
        releases=tuple(releases),
        gateways=chance.choice([1, 2]),
        rules=DispatchRules(places=chance.choice([4, 256])),
        queue_wait_s=chance.choice([0.5, 30.0]),
        load_wait_s=chance.choice([1.0, 600.0]),
        scaling=Scaling(0, 4, scale_to_zero=True, idle_s=chance.choice([5.0, 60.0])) if grows else None,
        autoscale=Autoscale(up_queue=1, down_utilization_s=20.0) if chance.random() < 0.5 else Autoscale(),
        load_s=chance.choice([1.0, 20.0]),
    )


def some_arrivals(seed: int) -> list[Arrival]:
    chance, at_s, found = Random(seed), 0.0, []
    rate = chance.choice([0.2, 3.0, 30.0])
    for _ in range(chance.choice([1, 40, 300])):
        at_s += chance.expovariate(rate)
        tokens, output = round(chance.lognormvariate(6, 1.2)) + 1, round(chance.lognormvariate(4, 1.2)) + 1
        # None that can never fit: an engine refuses nothing.
        output = max(1, min(output, 4096 - 16 - tokens))
        found.append(Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=output, tenant_id=chance.choice("xyz")))
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_sums_hold(seed: int) -> None:
    prices = {"a": Price(2, 6.0), "b": Price(1, 1.5)}
    variant = Variant(name="v", spec=some_world(Random(seed)), arrivals=some_arrivals, prices=prices)
    timeline = Timeline(0.25, {version_id: price.usd_per_hour for version_id, price in prices.items()})
    world = World(variant.spec, Random(seed), watch=timeline)
    requests = world.run(some_arrivals(seed))
    figures, series = figures_of(variant, world, requests), timeline.series(requests)

    assert all((one.done_s < inf) != bool(one.refusal) for one in requests), "each ends in exactly one way"
    assert figures["done"] + figures["refused"] == pytest.approx(1.0)
    assert 0 <= figures["within"] <= figures["done"]
    for one in requests:
        ended_s = min(one.done_s, one.refused_s)
        assert one.arrival.at_s <= ended_s < inf
        if one.done_s < inf:
            assert one.arrival.at_s <= one.dispatched_s < one.first_s <= one.done_s
    for what in ("ttft", "tpot"):
        assert figures[f"{what}_p50_s"] <= figures[f"{what}_p99_s"]

    end_s = max(min(one.done_s, one.refused_s) for one in requests)
    replicas = [*world.replicas.values(), *world.gone]
    held = {
        version_id: sum(
            max(0.0, min(one.gone_s, end_s) - one.began_s) / 3600
            for one in replicas
            if one.release.version_id == version_id
        )
        for version_id in ("a", "b")
    }
    assert figures["gpu_hours"] == pytest.approx(sum(prices[one].accelerators * held[one] for one in held))
    assert figures["usd_per_hour"] * end_s / 3600 == pytest.approx(
        sum(prices[one].usd_per_hour * held[one] for one in held)
    )
    assert figures["replicas_mean"] * end_s / 3600 == pytest.approx(sum(held.values()))
    assert figures["replicas_mean"] <= figures["replicas_most"] + 1e-9
    assert all(0 <= figures[key] <= 1 for key in ("busy", "kv", "done", "refused", "within"))
    assert sum(figures.get(f"tenant[{one}].share", 0.0) for one in "xyz") == pytest.approx(
        1.0 if len({one.arrival.tenant_id for one in requests}) > 1 else 0.0
    )

    # What was seen over time is what there was in all, but for what happened after the last point.
    points = len(series["hours"])
    until_s = timeline.every_s * points
    lived_s = sum(max(0.0, min(one.gone_s, until_s) - one.began_s) for one in replicas)
    assert sum(
        (series["replicas"][at] or 0) + (series["loading"][at] or 0) for at in range(points)
    ) * timeline.every_s == (pytest.approx(lived_s, abs=1e-6))
    assert end_s - until_s <= timeline.every_s + 1e-9


def test_all_that_is_refused_costs_and_divides_by_nothing() -> None:
    engine = EngineSpec(speed=Speed(0.01, 0.0, 0.0, 0.0), kv_blocks=64)
    spec = WorldSpec(releases=(ReleaseSpec(engine=engine),))
    never = [Arrival(at_s=5.0, prompt_tokens=5000, output_tokens=10)]
    ran = run_one(Variant(name="a", spec=spec, arrivals=lambda seed: never, prices={"ver_sim": Price(1, 3.0)}), 1)
    assert (ran.figures["done"], ran.figures["refused"]) == (0.0, 1.0)
    assert ran.figures["usd_per_hour"] == pytest.approx(3.0)
    assert "usd_per_million" not in ran.figures
    assert ran.figures["busy"] == 0.0


def test_replicas_that_begin_after_the_last_answer_take_nothing_off_the_time_of_the_others() -> None:
    asked = Request(Arrival(at_s=0.0, prompt_tokens=10, output_tokens=2), 0)
    asked.dispatched_s, asked.first_s, asked.done_s = 0.0, 1.0, 10.0
    late = Request(Arrival(at_s=1.0, prompt_tokens=10, output_tokens=2), 1)
    late.refused_s, late.refusal = 40.0, "late"
    spec = WorldSpec(releases=(ReleaseSpec(engine=EngineSpec(speed=Speed(0.01, 0, 0, 0))),))
    world = World(spec, Random(1))
    (first,) = world.replicas.values()
    first.engine.busy_s = 10.0
    world.events.now_s = 30.0
    world.begin(spec.releases[0], load_s=60.0)
    # 40 seconds of the first, ten of the second.
    assert summary(world, [asked, late]).busy_share == pytest.approx(10.0 / 50.0)


def test_who_goes_where_is_not_drawn_with_the_numbers_of_the_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Spy(World):
        def run(self, arrivals):  # type: ignore[no-untyped-def]
            seen.append(self.chance.random())
            return super().run(arrivals)

    monkeypatch.setattr(runs, "World", Spy)
    engine = EngineSpec(speed=Speed(0.01, 0.0, 0.0, 0.0))
    variant = Variant(name="a", spec=WorldSpec(releases=(ReleaseSpec(engine=engine),)), arrivals=some_arrivals)
    for seed in (1, 1, 2):
        run_one(variant, seed)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0] not in [Random(1).random() for _ in range(3)]
    drawn = Random(1)
    assert seen[0] not in [drawn.random() for _ in range(20)]


def test_a_run_that_is_over_at_once_has_a_point() -> None:
    engine = EngineSpec(speed=Speed(0.001, 0.0, 0.0, 0.0))
    one = [Arrival(at_s=0.0, prompt_tokens=5, output_tokens=1)]
    ran = run_one(Variant(name="a", spec=WorldSpec(releases=(ReleaseSpec(engine=engine),)), arrivals=lambda _: one), 1)
    assert len(ran.series["hours"]) >= 1
    assert {len(column) for column in ran.series.values()} == {len(ran.series["hours"])}


def test_of_thousands_of_tenants_the_largest_are_shown() -> None:
    engine = EngineSpec(speed=Speed(0.001, 0.0, 0.0, 0.0))
    many = [
        Arrival(at_s=0.01 * at, prompt_tokens=5, output_tokens=1, tenant_id=f"t{at % 40 if at < 80 else 7}")
        for at in range(90)
    ]
    variant = Variant(name="a", spec=WorldSpec(releases=(ReleaseSpec(engine=engine),)), arrivals=lambda _: many)
    results = run_all([variant], [1])
    shown = {figure.key for figure in results.figures if figure.key.endswith(".share")}
    assert len(shown) == GROUPS_MAX
    assert "tenant[t7].share" in shown
    assert results.tried[0].mean("tenants") == 40.0
