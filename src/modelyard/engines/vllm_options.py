"""What a deploy may set of vLLM.

No option here runs code that comes with a model (``--trust-remote-code`` is
never given), names a file of the machine, or reaches the network.
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Gib = Annotated[float, msgspec.Meta(ge=0, le=65_536)]
Ways = Annotated[int, msgspec.Meta(ge=1, le=64)]
ParserName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_\-]{0,40}$")]
FolderName = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._\-]{0,63})?$")]
Quantization = Literal[
    "", "fp8", "int8", "awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "compressed-tensors", "modelopt",
    "moe_wna16", "mxfp4",
]  # fmt: skip
KvType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"]
Task = Literal["generate", "embed", "classify", "score"]


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options, with vLLM's flags in brackets."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    """Requests in the batch at once [--max-num-seqs]."""
    context_length: Annotated[int, msgspec.Meta(ge=64, le=16_777_216)] = 4096
    """Most tokens of prompt and answer together [--max-model-len]."""
    task: Task = "generate"
    """What it serves: text, embeddings, classes, or scores and ranks [--runner, --convert]."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of weights and arithmetic; auto: as the model says [--dtype]."""
    quantization: Quantization = ""
    """How weights are packed; "": as the model says. fp8 and int8 pack those of a model that is not
    [--quantization]."""
    kv_type: KvType = "auto"
    """Precision of the KV cache; fp8 halves it [--kv-cache-dtype]."""
    kv_cache_gib: Gib = 0.0
    """KV cache of each accelerator, in GiB; 0: enough for half of what all slots could use
    [--kv-cache-memory-bytes]."""
    gpu_memory: Annotated[float, msgspec.Meta(ge=0, le=0.98)] = 0.0
    """Share of each GPU that vLLM takes, its KV cache with it, instead of an exact cache; 0: off
    [--gpu-memory-utilization]."""
    kv_blocks: Count = 0
    """KV blocks, of 'block_size' tokens each; 0: as many as fit the cache [--num-gpu-blocks-override]."""
    block_size: Literal[0, 8, 16, 32, 64, 128, 256] = 0
    """Tokens of a KV block, and the grain of the prefix cache; 0: as suits the machine; on CPUs a multiple
    of 32 [--block-size]."""
    prefix_caching: bool = True
    """Keep the beginnings of prompts, apart for each tenant [--enable-prefix-caching]."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Accelerators that share each layer; 0: all that the replica was given [--tensor-parallel-size]."""
    pipeline_parallel: Ways = 1
    """Groups of accelerators that share the layers among them [--pipeline-parallel-size]."""
    max_batched_tokens: Count = 0
    """Tokens of a step; longer prompts are read in parts. 0: vLLM's own [--max-num-batched-tokens]."""
    max_queued: Count = 0
    """Requests in the engine, running and waiting, above which it refuses more; the gateway keeps those in its own
    line. 0: no limit [--max-num-queued-reqs]."""
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    """Who is next in the engine's own queue [--scheduling-policy]."""
    max_loras: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Different LoRA adapters in one batch; 0: none can be loaded [--max-loras]."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Largest rank of an adapter [--max-lora-rank]."""
    loras_held: Count = 0
    """Adapters that a replica holds in memory, the batch's among them; 0: four times 'max_loras', at least 32
    [--max-cpu-loras]."""
    speculative: Literal["", "ngram", "draft"] = ""
    """Guess tokens ahead: by what stood in the text before, or by a small model [--speculative-config]."""
    speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] = 4
    """Tokens that are guessed at a time."""
    lookup_max: Annotated[int, msgspec.Meta(ge=1, le=32)] = 4
    """Longest run of tokens that ngram looks for."""
    lookup_min: Annotated[int, msgspec.Meta(ge=1, le=32)] = 2
    """Shortest run of tokens that ngram looks for."""
    draft_folder: FolderName = ""
    """Folder of the small model inside of the artifact."""
    tool_parser: ParserName = ""
    """How the model writes tool calls, like 'hermes' or 'llama3_json'; "": tools are only those that a request
    requires [--tool-call-parser]."""
    reasoning_parser: ParserName = ""
    """How the model writes what it thinks, like 'deepseek_r1' or 'qwen3' [--reasoning-parser]."""
    cpu_offload_gib: Gib = 0.0
    """Weights of each GPU that stay in the machine's memory [--cpu-offload-gb]."""
    eager: bool = False
    """Neither compile nor record graphs: ready sooner, slower at work. On CPUs always [--enforce-eager]."""
    sleep: bool = False
    """The platform may let it give its memory back and wake it; on GPUs only [--enable-sleep-mode]."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """What chance begins with [--seed]."""

    @property
    def held(self) -> int:
        """Adapters that a replica holds at once."""
        if not self.max_loras:
            return 0
        return max(self.loras_held or max(32, 4 * self.max_loras), self.max_loras)
