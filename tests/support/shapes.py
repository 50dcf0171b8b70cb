"""Configurations of models that everybody knows, as their makers publish them: what counts parameters and bytes."""

import json
from typing import Any

from modelyard.domain.facts import ModelFacts
from modelyard.formats.huggingface import facts_from

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
MIXTRAL_8X7B = LLAMA_3_8B | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN_3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
BERT: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": 30522, "tie_word_embeddings": True,
}  # fmt: skip

BGE_LARGE: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 30522, "max_position_embeddings": 512,
    "type_vocab_size": 2, "torch_dtype": "float32",
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536,
    "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4, "vocab_size": 50280, "torch_dtype": "float32",
}  # fmt: skip


def facts_of_config(config: dict[str, Any]) -> ModelFacts:
    """Return what a ``config.json`` says."""
    return facts_from({"config.json": json.dumps(config).encode()})
