"""A simulated engine batches, chunks, caches and preempts as it says, and leaps to where single steps lead."""

from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.engine_model import Speed
from modelyard.sim.engine import Engine
from modelyard.sim.tasks import BLOCK_TOKENS, EngineSpec, Task

SPEED = Speed(0.02, 0.0003, 0.0001, 1e-7)


class Stepwise(Engine):
    """The same engine, one iteration at a time."""

    __slots__ = ()

    def _length(self) -> int:
        return min(1, super()._length())


def task(number: int, prompt: int, output: int, blocks: tuple[int, ...] = (), band: int = 0) -> Task:
    return Task(f"r{number}", number=number, prompt_tokens=prompt, output_tokens=output, blocks=blocks, band=band)


def run(engine: Engine, arrivals: list[tuple[float, Task]], check: bool = False) -> None:
    def until(at_s: float) -> None:
        while engine.next_s <= at_s and engine.next_s < inf:
            engine.advance(engine.next_s)
            if check:
                check_blocks(engine)

    for at_s, one in arrivals:
        until(at_s)
        engine.submit(one, at_s)
    until(inf)


def check_blocks(engine: Engine) -> None:
    cache = engine.cache
    assert 0 <= cache.free <= cache.blocks
    assert cache._evictable == sum(cache._kept.values())
    own = sum(
        one._blocks
        if one._finish < 0
        else ceil((one._base + engine._steps) / BLOCK_TOKENS) - one._shared * cache.hash_blocks
        for one in engine._running
    )
    assert cache.held == own + len(cache._shared) * cache.hash_blocks


def test_one_request_alone_takes_its_chunks_and_then_a_step_a_token() -> None:
    engine, one = Engine(EngineSpec(speed=SPEED, chunk_tokens=1024)), task(0, 2500, 4)
    run(engine, [(1.0, one)])
    reading = sum(SPEED.iteration_s(1, chunk, held) for chunk, held in ((1024, 1024), (1024, 2048), (452, 2500)))
    writing = sum(SPEED.iteration_s(1, 0, held) for held in (2501, 2502, 2503))
    assert one.first_s == pytest.approx(1.0 + reading)
    assert one.done_s == pytest.approx(one.first_s + writing)
    assert engine.busy_s == pytest.approx(reading + writing)
    totals = engine.totals(one.done_s)
    assert (totals.iterations, totals.prefill_tokens, totals.generated) == (6, 2500, 4)


def test_those_who_run_get_a_token_each_while_a_prompt_is_read() -> None:
    engine, first, second = Engine(EngineSpec(speed=SPEED)), task(0, 100, 50), task(1, 1000, 50)
    run(engine, [(0.0, first), (0.1, second)])
    assert first.first_s < 0.1 < second.first_s < first.done_s < second.done_s


def test_a_newcomer_waits_for_the_iteration_that_runs_and_for_those_put_together_ahead() -> None:
    waits = []
    for ahead in (0, 1):
        engine, first, second = Engine(EngineSpec(speed=Speed(0.1), ahead=ahead)), task(0, 10, 50), task(1, 10, 5)
        run(engine, [(0.0, first), (1.05, second)])
        waits.append(second.first_s - 1.05)
    assert waits == pytest.approx([0.15, 0.25])


def test_no_more_run_at_once_than_its_sequences() -> None:
    engine = Engine(EngineSpec(speed=SPEED, max_num_seqs=4))
    tasks = [task(number, 20, 30) for number in range(9)]
    run(engine, [(0.0, one) for one in tasks])
    firsts = [one.first_s for one in tasks]
    assert firsts == sorted(firsts)
    assert firsts[4] >= tasks[0].done_s


def test_a_full_cache_makes_the_youngest_compute_again() -> None:
    spec = EngineSpec(speed=SPEED, kv_blocks=20)
    engine, old, young = Engine(spec), task(0, 100, 100), task(1, 100, 100)
    run(engine, [(0.0, old), (0.0, young)], check=True)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert old.done_s < young.done_s
    assert engine.totals(young.done_s).generated == 200
    assert engine.totals(young.done_s).prefill_tokens > 200


