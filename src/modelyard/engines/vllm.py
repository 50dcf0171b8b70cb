"""vLLM: large language models on GPUs, paged and batched, and small ones on CPUs with the same flags.

It is installed beside the platform, in an environment of its own; ``engines.vllm`` says how it is called. What was
found and must stay so (``reference/engines.md`` sections 1 and 5): SIGTERM ends it without its answers, and with a time
to shut down its ``/health`` goes on saying 200 while it refuses, so the platform drains before it asks; its own key
protects half of its paths, so a guard of ours stands before all (``inside_vllm/``); an adapter's name must stand for
the same content for as long as it lives, since prefixes are kept by it.
"""

import json
import shutil
from fractions import Fraction
from math import ceil
from pathlib import Path

import msgspec

from modelyard.domain.attention import kv_bytes
from modelyard.domain.facts import ModelFacts
from modelyard.engines import (
    EngineCall,
    EngineCommand,
    EngineLoad,
    Guest,
    GuestKind,
    LaunchSpec,
    Options,
    OptionsError,
    Settings,
    inside_vllm,
)
from modelyard.engines.defaults import EngineDefaults
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_labelled, read_samples, sleeping_on, total_of
from modelyard.engines.vllm_options import VllmOptions
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of, kind_of_file
from modelyard.formats.sniff import Kind

_ROUTES: dict[str, frozenset[str]] = {
    "generate": frozenset({"/v1/chat/completions", "/v1/completions"}),
    "embed": frozenset({"/v1/embeddings"}),
    "classify": frozenset({"/v1/classify"}),
    "score": frozenset({"/v1/score", "/v1/rerank"}),
}
_CONVERT = {"embed": "embed", "classify": "classify", "score": "classify"}
"""What a model becomes for a task other than writing."""
_CPU = "cpu"
_CONFIG = "config.json"
_SHUTDOWN_S = 20
"""For what is still in it at SIGTERM, should a drain have been cut short; the fleet's own grace is the last word."""
_KV_SHARE = {"fp8": Fraction(1, 2), "fp8_e4m3": Fraction(1, 2), "fp8_e5m2": Fraction(1, 2)}
_KV_OF_32_BITS = Fraction(2)
"""Where the cache is as precise as the arithmetic."""
_SPARE_TOKENS = 256
"""Two blocks of the largest usual size: whole blocks are given out, and one of them is never used."""
_POOL_SHARE = Fraction(1, 2)
"""Of what all slots could use at full context: requests rarely do, and blocks are given as they are needed."""
_PROCESS_BYTES = 3 * 1024**3
"""Three processes that each import torch, and a step's activations; measured with 3.4 GB for a model of 0.3."""
_LORA_WIDTHS = 21
"""Inputs and outputs of a layer's matrices together, in embedding sizes; a rough guess for Llama's kind."""
_KV_BYTES_BASE, _KV_WEIGHTS_BASE, _KV_GROWTH = 23_040, 269_000_000, 0.44
_LOAD_BYTES_PER_S = 200_000_000
_START_S = 45.0
_GPU_SHARE = 0.9
_FREE_SHARE = 0.05
"""Beside an exact cache, what of a GPU must be free when vLLM starts and nothing else: its own 0.92 would let nobody
share one."""
_POOL_BYTES = 1024**3
"""Where nobody said how large the KV cache is to be; an encoder takes none of it."""
_GUEST_S = 120.0
_SLEEP_S = 120.0


class _Card(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...] = ()


_decode_models = msgspec.json.Decoder(_Models).decode


