"""Reading a LoRA adapter in PEFT's form (``adapter_config.json``, ``adapter_model.safetensors``) with our own readers.

What every engine that takes such folders wants to know before it loads one:
that it is whole, that it is a LoRA adapter and nothing beyond, and which
modules its pairs of matrices change. Whether they fit a base, the engine says.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from modelyard.formats import ArtifactInvalidError, safetensors
from modelyard.formats.cursor import opened

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK_MAX = 4096
_CONFIG_BYTES_MAX = 1024 * 1024
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_DTYPES = ("F32", "F16", "BF16")


class PeftConfig(msgspec.Struct, frozen=True):
    """What of ``adapter_config.json`` decides what the adapter does."""

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


class Pair(NamedTuple):
    """The halves of what is added to one module: ``a`` reads (rank, size in), ``b`` writes (size out, rank)."""

    a: safetensors.Tensor
    b: safetensors.Tensor


class PeftFolder(NamedTuple):
    """An adapter that is whole; ``pairs`` by the names of the modules, like ``model.layers.0.self_attn.q_proj``."""

    config: PeftConfig
    pairs: dict[str, Pair]
    data_at: int
    """Where in the file of weights the numbers begin."""


def read_folder(folder: Path, *, engine: str) -> PeftFolder:
    """Return the adapter in ``folder``, for an engine of this name. Blocks.

    Raises:
        ArtifactInvalidError: it is none, a broken one, or does more than plain LoRA.
        OSError: a file cannot be read.
    """
    for part in (CONFIG, WEIGHTS):
        if not (folder / part).is_file():
            raise ArtifactInvalidError(f"The folder of the adapter has no '{part}'. Give a PEFT folder.")
    config = _config(folder / CONFIG, engine)
    with opened(folder / WEIGHTS, f"file '{WEIGHTS}'") as cursor:
        header = safetensors.read(cursor)
    return PeftFolder(config, _pairs(header.tensors), header.data_at)


def _config(file: Path, engine: str) -> PeftConfig:
    with opened(file, f"file '{CONFIG}'") as cursor:
        if cursor.size > _CONFIG_BYTES_MAX:
            raise ArtifactInvalidError(f"The file '{CONFIG}' has {cursor.size:,} bytes, which is no configuration.")
        raw = cursor.take(cursor.size)
    try:
        config = msgspec.json.decode(raw, type=PeftConfig, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file '{CONFIG}' is no LoRA configuration: {error}.") from error
    beyond = {
        f"the kind '{config.peft_type[:32]}'": config.peft_type.upper() != "LORA",
        "DoRA (use_dora)": config.use_dora,
        "trained biases (bias)": config.bias != "none",
        "whole modules (modules_to_save)": bool(config.modules_to_save),
        "activation by tokens (alora_invocation_tokens)": bool(config.alora_invocation_tokens),
        f"the rank {config.r}": not 1 <= config.r <= RANK_MAX,
    }
    if found := next((what for what, is_there in beyond.items() if is_there), ""):
        raise ArtifactInvalidError(f"The adapter has {found}, which {engine} cannot apply. Merge it into its base.")
    return config


def _pairs(tensors: dict[str, safetensors.Tensor]) -> dict[str, Pair]:
    halves: dict[str, dict[str, safetensors.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise ArtifactInvalidError(f"The adapter has the tensor '{name[:200]}', which is no half of a LoRA pair.")
        if tensor.dtype not in _DTYPES or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ArtifactInvalidError(
                f"The adapter has the tensor '{name[:200]}' of a type or shape that is no LoRA's."
            )
        both = halves.setdefault(found[1], {})
        if found[2] in both:
            raise ArtifactInvalidError(f"The adapter has lora_{found[2]} of '{found[1][:200]}' twice.")
        both[found[2]] = tensor
    for module, both in halves.items():
        if both.keys() != {"A", "B"} or both["A"].shape[0] != both["B"].shape[1]:
            raise ArtifactInvalidError(f"The adapter has no whole pair lora_A, lora_B for '{module[:200]}'.")
    return {module: Pair(both["A"], both["B"]) for module, both in halves.items()}
