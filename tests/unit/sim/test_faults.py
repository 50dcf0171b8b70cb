"""Engines of a simulated world crash and hang, and nobody but who cannot be helped is lost."""

from math import inf
from random import Random

import pytest

from modelyard.policy.engine_model import Speed
from modelyard.sim.faults import Fault, FaultRates, Kind, draw
from modelyard.sim.requests import Arrival, Request
from modelyard.sim.tasks import EngineSpec
from modelyard.sim.world import World
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

ENGINE = EngineSpec(speed=Speed(0.02, 0.0003, 0.0001, 1e-7), max_num_seqs=16, kv_blocks=4000)
HOUR_S = 3600.0


def arrivals(seed: int, count: int, rate: float, *, can_resume: bool = True) -> list[Arrival]:
    chance, at_s, came = Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate)
        size = chance.randrange(50, 800)
        came.append(
            Arrival(at_s=at_s, prompt_tokens=size, output_tokens=chance.randrange(20, 250), can_resume=can_resume)
        )
    return came


def world(*faults: Fault, replicas: int = 3, load_s: float = 20.0, keeps: bool = True) -> World:
    release = ReleaseSpec(engine=ENGINE, replicas=replicas)
    return World(WorldSpec(releases=(release,), faults=faults, keeps=keeps, load_s=load_s), Random(1))


def refusals(requests: list[Request]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in requests:
        if one.refusal:
            found[one.refusal] = found.get(one.refusal, 0) + 1
    return found


def test_a_crash_costs_no_answer_where_another_replica_can_go_on() -> None:
    simulated = world(Fault(at_s=30.0))
    requests = simulated.run(arrivals(1, 400, 8.0))
    assert all(one.is_done for one in requests)
    assert sum(one.told > 0 for one in requests) > 3, "nobody was on it"
    assert simulated.fronts[0].retried >= sum(one.told > 0 for one in requests)  # type: ignore[attr-defined]


def test_what_was_told_is_not_generated_twice() -> None:
    simulated = world(Fault(at_s=30.0), replicas=2)
    requests = simulated.run(arrivals(1, 200, 3.0))
    assert simulated.breakage is not None
    engines = [one.engine for one in [*simulated.replicas.values(), *simulated.gone]] + simulated.breakage.dead
    generated = sum(engine.totals(simulated.now_s).generated for engine in engines)
    asked = sum(one.arrival.output_tokens for one in requests)
    # An iteration that was cut in the middle counts in part, and each probe has a token.
    on_it = sum(one.told > 0 for one in requests)
    assert asked - on_it <= generated <= asked + on_it + 5


def test_an_answer_that_is_more_than_its_text_is_lost_with_its_engine() -> None:
    requests = world(Fault(at_s=30.0)).run(arrivals(1, 400, 8.0, can_resume=False))
    lost = [one for one in requests if one.refusal]
    assert {one.refusal for one in lost} == {"lost"}
    assert all(one.told > 0 for one in lost), "before the first token everything can be tried elsewhere"
    assert 3 < len(lost) < 20


def test_a_crashed_replica_is_replaced_and_a_hung_one_is_ended_first() -> None:
    simulated = world(Fault(at_s=30.0), Fault(at_s=120.0, kind=Kind.HANG, place=1))
    requests = simulated.run(arrivals(1, 1500, 4.0))
    keeper = simulated.keeper
    assert keeper is not None
    (crashed_s, crashed, _), (hung_s, hung, why) = keeper.failures
    assert (crashed, 30.0 <= crashed_s <= 32.0) == ("rep_000", True)
    assert hung_s > 120.0 + 30.0
    assert "no token" in why
    serving = [one.id for one in simulated.replicas.values() if one.is_ready(simulated.now_s)]
    assert len(serving) == 3
    assert not {crashed, hung} & set(serving)
    assert refusals(requests) == {}


def test_nothing_is_sent_to_who_hangs_once_that_was_noticed() -> None:
    simulated = world(Fault(at_s=20.0, kind=Kind.HANG), keeps=False)
    requests = simulated.run(arrivals(1, 800, 4.0))
    # Answers that had begun are given up after 30 s without a token, and eject it.
    late = [one for one in requests if one.arrival.at_s > 52.0 and one.replica_id == "rep_000"]
    assert not late
    assert all(one.is_done for one in requests)


def test_who_waits_for_a_first_token_leaves_with_the_first_who_was_given_up() -> None:
    simulated = world(Fault(at_s=20.0, kind=Kind.HANG), keeps=False)
    requests = simulated.run(arrivals(1, 800, 4.0))
    waited = [one for one in requests if one.failed_on and not one.told]
    assert waited
    assert max(one.ttft_s for one in waited) < 32.0, "they waited for all of their own two minutes"


def test_with_its_only_replica_an_endpoint_loses_what_runs_and_keeps_what_waits() -> None:
    release = ReleaseSpec(engine=ENGINE)
    spec = WorldSpec(
        releases=(release,), slots=4, faults=(Fault(at_s=20.0),), keeps=True, load_s=10.0, queue_wait_s=60.0
    )
    requests = World(spec, Random(1)).run(arrivals(1, 150, 1.5))
    assert refusals(requests) == {"lost": 4}
    waited = [one for one in requests if one.arrival.at_s < 20.0 <= one.dispatched_s < inf]
    assert waited
    assert all(one.dispatched_s > 30.0 for one in waited)


def test_a_request_is_tried_on_three_replicas_at_most() -> None:
    faults = [Fault(at_s=5.0 + number / 10, place=0, back_s=100.0) for number in range(4)]
    requests = world(*faults, replicas=5, keeps=False).run(arrivals(3, 60, 8.0))
    assert max(len(one.failed_on) for one in requests) <= 2
    assert any(one.failed_on for one in requests)


def test_a_world_without_faults_is_the_same_with_somebody_who_keeps_it() -> None:
    came = arrivals(2, 200, 4.0)
    kept = world().run(came)
    plain = world(keeps=False).run(came)
    assert [(one.first_s, one.done_s) for one in kept] == [(one.first_s, one.done_s) for one in plain]


def test_faults_come_by_chance_at_their_rate_and_the_same_for_a_seed() -> None:
    rates = FaultRates(crashes_h=0.5, hangs_h=0.25)
    faults = draw(rates, replicas=8, seconds=1000 * HOUR_S, chance=Random(1))
    assert faults == draw(rates, replicas=8, seconds=1000 * HOUR_S, chance=Random(1))
    crashes = sum(fault.kind is Kind.CRASH for fault in faults)
    assert crashes == pytest.approx(4000, rel=0.05)
    assert len(faults) - crashes == pytest.approx(2000, rel=0.06)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert draw(FaultRates(), replicas=8, seconds=HOUR_S, chance=Random(1)) == ()