class VllmEngine(EngineDefaults):
    """The ``Engine`` contract for ``vllm serve``; ``command`` are the words that begin it."""

    name = "vllm"
    computes_on_gpus = True
    routes = frozenset[str]().union(*_ROUTES.values())
    # Without "suffix", "best_of" and "dimensions": it refuses the first two, and the third for most models. Without
    # "echo": with logprobs it asks for those of the prompt, and two of that with adapters end vLLM 0.32 on a CPU.
    request_extras = frozenset(
        {
            "n", "cache_salt", "top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty",
            "continue_final_message", "token_arrays",
        }
    )  # fmt: skip
    guests_option = "max_loras"
    guests = GuestKind.ADAPTER

    def __init__(self, command: tuple[str, ...] = ("vllm",)) -> None:
        self._command = command

    def missing(self) -> str:
        """Return the fix when its command is not there, else ""."""
        if self._command and shutil.which(self._command[0]):
            return ""
        called = self._command[0] if self._command else ""
        return (
            f"The engine 'vllm' needs the command '{called}', which is not there. Install vLLM in an environment of "
            "its own (docs/how-to/run-vllm.md) and set engines.vllm to the path of its command."
        )

    def check_artifact(self, file: Path) -> None:
        """Accept folders as Hugging Face has them: safetensors and ``config.json``, and nothing that runs code.

        Raises:
            ArtifactInvalidError: another kind of file, an adapter, or a folder that lacks something.
        """
        if file.is_file():
            kind = kind_of_file(file)
            fix = "Convert it: modelyard models convert MODEL.gguf FOLDER" if kind is Kind.GGUF else "Name the folder."
            raise ArtifactInvalidError(
                f"The artifact is one file, {kind}; the engine 'vllm' loads a folder of safetensors with '{_CONFIG}'. "
                f"{fix}"
            )
        files = {one.relative_to(file).as_posix(): one for one in sorted(file.rglob("*")) if one.is_file()}
        facts = facts_of(files)
        if facts.is_adapter:
            raise ArtifactInvalidError(
                "The artifact is a LoRA adapter and no model; deploy its base, then the adapter."
            )
        if facts.format != "safetensors":
            raise ArtifactInvalidError(f"The artifact holds {facts.format}; the engine 'vllm' loads safetensors.")
        if _CONFIG not in files:
            raise ArtifactInvalidError(f"The artifact has no '{_CONFIG}', which says what its tensors are.")

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; compute memory from the model's shape, or estimate it from the size of its files.

        Raises:
            ValueError: an unknown option or a bad value, naming it, or one that the model cannot do.
        """
        read = read_options(VllmOptions, options, engine=self.name)
        known = facts or ModelFacts()
        _check(read, known)
        context = _context_length(read, known, is_given="context_length" in options)
        share = _KV_SHARE.get(read.kv_type, _KV_OF_32_BITS if read.dtype == "float32" else Fraction(1))
        has_facts = bool(known.kv_bytes_per_token or known.heads or known.state_bytes)
        per_token = ceil((known.kv_bytes_per_token if has_facts else _kv_bytes_per_token(artifact_bytes)) * share)
        sequence = kv_bytes(known, context, precision=share) if has_facts else per_token * context
        pool = _pool_bytes(read, context, sequence, per_token)
        weights = known.weights_bytes or artifact_bytes
        ways = max(read.tensor_parallel, 1) * read.pipeline_parallel
        return Settings(
            slots=read.slots,
            context_length=context,
            memory_bytes=weights + pool + _lora_bytes(read, known) + _PROCESS_BYTES * ways,
            load_s=_START_S + artifact_bytes / _LOAD_BYTES_PER_S,
            kv_tokens=0 if read.gpu_memory else _pool_tokens(read, pool, per_token),
            weights_bytes=weights,
            kv_bytes_per_token=per_token,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; the secret travels in the environment, which other users cannot read."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(VllmOptions, spec.options, engine=self.name)
        argv = [*self._command, "serve", str(spec.artifact), "--served-model-name", spec.model_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--middleware", "modelyard_guard.Guard"]
        argv += ["--allowed-origins", "[]", "--disable-fastapi-docs", "--disable-uvicorn-access-log"]
        argv += ["--enable-prompt-tokens-details", "--shutdown-timeout", str(_SHUTDOWN_S)]
        argv += ["--max-num-seqs", str(spec.slots), "--max-model-len", str(spec.context_length)]
        argv += ["--no-trust-remote-code", "--dtype", read.dtype, "--seed", str(read.seed)]
        is_cpu = spec.accelerator_kind == _CPU
        ways = read.tensor_parallel or max(1, len(spec.accelerators) // read.pipeline_parallel)
        argv += ["--tensor-parallel-size", str(ways)]
        argv += [*_memory_flags(read, spec, ways, is_cpu=is_cpu), *_flags(read, is_cpu=is_cpu)]
        argv += _speculative(read, spec.artifact)
        return EngineCommand(argv=tuple(argv), env=_environment(read, spec, ways, is_cpu=is_cpu))

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page, by the names of this and of older versions."""
        samples = read_samples(page)
        # Ranks take their steps together, and each counts them.
        steps = [value for _, value in read_labelled(page, "vllm:iteration_tokens_total_count")]
        usage = samples.get("vllm:kv_cache_usage_perc", samples.get("vllm:gpu_cache_usage_perc"))
        return EngineLoad(
            running=count_of(samples, "vllm:num_requests_running"),
            waiting=count_of(samples, "vllm:num_requests_waiting"),
            kv_usage=usage,
            prompt_tokens_total=samples.get("vllm:prompt_tokens_total"),
            generation_tokens_total=samples.get("vllm:generation_tokens_total"),
            progress_total=total_of(samples, "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
            prefix_queries_total=samples.get(
                "vllm:prefix_cache_queries_total", samples.get("vllm:gpu_prefix_cache_queries_total")
            ),
            prefix_hits_total=samples.get(
                "vllm:prefix_cache_hits_total", samples.get("vllm:gpu_prefix_cache_hits_total")
            ),
            preemptions_total=samples.get("vllm:num_preemptions_total"),
            iterations_total=max(steps, default=None),
            draft_tokens_total=samples.get("vllm:spec_decode_num_draft_tokens_total"),
            accepted_tokens_total=samples.get("vllm:spec_decode_num_accepted_tokens_total"),
            is_sleeping=sleeping_on(page),
        )

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return the paths of the option ``task``."""
        return _ROUTES[read_options(VllmOptions, options, engine=self.name).task]

    def guests_max(self, options: Options) -> int:
        """Return the adapters that a replica holds: none unless ``max_loras`` is given."""
        return read_options(VllmOptions, options, engine=self.name).held

    def load_guest(self, guest: Guest) -> EngineCall:
        """Return the call that loads an adapter; the guard makes one that is there no error."""
        body = {"lora_name": guest.name, "lora_path": str(guest.artifact)}
        return EngineCall("/v1/load_lora_adapter", body, timeout_s=_GUEST_S)

    def unload_guest(self, name: str) -> EngineCall:
        """Return the call that forgets an adapter: requests that have it go on, new ones do not find it."""
        return EngineCall("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=_GUEST_S)

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the models that have a parent."""
        try:
            return frozenset(card.id for card in _decode_models(models).data if card.parent)
        except msgspec.MsgspecError:
            return frozenset()

    def sleep(self, options: Options) -> EngineCall | None:
        """Return the call that moves the weights out and drops the cache, when nothing runs any more."""
        is_able = read_options(VllmOptions, options, engine=self.name).sleep
        return EngineCall("/sleep?level=1&mode=wait", timeout_s=_SLEEP_S) if is_able else None

    def wake(self, options: Options) -> EngineCall | None:
        """Return the call that moves them back."""
        is_able = read_options(VllmOptions, options, engine=self.name).sleep
        return EngineCall("/wake_up", timeout_s=_SLEEP_S) if is_able else None


def _check(read: VllmOptions, facts: ModelFacts) -> None:
    """Refuse what does not go together, or not with the model."""
    faults: dict[str, str] = {}
    if read.kv_blocks and not read.block_size:
        faults["kv_blocks"] = "say how many tokens a block has: block_size"
    if read.lookup_min > read.lookup_max:
        faults["lookup_min"] = f"it is more than lookup_max, {read.lookup_max}"
    if (read.speculative == "draft") != bool(read.draft_folder):
        faults["draft_folder"] = "name the folder of the small model, and set speculative to draft"
    if read.sleep and read.task != "generate":
        faults["sleep"] = "only a model that writes sleeps"
    if (ways := read.tensor_parallel) > 1 and facts.heads and facts.heads % ways:
        faults["tensor_parallel"] = f"{ways} does not divide the {facts.heads} heads of the model"
    if faults:
        raise OptionsError(VllmEngine.name, faults)


def _context_length(read: VllmOptions, facts: ModelFacts, *, is_given: bool) -> int:
    """Return the context: what is asked for, or the default where the model has as much."""
    most = facts.context_length
    if not most or read.context_length <= most:
        return read.context_length
    if is_given:
        reason = f"{read.context_length:,} is more than the model's own {most:,}; give at most that"
        raise OptionsError(VllmEngine.name, {"context_length": reason})
    return most


def _pool_bytes(read: VllmOptions, context: int, sequence: int, per_token: int) -> int:
    """Return the KV cache of all accelerators together; one sequence at full context fits at least.

    What only reads needs one, too, unless it is an encoder: a step's tokens look back through it.
    """
    if read.kv_blocks:
        return read.kv_blocks * read.block_size * per_token
    if read.kv_cache_gib:
        return int(read.kv_cache_gib * 1024**3) * max(read.tensor_parallel, 1) * read.pipeline_parallel
    return max(sequence + _SPARE_TOKENS * per_token, ceil(sequence * read.slots * _POOL_SHARE))


def _pool_tokens(read: VllmOptions, pool: int, per_token: int) -> int:
    if read.kv_blocks:
        return read.kv_blocks * read.block_size
    return pool // per_token if per_token else 0


def _lora_bytes(read: VllmOptions, facts: ModelFacts) -> int:
    return 2 * (read.max_loras + read.held) * read.max_lora_rank * _LORA_WIDTHS * facts.embedding_size * facts.layers


def _kv_bytes_per_token(weights_bytes: int) -> float:
    """Guess the KV bytes of a token: the curve of ``llamacpp.py``, for weights of 16 bits."""
    return float(_KV_BYTES_BASE * (max(weights_bytes, 1) / _KV_WEIGHTS_BASE) ** _KV_GROWTH)


def _memory_flags(read: VllmOptions, spec: LaunchSpec, ways: int, *, is_cpu: bool) -> list[str]:
    flags: list[str] = []
    is_exact = spec.kv_cache_bytes > 0 or read.task != "generate"
    if not is_cpu and (read.gpu_memory or not is_exact):
        flags += ["--gpu-memory-utilization", f"{read.gpu_memory or _GPU_SHARE:g}"]
    else:
        pool = spec.kv_cache_bytes or _POOL_BYTES
        flags += ["--kv-cache-memory-bytes", str(ceil(pool / (ways * read.pipeline_parallel)))]
        if not is_cpu:
            flags += ["--gpu-memory-utilization", f"{_FREE_SHARE:g}"]
    if read.kv_blocks:
        flags += ["--num-gpu-blocks-override", str(read.kv_blocks)]
    if read.block_size:
        flags += ["--block-size", str(read.block_size)]
    if read.cpu_offload_gib and not is_cpu:
        flags += ["--cpu-offload-gb", f"{read.cpu_offload_gib:g}"]
    return flags


def _flags(read: VllmOptions, *, is_cpu: bool) -> list[str]:
    """Return the flags of options that are flags and no more."""
    flags = ["--enable-prefix-caching" if read.prefix_caching else "--no-enable-prefix-caching"]
    flags += ["--kv-cache-dtype", read.kv_type, "--scheduling-policy", read.scheduling]
    named = {
        "--pipeline-parallel-size": read.pipeline_parallel if read.pipeline_parallel > 1 else 0,
        "--quantization": read.quantization,
        "--max-num-batched-tokens": read.max_batched_tokens,
        "--max-num-queued-reqs": read.max_queued,
        "--reasoning-parser": read.reasoning_parser,
    }
    for flag, value in named.items():
        if value:
            flags += [flag, str(value)]
    if read.task != "generate":
        flags += ["--runner", "pooling", "--convert", _CONVERT[read.task]]
    if read.max_loras:
        flags += ["--enable-lora", "--max-loras", str(read.max_loras), "--max-lora-rank", str(read.max_lora_rank)]
        flags += ["--max-cpu-loras", str(read.held)]
    if read.tool_parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", read.tool_parser]
    if read.eager or is_cpu:
        flags.append("--enforce-eager")
    if read.sleep and not is_cpu:
        flags.append("--enable-sleep-mode")
    return flags


def _speculative(read: VllmOptions, artifact: Path) -> list[str]:
    if not read.speculative:
        return []
    config: dict[str, str | int] = {"num_speculative_tokens": read.speculative_tokens}
    if read.speculative == "ngram":
        config |= {"method": "ngram", "prompt_lookup_max": read.lookup_max, "prompt_lookup_min": read.lookup_min}
    else:
        config |= {"method": "draft_model", "model": str(artifact / read.draft_folder)}
    return ["--speculative-config", json.dumps(config, sort_keys=True)]


def _environment(read: VllmOptions, spec: LaunchSpec, ways: int, *, is_cpu: bool) -> dict[str, str]:
    environment = {
        "ENGINE_SECRET": spec.secret,
        "PYTHONPATH": str(Path(inside_vllm.__file__).parent),
        "PYTHONUNBUFFERED": "1",
        # Nothing is fetched, and nothing told to anybody.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if read.max_loras:
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "MODELYARD_BASE": str(spec.artifact)}
    if read.sleep:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if is_cpu:
        threads = str(max(1, spec.threads // ways))
        environment |= {
            # Not bound to cores: its own choice leaves one of two idle, and replicas would choose the same ones.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",
        }
    return environment
