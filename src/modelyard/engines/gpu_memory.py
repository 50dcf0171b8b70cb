"""What a language model needs of each accelerator, for engines that divide it among several by tensor parallelism.

Pure arithmetic, shared by the engines that load safetensors. Weights divide
evenly; so does the KV cache as long as there are as many KV heads as parts,
beyond that heads are copied. What is beside both (context of the driver,
activations, graphs) is there once on each accelerator.
"""

from fractions import Fraction
from math import ceil
from typing import Protocol

import msgspec

from modelyard.domain.attention import kv_bytes
from modelyard.domain.facts import ModelFacts
from modelyard.engines import Settings

OVERHEAD_BYTES = 2 * 1024**3
"""On each accelerator: driver, activations of a batch, graphs. Engines differ; this is of vLLM's and SGLang's size."""
_KV_BYTES_8B = 131_072
_WEIGHTS_8B = 16_000_000_000
_KV_GROWTH = 0.44
"""As for llama.cpp: KV bytes grow with about this power of the weights."""


class GpuMemory(msgspec.Struct, frozen=True):
    """Of one replica, over all of its accelerators."""

    weights_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    """Tokens that were counted in."""
    total_bytes: int


class GpuOptions(Protocol):
    """What the options of engines that divide a model by tensor parallelism have in common."""

    @property
    def slots(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def kv_type(self) -> str: ...


def gpu_settings(
    read: GpuOptions,
    facts: ModelFacts | None,
    artifact_bytes: int,
    *,
    parallel: int,
    load_s: float,
    weights_share: Fraction = Fraction(1),
) -> Settings:
    """Return the settings of a replica with these options. ``load_s`` is the time of a start.

    ``weights_share``: what is left of weights that are not quantised yet, when the engine quantises them as it loads.
    """
    needs = gpu_memory(
        facts,
        artifact_bytes,
        slots=read.slots,
        context_length=read.context_length,
        parallel=parallel,
        kv_tokens=read.kv_tokens,
        kv_share=Fraction(1) if read.kv_type == "auto" else Fraction(1, 2),
        weights_share=weights_share if _is_wide(facts) else Fraction(1),
    )
    return Settings(
        slots=read.slots,
        context_length=read.context_length,
        memory_bytes=needs.total_bytes,
        load_s=load_s,
        kv_tokens=needs.kv_tokens,
        weights_bytes=needs.weights_bytes,
        kv_bytes_per_token=needs.kv_bytes_per_token,
    )


def _is_wide(facts: ModelFacts | None) -> bool:
    """Say whether weights are not quantised yet, or nobody knows: an engine that quantises as it loads shrinks them."""
    return facts is None or facts.quantisation in ("", "BF16", "F16", "F32")


def gpu_memory(
    facts: ModelFacts | None,
    artifact_bytes: int,
    *,
    slots: int,
    context_length: int,
    parallel: int,
    kv_tokens: int = 0,
    kv_share: Fraction = Fraction(1),
    weights_share: Fraction = Fraction(1),
) -> GpuMemory:
    """Return what a replica needs: computed from ``facts``, estimated from the size of the artifact without.

    ``kv_tokens``: the size of the KV cache; 0: a full context for each slot. ``kv_share``: its bits over 16.
    ``weights_share``: what is left of the weights when the engine quantises them as it loads.
    """
    known = facts or ModelFacts()
    weights = ceil((known.weights_bytes or artifact_bytes) * weights_share)
    copies = Fraction(max(parallel, known.kv_heads), known.kv_heads) if known.kv_heads else Fraction(1)
    if known.kv_bytes_per_token or known.heads or known.state_bytes:
        per_token = ceil(known.kv_bytes_per_token * kv_share * copies)
        cache = ceil(kv_bytes(known, context_length, precision=kv_share) * copies)
    else:
        per_token = ceil(_KV_BYTES_8B * (max(artifact_bytes, 1) / _WEIGHTS_8B) ** _KV_GROWTH * kv_share)
        cache = per_token * context_length
    # A sequence with a sliding window needs less than its tokens say, which holds of whole sequences only.
    all_of_it = per_token * kv_tokens if kv_tokens else cache * slots
    return GpuMemory(
        weights_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_tokens=kv_tokens or slots * context_length,
        total_bytes=weights + all_of_it + OVERHEAD_BYTES * parallel,
    )
