"""An engine's speed is learned from its counters, and what it serves follows."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.engine_model import (
    SAMPLES_MIN,
    EngineModel,
    Look,
    Sample,
    between,
    by_model,
    by_slots,
    learn,
)

A, B, C, D = 0.022, 0.00035, 0.0001, 2e-8
"""An engine like the Splitwise measurements of a 70B model."""


def iteration(batch: float, prefill: float, kv: float) -> float:
    return A + B * batch + C * prefill + D * kv


def sample(chance: random.Random, noise: float = 0.0) -> Sample:
    batch, prefill, kv = chance.uniform(1, 64), chance.uniform(0, 400), chance.uniform(1e3, 4e5)
    return Sample(iteration(batch, prefill, kv) * chance.uniform(1 - noise, 1 + noise), batch, prefill, kv)


def taught(samples: int, noise: float = 0.0, seed: int = 1) -> EngineModel:
    chance, model = random.Random(seed), EngineModel()
    for _ in range(samples):
        model = learn(model, sample(chance, noise))
    return model


def test_a_fit_finds_the_engine() -> None:
    model = taught(60)
    assert model.is_known
    for batch, prefill, kv in ((1, 0, 1000), (32, 200, 2e5), (64, 400, 4e5)):
        assert model.iteration_s(batch, prefill, kv) == pytest.approx(iteration(batch, prefill, kv), rel=0.03)


def test_a_noisy_fit_is_close_and_an_engine_that_changes_is_followed() -> None:
    model = taught(300, noise=0.2)
    assert model.iteration_s(32, 200, 2e5) == pytest.approx(iteration(32, 200, 2e5), rel=0.1)
    chance = random.Random(2)
    for _ in range(300):  # the same engine, twice as slow: another one took half of the accelerator
        one = sample(chance)
        model = learn(model, msgspec.structs.replace(one, seconds=2 * one.seconds))
    assert model.iteration_s(32, 200, 2e5) == pytest.approx(2 * iteration(32, 200, 2e5), rel=0.1)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_an_engine_on_other_hardware_is_known_anew_after_a_hundred_samples(factor: float) -> None:
    model, chance = taught(300, noise=0.1), random.Random(2)
    for _ in range(100):
        one = sample(chance, noise=0.1)
        model = learn(model, msgspec.structs.replace(one, seconds=factor * one.seconds))
    assert model.is_known
    assert model.iteration_s(32, 200, 2e5) == pytest.approx(factor * iteration(32, 200, 2e5), rel=0.2)


def test_capacity_is_that_of_a_full_batch() -> None:
    capacity = by_model(taught(60), batch=32, prompt_tokens=1000, completion_tokens=200)
    assert capacity is not None
    tokens_s = 32 / iteration(32, 32 * 1000 / 200, 32 * 1100)
    assert capacity.tokens_s == pytest.approx(tokens_s, rel=0.03)
    assert capacity.requests_s == pytest.approx(tokens_s / 200, rel=0.03)


def test_nothing_is_claimed_before_there_are_samples_that_agree() -> None:
    assert by_model(taught(SAMPLES_MIN - 1), batch=8, prompt_tokens=10, completion_tokens=10) is None
    chance, model = random.Random(3), EngineModel()
    for _ in range(60):
        model = learn(model, msgspec.structs.replace(sample(chance), seconds=10 ** chance.uniform(-3, 1)))
    assert by_model(model, batch=8, prompt_tokens=10, completion_tokens=10) is None


def test_two_looks_give_the_mean_iteration() -> None:
    before = Look(10.0, 4, 1000, 500, kv_tokens=2000)
    found = between(before, Look(12.0, 4, 1400, 700, kv_tokens=3000))
    assert found == Sample(seconds=0.04, batch=4, prefill_tokens=8.0, kv_tokens=2500)


def test_an_engine_that_counts_its_iterations_need_not_be_guessed_at() -> None:
    before = Look(10.0, 4, 1000, 500, iterations=100.0)
    found = between(before, Look(12.0, 8, 1400, 860, iterations=160.0))
    assert found == Sample(seconds=2 / 60, batch=6.0, prefill_tokens=400 / 60, kv_tokens=0.0)
    # Tokens that come several at once, or are counted at a request's end only, say nothing of the batch.
    late = between(before, Look(12.0, 8, 1400, 500, iterations=160.0))
    assert late is not None
    assert late.batch == 6.0
    alone = between(Look(10.0, 2, 1000, 500, iterations=100.0), Look(12.0, 2, 1000, 500, iterations=160.0))
    assert alone is not None
    assert alone.batch == 2.0
    assert between(before, Look(12.0, 4, 1400, 10, iterations=160.0)) is None  # it began anew
    assert between(before, Look(12.0, 8, 1400, 860, iterations=3.0)) is None  # it began anew


def test_a_quiet_time_in_which_all_terms_move_together_leads_nowhere() -> None:
    chance, model = random.Random(4), taught(60)
    for _ in range(2000):
        batch = chance.choice([1.0, 2.0])
        model = learn(model, Sample(iteration(batch, 10 * batch, 500 * batch), batch, 10 * batch, 500 * batch))
    assert all(0.0 <= weight < 0.1 for weight in model.weights)
    assert model.iteration_s(1, 10, 500) == pytest.approx(iteration(1, 10, 500), rel=0.01)


@pytest.mark.parametrize(
    "after",
    [
        Look(10.01, 4, 1400, 700),  # too soon
        Look(99.0, 4, 1400, 700),  # too late
        Look(12.0, 0, 1400, 700),  # idle
        Look(12.0, 4, 1400, 500),  # nothing written
        Look(12.0, 4, 0, 10),  # begun anew
    ],
)
def test_looks_that_say_nothing_give_no_sample(after: Look) -> None:
    assert between(Look(10.0, 4, 1000, 500), after) is None


def test_slots_say_it_where_the_engine_does_not() -> None:
    capacity = by_slots(8, service_s=4.0, completion_tokens=100)
    assert capacity is not None
    assert (capacity.requests_s, capacity.tokens_s) == (2.0, 200.0)
    assert by_slots(8, service_s=0.0) is None


@given(
    st.lists(
        st.builds(Sample, st.floats(1e-5, 100), st.floats(0.5, 1000), st.floats(0, 1e5), st.floats(0, 1e7)),
        max_size=80,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_samples_break_the_fit(samples: list[Sample]) -> None:
    model = EngineModel()
    for one in samples:
        model = learn(model, one)
    assert model.iteration_s(8, 100, 1000) > 0
    capacity = by_model(model, batch=8, prompt_tokens=100, completion_tokens=50)
    assert capacity is None or capacity.requests_s > 0
