"""Parameters by a configuration alone: the numbers that the makers give."""

from typing import Any

import pytest
from tests.support.models import Tensor, gguf, llama
from tests.support.shapes import (
    BGE_LARGE,
    DEEPSEEK_V3,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MIXTRAL_8X7B,
    QWEN_3_30B_A3B,
    facts_of_config,
)

from modelyard.formats.folder import facts_of


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (LLAMA_3_8B, 8.03, 0),
        (LLAMA_3_70B, 70.55, 0),
        (MIXTRAL_8X7B, 46.70, 12.88),
        (QWEN_3_30B_A3B, 30.53, 3.35),
        (DEEPSEEK_V3, 671.0, 37.55),
    ],
)
def test_parameters_are_those_that_the_makers_give(config: dict[str, Any], billions: float, active: float) -> None:
    facts = facts_of_config(config)
    assert facts.parameters / 1e9 == pytest.approx(billions, rel=0.0005)
    assert facts.active_parameters / 1e9 == pytest.approx(active, rel=0.001)


def test_an_encoder_has_no_output_layer_and_what_a_bert_has_beside_is_counted() -> None:
    assert facts_of_config(BGE_LARGE).parameters == 335_141_888
    untold = {name: value for name, value in LLAMA_3_8B.items() if name != "tie_word_embeddings"}
    tied = facts_of_config(untold | {"model_type": "gemma"})
    assert facts_of_config(untold).parameters - tied.parameters == 128256 * 4096


def test_a_configuration_that_says_too_little_counts_nothing() -> None:
    assert facts_of_config({"model_type": "llama", "hidden_size": 64}).parameters == 0


def test_only_latent_attention_has_a_cache_that_cannot_be_divided() -> None:
    assert facts_of_config(DEEPSEEK_V3).kv_is_latent
    assert facts_of_config(DEEPSEEK_V3).kv_bytes_per_token == 61 * (512 + 64) * 2
    assert not facts_of_config(LLAMA_3_70B).kv_is_latent


def test_experts_of_a_gguf_file_are_found(tmp_path) -> None:
    file = tmp_path / "experts.gguf"
    own = {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.feed_forward_length": 4}
    values = llama() | own
    file.write_bytes(gguf(values, [Tensor("blk.0.ffn_up_exps.weight", (32, 64))]))
    facts = facts_of({file.name: file})
    layers, width = int(values["llama.block_count"]), int(values["llama.embedding_length"])
    assert (facts.experts, facts.experts_used, facts.parameters) == (8, 2, 2048)
    idle = layers * (8 - 2) * 3 * width * 4
    assert facts.active_parameters == (2048 - idle if idle < 2048 else 0)
