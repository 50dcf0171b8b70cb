"""From a PEFT folder (``adapter_config.json``, ``adapter_model.safetensors``) to llama.cpp's form of a LoRA adapter.

Each pair ``lora_A``, ``lora_B`` of a module becomes ``TENSOR.lora_a``, ``TENSOR.lora_b`` under the base's own name of
that tensor; the numbers stay as they are, but for the rows of query and key: where llama.cpp rotates neighbouring
numbers and the original halves, their rows in the base were reordered, and so must be what is added to them.
"""

import re
import struct
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines.llamacpp.gguf_file import Tensor, write_gguf
from modelyard.formats import ArtifactInvalidError, safetensors
from modelyard.formats.cursor import opened

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1024 * 1024
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
_NAME = re.compile(
    r"(?:base_model\.model\.)?((?:model\.)?layers\.(\d{1,4})\.(\w+\.\w+))\.lora_([AB])(?:\.\w+)?\.weight"
)
_TYPES = {"F32": (0, "f", 4), "F16": (1, "e", 2), "BF16": (30, "", 2)}
"""``ggml_type``, letter of ``struct`` and bytes of a number."""


class _Config(msgspec.Struct, frozen=True):
    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    alora_invocation_tokens: list[int] | None = None


class _Pair(NamedTuple):
    a: safetensors.Tensor
    b: safetensors.Tensor


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
    config = _config(folder / CONFIG)
    with opened(folder / WEIGHTS, f"file '{WEIGHTS}'") as cursor:
        header = safetensors.read(cursor)
    pairs = _pairs(header.tensors)
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
        write_gguf(file, keys, _tensors(source, header.data_at, pairs, config, alpha, base))


def _config(file: Path) -> _Config:
    with opened(file, f"file '{CONFIG}'") as cursor:
        if cursor.size > _CONFIG_BYTES_MAX:
            raise ArtifactInvalidError(f"The file '{CONFIG}' has {cursor.size:,} bytes, which is no configuration.")
        raw = cursor.take(cursor.size)
    try:
        config = msgspec.json.decode(raw, type=_Config, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file '{CONFIG}' is no LoRA configuration: {error}.") from error
    beyond = {
        f"the kind '{config.peft_type[:32]}'": config.peft_type.upper() != "LORA",
        "DoRA (use_dora)": config.use_dora,
        "trained biases (bias)": config.bias != "none",
        "whole modules (modules_to_save)": bool(config.modules_to_save),
        "activation by tokens (alora_invocation_tokens)": bool(config.alora_invocation_tokens),
        f"the rank {config.r}": not 1 <= config.r <= 4096,
    }
    if found := next((what for what, is_there in beyond.items() if is_there), ""):
        raise ArtifactInvalidError(f"The adapter has {found}, which llama.cpp cannot apply. Merge it into its base.")
    return config


def _pairs(tensors: dict[str, safetensors.Tensor]) -> dict[tuple[int, str], _Pair]:
    halves: dict[tuple[int, str], dict[str, safetensors.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None or found[3] not in _MODULES:
            raise ArtifactInvalidError(
                f"The adapter changes '{name[:200]}', which cannot be converted; known are {', '.join(_MODULES)}."
            )
        if tensor.dtype not in _TYPES or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ArtifactInvalidError(
                f"The adapter has the tensor '{name[:200]}' of a type or shape that is no LoRA's."
            )
        halves.setdefault((int(found[2]), found[3]), {})[found[4]] = tensor
    for (layer, module), both in halves.items():
        if both.keys() != {"A", "B"} or both["A"].shape[0] != both["B"].shape[1]:
            raise ArtifactInvalidError(f"The adapter has no whole pair lora_A, lora_B for layer {layer}, {module}.")
    return {key: _Pair(both["A"], both["B"]) for key, both in halves.items()}


def _tensors(
    source: BinaryIO,
    data_at: int,
    pairs: dict[tuple[int, str], _Pair],
    config: _Config,
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


def _scale(config: _Config, module: str, rank: int) -> float:
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
