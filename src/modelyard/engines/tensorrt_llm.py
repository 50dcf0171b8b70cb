"""TensorRT-LLM: ``trtllm-serve`` with its PyTorch backend, which loads Hugging Face checkpoints.

It runs behind the guard, for it knows no secret. What has no flag goes into a
configuration file (JSON is YAML). Its ``/metrics`` is a queue of JSON that each
reader empties for the others, so that is let through to nobody;
``/prometheus/metrics`` is what is read, with both switches on that it needs.
Its gauges stand still between two ends of requests.

Not run here (CUDA only): flags of NVIDIA/TensorRT-LLM
``tensorrt_llm/commands/serve.py`` @ 00209af, metric names of
``tensorrt_llm/metrics/collector.py`` @ 050f80d and
``examples/serve/prometheus_metrics.py`` @ 47d640e.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCommand, EngineLoad, LaunchSpec, Options, Settings
from modelyard.engines.gpu_memory import gpu_settings
from modelyard.engines.guard import Plan, Route, folder_of, guarded, openai_routes
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples
from modelyard.engines.programs import ProgramEngine
from modelyard.engines.safetensors_folder import check_safetensors_folder

_CHAT_ROUTE = "/v1/chat/completions"
_COMPLETIONS_ROUTE = "/v1/completions"
_CONFIG = "trtllm.yaml"
_LOAD_S = 90.0
_LOAD_BYTES_PER_S = 1_000_000_000

Parser = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_.-]{0,40}$")]


class TensorRtLlmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Requests that run at once."""
    context_length: Annotated[int, msgspec.Meta(ge=256, le=10_485_760)] = 8192
    """Most tokens of prompt and answer together."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Accelerators that each layer is divided among; 0: all that the replica was given."""
    pipeline_parallel: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Groups of accelerators that the layers are divided among."""
    memory_share: Annotated[float, msgspec.Meta(ge=0.1, le=0.98)] = 0.9
    """Share, of the memory that weights leave free, for the KV cache."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens that fit the KV cache, running and kept; 0: a full context for each slot. Never more than the share of
    memory has room for."""
    kv_type: Literal["auto", "fp8"] = "auto"
    """Precision of the KV cache; auto: the model's."""
    prefix_caching: bool = True
    """Keep prompts' beginnings, each tenant's apart by ``cache_salt``. Completions cannot be kept apart, so they are
    served only without."""
    chunked_prefill: bool = True
    """Read long prompts in pieces between steps of the others."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=256, le=1_048_576)] = 8192
    """Most tokens of a step."""
    structured_output: Literal["", "xgrammar", "llguidance"] = "xgrammar"
    """What enforces ``response_format``; "": nothing does."""
    speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=32)] = 0
    """Tokens that are guessed from n-grams, a step; 0: none."""
    tool_parser: Parser = ""
    """How the model writes tool calls, like ``qwen3``."""
    reasoning_parser: Parser = ""
    """How the model marks its reasoning, like ``deepseek-r1``."""


class TensorRtLlmEngine(ProgramEngine):
    """The ``Engine`` contract for ``trtllm-serve``."""

    name = "tensorrt_llm"
    computes_on_gpus = True
    routes = frozenset({_CHAT_ROUTE, _COMPLETIONS_ROUTE})
    request_extras = frozenset(
        {"n", "top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "cache_salt"}
    )  # fmt: skip
    load_path = "/prometheus/metrics"

    def __init__(self, command: tuple[str, ...] = ("trtllm-serve",)) -> None:
        super().__init__(command)

    def check_artifact(self, file: Path) -> None:
        """Accept folders of safetensors without code: compiled engines are native code, and load on one GPU model only.

        Raises:
            ArtifactInvalidError: it is something else.
        """
        check_safetensors_folder(file, engine=self.name)

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; compute memory from the model's shape, or estimate it from its size.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(TensorRtLlmOptions, options, engine=self.name)
        return gpu_settings(
            read,
            facts,
            artifact_bytes,
            parallel=max(1, read.tensor_parallel) * read.pipeline_parallel,
            load_s=_LOAD_S + artifact_bytes / _LOAD_BYTES_PER_S,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the guard with ``trtllm-serve`` behind it."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(TensorRtLlmOptions, spec.options, engine=self.name)
        routes = openai_routes(frozenset({_CHAT_ROUTE}), ready=self.ready_path, load=self.load_path)
        if _COMPLETIONS_ROUTE in self.routes_for(spec.options):
            # It refuses fields that it does not know, and knows the salt in chats only.
            routes = (*routes, Route("POST", _COMPLETIONS_ROUTE, dropped=("cache_salt",)))
        config = msgspec.json.encode(_config(read, read.kv_tokens or spec.slots * spec.context_length)).decode()
        plan = Plan(spec.host, spec.port, str(folder_of(spec)), routes, files={_CONFIG: config})
        parallel = read.tensor_parallel or max(1, len(spec.accelerators) // read.pipeline_parallel)
        words = [*self._command, str(spec.artifact), "--backend", "pytorch", "--host", "127.0.0.1", "--port", "@http@"]
        words += ["--served_model_name", spec.model_name, "--config", str(folder_of(spec) / _CONFIG)]
        words += ["--tp_size", str(parallel), "--pp_size", str(read.pipeline_parallel)]
        words += ["--max_batch_size", str(spec.slots), "--max_seq_len", str(spec.context_length)]
        words += ["--max_num_tokens", str(read.batch_tokens)]
        for flag, value in (("--tool_parser", read.tool_parser), ("--reasoning_parser", read.reasoning_parser)):
            words += [flag, value] if value else []
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(max(1, spec.threads))}
        return guarded(spec, plan, words, {**offline, "TRTLLM_NO_USAGE_STATS": "1"})

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return chat, and completions where nothing of one tenant's prompts is kept for another's."""
        return self.routes if options.get("prefix_caching") is False else frozenset({_CHAT_ROUTE})

    def read_load(self, page: str) -> EngineLoad:
        """Parse the Prometheus page."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "trtllm_num_requests_running"),
            waiting=count_of(samples, "trtllm_num_requests_waiting"),
            kv_usage=samples.get("trtllm_kv_cache_utilization"),
            prompt_tokens_total=samples.get("trtllm_prompt_tokens_total"),
            generation_tokens_total=samples.get("trtllm_generation_tokens_total"),
            prefix_queries_total=samples.get("trtllm_prompt_tokens_total"),
            prefix_hits_total=samples.get("trtllm_prompt_cached_tokens_total"),
            draft_tokens_total=samples.get("trtllm_spec_decode_num_draft_tokens_total"),
            accepted_tokens_total=samples.get("trtllm_spec_decode_num_accepted_tokens_total"),
        )


def _config(read: TensorRtLlmOptions, kv_tokens: int) -> dict[str, Any]:
    """Return what has no flag. The whole of ``kv_cache_config``, since a file's replaces what flags say of it."""
    config: dict[str, Any] = {
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        "enable_chunked_prefill": read.chunked_prefill,
        "trust_remote_code": False,
        "kv_cache_config": {
            "free_gpu_memory_fraction": read.memory_share,
            # No larger than what the replica was placed for: others may be on the same accelerator.
            "max_tokens": kv_tokens,
            "enable_block_reuse": read.prefix_caching,
            "dtype": read.kv_type,
        },
    }
    if read.structured_output:
        config["guided_decoding_backend"] = read.structured_output
    if read.speculative_tokens:
        config["speculative_config"] = {
            "decoding_type": "NGram",
            "max_draft_len": read.speculative_tokens,
            "max_matching_ngram_size": 4,
        }
    return config
