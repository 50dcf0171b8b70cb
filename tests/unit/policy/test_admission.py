"""Admission by the memory of a replica's KV cache."""

import statistics
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelyard.policy.admission import (
    OUTPUT_DEFAULT,
    SAMPLED_ONE_IN,
    SAMPLES,
    SAMPLES_OF_TENANT_MIN,
    TENANTS_MAX,
    KvAccount,
    OutputPredictor,
    can_ever_fit,
    reservation,
)
from modelyard.policy.job import Job


def job(prompt: int, predicted: int = 32, most: int = 4096) -> Job:
    return Job("ten-a", prompt_tokens=prompt, output_tokens=predicted, output_max=most)


@pytest.mark.parametrize(
    ("made", "generated", "tokens"),
    [
        (job(100, 200), 0, 300),
        (job(100, 200), 150, 300),
        (job(100, 200), 180, 312),  # 32 more than there are, at least
        (job(100, 200), 500, 632),
        (job(100, 8), 0, 132),
        (job(100, 8, most=16), 0, 116),  # never more than it may
        (job(100, 200, most=200), 199, 300),
        (job(100, 200, most=200), 230, 330),  # an engine that goes on nevertheless uses what it uses
        (job(100, 1, most=1), 0, 101),
    ],
)
def test_reservation_is_prompt_and_predicted_output(made: Job, generated: int, tokens: int) -> None:
    assert reservation(made, generated) == tokens


def test_replica_takes_what_fits_into_its_share() -> None:
    account = KvAccount(1000)
    account.take(job(400, 85))
    assert account.fits(job(400, 85), 0.97)
    assert not account.fits(job(400, 86), 0.97)
    assert repr(account) == "<KvAccount 485/1000 tokens, 1 jobs>"


def test_idle_replica_takes_any_job_whose_prompt_fits() -> None:
    account = KvAccount(1000)
    assert account.fits(job(1000, 4000), 0.97)
    assert not account.fits(job(1001), 0.97)
    account.take(job(1, 1, most=1))
    assert not account.fits(job(1000, 4000), 0.97)


def test_unknown_capacity_admits_by_slots_only() -> None:
    account = KvAccount()
    account.take(job(10**9))
    assert account.fits(job(10**9), 0.97)
    assert can_ever_fit(job(10**9), 0)


def test_prompt_longer_than_the_cache_never_fits() -> None:
    assert can_ever_fit(job(1000), 1000)
    assert not can_ever_fit(job(1001), 1000)


def test_what_generates_nothing_is_read_by_turns_and_may_be_longer_than_the_cache() -> None:
    texts = job(5000, 0, most=0)
    assert can_ever_fit(texts, 1000)
    account = KvAccount(1000)
    assert account.fits(texts, 0.97)
    account.take(texts)
    assert not account.fits(job(10), 0.97), "until it has been read"
    account.give_back(texts)
    account.take(job(10))
    assert not account.fits(texts, 0.97)


def test_answer_longer_than_predicted_reserves_more() -> None:
    account, long = KvAccount(1000), job(100, 200)
    account.take(long)
    account.grow(long, 100)
    assert account.reserved == 300
    account.grow(long, 400)
    assert account.reserved == 532
    account.grow(long, 300)
    assert account.reserved == 532, "a reservation never shrinks"
    account.give_back(long)
    account.grow(long, 600)
    assert account.reserved == 0, "a job that has left reserves nothing"


