"""Variants run with the same seeds, are compared by the same figures, and looking at a world changes nothing in it."""

from itertools import pairwise
from random import Random

import msgspec
import pytest

from modelyard.domain.endpoints import Scaling
from modelyard.policy.engine_model import Speed
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.runs import Price, Variant, run_all, run_one
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.timeline import POINTS, POINTS_MAX, Timeline, every_s
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

ENGINE = EngineSpec(speed=Speed(0.0135, 6.4e-05, 3.8e-05, 4.9e-08))
PLAIN = WorldSpec(releases=(ReleaseSpec(engine=ENGINE, replicas=2),), slots=16)
GROWS = WorldSpec(releases=(ReleaseSpec(engine=ENGINE),), slots=6, scaling=Scaling(1, 4), load_s=20.0, gateways=2)


def arrivals(seed: int, *, tenants: int = 1) -> list[Arrival]:
    chance, at_s, found = Random(seed), 0.0, []
    for number in range(400):
        at_s += chance.expovariate(5.0)
        tokens, output = chance.randrange(50, 900), chance.randrange(5, 300)
        found.append(Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=output, tenant_id=f"t{number % tenants}"))
    return found


def fate(request: Request) -> tuple[object, ...]:
    return request.replica_id, request.dispatched_s, request.first_s, request.done_s, request.refusal


@pytest.mark.parametrize("spec", [PLAIN, GROWS])
def test_a_world_that_is_looked_at_is_equal_to_one_that_is_not(spec: WorldSpec) -> None:
    alone, watched = World(spec, Random(3)), World(spec, Random(3), watch=Timeline(0.7, {}))
    assert list(map(fate, alone.run(arrivals(3)))) == list(map(fate, watched.run(arrivals(3))))
    assert alone.events.happened == watched.events.happened


def test_a_timeline_counts_each_request_once_and_all_that_replicas_cost() -> None:
    timeline = Timeline(2.0, {"ver_sim": 3.0})
    world = World(GROWS, Random(1), watch=timeline)
    requests = world.run(arrivals(1))
    series = timeline.series(requests)
    until_s = 3600 * (series["hours"][-1] or 0.0)
    assert len({len(column) for column in series.values()}) == 1
    came = sum(one.arrival.at_s < until_s for one in requests)
    assert sum(value or 0.0 for value in series["requests_s"]) * 2.0 == pytest.approx(came)
    replicas = [*world.replicas.values(), *world.gone]
    lived_s = sum(min(one.gone_s, until_s) - one.began_s for one in replicas if one.began_s < until_s)
    assert sum(value or 0.0 for value in series["usd_per_hour"]) * 2.0 == pytest.approx(3.0 * lived_s)
    ready_s = sum(until_s - one.ready_s for one in replicas if one.gone_s > until_s > one.ready_s)
    assert sum(value or 0.0 for value in series["replicas"]) * 2.0 >= ready_s * 0.999
    assert max(value or 0.0 for value in series["loading"]) > 0, "nothing was started: this shows little"
    written = sum(one.arrival.output_tokens for one in requests)  # some of it after the last point
    assert 0.98 * written < sum(value or 0.0 for value in series["tokens_s"]) * 2.0 <= written


def test_points_are_as_many_as_a_picture_shows() -> None:
    assert every_s(arrivals(1)) == 1.0
    for span_s in (30.0, 3600.0, 86_400.0, 14 * 86_400.0):
        last = Arrival(at_s=span_s, prompt_tokens=1, output_tokens=1)
        assert span_s / every_s([last]) <= POINTS


def test_equal_seeds_give_equal_results_and_other_seeds_others() -> None:
    variant = Variant(name="a", spec=PLAIN, arrivals=arrivals, prices={"ver_sim": Price(2, 5.0)})
    first, again = run_all([variant], [1, 2]), run_all([variant], [1, 2])
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first.tried[0].runs[0].figures != first.tried[0].runs[1].figures
    assert first.seeds == [1, 2]


