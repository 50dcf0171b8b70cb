"""Prepare a real Triton Inference Server for the tests: NVIDIA's server as PyPI has it, without Docker and GPU.

    python tools/pytriton.py            # once; what was found stays
    python tools/pytriton.py --again    # also where it could not be had before

``nvidia-pytriton`` brings ``tritonserver`` and its Python backend (370 MB). That
backend embeds a Python of its own, which works with the standard library of
Debian's /usr/bin/python3 and not with every other one, so the environment
``.cache/pytriton`` is made of that, and the server is started once to see. Where
it cannot be had the tests that need it are skipped, with the reason that this
says; nothing else depends on it.
"""

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "pytriton"
REFUSAL = ROOT / ".cache" / "pytriton.refusal"
"""Why there is none."""
PINS = ("nvidia-pytriton==0.7.0", "onnxruntime==1.32.0", "tritonclient==2.73.0", "geventhttpclient==2.6.1")
"""The server; what runs models in it; a client of its protocol."""
SYSTEM_PYTHON = "/usr/bin/python3"
INSTALL_WITHIN_S = 900
TRIAL_WITHIN_S = 60
TRIAL = """
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig
import numpy, socket
def ports():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = [one.getsockname()[1] for one in sockets]
    [one.close() for one in sockets]
    return dict(zip(("http_port", "grpc_port", "metrics_port"), found))
with Triton(config=TritonConfig(http_address="127.0.0.1", **ports())) as triton:
    tensor = [Tensor(name="x", dtype=numpy.float32, shape=(1,))]
    triton.bind("trial", lambda requests: [{"x": r["x"]} for r in requests], tensor, tensor)
    triton.run()
"""


def digest() -> str:
    """Return what tells one set of pins from another."""
    return hashlib.sha256("\n".join(PINS).encode()).hexdigest()


def is_prepared() -> bool:
    """Say whether the environment is complete, tried, and made of the present pins."""
    stamp = FOLDER / ".prepared"
    return stamp.exists() and stamp.read_text() == digest()


def why_not() -> str:
    """Return why there is no Triton here; "" when there is one."""
    if is_prepared():
        return ""
    return REFUSAL.read_text() if REFUSAL.exists() else "no Triton prepared: run make triton-setup"


def prepare() -> str:
    """Make the environment; return why it cannot be, or ""."""
    if not Path(SYSTEM_PYTHON).exists():
        return f"there is no {SYSTEM_PYTHON}"
    shutil.rmtree(FOLDER, ignore_errors=True)
    python = str(FOLDER / "bin" / "python")
    # Without pip of its own: Debian splits ensurepip off, and ours can fill another environment.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python)
    return (
        run(INSTALL_WITHIN_S, SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(FOLDER))
        or run(INSTALL_WITHIN_S, *pip, "install", *PINS)
        or run(TRIAL_WITHIN_S, python, "-c", TRIAL)
    )


def run(within_s: int, *command: str) -> str:
    """Run a command; return "", or what went wrong in one line."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=within_s, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(command[0]).name}: {error}"[:300]
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return f"{Path(command[0]).name} ended with {done.returncode}: {lines[-1][:240] if lines else 'it said nothing'}"


def main() -> None:
    """Prepare, and say what came of it; failing here fails nothing else."""
    if is_prepared():
        return
    if REFUSAL.exists() and "--again" not in sys.argv[1:]:
        print(f"==> The tests with a real Triton are skipped: {REFUSAL.read_text()}")
        return
    began = time.monotonic()
    print("==> Preparing Triton (370 MB)", flush=True)
    REFUSAL.parent.mkdir(exist_ok=True)
    REFUSAL.unlink(missing_ok=True)
    if reason := prepare():
        REFUSAL.write_text(f"no Triton on this machine ({reason}); to try again: python tools/pytriton.py --again")
        print(f"==> The tests with a real Triton are skipped: {REFUSAL.read_text()}")
        return
    (FOLDER / ".prepared").write_text(digest())
    print(f"==> Prepared Triton in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