class AccountMachine(RuleBasedStateMachine):
    """Jobs come, grow, are changed by their owner, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.account = KvAccount(10_000)
        self.live: list[Job] = []

    @rule(prompt=st.integers(1, 9000), predicted=st.integers(1, 3000), most=st.integers(1, 5000))
    def arrive(self, prompt: int, predicted: int, most: int) -> None:
        new = job(prompt, predicted, most)
        if self.account.fits(new, 0.97):
            self.account.take(new)
            self.live.append(new)
            assert len(self.live) == 1 or self.account.reserved <= 9700
        else:
            assert self.live, "an idle replica refused a job whose prompt fits"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), generated=st.integers(0, 6000))
    def grow(self, data: st.DataObject, generated: int) -> None:
        chosen = data.draw(st.sampled_from(self.live))
        before = self.account.held[chosen]
        self.account.grow(chosen, generated)
        assert self.account.held[chosen] >= before
        assert self.account.held[chosen] >= chosen.prompt_tokens + min(generated, chosen.output_max)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), predicted=st.integers(1, 9000))
    def predict_anew(self, data: st.DataObject, predicted: int) -> None:
        data.draw(st.sampled_from(self.live)).output_tokens = predicted

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.live))
        self.live.remove(chosen)
        self.account.give_back(chosen)

    @invariant()
    def adds_up(self) -> None:
        assert self.account.reserved == sum(self.account.held.values()) >= 0
        assert set(self.account.held) == set(self.live)
        assert self.live or self.account.reserved == 0


TestAccount = AccountMachine.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_prediction_before_any_answer_is_the_default_or_what_the_request_may() -> None:
    predictor = OutputPredictor()
    assert predictor.predict("ten-a", 4096) == OUTPUT_DEFAULT
    assert predictor.predict("ten-a", 16) == 16


def test_tenant_is_judged_by_its_own_answers_from_the_twentieth() -> None:
    predictor = OutputPredictor()
    for _ in range(1000):
        predictor.observe("ten-b", 50)
    for _ in range(SAMPLES_OF_TENANT_MIN - 1):
        predictor.observe("ten-a", 900)
    assert predictor.predict("ten-b", 4096) == 50
    everybody = predictor.predict("ten-a", 4096)
    assert everybody == predictor.predict("ten-new", 4096)
    predictor.observe("ten-a", 900)
    assert predictor.predict("ten-a", 4096) == 900
    assert predictor.predict("ten-a", 100) == 100


def note_all(predictor: OutputPredictor, lengths: list[int]) -> None:
    """Let ``predictor`` note each of ``lengths``: when enough are known, it takes one answer in a few."""
    for index, length in enumerate(lengths):
        for _ in range(1 if index < SAMPLES else SAMPLED_ONE_IN):
            predictor.observe("ten-a", length)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=2 * SAMPLES))
def test_prediction_is_a_p90_of_recent_answers(lengths: list[int]) -> None:
    predictor = OutputPredictor()
    note_all(predictor, lengths)
    told = predictor.predict("ten-a", 10_000)
    # It may be as old as a tenth of the samples: the exact P90 of one of those moments.
    stale = max(1, min(len(lengths), SAMPLES) // 10)
    moments = [lengths[: len(lengths) - back] for back in range(stale)]
    exact = [sorted(seen[-SAMPLES:])[(len(seen[-SAMPLES:]) * 9 - 1) // 10] for seen in moments if seen]
    assert told in exact


def test_sample_is_gone_after_exactly_as_many_new_ones() -> None:
    predictor = OutputPredictor()
    tenth = SAMPLES // 10
    note_all(predictor, [0] * (SAMPLES - 1) + [1000] + [0] * (SAMPLES - tenth) + [1000] * tenth + [0] * tenth)
    assert predictor.predict("ten-a", 4096) == 0, "one answer in ten is long, and one more only if the old one stayed"


def test_prediction_follows_a_change_of_traffic() -> None:
    predictor, random = OutputPredictor(), Random(1)
    for mean, count in ((100, SAMPLES), (2000, SAMPLES * SAMPLED_ONE_IN)):
        lengths = [int(random.gauss(mean, mean / 10)) for _ in range(count)]
        for length in lengths:
            predictor.observe("ten-a", length)
        assert predictor.predict("ten-a", 10_000) == pytest.approx(statistics.quantiles(lengths, n=10)[8], rel=0.02)


def test_tenants_that_take_turns_are_sampled_alike_once_enough_is_known() -> None:
    predictor = OutputPredictor()
    for length in [10] * SAMPLES + [900] * (SAMPLES * SAMPLED_ONE_IN):
        for number in range(SAMPLED_ONE_IN):
            predictor.observe(f"ten-{number}", length)
    assert {predictor.predict(f"ten-{number}", 4096) for number in range(SAMPLED_ONE_IN)} == {900}


def test_predictor_forgets_tenants_beyond_its_bound_and_bears_absurd_lengths() -> None:
    predictor = OutputPredictor()
    for number in range(TENANTS_MAX + 10):
        predictor.observe(f"ten-{number}", 2**40)
    assert repr(predictor).endswith(f"{TENANTS_MAX} tenants>")
    assert predictor.predict("ten-0", 2**50) == 2**32 - 1