def test_cost_is_what_replicas_hold_for_as_long_as_requests_run() -> None:
    ran = run_one(Variant(name="a", spec=PLAIN, arrivals=arrivals, prices={"ver_sim": Price(2, 5.0)}), 1)
    figures = ran.figures
    assert figures["usd_per_hour"] == pytest.approx(10.0)
    assert figures["gpu_hours"] == pytest.approx(figures["replicas_mean"] * 2 * _hours(ran.series["hours"]), rel=0.03)
    tokens = sum(one.output_tokens for one in arrivals(1))
    usd = figures["gpu_hours"] / 2 * 5.0
    assert figures["usd_per_million"] == pytest.approx(usd / tokens * 1e6)


def test_the_cache_that_is_held_is_what_requests_hold_over_time() -> None:
    alone = [Arrival(at_s=0.0, prompt_tokens=1600, output_tokens=400)]
    spec = WorldSpec(releases=(ReleaseSpec(engine=ENGINE),))
    ran = run_one(Variant(name="a", spec=spec, arrivals=lambda seed: alone), 1)
    # From 1,600 tokens it grows to 2,000, of the cache's 131,072.
    assert ran.figures["kv"] == pytest.approx(1800 / ENGINE.kv_tokens, rel=0.02)
    held = [value for value in ran.series["kv"] if value]
    assert sum(held) / len(held) == pytest.approx(1800 / ENGINE.kv_tokens, rel=0.1)


def test_tenants_have_figures_of_their_own_where_there_are_several() -> None:
    both = run_all([Variant(name="a", spec=PLAIN, arrivals=lambda seed: arrivals(seed, tenants=2))], [1])
    alone = run_all([Variant(name="a", spec=PLAIN, arrivals=arrivals)], [1])
    assert [figure.key for figure in both.figures if "[" in figure.key][:2] == ["tenant[t0].share", "tenant[t0].within"]
    assert both.tried[0].mean("tenant[t1].share") == pytest.approx(0.5)
    assert not [figure for figure in alone.figures if "[" in figure.key]


def test_progress_tells_the_share_of_the_time_that_has_passed() -> None:
    told: list[tuple[str, int, float]] = []
    run_all([Variant(name="a", spec=PLAIN, arrivals=arrivals)], [7], progress=lambda *news: told.append(tuple(news)))
    shares = [share for _, _, share in told]
    assert {(name, seed) for name, seed, _ in told} == {("a", 7)}
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.1
    assert shares[-1] > 0.9


def _hours(column: list[float | None]) -> float:
    return column[-1] or 0.0


def test_what_an_engine_did_by_now_is_told_between_its_steps_too() -> None:
    world = World(PLAIN, Random(1))
    world.run(arrivals(1))
    for replica in world.replicas.values():
        assert replica.engine.busy_by(1e9) == pytest.approx(replica.engine.busy_s)


def test_points_stay_few_however_long_the_last_answers_take() -> None:
    slow = EngineSpec(speed=Speed(5.0, 0.0, 0.0, 0.0))
    few = [Arrival(at_s=at / 10, prompt_tokens=50, output_tokens=900) for at in range(20)]
    spec = WorldSpec(releases=(ReleaseSpec(engine=slow),), knows_kv=False)
    variant = Variant(name="a", spec=spec, arrivals=lambda seed: few, prices={"ver_sim": Price(1, 2.0)})
    series = run_one(variant, 1).series
    assert POINTS < len(series["hours"]) < POINTS_MAX
    assert {len(column) for column in series.values()} == {len(series["hours"])}
    gaps = [(later or 0.0) - (before or 0.0) for before, later in pairwise([0.0, *series["hours"]])]
    assert max(gaps) == pytest.approx(min(gaps))
    assert series["usd_per_hour"] == pytest.approx([2.0] * len(gaps))
    assert sum(value or 0.0 for value in series["requests_s"]) * gaps[0] * 3600 == pytest.approx(len(few))
    written = sum(value or 0.0 for value in series["tokens_s"]) * gaps[0] * 3600
    assert written == pytest.approx(20 * 900, rel=0.02)
