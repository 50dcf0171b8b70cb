"""An engine by the roofline is as fast as the roofline says, and has the cache that the production's sums leave."""

import pytest

from modelyard.policy.engine_model import Speed
from modelyard.policy.fit import advise
from modelyard.policy.hardware import KINDS, offers_of_table
from modelyard.policy.precisions import PRECISIONS
from modelyard.policy.roofline import Load, decoding_s, pace_of, prompt_s, speed, weights_of
from modelyard.sim.fleet.models import MODELS
from modelyard.sim.hardware import Place, estimate

FP8 = next(one for one in PRECISIONS if one.name == "fp8")
PLACES = [("llama-3.1-8b", "fp8", Place("l4")), ("llama-3.3-70b", "fp8", Place("h100", 2))]


@pytest.mark.parametrize(("model", "precision", "place"), PLACES)
def test_the_four_numbers_come_close_to_the_roofline(model: str, precision: str, place: Place) -> None:
    facts, kind = MODELS[model], KINDS[place.kind]
    found: Speed = estimate(facts, precision, place).speed
    weights, pace = weights_of(facts, FP8), pace_of(facts, FP8, kind, place.count)
    for batch in (1, 8, 32):
        wanted = max(decoding_s(facts, weights, pace, batch, 768))
        assert found.iteration_s(batch, 0, batch * 768) == pytest.approx(wanted, rel=0.1), batch
    # A sum is more than the longer of both where both are alike, which short prompts are.
    assert found.iteration_s(1, 2048, 2048) == pytest.approx(prompt_s(facts, weights, pace, 2048), rel=0.15)


def test_the_cache_is_what_the_advice_leaves_beside_the_weights() -> None:
    offers = [offer for offer in offers_of_table() if offer.kind.name == "l40s"]
    rows = advise(MODELS["llama-3.1-8b"], offers, Load(1, 1, 1)).rows
    advised = next(row for row in rows if row.precision == "fp8" and row.count == 1)
    assert estimate(MODELS["llama-3.1-8b"], "fp8", Place("l40s")).kv_tokens == advised.kv_tokens_max


def test_the_parts_of_the_roofline_are_the_roofline() -> None:
    facts, kind, load = MODELS["llama-3.1-8b"], KINDS["h100"], Load(8, 512, 256)
    weights, pace = weights_of(facts, FP8), pace_of(facts, FP8, kind, 1)
    step_s, own_s = max(decoding_s(facts, weights, pace, 8, 640)), prompt_s(facts, weights, pace, 512)
    whole = speed(facts, weights, FP8, kind, 1, load)
    assert whole.ttft_ms == pytest.approx(1000 * (own_s + step_s))
    assert whole.itl_ms == pytest.approx(1000 * (256 * step_s + 8 * own_s) / 256)


@pytest.mark.parametrize(
    ("model", "precision", "place", "why"),
    [
        ("llama-3.3-70b", "", Place("h100"), "takes 132 GiB in bf16, and 1 x h100 have 72 GiB"),
        ("llama-3.2-3b", "q4_k_m", Place("cpu"), "say how much"),
        ("llama-3.2-3b", "fp8", Place("cpu", 1, 16), "fp8 cannot run on cpu: choose one of bf16, q8_0"),
    ],
)
def test_what_cannot_be_says_what_could(model: str, precision: str, place: Place, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        estimate(MODELS[model], precision, place)
