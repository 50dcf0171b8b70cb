"""What a deploy of llama.cpp may set."""

from typing import Annotated, Literal

import msgspec

from modelyard.engines import Options, OptionsError
from modelyard.engines.options import read_options as read_strictly

NAME = "llamacpp"


class LlamaCppOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Sequences decoded at once."""
    context_length: Annotated[int, msgspec.Meta(ge=256, le=1_048_576)] = 2048
    """Most tokens of prompt and answer together, of each slot."""
    embedding: bool = False
    """Serve embeddings too."""
    pooling: Literal["", "mean", "cls", "last"] = ""
    """How token vectors become one; "": as the model file says, else the mean."""
    kv_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    """Precision of the KV cache: less memory, slightly other answers."""
    cache_ram_mib: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 0
    """Memory for prompts that lost their slot. Off: it counts against the replica's memory."""
    sleep_idle_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86_400)] = 0
    """Seconds without a request after which the replica gives its memory back; the next request wakes it. 0: never."""
    max_adapters: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """LoRA adapters that a replica takes in while it runs. 0: none, and no process between it and its callers."""
    max_adapter_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Largest rank of an adapter; memory is kept for so large ones."""
    speculative: Literal["", "ngram"] = ""
    """Guess the next tokens from what was said before: "ngram"."""
    draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """Most tokens guessed at once."""
    spin: Literal["passive", "active"] = "passive"
    """How threads wait for each other: "active" is faster for a replica that has its cores to itself, and 20 times
    slower for one that shares them."""


def read_options(options: Options) -> LlamaCppOptions:
    """Return the options.

    Raises:
        OptionsError: an unknown one, a bad value, or two that exclude each other.
    """
    read = read_strictly(LlamaCppOptions, options, engine=NAME)
    faults: dict[str, str] = {}
    if read.max_adapters and read.embedding:
        faults["embedding"] = "adapters are for answers; deploy embeddings as an endpoint without 'max_adapters'"
    if read.max_adapters and read.cache_ram_mib:
        # It finds a prompt by its tokens alone, whatever adapter it was computed with.
        faults["cache_ram_mib"] = "llama.cpp's prompt memory mixes adapters up; leave it out with 'max_adapters'"
    if faults:
        raise OptionsError(NAME, faults)
    return read
