"""What Hugging Face calls the tensors and sizes of a GGUF file, for the architectures that are alike in both.

llama.cpp stores the queries and keys of its ``llama`` with the two halves of
each rotated pair side by side; the order is undone here. Of others it keeps
the order. What is not listed is refused: a model that loads and answers
slightly wrong would be worse than none.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from modelyard.formats.convert import ConvertError
from modelyard.formats.convert.gguf_source import GgufSource

if TYPE_CHECKING:
    import numpy as np

Config = dict[str, Any]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"
"""Llama 3.1's factors of the rotation; in Hugging Face's form they are numbers in the configuration."""
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
"""What all models with them have in common."""


class Architecture(NamedTuple):
    """An architecture of llama.cpp and what Hugging Face makes of it."""

    name: str
    model_class: str
    is_permuted: bool = False
    """Queries and keys are stored pairwise."""
    extend: Callable[[GgufSource, Config], None] = lambda source, config: None
    """Adds what only this architecture has to its configuration."""


def _llama(source: GgufSource, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in source.names
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in source.names
    config["pretraining_tp"] = 1


def _qwen2(source: GgufSource, config: Config) -> None:
    config["use_sliding_window"] = False


def _qwen3(source: GgufSource, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in source.names
    config["use_sliding_window"] = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", is_permuted=True, extend=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", extend=_qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", extend=_qwen3),
}
"""By llama.cpp's name, which is Hugging Face's ``model_type`` as well."""


def architecture_of(source: GgufSource) -> Architecture:
    """Return what a file's architecture is.

    Raises:
        ConvertError: it is not one of ``ARCHITECTURES``, or has something that they lack.
    """
    found = ARCHITECTURES.get(source.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConvertError(
            f"The GGUF file is of the architecture '{source.architecture}', which is not converted; {known} are. "
            "Take the model from where its maker publishes it: modelyard deploy hf://OWNER/MODEL"
        )
    if source.facts.is_adapter:
        raise ConvertError("The GGUF file is a LoRA adapter and no model. Give its base.")
    if source.own("expert_count", 0):
        raise ConvertError("The GGUF file is a mixture of experts, whose tensors are not converted.")
    if (scaling := source.own("rope.scaling.type", "none")) not in ("none", ""):
        raise ConvertError(f"The GGUF file stretches its context by '{scaling}', which is not converted.")
    return found


def config_of(source: GgufSource, architecture: Architecture) -> Config:
    """Return ``config.json``.

    Raises:
        ConvertError: the file lacks a size, or has numbers that the configuration cannot say.
    """
    heads, hidden = source.number("attention.head_count"), source.number("embedding_length")
    head_size = int(source.own("attention.key_length") or source.own("rope.dimension_count") or hidden // heads)
    if (rotated := source.own("rope.dimension_count", head_size)) != head_size:
        raise ConvertError(f"The GGUF file rotates {rotated} of {head_size} numbers of a head; only all are converted.")
    theta = float(source.own("rope.freq_base", 10_000.0))
    config: Config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.name,
        "hidden_size": hidden,
        "intermediate_size": source.number("feed_forward_length"),
        "num_hidden_layers": source.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.own("attention.head_count_kv", heads)),
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": _short(source.own("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _short(theta),
        "max_position_embeddings": source.number("context_length"),
        "vocab_size": source.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in source.names,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    architecture.extend(source, config)
    if _FREQUENCIES in source.names:
        config["rope_scaling"] = _scaling(source, theta, head_size)
    return config


def name_of(tensor: str, layers: int) -> str:
    """Return Hugging Face's name of a tensor, "" for one that has none there.

    Raises:
        ConvertError: nobody knows what it is.
    """
    if tensor == _FREQUENCIES:
        return ""
    if tensor in _TOP:
        return _TOP[tensor]
    parts = tensor.split(".")
    is_block = len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and int(parts[1]) < layers
    if is_block and parts[2] in _BLOCK and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    raise ConvertError(f"The GGUF file has the tensor '{tensor}', which its architecture should not have.")


def order_of(tensor: str, architecture: Architecture, config: Config) -> "np.ndarray | None":
    """Return which row of a tensor comes when, None when they stay where they are."""
    import numpy as np

    kind = tensor.split(".")[-2]
    if not architecture.is_permuted or kind not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads"] if kind == "attn_q" else config["num_key_value_heads"]
    rows = np.arange(heads * config["head_dim"])
    return rows.reshape(heads, config["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)


def _scaling(source: GgufSource, theta: float, head_size: int) -> Config:
    """Return Llama 3.1's scaling from its factors, if they are what its formula gives."""
    import numpy as np

    factors = np.concatenate(list(source.rows(_FREQUENCIES))).reshape(-1)
    factor = float(factors.max())
    waves = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = (_ORIGINAL / waves - _LOW) / (_HIGH - _LOW)
    expected = 1 / ((1 - smooth) / factor + smooth)
    expected[waves < _ORIGINAL / _HIGH] = 1.0
    expected[waves > _ORIGINAL / _LOW] = factor
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ConvertError(f"The GGUF file has factors of rotation ('{_FREQUENCIES}') that are not those of Llama 3.")
    return {
        "rope_type": "llama3",
        "factor": _short(factor),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _short(value: float) -> float:
    """Return a number of 32 bits as its maker wrote it: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
