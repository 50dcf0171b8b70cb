"""The contract for llama.cpp: its commands, its memory and its metrics.

Each replica is a process of its own (``server.py``): a bad model file
aborts the process that loads it. What was found and must stay so
(``reference/engines.md`` sections 1 and 2): threads are the cores given to the
replica and OpenMP waits passively, else two replicas on shared cores slow each
other down 20 times and more; each slot owns ``context_length`` tokens of KV
cache, so that no request fails because of its neighbours.
"""

import importlib.util
import sys
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

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
)
from modelyard.engines.defaults import EngineDefaults
from modelyard.engines.llamacpp.options import NAME, LlamaCppOptions, read_options
from modelyard.engines.pages import count_of, read_samples
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of, kind_of_file
from modelyard.formats.sniff import Kind

_SERVER, _FRONT = "modelyard.engines.llamacpp.server", "modelyard.engines.llamacpp.front"
_GUEST_S_MAX = 900.0
"""Longest that a load may take: the process beside must read the whole model again, if not from the disk."""
_CHAT_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
_EMBEDDINGS_ROUTE = "/v1/embeddings"
_NO_MODELS = frozenset({"clip"})
"""Architectures that llama.cpp takes only beside a model: pictures' projectors."""

_KV_BYTES_BASE = 23_040
_KV_WEIGHTS_BASE = 98_000_000
_KV_GROWTH = 0.44
_KV_SHARE = {"f16": Fraction(1), "q8_0": Fraction(34, 64), "q4_0": Fraction(18, 64)}
"""Of 16 bits: ggml's blocks of 32 numbers have 34 and 18 bytes."""
_WINDOW_SPARE = 512
"""Tokens that llama.cpp keeps beyond a sliding window: it writes a batch before it forgets."""
_ADAPTER_ROWS = 20
"""Rows and columns of a layer's seven matrices together, in sizes of its embedding: 4 of attention's own width, less
for KV heads, and three matrices of about 3.5."""
_RANKS_OF_WEIGHTS = 128
"""Ranks of an adapter in 32 bits that take as much as weights of 4 bits: SmolLM2's 90 MB at rank 64 are nearly so."""
_OVERHEAD_BYTES = 96 * 1024 * 1024
_FRONT_BYTES = 48 * 1024 * 1024
_LOAD_BYTES_PER_S = 150_000_000
_PROCESS_START_S = 0.8


