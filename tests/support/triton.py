"""A real Triton: the server that ``tools/pytriton.py`` prepared, a model for it, and an outside client.

NVIDIA's backends have no wheel. What runs ONNX models here is a backend in
Python under the name of NVIDIA's (``fixtures/triton_backend``), which Triton
loads as any other: the server, its batcher and its metrics are the real ones.
"""

import shutil
import struct
from pathlib import Path

from tools.pytriton import FOLDER, why_not

from tests.support.models import field, onnx_tensor

__all__ = ["PYTHON", "command_in", "config_text", "doubling_onnx", "why_not"]

PYTHON = FOLDER / "bin" / "python"
"""Has ``tritonclient``."""
_BACKEND = Path(__file__).parents[1] / "fixtures" / "triton_backend" / "model.py"


def command_in(folder: Path) -> tuple[str, ...]:
    """Return the words that begin Triton's command, after making its backends in ``folder``."""
    site = next(FOLDER.glob("lib/python3.*/site-packages"))
    server = site / "pytriton" / "tritonserver"
    backends = folder / "backends"
    if not backends.exists():
        # Copies: Triton refuses libraries that links lead out of its folder.
        shutil.copytree(server / "backends", backends)
        stub = server / "python_backend_stubs" / site.parent.name.removeprefix("python") / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        (backends / "onnxruntime").mkdir()
        shutil.copy(_BACKEND, backends / "onnxruntime")
    libraries = f"LD_LIBRARY_PATH={site / 'nvidia_pytriton.libs'}"
    path = f"PATH={FOLDER / 'bin'}:/usr/bin:/bin"
    return ("/usr/bin/env", libraries, path, str(server / "bin" / "tritonserver"), f"--backend-directory={backends}")


def doubling_onnx() -> bytes:
    """Return a model of ONNX: ``y = 2 x`` for rows of four numbers."""
    eye = [2.0 if row == column else 0.0 for row in range(4) for column in range(4)]
    node = field(1, "x") + field(1, "w") + field(2, "y") + field(4, "MatMul")
    graph = field(1, node) + field(2, "tiny") + field(5, onnx_tensor("w", [4, 4], struct.pack("<16f", *eye)))
    graph += field(11, _value("x")) + field(12, _value("y"))
    return field(1, 8) + field(2, "tests") + field(7, graph) + field(8, field(2, 17))


def config_text(**more: str) -> str:
    """Return a model's own configuration, with more fields as they are written."""
    fields = {
        "name": '"as_its_maker_called_it"',
        "backend": '"onnxruntime"',
        "max_batch_size": "16",
        "input": '[ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]',
        "output": '[ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]',
        **more,
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _value(name: str) -> bytes:
    shape = field(1, field(2, "n")) + field(1, field(1, 4))
    return field(1, name) + field(2, field(1, field(1, 1) + field(2, shape)))
