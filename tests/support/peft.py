"""Random LoRA adapters of SmolLM2-135M in PEFT's form: strong enough to be told apart by their logprobs."""

import json
import random
import struct
from array import array
from pathlib import Path
from typing import Any

from tests.support.models import safetensors

LAYERS, EMBEDDING, QUERIES, KEYS, FEED = 30, 576, 576, 192, 1536
SHAPES = {
    "self_attn.q_proj": (EMBEDDING, QUERIES),
    "self_attn.k_proj": (EMBEDDING, KEYS),
    "self_attn.v_proj": (EMBEDDING, KEYS),
    "self_attn.o_proj": (QUERIES, EMBEDDING),
    "mlp.gate_proj": (EMBEDDING, FEED),
    "mlp.down_proj": (FEED, EMBEDDING),
}
ATTENTION = tuple(name for name in SHAPES if name.startswith("self_attn"))


def peft_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    spread: float = 0.05,
    modules: tuple[str, ...] = ATTENTION,
    dtype: str = "F32",
    shapes: dict[str, tuple[int, int]] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter to ``folder`` and return it; ``config`` is what its configuration says beside."""
    chance = random.Random(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            size_in, size_out = (shapes or SHAPES)[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            for half, shape in (("A", [rank, size_in]), ("B", [size_out, rank])):
                numbers = array("f", (chance.gauss(0, spread) for _ in range(shape[0] * shape[1])))
                tensors[f"{name}.lora_{half}.weight"] = (dtype, shape, stored(numbers, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors, {"format": "pt"}))
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def stored(numbers: "array[float]", dtype: str) -> bytes:
    """Return numbers as a file has them."""
    content = numbers.tobytes()
    if dtype == "BF16":
        return b"".join(content[at + 2 : at + 4] for at in range(0, len(content), 4))
    return struct.pack(f"<{len(numbers)}e", *numbers) if dtype == "F16" else content
