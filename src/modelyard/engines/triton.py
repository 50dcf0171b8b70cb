"""Triton Inference Server: ONNX models by the Open Inference Protocol, with its own dynamic batcher.

It runs behind the guard: it knows no secret, and its shared memory, tracing and
repository paths are nobody's business. Behind the guard ``triton_repository.py``
plants the model repository, then becomes the server. Models are chosen when it
starts (``--model-control-mode=none``): with ``explicit`` its repository API
would take in files, and with them code, from whoever reaches its own port.

Run here for real, as ``nvidia-pytriton`` brings it (2.51.0, without NVIDIA's
backends): ``tests/conformance/test_triton.py``. Flags are those of its
``--help``, metric names of a recorded page and of triton-inference-server/server
``docs/user_guide/metrics.md`` @ e1db8a6.
"""

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCommand, EngineLoad, LaunchSpec, Options, Settings, triton_config
from modelyard.engines.guard import Plan, Route, folder_of, guarded
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples
from modelyard.engines.programs import ProgramEngine
from modelyard.engines.safetensors_folder import files_of
from modelyard.engines.triton_repository import CONFIG, MODEL_FILE, Plant
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of, kind_of_file
from modelyard.formats.sniff import Kind

_OVERHEAD_BYTES = 512 * 1024 * 1024
_ACTIVATIONS = 2
"""Bytes that an instance needs, over those of its weights; a guess, for no header tells."""
_LOAD_S = 5.0
_LOAD_BYTES_PER_S = 300_000_000
_EXIT_TIMEOUT_S = 25
_CPU = "cpu"


class TritonOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deploy may set; ``batch_max`` to ``instances`` are for an ONNX file without a configuration of its own."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Requests that it is sent at once; its batcher needs several to make a batch of."""
    batch_max: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 32
    """Largest batch; the first dimension of every tensor is the batch's then. 0: the model takes none."""
    batch_delay_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 2000
    """Microseconds that a request waits for others to share its batch."""
    instances: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Copies of the model that run at once (on each accelerator)."""
    pinned_mib: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 256
    """Host memory that is pinned for copies to GPUs."""


class TritonEngine(ProgramEngine):
    """The ``Engine`` contract for ``tritonserver``."""

    name = "triton"
    routes = frozenset({"/v2/models/{model}/infer"})
    ready_path = "/v2/health/ready"

    def __init__(self, command: tuple[str, ...] = ("tritonserver",)) -> None:
        super().__init__(command)

    def check_artifact(self, file: Path) -> None:
        """Accept an ONNX file, or a model's folder as Triton has it: ``config.pbtxt`` and ``1/model.onnx``.

        Raises:
            ArtifactInvalidError: it is something else, or could run code.
        """
        if not file.is_dir():
            if (kind := kind_of_file(file)) is not Kind.ONNX:
                raise ArtifactInvalidError(
                    f"The artifact is {kind}. The engine 'triton' takes an ONNX file, or a folder with config.pbtxt "
                    "and 1/model.onnx."
                )
            facts_of({file.name: file})
            return
        files = files_of(file)
        if CONFIG not in files:
            raise ArtifactInvalidError(
                f"The artifact lacks {CONFIG}: give a model's own folder, not a whole repository."
            )
        fields = triton_config.read(files[CONFIG])
        wanted = triton_config.scalar(fields, "default_model_filename") or MODEL_FILE
        versions = {name.partition("/")[0] for name in files if name.endswith(f"/{wanted}") and name.count("/") == 1}
        if not any(version.isdecimal() and int(version) > 0 for version in versions):
            raise ArtifactInvalidError(f"The artifact has no version with '{wanted}', like 1/{wanted}.")
        for version in sorted(versions):
            # One that begins as a text can go on as a graph, and would be loaded though no header of it was read.
            if (kind := kind_of_file(files[f"{version}/{wanted}"])) is not Kind.ONNX:
                raise ArtifactInvalidError(f"The file '{version}/{wanted}' is no ONNX file: it is {kind}.")
        facts_of(files)

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; memory is the weights of each instance, as much again for what it computes, and its own.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(TritonOptions, options, engine=self.name)
        weights = (facts.weights_bytes if facts else 0) or artifact_bytes
        return Settings(
            slots=read.slots,
            context_length=0,
            memory_bytes=weights * _ACTIVATIONS * read.instances + _OVERHEAD_BYTES + read.pinned_mib * 1024 * 1024,
            load_s=_LOAD_S + artifact_bytes / _LOAD_BYTES_PER_S,
            weights_bytes=weights * read.instances,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the guard, with the step that plants the repository and becomes Triton behind it."""
        assert spec.artifact is not None, "needs_artifact is set"
        read = read_options(TritonOptions, spec.options, engine=self.name)
        # A folder cannot have the slash of OWNER/NAME.
        model = spec.model_name.replace("/", "__")
        repository = str(folder_of(spec) / "repository")
        is_on_gpu = bool(spec.accelerators) and spec.accelerator_kind != _CPU
        order = Plant(
            str(spec.artifact), model, repository, read.batch_max, read.batch_delay_us, read.instances, is_on_gpu
        )
        words = [sys.executable, "-P", "-m", "modelyard.engines.triton_repository", msgspec.json.encode(order).decode()]
        words += ["--", *self._command, f"--model-repository={repository}", "--model-control-mode=none"]
        words += ["--http-address=127.0.0.1", "--http-port=@http@", "--allow-grpc=false"]
        words += ["--metrics-address=127.0.0.1", "--metrics-port=@metrics@"]
        words += ["--strict-readiness=true", "--exit-on-error=true", f"--exit-timeout-secs={_EXIT_TIMEOUT_S}"]
        words += [f"--pinned-memory-pool-byte-size={read.pinned_mib * 1024 * 1024}"]
        plan = Plan(
            spec.host, spec.port, str(folder_of(spec)), _routes(spec.model_name, model), ports=("http", "metrics")
        )
        return guarded(spec, plan, words, {"OMP_NUM_THREADS": str(max(1, spec.threads))})

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page; Triton tells what waits, and not what runs."""
        return EngineLoad(waiting=count_of(read_samples(page), "nv_inference_pending_request_count"))


def _routes(name: str, model: str) -> tuple[Route, ...]:
    """Return what is let through for the model that callers call ``name``."""
    said, real = f"/v2/models/{quote(name, safe='')}", f"/v2/models/{model}"
    return (
        Route("GET", TritonEngine.ready_path, is_open=True),
        Route("GET", "/v2/health/live"),
        Route("GET", TritonEngine.load_path, port="metrics"),
        # It answers 500 to data that does not fit its own shape.
        Route("POST", f"{said}/infer", f"{real}/infer", caller_fault='{"error":"Unable to parse'),
        Route("GET", said, real),
        Route("GET", f"{said}/ready", f"{real}/ready"),
        Route("GET", f"{said}/stats", f"{real}/stats"),
    )
