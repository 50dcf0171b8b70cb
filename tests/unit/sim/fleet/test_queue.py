"""The closed form of a tick against a simulation of every request, and what must hold of it whatever comes."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.sim.fleet.queue import Line, Replicas, first_token_s, step, wait_within

TICK_S = 2.0


def replicas_of(ready, slots, fixed_s, shared_s):
    return Replicas(*(np.array([float(one)]) for one in (ready, slots, fixed_s, shared_s)))


def every_request(rate, ready, slots, fixed_s, shared_s, *, seconds, seed):
    """Simulate each request: Poisson arrivals, exponential lengths at the pace of the batch, one line.

    Return the mean number that runs, the share that waited and their mean wait.
    """
    chance = random.Random(seed)
    now_s, running, line = 0.0, 0, deque()
    area, waited, wait_s, served = 0.0, 0, 0.0, 0
    while now_s < seconds:
        ends = running / (fixed_s + running / ready * shared_s) if running else 0.0
        passed_s = chance.expovariate(rate + ends)
        area, now_s = area + running * passed_s, now_s + passed_s
        if chance.random() * (rate + ends) < rate:
            if running < ready * slots:
                running, served = running + 1, served + 1
            else:
                line.append(now_s)
        else:
            running -= 1
            if line:
                waited, wait_s, served = waited + 1, wait_s + now_s - line.popleft(), served + 1
                running += 1
    return area / now_s, waited / served, wait_s / max(waited, 1)


def by_ticks(rate, ready, slots, fixed_s, shared_s, *, seconds, seed):
    """Return the same of the closed form."""
    chance = np.random.Generator(np.random.PCG64(seed))
    of = np.array
    running, waiting = of([0.0]), of([0.0])
    area = waited = wait_s = served = late = 0.0
    for _ in range(int(seconds / TICK_S)):
        had = waiting[0] > 0
        arrived = of([float(chance.poisson(rate * TICK_S))])
        line = Line(running, waiting, arrived)
        done = step(line, replicas_of(ready, slots, fixed_s, shared_s), TICK_S, luck=chance.standard_normal(1))
        running, waiting = done.running, done.waiting
        area += running[0]
        served += done.admitted[0]
        late += waiting[0] * TICK_S
        if not had and waiting[0] == 0:
            share, mean_s = wait_within(of([rate]), of([float(ready * slots)]), done.service_s, of([1.0]))
            waited += done.admitted[0] * share[0]
            wait_s += done.admitted[0] * share[0] * mean_s[0]
        else:
            waited += done.admitted[0]
    return area * TICK_S / seconds, waited / served, (wait_s + late) / max(waited, 1e-9)


@pytest.mark.parametrize(
    ("rate", "ready", "slots", "fixed_s", "shared_s"),
    [
        (0.5, 1, 16, 2.0, 0.1),  # mostly idle
        (6.0, 1, 64, 2.0, 0.1),  # two thirds of what it serves
        (20.0, 4, 32, 1.0, 0.1),  # several replicas
        (40.0, 2, 64, 0.3, 0.02),  # answers shorter than a tick
    ],
)
def test_as_many_run_as_if_each_request_were_followed(rate, ready, slots, fixed_s, shared_s) -> None:
    exact = [every_request(rate, ready, slots, fixed_s, shared_s, seconds=2000, seed=seed)[0] for seed in range(3)]
    closed = by_ticks(rate, ready, slots, fixed_s, shared_s, seconds=2000, seed=1)[0]
    assert closed == pytest.approx(sum(exact) / len(exact), rel=0.1)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_waits_are_of_the_size_that_following_each_request_gives(load) -> None:
    # Few slots, where waits are: the mean over all requests, in seconds.
    ready, slots, fixed_s, shared_s = 2, 8, 2.0, 0.25
    rate = load * ready * slots / (fixed_s + slots * shared_s)
    exact = [every_request(rate, ready, slots, fixed_s, shared_s, seconds=8000, seed=seed) for seed in range(3)]
    closed = [by_ticks(rate, ready, slots, fixed_s, shared_s, seconds=8000, seed=seed) for seed in range(3)]
    mean_exact = sum(share * wait_s for _, share, wait_s in exact) / 3
    mean_closed = sum(share * wait_s for _, share, wait_s in closed) / 3
    assert 0.6 * mean_exact - 0.1 <= mean_closed <= 1.7 * mean_exact + 0.2


NUMBER = st.floats(0, 1000)


@settings(deadline=None, max_examples=200)
@given(NUMBER, NUMBER, NUMBER, st.integers(0, 20), st.integers(1, 256), st.floats(1e-3, 60), st.floats(1e-6, 2))
def test_nobody_is_lost_and_no_slot_is_taken_twice(running, waiting, arrived, ready, slots, fixed_s, shared_s) -> None:
    of = np.array
    running = min(running, ready * slots)
    line = Line(of([running]), of([waiting]), of([arrived]))
    done = step(line, replicas_of(ready, slots, fixed_s, shared_s), TICK_S)
    offered = waiting + arrived
    assert done.admitted[0] + done.waiting[0] == pytest.approx(offered)
    assert running + done.admitted[0] == pytest.approx(done.done[0] + done.running[0])
    assert -1e-9 <= done.running[0] <= ready * slots * (1 + 1e-9) + 1e-9
    assert done.done[0] >= -1e-9
    if ready == 0:
        assert done.admitted[0] == 0


def test_prompts_of_others_slow_the_first_token() -> None:
    of = np.array
    alone, beside = (first_token_s(of([rate]), of([1.0]), of([0.1]), of([0.02]))[0] for rate in (0.0, 5.0))
    assert alone == pytest.approx(0.14)
    assert beside == pytest.approx(0.24)
