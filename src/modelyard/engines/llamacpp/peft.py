"""From a PEFT folder to llama.cpp's form of a LoRA adapter.

Each pair ``lora_A``, ``lora_B`` of a module becomes ``TENSOR.lora_a``, ``TENSOR.lora_b`` under the base's own name of
that tensor; the numbers stay as they are, but for the rows of query and key: where llama.cpp rotates neighbouring
numbers and the original halves, their rows in the base were reordered, and so must be what is added to them.
"""

import re
import struct
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import BinaryIO

from modelyard.domain.facts import ModelFacts
from modelyard.engines.llamacpp.gguf_file import Tensor, write_gguf
from modelyard.engines.peft_folder import WEIGHTS, Pair, PeftConfig, read_folder
from modelyard.formats import ArtifactInvalidError, safetensors

_REORDERED = frozenset({"llama", "granite", "smollm3"})
"""Architectures in whose GGUF files the rows of query and key stand in another order than in the original."""
_PLAIN = frozenset({"qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2"})
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
_MODULE = re.compile(r"(?:model\.)?layers\.(\d{1,4})\.(\w+\.\w+)")
_TYPES = {"F32": (0, "f", 4), "F16": (1, "e", 2), "BF16": (30, "", 2)}
"""``ggml_type``, letter of ``struct`` and bytes of a number."""


def convert(folder: Path, file: Path, base: ModelFacts) -> None:
    """Write the adapter in ``folder`` to ``file``, for a base of these facts. Blocks.

    Raises:
        ArtifactInvalidError: it is broken, or does what llama.cpp cannot.
        OSError: a file cannot be read or written.
    """
    if base.architecture not in _REORDERED | _PLAIN:
        known = ", ".join(sorted(_REORDERED | _PLAIN))
        raise ArtifactInvalidError(
            f"A PEFT adapter cannot be converted for the architecture '{base.architecture}' (known: {known}). "
            "Convert it with llama.cpp's convert_lora_to_gguf.py and give the GGUF file."
        )
    config, named, data_at = read_folder(folder, engine="llama.cpp")
    pairs = _by_layer(named)
    # One of 0, which switches an adapter off, is none to llama.cpp: it would apply the adapter in full.
    alpha = config.lora_alpha * (sqrt(config.r) if config.use_rslora else 1.0) or float(config.r)
    keys: dict[str, str | float] = {
        "general.type": "adapter",
        "general.architecture": base.architecture,
        "adapter.type": "lora",
        # Fewer than a model's architecture promises: what the adapter adds is scaled by this over its rank.
        "adapter.lora.alpha": alpha,
    }
    with (folder / WEIGHTS).open("rb") as source:
        write_gguf(file, keys, _tensors(source, data_at, pairs, config, alpha, base))


def _by_layer(pairs: dict[str, Pair]) -> dict[tuple[int, str], Pair]:
    """Return the pairs by layer and module of it."""
    found: dict[tuple[int, str], Pair] = {}
    for name, pair in pairs.items():
        module = _MODULE.fullmatch(name)
        if module is None or module[2] not in _MODULES:
            raise ArtifactInvalidError(
                f"The adapter changes '{name[:200]}', which cannot be converted; known are {', '.join(_MODULES)}."
            )
        key = int(module[1]), module[2]
        if key in found:
            raise ArtifactInvalidError(f"The adapter has a pair for layer {key[0]}, {key[1]} twice.")
        found[key] = pair
    return found


def _tensors(
    source: BinaryIO,
    data_at: int,
    pairs: dict[tuple[int, str], Pair],
    config: PeftConfig,
    alpha: float,
    base: ModelFacts,
) -> Iterator[Tensor]:
    for (layer, module), (a, b) in sorted(pairs.items()):
        name = f"blk.{layer}.{_MODULES[module]}.weight"
        rank, size_in = a.shape
        size_out = b.shape[0]
        factor = _scale(config, f"layers.{layer}.{module}", rank) / (alpha / rank)
        yield Tensor(f"{name}.lora_a", (size_in, rank), _TYPES[a.dtype][0], _content(source, data_at, a))
        content = _content(source, data_at, b)
        if base.architecture in _REORDERED and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = base.heads if module == "self_attn.q_proj" else base.kv_heads
            content = _reordered(content, size_out, heads)
        kind = _TYPES[b.dtype][0]
        if abs(factor - 1) > 1e-6:
            kind, content = 0, _scaled(content, b.dtype, factor)
        yield Tensor(f"{name}.lora_b", (rank, size_out), kind, content)


def _scale(config: PeftConfig, module: str, rank: int) -> float:
    """Return what the product of a module's pair is multiplied with, as PEFT computes it."""
    alpha = next((value for key, value in config.alpha_pattern.items() if _matches(key, module)), config.lora_alpha)
    return alpha / (sqrt(rank) if config.use_rslora else rank)


def _matches(key: str, module: str) -> bool:
    """Say whether PEFT takes the pattern ``key`` for ``module``: its whole name or the end of it."""
    if not re.fullmatch(r"[\w.^$]{1,200}", key):
        raise ArtifactInvalidError(f"The adapter has the pattern '{key[:100]}'; only names of modules are read.")
    return f".model.{module}".endswith(f".{key.strip('^$')}")


def _content(source: BinaryIO, data_at: int, tensor: safetensors.Tensor) -> bytes:
    begin, end = tensor.data_offsets
    source.seek(data_at + begin)
    content = source.read(end - begin)
    if len(content) != end - begin:
        raise ArtifactInvalidError(f"The file '{WEIGHTS}' was cut while it was read. Fetch it again.")
    return content


def _reordered(content: bytes, rows: int, heads: int) -> bytes:
    """Return rows in llama.cpp's order: of each head, those of both halves by turns."""
    if not heads or rows % (2 * heads):
        raise ArtifactInvalidError(f"The adapter has {rows} rows for {heads} heads: it is for another base.")
    size = len(content) // rows
    half = rows // heads // 2
    order = (head * 2 * half + side * half + row for head in range(heads) for row in range(half) for side in range(2))
    return b"".join(content[row * size : (row + 1) * size] for row in order)


def _scaled(content: bytes, dtype: str, factor: float) -> bytes:
    """Return numbers times ``factor``, in 32 bits."""
    _, letter, size = _TYPES[dtype]
    count = len(content) // size
    if dtype == "BF16":
        wide = bytearray(4 * count)
        wide[2::4], wide[3::4] = content[0::2], content[1::2]
        content, letter = bytes(wide), "f"
    return struct.pack(f"<{count}f", *(value * factor for value in struct.unpack(f"<{count}{letter}", content)))
