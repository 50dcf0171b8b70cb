"""The step before Triton: plant a model repository of links around an artifact, then become the server.

    python -m modelyard.engines.triton_repository PLANT -- tritonserver --model-repository=…

Triton names a model as its folder is named, and refuses a configuration that
names another. So the repository is the replica's own: a folder with the name
that callers use, links to the artifact's versions, and the artifact's
configuration without its name, or a small one for a bare ONNX file.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelyard.engines import triton_config
from modelyard.formats import ArtifactInvalidError

CONFIG = "config.pbtxt"
MODEL_FILE = "model.onnx"


class Plant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model to make a repository for; the last four are for a bare file, whose artifact has no configuration."""

    artifact: str
    model: str
    repository: str
    batch_max: int
    batch_delay_us: int
    instances: int
    is_on_gpu: bool


def plant(order: Plant) -> Path:
    """Make the repository anew; return the model's folder in it.

    Raises:
        ArtifactInvalidError: the artifact's configuration cannot be used.
        OSError: the disk fails.
    """
    folder = Path(order.repository) / order.model
    shutil.rmtree(order.repository, ignore_errors=True)  # of an earlier start, and nobody else's
    folder.mkdir(mode=0o700, parents=True)
    artifact = Path(order.artifact)
    if artifact.is_dir():
        fields = [(name, value) for name, value in triton_config.read(artifact / CONFIG) if name != "name"]
        for entry in artifact.iterdir():
            if entry.name != CONFIG:
                (folder / entry.name).symlink_to(entry)
        text = triton_config.write(fields)
    else:
        (folder / "1").mkdir(mode=0o700)
        (folder / "1" / MODEL_FILE).symlink_to(artifact)
        text = _config_of(order)
    (folder / CONFIG).write_text(text, "utf-8")
    return folder


def _config_of(order: Plant) -> str:
    """Return the configuration of a bare ONNX file; Triton reads its inputs and outputs from the file."""
    kind = "KIND_GPU" if order.is_on_gpu else "KIND_CPU"
    fields: triton_config.Message = [("backend", '"onnxruntime"'), ("max_batch_size", str(order.batch_max))]
    if order.batch_max:
        fields.append(("dynamic_batching", [("max_queue_delay_microseconds", str(order.batch_delay_us))]))
    fields.append(("instance_group", [("count", str(order.instances)), ("kind", kind)]))
    return triton_config.write(fields)


def main(arguments: Sequence[str]) -> int:
    """Plant, then become the server; return the exit code where that fails."""
    try:
        assert arguments[1] == "--", "the command is rendered"
        plant(msgspec.json.decode(arguments[0], type=Plant))
        os.execvp(arguments[2], list(arguments[2:]))  # noqa: S606 - the operator's own words
    except (ArtifactInvalidError, OSError) as error:
        print(f"triton: {error}", file=sys.stderr)  # noqa: T201 - the log
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
