"""Random LoRA adapters in PEFT's format, of any Llama-like base: folders as users upload them.

The numbers come from a seed, so that an adapter can be made again and told
from all others. They are large enough to move an answer's logprobs beyond what
precision does to them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class BaseShape(NamedTuple):
    """What of a base decides the shapes of an adapter."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int

    def of(self, module: str) -> tuple[int, int]:
        """Return what goes into a module and what comes out."""
        inner, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, inner),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (inner, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[module]


SMOLLM = BaseShape("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 9, 3, 64, 1536)


def shape_of(folder: Path) -> BaseShape:
    """Return the shape of a model in a Hugging Face folder."""
    said = json.loads((folder / "config.json").read_text("utf-8"))
    heads = said["num_attention_heads"]
    return BaseShape(
        str(said.get("_name_or_path") or folder.name),
        said["num_hidden_layers"],
        said["hidden_size"],
        heads,
        said.get("num_key_value_heads", heads),
        said.get("head_dim") or said["hidden_size"] // heads,
        said["intermediate_size"],
    )


def write_lora(
    folder: Path,
    *,
    seed: int,
    shape: BaseShape = SMOLLM,
    rank: int = 8,
    alpha: int = 16,
    size: float = 0.05,
    modules: tuple[str, ...] = ATTENTION,
) -> Path:
    """Write an adapter into ``folder`` (made if need be); ``size`` is the spread of its numbers. Returns ``folder``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(_tensors(shape, seed, rank, size, modules)), folder / "adapter_model.safetensors", {"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder


def _tensors(
    shape: BaseShape, seed: int, rank: int, size: float, modules: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    import numpy as np

    chance = np.random.default_rng(seed)
    for layer in range(shape.layers):
        for module in modules:
            group = "self_attn" if module in ATTENTION else "mlp"
            name = f"base_model.model.model.layers.{layer}.{group}.{module}"
            read, written = shape.of(module)
            yield f"{name}.lora_A.weight", chance.normal(0.0, size, (rank, read)).astype(np.float32)
            yield f"{name}.lora_B.weight", chance.normal(0.0, size, (written, rank)).astype(np.float32)
