"""Text Generation Inference: Hugging Face's launcher, one process that starts a shard for each accelerator.

It runs behind the guard with a key of its own in the environment (``API_KEY``):
besides OpenAI's paths it has ``/generate``, ``/invocations`` and pages of
documentation. It calls its model by the path that it was given, so it is given
a link in the replica's folder that is named as callers name the model.

Not run here (images only): flags of huggingface/text-generation-inference
``docs/source/reference/launcher.md`` @ 032fc4c, metric names of
``docs/source/reference/metrics.md`` @ 53fdbe6.
"""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCommand, EngineLoad, LaunchSpec, Options, Settings
from modelyard.engines.gpu_memory import gpu_settings
from modelyard.engines.guard import Plan, folder_of, guarded, openai_routes
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples
from modelyard.engines.programs import ProgramEngine
from modelyard.engines.safetensors_folder import check_safetensors_folder

_PAYLOAD_BYTES_MAX = 64 * 1024 * 1024
_LOAD_S = 40.0
_LOAD_BYTES_PER_S = 1_000_000_000
_WEIGHTS_SHARE = {
    "fp8": Fraction(1, 2), "eetq": Fraction(1, 2), "bitsandbytes": Fraction(1, 2),
    "bitsandbytes-nf4": Fraction(1, 3), "bitsandbytes-fp4": Fraction(1, 3),
}  # fmt: skip
"""Of 16-bit weights that it quantises as it loads them."""


class TgiOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Requests that it takes at once; it refuses more."""
    context_length: Annotated[int, msgspec.Meta(ge=256, le=10_485_760)] = 8192
    """Most tokens of prompt and answer together."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Accelerators that each layer is divided among; 0: all that the replica was given."""
    memory_share: Annotated[float, msgspec.Meta(ge=0.1, le=1)] = 0.9
    """Share of each accelerator's memory that it may use."""
    dtype: Literal["", "float16", "bfloat16"] = ""
    """Precision of weights that are not quantised; "": the checkpoint's."""
    quantisation: Literal[
        "", "awq", "gptq", "marlin", "compressed-tensors", "fp8", "eetq", "bitsandbytes", "bitsandbytes-nf4",
        "bitsandbytes-fp4",
    ] = ""  # fmt: skip
    """Of the checkpoint (awq, gptq, marlin, compressed-tensors) or done while loading. "": as the checkpoint says."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens that fit the KV cache, running and kept; 0: a full context for each slot. Never more than the share of
    memory has room for."""
    kv_type: Literal["auto", "fp8_e4m3fn", "fp8_e5m2"] = "auto"
    """Precision of the KV cache; auto: the model's."""
    prefix_caching: bool = False
    """Keep prompts' beginnings. It cannot keep tenants apart in it: not for endpoints that tenants share."""
    prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 0
    """Most tokens that are read in one step; 0: its own choice."""
    speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Tokens that are guessed from n-grams (or by Medusa heads in the checkpoint), a step; 0: none."""


class TgiEngine(ProgramEngine):
    """The ``Engine`` contract for ``text-generation-launcher``."""

    name = "tgi"
    computes_on_gpus = True
    routes = frozenset({"/v1/chat/completions", "/v1/completions"})
    # Its chat takes none of the sampling fields beyond OpenAI's, and gives one choice whatever "n" says.
    request_extras = frozenset()

    def __init__(self, command: tuple[str, ...] = ("text-generation-launcher",)) -> None:
        super().__init__(command)

    def check_artifact(self, file: Path) -> None:
        """Accept folders of safetensors without code.

        Raises:
            ArtifactInvalidError: it is something else.
        """
        check_safetensors_folder(file, engine=self.name)

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; compute memory from the model's shape, or estimate it from its size.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(TgiOptions, options, engine=self.name)
        return gpu_settings(
            read,
            facts,
            artifact_bytes,
            parallel=max(1, read.tensor_parallel),
            load_s=_LOAD_S + artifact_bytes / _LOAD_BYTES_PER_S,
            weights_share=_WEIGHTS_SHARE.get(read.quantisation, Fraction(1)),
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the guard with the launcher behind it; the key between them is in the environment."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(TgiOptions, spec.options, engine=self.name)
        plan = Plan(
            spec.host,
            spec.port,
            str(folder_of(spec)),
            openai_routes(self.routes, ready=self.ready_path, load=self.load_path),
            ports=("http", "master"),
            links={spec.model_name: str(spec.artifact)},
            has_key=True,
        )
        # The guard starts it in the folder of the link.
        words = [*self._command, "--model-id", spec.model_name, "--hostname", "127.0.0.1", "--port", "@http@"]
        words += ["--master-addr", "127.0.0.1", "--master-port", "@master@"]
        words += ["--shard-uds-path", str(folder_of(spec) / "shard")]
        words += _words(read, spec)
        env = {
            "API_KEY": "@key@",
            "PREFIX_CACHING": "1" if read.prefix_caching else "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, spec.threads)),
        }
        return guarded(spec, plan, words, env)

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page; tokens are counted when a request ends, and the KV cache's use is not told."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "tgi_batch_current_size"),
            waiting=count_of(samples, "tgi_queue_size"),
            prompt_tokens_total=samples.get("tgi_request_input_length_sum"),
            generation_tokens_total=samples.get("tgi_request_generated_tokens_sum"),
            progress_total=samples.get("tgi_batch_inference_count"),
            accepted_tokens_total=samples.get("tgi_request_skipped_tokens_sum"),
        )


def _words(read: TgiOptions, spec: LaunchSpec) -> list[str]:
    """Return the flags of ``read``."""
    words = ["--num-shard", str(read.tensor_parallel or max(1, len(spec.accelerators)))]
    words += ["--max-concurrent-requests", str(spec.slots), "--max-total-tokens", str(spec.context_length)]
    words += ["--max-input-tokens", str(spec.context_length - 1), "--cuda-memory-fraction", f"{read.memory_share:g}"]
    # No larger than what the replica was placed for: others may be on the same accelerator.
    words += ["--max-batch-total-tokens", str(read.kv_tokens or spec.slots * spec.context_length)]
    words += ["--payload-limit", str(_PAYLOAD_BYTES_MAX), "--usage-stats", "off", "--json-output"]
    valued = {
        "--quantize": read.quantisation,
        "--dtype": "" if read.quantisation else read.dtype,
        "--kv-cache-dtype": "" if read.kv_type == "auto" else read.kv_type,
        "--max-batch-prefill-tokens": read.prefill_tokens,
        "--speculate": read.speculative_tokens,
    }
    for flag, value in valued.items():
        words += [flag, str(value)] if value else []
    return words