def test_an_urgent_request_comes_in_first_and_gives_up_last() -> None:
    spec = EngineSpec(speed=SPEED, kv_blocks=20, by_band=True)
    engine, batch, urgent = Engine(spec), task(0, 100, 100, band=2), task(1, 100, 100, band=0)
    run(engine, [(0.0, batch), (0.01, urgent)], check=True)
    assert (batch.preemptions, urgent.preemptions) == (1, 0)
    assert urgent.done_s < batch.done_s


def test_a_prompt_that_begins_alike_is_not_read_again_until_its_blocks_are_needed() -> None:
    spec = EngineSpec(speed=SPEED, kv_blocks=128, hash_tokens=512)
    engine = Engine(spec)
    tasks = [
        task(0, 1200, 2, (1, 2)),
        task(1, 1200, 2, (1, 2)),  # all of it is there
        task(2, 1600, 2, (7, 8, 9)),  # needs most blocks
        task(3, 1200, 2, (1, 2)),  # what others needed is gone
    ]
    run(engine, [(10.0 * number, one) for number, one in enumerate(tasks)], check=True)
    assert [one.cached_tokens for one in tasks[:3]] == [0, 1024, 0]
    assert tasks[3].cached_tokens < 1024
    whole = task(4, 1024, 2, (1, 2))
    run(engine, [(100.0, task(5, 1024, 2, (1, 2))), (200.0, whole)])
    assert whole.cached_tokens == 1023, "the last token is always computed"


def test_requests_that_leave_give_everything_back() -> None:
    engine = Engine(EngineSpec(speed=SPEED, kv_blocks=64, max_num_seqs=2))
    waiting = [task(0, 200, 500), task(1, 200, 500), task(2, 200, 500)]
    for one in waiting:
        engine.submit(one, 0.0)
    for _ in range(2):
        engine.advance(engine.next_s)
    now_s = engine.next_s - 0.001
    for one in waiting:
        engine.abort(one, now_s)
    engine.advance(engine.next_s)
    assert (engine.running, engine.waiting, engine.next_s, engine.cache.held) == (0, 0, inf, 0)
    assert engine._tokens == 0


@st.composite
def loads(draw: st.DrawFn) -> tuple[EngineSpec, list[tuple[float, int, int, tuple[int, ...], int]]]:
    spec = EngineSpec(
        speed=SPEED,
        max_num_seqs=draw(st.integers(1, 6)),
        chunk_tokens=draw(st.sampled_from([32, 100, 512])),
        kv_blocks=draw(st.integers(24, 60)),
        hash_tokens=draw(st.sampled_from([0, 16, 64])),
        ahead=draw(st.integers(0, 1)),
        by_band=draw(st.booleans()),
    )
    rows, at_s = [], 0.0
    for _ in range(draw(st.integers(1, 14))):
        at_s += draw(st.sampled_from([0.0, 0.013, 0.4, 3.0]))
        prompt, output = draw(st.integers(1, 250)), draw(st.integers(1, 120))
        parts = prompt // spec.hash_tokens if spec.hash_tokens else 0
        root = draw(st.integers(0, 2))
        hashes = tuple(root * 1000 + part for part in range(parts))
        rows.append((at_s, prompt, output, hashes, draw(st.integers(0, 2))))
    return spec, rows


@given(loads())
@settings(max_examples=150, deadline=None)
def test_leaps_lead_where_single_steps_do(
    load: tuple[EngineSpec, list[tuple[float, int, int, tuple[int, ...], int]]],
) -> None:
    spec, rows = load
    ends = []
    for kind in (Engine, Stepwise):
        engine = kind(spec)
        tasks = [(row[0], task(number, *row[1:])) for number, row in enumerate(rows)]
        run(engine, tasks, check=True)
        assert (engine.running, engine.waiting, engine.cache.held, engine._tokens) == (0, 0, 0, 0)
        assert not any(engine._needs)
        written = sum(one.output_tokens for _, one in tasks)
        totals = engine.totals(1e9)
        assert totals.generated == written
        ends.append(
            [value for _, one in tasks for value in (one.first_s, one.done_s, one.preemptions, one.cached_tokens)]
            + [*totals.terms]
        )
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
