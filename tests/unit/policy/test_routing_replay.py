"""The routing benchmark's own engine, and that the production dispatcher earns its keep on a small workload."""

import random

import pytest
from bench.routing.engine import BATCH_MAX, BLOCK_TOKENS, STEP_S, STEP_S_PER_RUNNING, Engine, Request, reading_s
from bench.routing.ours import Modelyard
from bench.routing.policies import PEERS, LlmD, RoundRobin
from bench.routing.replay import floor, outcome, read, replay

REPLICAS = 4


def conversations(seed: int, *, count: int = 90, turns: int = 5) -> list[Request]:
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
        Request(number, at_s, len(blocks) * BLOCK_TOKENS + 40, output, tuple(blocks))
        for number, (at_s, blocks, output) in enumerate(rows)
    ]


def run_alone(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.submit(request, request.at_s)
    while (at_s := engine.next_event_s()) < float("inf"):
        engine.happen(at_s)


def test_an_idle_engine_reads_then_takes_a_step_for_each_token() -> None:
    request = Request(0, 0.0, 4096, 11, tuple(range(8)))
    run_alone(Engine(0), [request])
    assert request.first_token_s == pytest.approx(reading_s(4096))
    assert request.done_s - request.first_token_s == pytest.approx(10 * (STEP_S + STEP_S_PER_RUNNING))


def test_an_engine_reuses_the_blocks_that_it_has_read_and_reads_one_prompt_at_a_time() -> None:
    engine = Engine(0)
    first, again, other = (
        Request(0, 0.0, 4096, 1, tuple(range(8))),
        Request(1, 0.0, 4196, 1, tuple(range(8))),
        Request(2, 0.0, 4096, 1, tuple(range(100, 108))),
    )
    run_alone(engine, [first, again, other])
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 4096, 0)
    assert again.first_token_s == pytest.approx(reading_s(4196))
    assert other.first_token_s == pytest.approx(reading_s(4196 + 4096))
    assert engine.gauges().running == engine.gauges().waiting == engine.tokens == 0


def test_an_engine_never_runs_more_than_its_batch() -> None:
    engine = Engine(0)
    for number in range(BATCH_MAX + 20):
        engine.submit(Request(number, 0.0, 1, 5000, ()), 0.0)
    for _ in range(BATCH_MAX + 1):
        engine.happen(engine.next_event_s())
        assert engine.gauges().running <= BATCH_MAX
    assert engine.gauges().waiting > 0


@pytest.mark.parametrize("kind", [*PEERS, Modelyard])
@pytest.mark.parametrize("staleness_s", [0.0, 1.0])
def test_every_request_of_every_router_is_answered_once(kind: type, staleness_s: float) -> None:
    requests = conversations(1, count=20)
    router = kind(REPLICAS, random.Random(1))
    found = replay(requests, router, replicas=REPLICAS, staleness_s=staleness_s)
    assert [request.number for request in found] == [request.number for request in requests]
    assert all(request.at_s < request.first_token_s <= request.done_s < float("inf") for request in found)
    assert all(request.first_token_s == float("inf") for request in requests), "the replay changed its input"


def test_the_dispatcher_has_nothing_left_after_a_replay() -> None:
    router = Modelyard(REPLICAS, random.Random(1))
    replay(conversations(2), router, replicas=REPLICAS, staleness_s=0.0)
    assert not router.jobs
    assert not router.dispatcher.line
    for replica in router.dispatcher.replicas:
        assert (replica.running, replica.pending_tokens) == (0, 0)
    assert 7_000 < router.dispatcher.model.prefill_tokens_per_s < 9_500, "the engine's speed was not learned"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_added_seconds_beat_round_robin_and_polled_gauges(seed: int) -> None:
    requests = conversations(seed)
    ours, robin, llm_d = (
        outcome(replay(requests, kind(REPLICAS, random.Random(seed)), replicas=REPLICAS, staleness_s=1.0))
        for kind in (Modelyard, RoundRobin, LlmD)
    )
    assert ours.hit_rate > 1.3 * robin.hit_rate
    assert ours.p90_s < robin.p90_s / 1.5
    assert ours.p90_s < llm_d.p90_s
    assert floor(requests, replicas=REPLICAS).p90_s <= ours.p90_s


def test_equal_seeds_give_equal_results() -> None:
    def once() -> object:
        router = Modelyard(REPLICAS, random.Random(4))
        return outcome(replay(conversations(4), router, replicas=REPLICAS, staleness_s=0.0))

    assert once() == once()


def test_a_trace_is_read_at_the_load_asked_for() -> None:
    rows = [
        '{"timestamp": 3000, "input_length": 1100, "output_length": 0, "hash_ids": [1, 2, 3]}',
        '{"timestamp": 2000, "input_length": 512, "output_length": 9, "hash_ids": [1]}',
    ]
    early, late = read(rows, load=2.0)
    assert (late.at_s, late.blocks, late.output_tokens) == (1.5, (1, 2), 1)
    assert (early.at_s, early.blocks) == (1.0, (1,))
