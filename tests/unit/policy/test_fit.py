"""The adviser: memory against known facts, the rules, and what it recommends."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shapes import BERT, DEEPSEEK_V3, LLAMA_3_8B, LLAMA_3_70B, MAMBA, facts_of_config

from modelyard.domain.facts import ModelFacts
from modelyard.domain.nodes import Accelerator, Node
from modelyard.policy.fit import (
    AS_IT_IS,
    Advice,
    Row,
    Targets,
    advise,
    cheapest,
    is_encoder,
    load_of,
    memory_of,
    too_long,
)
from modelyard.policy.hardware import GIB, KINDS, Offer, offers_of_fleet, offers_of_table
from modelyard.policy.precisions import PRECISIONS, Purpose
from modelyard.policy.roofline import Load

EIGHT, SEVENTY = facts_of_config(LLAMA_3_8B), facts_of_config(LLAMA_3_70B)
SMALL = Load(1, 1792, 256)
HERE = Offer(KINDS["cpu"], 64 * GIB, 1, 0)


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
    assert not row(rows(EIGHT), "fp16", "t4", 1).fits


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
    advice = advise(facts, [*offers_of_table(), HERE], SMALL)
    assert {one.precision for one in advice.rows} == {"q4_k_m"}
    assert {one.kind for one in advice.rows} == {"cpu"}, "its engine computes on CPUs"
    assert rows(facts).reason == "GGUF models run on CPUs; ask for the kind 'cpu'"
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


def test_a_request_is_as_long_as_the_model_allows_where_nothing_is_asked_for() -> None:
    short = ModelFacts(parameters=10**9, context_length=512)
    assert load_of(short, 0, 256, 2) == Load(2, 256, 256)
    assert load_of(EIGHT, 0, 256, 2) == Load(2, 3840, 256)
    assert load_of(ModelFacts(), 100_000, 256, 2).context == 100_000
    assert "takes 8,192 tokens at most" in too_long(EIGHT, 100_000)
    assert [too_long(EIGHT, 8192), too_long(EIGHT, 0), too_long(ModelFacts(), 100_000)] == ["", "", ""]


def test_a_cpu_without_a_price_is_not_taken_before_gpus_for_what_is_too_large_or_too_slow_on_it() -> None:
    load = Load(16, 3840, 256)
    both = [Offer(KINDS["rtx4090"], 24 * GIB, 1, 500_000_000), HERE]
    large = advise(EIGHT, both, SMALL)
    assert large.recommended is not None
    assert large.recommended.kind == "rtx4090"
    assert "lowest price" in large.reason
    assert "too large a model for a CPU" in row(large, "q4_k_m", "cpu", 1).note
    only = advise(EIGHT, [HERE], load)
    assert only.recommended is None
    assert only.reason.startswith("nothing that fits is fast enough to use, 250 ms on a CPU; the fastest is ")
    assert advise(EIGHT, [HERE], load, targets=Targets(itl_ms=1e6)).recommended is not None, "it was asked for"
    small = advise(facts_of_config(BERT), both, Load(1, 256, 256))
    assert small.recommended is not None
    assert small.recommended.kind == "cpu"
    assert "it costs nothing, as no price is set for a cpu" in small.reason
    assert "fewest accelerators and is the fastest" not in small.reason


def test_llamacpp_is_advised_on_cpus_only() -> None:
    advice = advise(EIGHT, [*offers_of_table(), HERE], SMALL)
    assert {one.kind for one in advice.rows if one.engine == "llamacpp"} == {"cpu"}


def test_what_leaves_nothing_to_spare_is_told_and_taken_only_where_there_is_nothing_else() -> None:
    deep = facts_of_config(DEEPSEEK_V3)
    load = Load(16, 3840, 256)
    tight = row(rows(deep, load=load), "fp8", "b200", 4)
    assert (tight.fits, tight.is_tight) == (True, True)
    assert tight.note.startswith("tight: only 0.")
    roomy = rows(deep, load=load)
    assert roomy.recommended is not None
    assert not roomy.recommended.is_tight
    only = advise(deep, [Offer(KINDS["b200"], 180 * GIB, 4, 1)], load)
    assert only.recommended == cheapest(only.rows)
    assert "it may not start" in only.reason
    cheap, dear = (tight, roomy.recommended)
    assert cheapest([cheap, dear]) is dear
    assert cheapest([cheap, dear], is_tight_fine=True) is min(cheap, dear, key=lambda one: one.usd_per_million_output)


def test_a_mamba_makes_text_and_keeps_a_state() -> None:
    mamba = facts_of_config(MAMBA)
    assert mamba.state_bytes == 24 * 4 * 1536 * (16 + 4)
    assert not is_encoder(mamba)
    assert not is_encoder(ModelFacts(architecture="RwkvForCausalLM", layers=24))
    assert is_encoder(facts_of_config(BERT))
    assert mamba.parameters == pytest.approx(129e6, rel=0.06)


def test_16_bits_are_named_by_what_the_model_was_trained_in_and_the_accelerator_has() -> None:
    trained = facts_of_config(LLAMA_3_8B | {"torch_dtype": "float32"})
    assert row(rows(trained), "bf16", "l4", 1).quality == "rounded from the 32 bits that it was trained in"
    half = facts_of_config(LLAMA_3_8B | {"torch_dtype": "float16"})
    assert row(rows(half), "fp16", "l4", 1).quality == "as trained"
    assert not [one for one in rows(half).rows if one.precision == "bf16"]
    assert "a t4 has no BF16" in row(rows(EIGHT), "fp16", "t4", 2).quality
    assert not [one for one in rows(EIGHT).rows if (one.precision, one.kind) == ("bf16", "t4")]


def test_what_binds_is_the_prompts_of_others_where_they_take_most_of_the_time() -> None:
    long = row(rows(EIGHT, load=Load(64, 3840, 16)), "bf16", "h100", 1)
    assert long.speed.bound == "prompts"
    assert row(rows(EIGHT, load=Load(1, 16, 256)), "bf16", "h100", 1).speed.bound == "memory"


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
