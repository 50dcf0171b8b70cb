"""The two levels of the simulator on the same small case: ticks of columns, and every iteration of an engine."""

import random

import numpy as np
import pytest

from modelyard.sim.fleet.queue import Line, Replicas, first_token_s, step

engine_model = pytest.importorskip("modelyard.policy.engine_model")
engine = pytest.importorskip("modelyard.sim.engine", reason="the request level is not in this tree")
tasks = pytest.importorskip("modelyard.sim.tasks")

A_S, B_S, C_S, D_S = 0.012, 2e-4, 6e-5, 2e-8
"""An 8B model on one accelerator, or nearly."""
PROMPT, ANSWER = 600, 150
SECONDS, TICK_S, SLOTS = 1200, 2.0, 128


def by_iterations(rate: float, seed: int) -> tuple[float, float]:
    """Return how many run on average, and the mean seconds to the first token, of every request followed."""
    chance = random.Random(seed)
    spec = tasks.EngineSpec(
        speed=engine_model.Speed(A_S, B_S, C_S, D_S), max_num_seqs=SLOTS, kv_blocks=40_000, hash_tokens=0
    )
    one, now_s, arrives_s, number = engine.Engine(spec), 0.0, 0.0, 0
    every, area, last_s = [], 0.0, 0.0
    while now_s < SECONDS:
        now_s = min(arrives_s, one.next_s)
        area, last_s = area + (one.running + one.waiting) * (now_s - last_s), now_s
        if arrives_s <= one.next_s:
            number += 1
            answer = max(1, round(chance.expovariate(1 / ANSWER)))
            every.append(tasks.Task(number, number=number, prompt_tokens=PROMPT, output_tokens=answer))
            one.submit(every[-1], now_s)
            arrives_s = now_s + chance.expovariate(rate)
        else:
            one.advance(now_s)
    begun = [task.first_s - task.come_s for task in every if task.first_s < float("inf")]
    return area / now_s, sum(begun) / len(begun)


def by_ticks(rate: float, seed: int) -> tuple[float, float]:
    """Return the same of columns."""
    chance = np.random.Generator(np.random.PCG64(seed))

    def of(value: float):
        return np.array([value])

    # A request's own steps, and what each other one on the replica adds to them: a token a step, and its prompt once.
    shared_s = ANSWER * (B_S + D_S * (PROMPT + ANSWER / 2)) + C_S * PROMPT
    replicas = Replicas(of(1.0), of(float(SLOTS)), of(ANSWER * A_S), of(shared_s))
    running, waiting, area, first_s = of(0.0), of(0.0), 0.0, 0.0
    for _ in range(int(SECONDS / TICK_S)):
        arrived = of(float(chance.poisson(rate * TICK_S)))
        done = step(Line(running, waiting, arrived), replicas, TICK_S, luck=chance.standard_normal(1))
        running, waiting = done.running, done.waiting
        area += running[0] + waiting[0]
        step_s = A_S + B_S * done.batch
        first_s += first_token_s(of(rate), of(1.0), of(C_S * PROMPT), step_s)[0]
    return area * TICK_S / SECONDS, first_s * TICK_S / SECONDS


@pytest.mark.parametrize("rate", [1.0, 4.0, 8.0])
def test_both_levels_see_the_same_load_and_the_same_first_tokens(rate: float) -> None:
    exact = [by_iterations(rate, seed) for seed in range(2)]
    ticks = [by_ticks(rate, seed) for seed in range(2)]
    runs, first_s = (sum(one) / 2 for one in zip(*exact, strict=True))
    runs_by_ticks, first_by_ticks_s = (sum(one) / 2 for one in zip(*ticks, strict=True))
    assert runs_by_ticks == pytest.approx(runs, rel=0.15)
    assert first_by_ticks_s == pytest.approx(first_s, rel=0.3)
