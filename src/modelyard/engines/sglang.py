"""SGLang: language models on GPUs, with a prefix cache that is a tree and LoRA adapters that come at run time.

It runs behind the guard: its ``--api-key`` would stand on the command line, it
answers ``/metrics`` to anybody, and it has paths that load weights from
elsewhere. The key goes into a configuration file that only this user reads
(``--config``, whose values SGLang puts before its own arguments).

An adapter is asked for by name in ``lora_path``, for its ``model`` knows
``BASE:ADAPTER`` only and takes anything else for the base itself; the guard
puts it there, so that a caller never gets the base for an adapter.

Not run here (no build without CUDA): flags and fields are those of
sgl-project/sglang ``docs/advanced_features/server_arguments.md`` @ 004813e,
``srt/server_args_config_parser.py`` @ 03bd2f1 and ``srt/entrypoints/openai``;
metric names of ``srt/observability/metrics_collector.py`` @ 016d860.
"""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCall, EngineCommand, EngineLoad, Guest, GuestKind, LaunchSpec, Options, Settings
from modelyard.engines.gpu_memory import gpu_settings
from modelyard.engines.guard import Plan, Route, folder_of, guarded, openai_routes
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples
from modelyard.engines.programs import ProgramEngine
from modelyard.engines.safetensors_folder import check_safetensors_folder

_CHAT_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
_EMBEDDINGS_ROUTES = frozenset({"/v1/embeddings"})
_CONFIG = "sglang.yaml"
_LOAD_S = 45.0
_LOAD_BYTES_PER_S = 1_000_000_000
_WEIGHTS_SHARE = {"fp8": Fraction(1, 2), "bitsandbytes": Fraction(1, 3)}
"""Of 16-bit weights that SGLang quantises as it loads them; the other kinds are in the checkpoint already."""

Parser = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_.-]{0,40}$")]


class SglangOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Requests that run at once."""
    context_length: Annotated[int, msgspec.Meta(ge=256, le=10_485_760)] = 8192
    """Most tokens of prompt and answer together."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Accelerators that each layer is divided among; 0: all that the replica was given."""
    memory_share: Annotated[float, msgspec.Meta(ge=0.1, le=0.98)] = 0.85
    """Share of each accelerator's memory for weights and KV cache."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of weights and activations; auto: the checkpoint's."""
    quantisation: Literal[
        "", "awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "w8a8_fp8", "w8a8_int8", "bitsandbytes",
        "compressed-tensors", "modelopt_fp8", "modelopt_fp4", "mxfp4",
    ] = ""  # fmt: skip
    """As the checkpoint has it; fp8 and bitsandbytes also quantise 16-bit weights while loading. "": as it says."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens that fit the KV cache, running and kept; 0: a full context for each slot. Never more than the share of
    memory has room for."""
    kv_type: Literal["auto", "fp8_e5m2", "fp8_e4m3"] = "auto"
    """Precision of the KV cache; auto: the model's."""
    prefix_caching: bool = True
    """Keep prompts' beginnings in a tree (RadixAttention), each tenant's apart by ``cache_salt``."""
    schedule: Literal["fcfs", "lpm"] = "fcfs"
    """Who is next: first come, or the longest prefix that is cached."""
    queue_max: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    """Most requests in SGLang's own queue; 0: as many as come. The gateway's queue comes first anyway."""
    chunked_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=131_072)] = 0
    """Tokens of a prompt that are read between two steps of the others; 0: SGLang's own choice."""
    speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Tokens that are guessed from n-grams seen before, a step; 0: none."""
    adapters_max: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """LoRA adapters that a replica holds at once; 0: it takes none."""
    adapters_in_batch: Annotated[int, msgspec.Meta(ge=1, le=128)] = 8
    """Adapters that one batch can mix, the base among them."""
    adapter_rank_max: Annotated[int, msgspec.Meta(ge=1, le=512)] = 64
    """Highest rank of an adapter; memory is set aside for it."""
    embedding: bool = False
    """Serve embeddings, and nothing else."""
    tool_parser: Parser = ""
    """How the model writes tool calls, like ``qwen25``."""
    reasoning_parser: Parser = ""
    """How the model marks its reasoning, like ``qwen3``."""


class SglangEngine(ProgramEngine):
    """The ``Engine`` contract for SGLang's server; ``command`` are the words that begin its command."""

    name = "sglang"
    computes_on_gpus = True
    routes = _CHAT_ROUTES | _EMBEDDINGS_ROUTES
    request_extras = frozenset(
        {
            "n", "top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "cache_salt",
            "continue_final_message",
        }
    )  # fmt: skip
    guests_option = "adapters_max"
    guests = GuestKind.ADAPTER

    def __init__(self, command: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")) -> None:
        super().__init__(command)

    def check_artifact(self, file: Path) -> None:
        """Accept folders of safetensors without code, models and adapters.

        Raises:
            ArtifactInvalidError: it is something else.
        """
        check_safetensors_folder(file, engine=self.name, takes_adapters=True)

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; compute memory from the model's shape, or estimate it from its size.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(SglangOptions, options, engine=self.name)
        return gpu_settings(
            read,
            facts,
            artifact_bytes,
            parallel=max(1, read.tensor_parallel),
            load_s=_LOAD_S + artifact_bytes / _LOAD_BYTES_PER_S,
            weights_share=_WEIGHTS_SHARE.get(read.quantisation, Fraction(1)),
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the guard with SGLang behind it; the key between them is in a file, not in any argument."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(SglangOptions, spec.options, engine=self.name)
        routes = openai_routes(self.routes_for(spec.options), ready=self.ready_path, load=self.load_path)
        if read.adapters_max:
            loading = Route("POST", "/load_lora_adapter", guest_field="lora_name")
            routes = (*routes, loading, Route("POST", "/unload_lora_adapter"))
        plan = Plan(
            spec.host,
            spec.port,
            str(folder_of(spec)),
            routes,
            files={_CONFIG: "api-key: @key@\n"},
            has_key=True,
            model=spec.model_name,
            adapter_field="lora_path" if read.adapters_max else "",
        )
        words = [*self._command, "--config", str(folder_of(spec) / _CONFIG)]
        words += ["--host", "127.0.0.1", "--port", "@http@"]
        words += ["--model-path", str(spec.artifact), "--served-model-name", spec.model_name]
        words += _words(read, spec)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(max(1, spec.threads))}
        return guarded(spec, plan, words, offline)

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "sglang:num_running_reqs"),
            waiting=count_of(samples, "sglang:num_queue_reqs"),
            kv_usage=samples.get("sglang:token_usage"),
            prompt_tokens_total=samples.get("sglang:prompt_tokens_total"),
            generation_tokens_total=samples.get("sglang:generation_tokens_total"),
            # The others are counted when a request ends.
            progress_total=samples.get("sglang:realtime_tokens_total"),
            # Every prompt is looked up in the tree.
            prefix_queries_total=samples.get("sglang:prompt_tokens_total"),
            prefix_hits_total=samples.get("sglang:cached_tokens_total"),
        )

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return embeddings with the option ``embedding``, chat and completions without."""
        return _EMBEDDINGS_ROUTES if options.get("embedding") is True else _CHAT_ROUTES

    def guests_max(self, options: Options) -> int:
        """Return the option ``adapters_max``."""
        return read_options(SglangOptions, options, engine=self.name).adapters_max

    def load_guest(self, guest: Guest) -> EngineCall:
        """Return the call that loads an adapter; the guard answers for one that is there already."""
        return EngineCall("/load_lora_adapter", {"lora_name": guest.name, "lora_path": str(guest.artifact)})

    def unload_guest(self, name: str) -> EngineCall:
        """Return the call that unloads an adapter; SGLang waits for its requests first."""
        return EngineCall("/unload_lora_adapter", {"lora_name": name})

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the models that have a base."""
        try:
            page = msgspec.json.decode(models, type=_Models)
        except msgspec.MsgspecError:
            return frozenset()
        return frozenset(model.id for model in page.data if model.parent)


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _words(read: SglangOptions, spec: LaunchSpec) -> list[str]:
    """Return the flags of ``read``; what is SGLang's default has none."""
    words = ["--tp-size", str(read.tensor_parallel or max(1, len(spec.accelerators)))]
    words += ["--context-length", str(spec.context_length), "--max-running-requests", str(spec.slots)]
    # No larger than what the replica was placed for: others may be on the same accelerator.
    words += ["--max-total-tokens", str(read.kv_tokens or spec.slots * spec.context_length)]
    words += ["--mem-fraction-static", f"{read.memory_share:g}", "--dtype", read.dtype]
    words += ["--kv-cache-dtype", read.kv_type, "--schedule-policy", read.schedule]
    # The text of a prompt is nobody's business; usage tells what was cached.
    words += ["--enable-metrics", "--enable-cache-report", "--log-level", "info"]
    valued = {
        "--quantization": read.quantisation,
        "--chunked-prefill-size": read.chunked_prefill_tokens,
        "--max-queued-requests": read.queue_max,
        "--tool-call-parser": read.tool_parser,
        "--reasoning-parser": read.reasoning_parser,
    }
    for flag, value in valued.items():
        words += [flag, str(value)] if value else []
    set_ = {
        "--disable-radix-cache": not read.prefix_caching,
        "--is-embedding": read.embedding,
    }
    words += [flag for flag, is_set in set_.items() if is_set]
    if read.speculative_tokens:
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(read.speculative_tokens)]
    if read.adapters_max:
        in_batch = min(read.adapters_in_batch, read.adapters_max)
        words += ["--enable-lora", "--max-loras-per-batch", str(in_batch)]
        words += ["--max-loaded-loras", str(read.adapters_max), "--max-lora-rank", str(read.adapter_rank_max)]
        words += ["--lora-target-modules", "all"]
    return words
