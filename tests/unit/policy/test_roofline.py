"""The roofline against what is known: data sheets' bounds, and a real run of vLLM."""

import pytest
from tests.support.shapes import LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B, facts_of_config

from modelyard.domain.facts import ModelFacts
from modelyard.policy.hardware import KINDS
from modelyard.policy.precisions import BF16, PRECISIONS
from modelyard.policy.roofline import BANDWIDTH_SHARE, Load, speed, weights_of

EIGHT, SEVENTY, MIXTRAL = map(facts_of_config, (LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B))
OF = {precision.name: precision for precision in PRECISIONS}


@pytest.mark.parametrize(
    ("precision", "gigabytes"),
    # 141.1 GB is the repository's; 39.8 GB that of hugging-quants' AWQ; 74.98 and 42.5 GB the GGUF files of 3.1.
    [("bf16", 141.1), ("int4", 39.8), ("fp8", 72.7), ("q8_0", 74.98), ("q4_k_m", 42.5)],
)
def test_weights_of_llama_70b_have_the_size_of_the_published_files(precision: str, gigabytes: float) -> None:
    assert weights_of(SEVENTY, OF[precision]).total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_one_request_is_never_faster_than_the_bandwidth_allows() -> None:
    weights = weights_of(EIGHT, BF16)
    found = speed(EIGHT, weights, BF16, KINDS["l4"], 1, Load(1, 1, 1000))
    bound = KINDS["l4"].bandwidth_gb_s * 1e9 / weights.total_bytes
    assert found.output_tokens_s < bound
    assert found.output_tokens_s == pytest.approx(bound * BANDWIDTH_SHARE, rel=0.02)
    assert found.bound == "memory"


def test_a_batch_reads_the_weights_once_until_arithmetic_is_what_it_waits_for() -> None:
    h100 = KINDS["h100"]
    weights = weights_of(EIGHT, BF16)
    one, many, most = (speed(EIGHT, weights, BF16, h100, 1, Load(batch, 16, 512)) for batch in (1, 16, 4096))
    assert 12 < many.output_tokens_s / one.output_tokens_s < 16
    assert (many.bound, most.bound) == ("memory", "memory" if most.itl_ms < many.itl_ms else most.bound)
    assert most.output_tokens_s / many.output_tokens_s < 4096 / 16


def test_a_mixture_reads_two_experts_for_one_token_and_nearly_all_for_a_batch() -> None:
    weights = weights_of(MIXTRAL, BF16)
    assert weights.read_bytes(1) == pytest.approx(2 * MIXTRAL.active_parameters, rel=0.001)
    assert 0.98 * weights.total_bytes < weights.read_bytes(16) < weights.total_bytes


def test_layers_that_take_turns_are_no_faster_on_two_accelerators() -> None:
    gguf, load = OF["q4_k_m"], Load(1, 100, 100)
    weights = weights_of(SEVENTY, gguf)
    one, two = (speed(SEVENTY, weights, gguf, KINDS["a100"], count, load) for count in (1, 2))
    assert one == two
    linked = [speed(SEVENTY, weights_of(SEVENTY, BF16), BF16, KINDS["h100"], count, load) for count in (2, 4)]
    assert 1.3 < linked[1].output_tokens_s / linked[0].output_tokens_s < 2


def test_a_real_run_of_vllm_is_met_within_a_quarter() -> None:
    """LLMServingSim's run: Llama-3.1-8B, vLLM 0.19, RTX 4090, 300 ShareGPT requests, about 40 at once: 195,753 tokens
    in 184 s with their ramps, 32 to 34 ms a step."""
    load = Load(40, 257_239 // 300, 195_753 // 300)
    found = speed(EIGHT, weights_of(EIGHT, BF16), BF16, KINDS["rtx4090"], 1, load)
    assert found.output_tokens_s == pytest.approx(195_753 / 184, rel=0.25)
    assert found.itl_ms == pytest.approx(33, rel=0.3)


@pytest.mark.parametrize(
    "facts",
    [
        ModelFacts(parameters=10**9, active_parameters=10**8, experts=8, experts_used=8, weights_bytes=2 * 10**9),
        ModelFacts(parameters=10**9, active_parameters=10**8, experts=8, experts_used=200),
        ModelFacts(parameters=10**9, active_parameters=10**8, experts=8),
        ModelFacts(weights_bytes=1),
    ],
)
def test_facts_that_do_not_go_together_make_a_speed_all_the_same(facts: ModelFacts) -> None:
    found = speed(facts, weights_of(facts, None), None, KINDS["h100"], 1, Load(100_000, 4096, 10_000_000))
    assert 0 < found.output_tokens_s < float("inf")