class _Model(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []


_decode_models = msgspec.json.Decoder(_Models).decode


class LlamaCppEngine(EngineDefaults):
    """The ``Engine`` contract for ``llamacpp/server.py``, and for ``llamacpp/front.py`` where adapters may come."""

    name = NAME
    guests_option = "max_adapters"
    guests = GuestKind.ADAPTER
    routes = _CHAT_ROUTES | {_EMBEDDINGS_ROUTE}
    # Without "n": its usage covers only one of several choices, so they could not be billed. Without "echo", "suffix"
    # and "dimensions": it ignores them. A trailing assistant message is always continued (see the conformance tests).
    request_extras = frozenset(
        {"top_k", "min_p", "typical_p", "repeat_penalty", "ignore_eos", "cache_prompt", "assistant_prefill"}
    )

    def missing(self) -> str:
        """Return the fix when ``xllamacpp`` is not installed, else ""."""
        if importlib.util.find_spec("xllamacpp") is None:
            return "The engine 'llamacpp' needs the package xllamacpp. Run: pip install 'modelyard[llamacpp]'"
        return ""

    def check_artifact(self, file: Path) -> None:
        """Accept GGUF files that our own reader has gone through: a header that lies has harmed llama.cpp before.

        Raises:
            ArtifactInvalidError: another kind of file, a truncated or a dangerous one.
        """
        if (kind := kind_of_file(file)) is not Kind.GGUF:
            raise ArtifactInvalidError(
                f"The artifact is not a GGUF file: it is {kind}. The engine 'llamacpp' loads GGUF only."
            )
        facts = facts_of({file.name: file})
        if facts.architecture in _NO_MODELS:
            raise ArtifactInvalidError(
                f"The artifact is a GGUF file of the architecture '{facts.architecture}', which is a part for another "
                "model and none by itself."
            )

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; compute memory from the model's shape, or estimate it from the size of the file.

        Raises:
            ValueError: an unknown option or a bad value, naming it, or a longer context than the model's own.
        """
        read = read_options(options)
        known = facts or ModelFacts()
        context = _context_length(read, known, is_given="context_length" in options)
        share = _KV_SHARE[read.kv_type]
        if known.kv_bytes_per_token or known.heads or known.state_bytes:
            per_token = ceil(known.kv_bytes_per_token * share)
            cache = kv_bytes(known, context, precision=share, spare=_WINDOW_SPARE)
        else:
            per_token = int(_kv_bytes_per_token(artifact_bytes) * share)
            cache = per_token * context
        weights = known.weights_bytes or artifact_bytes
        adapters = read.max_adapters * _adapter_bytes(known, weights, read.max_adapter_rank)
        # While a load replaces its process two stand side by side, on one mapping of the weights.
        processes = 2 if read.max_adapters else 1
        each = cache * read.slots + _OVERHEAD_BYTES + adapters
        front = _FRONT_BYTES if read.max_adapters else 0
        return Settings(
            slots=read.slots,
            context_length=context,
            memory_bytes=weights + processes * each + front + read.cache_ram_mib * 1024 * 1024,
            load_s=_PROCESS_START_S + artifact_bytes / _LOAD_BYTES_PER_S,
            kv_tokens=read.slots * context,
            weights_bytes=weights,
            kv_bytes_per_token=per_token,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; the secret travels in the environment, which other users cannot read."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(spec.options)
        threads = str(max(1, spec.threads))
        argv = [sys.executable, "-P", "-m", _FRONT if read.max_adapters else _SERVER]
        argv += ["--model", str(spec.artifact), "--model-name", spec.model_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--threads", threads]
        argv += ["--slots", str(spec.slots), "--context-length", str(spec.context_length)]
        argv += ["--kv-type", read.kv_type, "--cache-ram-mib", str(read.cache_ram_mib)]
        if read.sleep_idle_s:
            argv += ["--sleep-idle-s", str(read.sleep_idle_s)]
        if read.speculative:
            argv += ["--speculative", read.speculative, "--draft-tokens", str(read.draft_tokens)]
        if read.embedding:
            argv += ["--embedding", "--pooling", read.pooling]
        if read.max_adapters:
            argv += ["--max-adapters", str(read.max_adapters), "--max-adapter-rank", str(read.max_adapter_rank)]
            argv += ["--work-dir", str(spec.work_dir)]
        environment = {"ENGINE_SECRET": spec.secret, "OMP_WAIT_POLICY": read.spin, "OMP_NUM_THREADS": threads}
        return EngineCommand(argv=tuple(argv), env={**environment, "PYTHONUNBUFFERED": "1"})

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page; llama.cpp reports no use of its KV cache."""
        samples = read_samples(page)
        prompt = samples.get("llamacpp:prompt_tokens_total")
        cached = samples.get("llamacpp:prompt_tokens_cached_total")
        return EngineLoad(
            running=count_of(samples, "llamacpp:requests_processing"),
            waiting=count_of(samples, "llamacpp:requests_deferred"),
            # llama.cpp counts only what it computed; the contract counts prompts.
            prompt_tokens_total=None if prompt is None else prompt + (cached or 0.0),
            generation_tokens_total=samples.get("llamacpp:tokens_predicted_total"),
            # Its tokens are counted when a request ends, its steps at once.
            progress_total=samples.get("llamacpp:n_decode_total"),
            iterations_total=samples.get("llamacpp:n_decode_total"),
            draft_tokens_total=samples.get("llamacpp:spec_decode_num_draft_tokens_total"),
            accepted_tokens_total=samples.get("llamacpp:spec_decode_num_accepted_tokens_total"),
        )

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return chat and completions, and embeddings when the option ``embedding`` is set."""
        return self.routes if options.get("embedding") is True else _CHAT_ROUTES

    def routes_of(self, options: Options, facts: ModelFacts) -> frozenset[str]:
        """Return embeddings only of an encoder: llama.cpp answers a chat with it by an error of its own (500)."""
        routes = self.routes_for(options)
        return routes & {_EMBEDDINGS_ROUTE} if _is_encoder(facts) else routes

    def extras_of(self, facts: ModelFacts) -> frozenset[str]:
        """Return the extras, and that tools are called where they must be if the model's template knows of tools:
        without one llama.cpp answers in plain text whatever it was asked (tried).
        """
        return self.request_extras | ({"tools.required"} if "tools" in facts.chat_template else frozenset())

    def sleeps_after_s(self, options: Options) -> float:
        """Return the option ``sleep_idle_s``. Looks at health and metrics do not wake a replica (tried)."""
        return float(read_options(options).sleep_idle_s)

    def guests_max(self, options: Options) -> int:
        """Return the option ``max_adapters``."""
        return read_options(options).max_adapters

    def load_guest(self, guest: Guest) -> EngineCall:
        """Return the call that starts the next process with the adapter; a PEFT folder or a GGUF file."""
        body: dict[str, Any] = {"lora_name": guest.name, "lora_path": str(guest.artifact)}
        return EngineCall("/v1/load_lora_adapter", body, timeout_s=_GUEST_S_MAX)

    def unload_guest(self, name: str) -> EngineCall:
        """Return the call that makes the name unknown at once; the memory goes with the next load."""
        return EngineCall("/v1/unload_lora_adapter", {"lora_name": name})

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the models that have a parent."""
        listed = _decode_models(models).data
        return frozenset(one.id for one in listed if one.parent)


def _context_length(read: LlamaCppOptions, facts: ModelFacts, *, is_given: bool) -> int:
    """Return the context of a slot: what is asked for, or the default where the model has as much."""
    most = facts.context_length
    if not most or read.context_length <= most:
        return read.context_length
    if is_given:
        reason = f"{read.context_length:,} is more than the model's own {most:,}; give at most that"
        raise OptionsError(LlamaCppEngine.name, {"context_length": reason})
    return most


def _kv_bytes_per_token(weights_bytes: int) -> float:
    """Guess the f16 KV bytes of a token: a curve through SmolLM2-135M, Llama-3-8B and Llama-3-70B at 4 bits."""
    return float(_KV_BYTES_BASE * (max(weights_bytes, 1) / _KV_WEIGHTS_BASE) ** _KV_GROWTH)


def _is_encoder(facts: ModelFacts) -> bool:
    """Say whether a model reads only: it keeps nothing of the tokens before."""
    return facts.heads > 0 and not facts.kv_bytes_per_token and not facts.state_bytes


def _adapter_bytes(facts: ModelFacts, weights_bytes: int, rank: int) -> int:
    """Return the bytes of an adapter of all matrices of a model, in 32 bits; without its shape, from its size."""
    if facts.layers and facts.embedding_size:
        return 4 * rank * facts.layers * facts.embedding_size * _ADAPTER_ROWS
    return weights_bytes * rank // _RANKS_OF_WEIGHTS
