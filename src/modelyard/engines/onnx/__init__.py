"""ONNX Runtime: small models (embeddings, classifiers, rerankers, vision, any tensors), many to a process.

The server is our own (``server.py``): requests of one model are computed in
batches of like length (``batching.py``), models take turns by the time of the
cores that they had, further models come and go while others serve
(``shelf.py``). What was found and must stay so: threads are the cores given to
the replica and never spin, else replicas on shared cores slow each other down;
waiting to fill a batch gains a CPU nothing (``reference/engines.md`` section 4).
"""

import importlib.util
import sys
from pathlib import Path

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCall, EngineCommand, EngineLoad, Guest, GuestKind, LaunchSpec, Options, Settings
from modelyard.engines.defaults import EngineDefaults
from modelyard.engines.onnx.artifact import read_artifact
from modelyard.engines.onnx.options import TASK_ROUTES, TENSORS_ROUTE, OnnxOptions, routes_of
from modelyard.engines.options import read_options
from modelyard.engines.pages import count_of, read_samples

_PACKAGES = ("onnxruntime", "tokenizers", "PIL", "numpy")
_OVERHEAD_BYTES = 128 * 1024 * 1024
"""Of the process with its libraries (78 MiB) and of a session before its first batch (50 MiB for MiniLM); measured."""
_HIDDEN_SIZE = 384
"""Of a model that does not tell its own: MiniLM's."""
_TOKEN_BYTES = 160
"""Of a token in a batch for each of its hidden numbers; MiniLM took 143 (full batches of 4,096 tokens)."""
_WEIGHTS_SHARE = 1.15
"""ONNX Runtime keeps some weights twice, packed for its kernels."""
_LOAD_BYTES_PER_S = 200_000_000
_PROCESS_START_S = 0.8
PICTURE_AXES = 4
_LOAD_TIMEOUT_S = 120.0
_TASKS_OF_CLASSES = {
    "ForSequenceClassification": ("classify", "rerank"),  # as it has several labels, or one
    "ForTokenClassification": ("token_classify",),
    "ForImageClassification": ("image_classify",),
    "Model": ("embeddings",),
}
"""By the end of what ``config.json`` calls a model's class, as ``judge.py`` has it."""


def _takes_neither_text_nor_pictures(facts: ModelFacts) -> bool:
    """Say whether the graph's inputs leave it nothing but tensors, as ``judge.py`` will find."""
    inputs = facts.inputs
    if not inputs or any(one.name == "input_ids" for one in inputs):
        return False
    return len(inputs) > 1 or len(inputs[0].shape) != PICTURE_AXES


class _Shown(msgspec.Struct):
    id: str
    is_guest: bool = False


class _Models(msgspec.Struct):
    data: list[_Shown] = []


class OnnxEngine(EngineDefaults):
    """The ``Engine`` contract for ``python -m modelyard.engines.onnx.server``."""

    name = "onnx"
    routes = frozenset().union(*TASK_ROUTES.values(), {TENSORS_ROUTE})
    # Token ids are taken or refused by the option ``token_ids``, which this set cannot know.
    request_extras = frozenset({"n", "dimensions", "token_arrays", "max_tokens_per_doc", "classify.pictures"})
    guests = GuestKind.MODEL
    guests_option = "guests"

    def missing(self) -> str:
        """Return the fix when a package is not installed, else ""."""
        lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if lacking:
            return f"The engine 'onnx' needs the package {lacking[0]}. Run: pip install 'modelyard[onnx]'"
        return ""

    def check_artifact(self, file: Path) -> None:
        """Accept an ONNX file, or a folder with one, that our own readers have gone through.

        Raises:
            ArtifactInvalidError: another kind of file, a truncated or a dangerous one.
        """
        read_artifact(file, OnnxOptions(), is_choice_open=True)

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; memory is that of the weights, of the process, and what guests were promised.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(OnnxOptions, options, engine=self.name)
        weights = (facts.weights_bytes if facts is not None else 0) or artifact_bytes
        guests = read.guests_mib * 1024 * 1024 if read.guests else 0
        hidden = (facts.embedding_size if facts is not None else 0) or _HIDDEN_SIZE
        batches = max(1, read.parallel) * max(read.batch_tokens_max, read.context_length) * hidden * _TOKEN_BYTES
        return Settings(
            slots=read.slots,
            context_length=read.context_length,
            memory_bytes=int(weights * _WEIGHTS_SHARE) + _OVERHEAD_BYTES + batches + guests,
            load_s=_PROCESS_START_S + artifact_bytes / _LOAD_BYTES_PER_S,
            weights_bytes=weights,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; the secret travels in the environment, which other users cannot read."""
        assert spec.artifact is not None, "needs_artifact is set"
        threads = str(max(1, spec.threads))
        read = msgspec.structs.replace(
            read_options(OnnxOptions, spec.options, engine=self.name),
            slots=spec.slots,
            context_length=spec.context_length,
        )
        argv = [sys.executable, "-P", "-m", "modelyard.engines.onnx.server"]
        argv += ["--model", str(spec.artifact), "--model-name", spec.model_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--threads", threads]
        argv += ["--memory-bytes", str(spec.memory_bytes), "--options", msgspec.json.encode(read).decode()]
        # The tokenizer's own threads would take cores that were not given.
        environment = {"ENGINE_SECRET": spec.secret, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        return EngineCommand(argv=tuple(argv), env={**environment, "PYTHONUNBUFFERED": "1"})

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page; nothing is generated and nothing cached."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "modelyard_onnx_requests_running"),
            waiting=count_of(samples, "modelyard_onnx_requests_waiting"),
            prompt_tokens_total=samples.get("modelyard_onnx_prompt_tokens_total"),
            progress_total=samples.get("modelyard_onnx_prompt_tokens_total"),
        )

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return the routes of the option ``task``; of ``auto`` all, and the replica refuses what its model is not."""
        return routes_of(read_options(OnnxOptions, options, engine=self.name).task)

    def routes_of(self, options: Options, facts: ModelFacts) -> frozenset[str]:
        """Return the routes of the option ``task``; of ``auto`` those of the model's class, all where it has none."""
        read = read_options(OnnxOptions, options, engine=self.name)
        if read.task != "auto":
            return routes_of(read.task)
        if _takes_neither_text_nor_pictures(facts):
            return routes_of("tensors")
        tasks = next((tasks for end, tasks in _TASKS_OF_CLASSES.items() if facts.architecture.endswith(end)), ("auto",))
        return frozenset().union(*map(routes_of, tasks))

    def guests_max(self, options: Options) -> int:
        """Return the option ``guests``."""
        return read_options(OnnxOptions, options, engine=self.name).guests

    def load_guest(self, guest: Guest) -> EngineCall:
        """Return the call that loads and warms a further model."""
        body = {"name": guest.name, "path": str(guest.artifact), "options": dict(guest.options)}
        return EngineCall("/v1/load_model", body, timeout_s=_LOAD_TIMEOUT_S)

    def unload_guest(self, name: str) -> EngineCall:
        """Return the call that forgets one; its requests are finished first."""
        return EngineCall("/v1/unload_model", {"name": name}, timeout_s=_LOAD_TIMEOUT_S)

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the guests that answer, those among them that would first be loaded again."""
        try:
            found = msgspec.json.decode(models, type=_Models)
        except msgspec.MsgspecError:
            return frozenset()
        return frozenset(one.id for one in found.data if one.is_guest)
