"""The routing benchmark: the production dispatcher earns its keep on a small workload and simulated engines."""

import random
from math import inf

import pytest
from bench.routing.policies import BLOCK_TOKENS, PEERS, Base, LlmD, RoundRobin
from bench.routing.replay import SPEED, Setting, floor, outcome, read, reading_s, replay

from modelyard.sim.gateway import Gateway
from modelyard.sim.requests import Arrival

REPLICAS = 4


def conversations(seed: int, *, count: int = 90, turns: int = 5) -> list[Arrival]:
    """Return what chat does: a few shared instructions, then turns that each repeat all that was said."""
    chance = random.Random(seed)
    fresh = iter(range(1_000_000))
    instructions = [[next(fresh) for _ in range(size)] for size in (2, 4, 8)]
    rows: list[tuple[float, list[int], int]] = []
    for _ in range(count):
        at_s, said = chance.uniform(0, 100), list(chance.choice(instructions))
        for _ in range(chance.randrange(1, turns + 1)):
            said += [next(fresh) for _ in range(chance.randrange(2, 16))]
            rows.append((at_s, list(said), chance.randrange(20, 300)))
            at_s += chance.uniform(8, 40)
    rows.sort()
    return [
        Arrival(at_s=at_s, prompt_tokens=len(blocks) * BLOCK_TOKENS + 40, output_tokens=output, blocks=tuple(blocks))
        for at_s, blocks, output in rows
    ]


@pytest.mark.parametrize("kind", [*PEERS, None])
@pytest.mark.parametrize("staleness_s", [0.0, 1.0])
def test_every_request_of_every_router_is_answered_once(kind: type[Base] | None, staleness_s: float) -> None:
    arrivals = conversations(1, count=20)
    found = replay(arrivals, kind, Setting(REPLICAS, staleness_s))
    assert [request.arrival for request in found] == arrivals
    assert all(request.arrival.at_s < request.first_s <= request.done_s < inf for request in found)


def test_the_dispatcher_has_nothing_left_after_a_replay() -> None:
    world = Setting(REPLICAS).world(None)
    world.run(conversations(2))
    (gateway,) = world.fronts
    assert isinstance(gateway, Gateway)
    assert not gateway.dispatcher.line
    for replica in gateway.dispatcher.replicas:
        assert (replica.running, replica.pending_tokens) == (0, 0)
    assert 6_000 < gateway.dispatcher.model.prefill_tokens_per_s < 9_000, "the engine's speed was not learned"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_added_seconds_beat_round_robin_and_polled_gauges(seed: int) -> None:
    arrivals = conversations(seed)
    ours, robin, llm_d = (
        outcome(replay(arrivals, kind, Setting(REPLICAS, 1.0, seed=seed))) for kind in (None, RoundRobin, LlmD)
    )
    assert ours.hit_rate > 1.3 * robin.hit_rate
    assert ours.p90_s < robin.p90_s / 1.5
    assert ours.p90_s < llm_d.p90_s
    assert floor(arrivals, replicas=REPLICAS).p90_s <= ours.p90_s


def test_the_floor_reads_each_prompt_alone() -> None:
    prompt = Arrival(at_s=0.0, prompt_tokens=4000, output_tokens=1)
    assert floor([prompt], replicas=1).p50_s == pytest.approx(reading_s(4000))
    assert reading_s(4000) == pytest.approx(2 * SPEED.iteration_s(1, 0, 0) + 4000 / 9000)
    (alone,) = replay([prompt], None, Setting(1))
    assert alone.ttft_s == pytest.approx(reading_s(4000))


def test_equal_seeds_give_equal_results() -> None:
    def once() -> object:
        return outcome(replay(conversations(4), None, Setting(REPLICAS, seed=4)))

    assert once() == once()


def test_a_trace_is_read_at_the_load_asked_for() -> None:
    rows = [
        '{"timestamp": 3000, "input_length": 1100, "output_length": 0, "hash_ids": [1, 2, 3]}',
        '{"timestamp": 2000, "input_length": 512, "output_length": 9, "hash_ids": [1]}',
    ]
    early, late = read(rows, load=2.0)
    assert (late.at_s, late.blocks, late.output_tokens) == (1.5, (1, 2), 1)
    assert (early.at_s, early.blocks) == (1.0, (1,))
