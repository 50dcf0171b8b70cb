"""The adviser: memory against known facts, the rules, and what it recommends."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shapes import BERT, DEEPSEEK_V3, LLAMA_3_8B, LLAMA_3_70B, facts_of_config

from modelyard.domain.facts import ModelFacts
from modelyard.domain.nodes import Accelerator, Node
from modelyard.policy.fit import AS_IT_IS, Advice, Row, Targets, advise, memory_of
from modelyard.policy.hardware import GIB, KINDS, Offer, offers_of_fleet, offers_of_table
from modelyard.policy.precisions import PRECISIONS, Purpose
from modelyard.policy.roofline import Load

EIGHT, SEVENTY = facts_of_config(LLAMA_3_8B), facts_of_config(LLAMA_3_70B)
SMALL = Load(1, 1792, 256)


def rows(facts: ModelFacts, *, load: Load = SMALL, **given: Any) -> Advice:
    return advise(facts, offers_of_table(), load, **given)


def row(advice: Advice, precision: str, kind: str, count: int) -> Row:
    (found,) = [one for one in advice.rows if (one.precision, one.kind, one.count) == (precision, kind, count)]
    return found


def test_llama_70b_fits_two_h100_in_16_bits_and_one_in_4() -> None:
    advice = rows(SEVENTY)
    assert SEVENTY.kv_bytes_per_token == 320 * 1024
    assert not row(advice, "bf16", "h100", 1).fits
    assert row(advice, "bf16", "h100", 2).fits
    assert row(advice, "int4", "h100", 1).fits
    assert not row(advice, "int4", "l4", 1).fits
    # At 16 x 4,096 tokens the cache alone takes 20 GiB: two are not enough any more.
    assert not row(rows(SEVENTY, load=Load(16, 3840, 256)), "bf16", "h100", 2).fits


def test_llama_8b_fits_an_l4_with_24_gib() -> None:
    found = row(rows(EIGHT), "bf16", "l4", 1)
    assert found.fits
    assert found.memory.weights_bytes / 1e9 == pytest.approx(16.06, abs=0.01)
    assert found.memory.kv_bytes == 2048 * 128 * 1024
    assert not row(rows(EIGHT), "bf16", "t4", 1).fits


def test_the_cache_that_a_real_vllm_had_is_met_within_3_percent() -> None:
    """vLLM 0.19, Llama-3.1-8B, RTX 4090 of 25,250,627,584 bytes, 256 sequences: room for 41,408 tokens."""
    offer = Offer(KINDS["rtx4090"], 25_250_627_584, 1, 0)
    memory = memory_of(EIGHT, 2 * EIGHT.parameters, offer, 1, Load(256, 1, 1), is_gguf=False)
    room = memory.usable_bytes - memory.needed_bytes + memory.kv_bytes
    assert room // EIGHT.kv_bytes_per_token == pytest.approx(41_408, rel=0.03)


def test_a_latent_cache_is_on_every_accelerator_and_plain_heads_are_divided_down_to_one() -> None:
    load = Load(8, 8000, 192)
    deep, offer = facts_of_config(DEEPSEEK_V3), Offer(KINDS["h200"], 141 * GIB, 8, 0)
    each = [memory_of(deep, 0, offer, count, load, is_gguf=False).kv_bytes for count in (1, 8)]
    assert each[0] == each[1]
    plain = [memory_of(SEVENTY, 0, offer, count, load, is_gguf=False).kv_bytes for count in (1, 8, 16)]
    assert (plain[0], plain[2]) == (8 * plain[1], plain[1])  # of 8 KV heads none is halved


def test_the_recommendation_is_the_cheapest_that_fits_and_meets_the_targets() -> None:
    advice = rows(SEVENTY, load=Load(16, 3840, 256))
    able = [one for one in advice.rows if one.fits]
    assert advice.recommended is not None
    assert advice.recommended.usd_per_million_output == min(one.usd_per_million_output for one in able)
    fast = rows(SEVENTY, load=Load(16, 3840, 256), targets=Targets(itl_ms=25))
    assert fast.recommended is not None
    assert fast.recommended.speed.itl_ms <= 25
    assert fast.recommended.usd_per_million_output >= advice.recommended.usd_per_million_output
    never = rows(SEVENTY, targets=Targets(itl_ms=0.01))
    assert never.recommended is None
    assert "nothing that fits meets the target; the fastest is" in never.reason


@pytest.mark.parametrize("purpose", [Purpose.MATH, Purpose.CODE_EXACT, Purpose.EMBEDDINGS, Purpose.REPRODUCIBLE])
def test_what_must_not_be_quantised_is_not(purpose: Purpose) -> None:
    advice = rows(SEVENTY, purpose=purpose)
    assert advice.recommended is not None
    assert advice.recommended.precision == "bf16"
    assert advice.rules[0].startswith("Do not quantise: ")
    assert row(advice, "int4", "h100", 1).note.startswith("do not quantise: ")
    (only,) = [advise(SEVENTY, [Offer(KINDS["h100"], 80 * GIB, 1, 1)], SMALL, purpose=purpose)]
    assert only.recommended is None
    assert "quantised, which this purpose does not allow" in only.reason


def test_a_model_of_embeddings_is_one_without_being_told() -> None:
    advice = rows(facts_of_config(BERT))
    assert advice.recommended is not None
    assert advice.recommended.precision == "bf16"
    assert "vectors lose quality" in advice.rules[0]


def test_weights_that_are_quantised_stay_as_they_are() -> None:
    facts = ModelFacts(format="gguf", quantisation="Q4_K_M", parameters=8_030_000_000, weights_bytes=4_920_000_000,
                       layers=32, heads=32, kv_heads=8, head_size=128, embedding_size=4096, vocabulary=128256,
                       kv_bytes_per_token=131072)  # fmt: skip
    advice = rows(facts)
    assert {one.precision for one in advice.rows} == {"q4_k_m"}
    assert {one.engine for one in advice.rows} == {"llamacpp"}
    assert "quantised already (Q4_K_M)" in advice.rules[0]
    assert rows(EIGHT, is_fixed=True).rows[0].precision == "bf16"
    assert {one.precision for one in rows(ModelFacts(parameters=10**9), is_fixed=True).rows} == {AS_IT_IS}


def test_nothing_fits_is_told_with_the_least_that_it_takes() -> None:
    advice = advise(SEVENTY, [Offer(KINDS["l4"], 24 * GIB, 1, 1)], SMALL)
    assert advice.recommended is None
    assert advice.reason.startswith("nothing fits: the least is 38.9 GiB (int4 on 1 x l4)")


def test_accelerators_compute_only_what_they_can() -> None:
    advice = rows(EIGHT)
    assert not [one for one in advice.rows if one.precision == "fp8" and one.kind in ("a100", "a10", "t4")]
    assert not [one for one in advice.rows if one.precision == "int8" and one.kind == "b200"]
    fifty_six_heads = facts_of_config(LLAMA_3_8B | {"num_attention_heads": 28, "num_key_value_heads": 4})
    assert {one.count for one in rows(fifty_six_heads).rows if one.precision == "bf16"} == {1, 2, 4}


def test_prices_of_nodes_come_before_those_of_the_configuration_and_the_table() -> None:
    eight = tuple(Accelerator(at, "h100", 80 * GIB) for at in range(8))
    spot = Node("spot", eight, is_spot=True, price_nanousd=1_000_000_000)
    dear = Node("dear", eight[:2], price_nanousd=3_000_000_000)
    cheap = Node("cheap", eight, price_nanousd=2_000_000_000)
    unknown = Node("odd", (Accelerator(0, "abacus", GIB),))
    (offer,) = offers_of_fleet([spot, dear, cheap, unknown])
    assert (offer.price_nanousd, offer.count_max, offer.is_in_fleet) == (2_000_000_000, 8, True)
    free = Node("free", eight)
    assert offers_of_fleet([free], {"h100": 7})[0].price_nanousd == 7
    assert offers_of_fleet([free])[0].price_nanousd == round(KINDS["h100"].price_usd * 1e9)


@settings(deadline=None, max_examples=40)
@given(
    concurrency=st.integers(1, 512),
    context=st.integers(2, 200_000),
    precision=st.sampled_from([one.name for one in PRECISIONS]),
)
def test_more_accelerators_never_need_more_of_each_and_more_requests_never_less(
    concurrency: int, context: int, precision: str
) -> None:
    output = max(1, context // 4)
    less = rows(EIGHT, load=Load(concurrency, context - output, output))
    more = rows(EIGHT, load=Load(concurrency + 1, context - output, output))
    for kind in ("h100", "l4"):
        needs = [one.memory.needed_bytes for one in less.rows if (one.precision, one.kind) == (precision, kind)]
        assert needs == sorted(needs, reverse=True)
    for one, other in zip(less.rows, more.rows, strict=True):
        assert other.memory.needed_bytes > one.memory.needed_bytes
        assert one.fits == (one.memory.needed_bytes <= one.memory.usable_bytes)
        assert one.fits or one.note.startswith("needs ")
